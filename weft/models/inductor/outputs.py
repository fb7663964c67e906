"""A graph's results keep their strides, whatever its operators became: callers, and autograd's own views of them, rely on that.
Those that are views of one tensor stay that, so that who changes one in place changes the others.

Inductor sees to this by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

Tensor = torch.Tensor


@dataclass(frozen=True)
class Lie:
    """Where a result's elements are in its storage. shape, offset: symbolic where they are not known."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def is_known(self) -> bool:
        return all(isinstance(number, int) for number in (*self.shape, self.offset))


@dataclass(frozen=True)
class AliasedResults:
    """Results, by their places, that are views of one tensor of the graph, `base`, which may be among them."""

    base: Lie
    at: tuple[int, ...]
    lies: tuple[Lie, ...]

    def laid(self, outs: Sequence[Tensor]) -> list[Tensor]:
        """These results, as views of one tensor: if they are not, of a copy."""
        if self._is_kept(outs):
            return list(outs)
        base = torch.empty_strided(self.base.shape, self.base.strides, dtype=outs[0].dtype, device=outs[0].device)
        views = [base if lie == self.base else self._view(base, lie) for lie in self.lies]
        for view, out in zip(views, outs, strict=True):
            _fill(view, out)
        return views

    def _view(self, base: Tensor, lie: Lie) -> Tensor:
        return base.as_strided(lie.shape, lie.strides, lie.offset - self.base.offset)

    def _is_kept(self, outs: Sequence[Tensor]) -> bool:
        storages = {out.untyped_storage()._cdata for out in outs}
        starts = {out.storage_offset() - lie.offset for out, lie in zip(outs, self.lies, strict=True)}
        alike = all(_alike(out, lie) for out, lie in zip(outs, self.lies, strict=True))
        return alike and len(storages) == len(starts) == 1


@dataclass(frozen=True)
class ResultLayout:
    """Of a graph's results. lies: None for what is no tensor, or has strides that are not known."""

    lies: tuple[Lie | None, ...]
    families: tuple[AliasedResults, ...]

    def laid(self, outs: Sequence[Any]) -> list[Any]:
        """Results that lie so: those that lie otherwise in memory are copied."""
        found = list(outs)
        for family in self.families:
            for at, out in zip(family.at, family.laid([found[at] for at in family.at]), strict=True):
                found[at] = out
        return [_laid(out, lie) for out, lie in zip(found, self.lies, strict=True)]


def layout_of_outputs(graph: Graph) -> ResultLayout:
    """As the results' examples have it, before the graph is changed."""
    nodes: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    lies = tuple(_lie(_example(node)) for node in nodes)
    of_base: dict[Node, list[int]] = {}
    for at, (node, lie) in enumerate(zip(nodes, lies, strict=True)):
        if lie is not None and (base := _base_of(node)) is not None:
            of_base.setdefault(base, []).append(at)
    families = []
    for base, places in of_base.items():
        known, members = _lie(_example(base)), [lie for at in places if (lie := lies[at]) is not None]
        if known is not None and len(places) > 1 and all(lie.is_known for lie in (known, *members)):
            families.append(AliasedResults(known, tuple(places), tuple(members)))
    return ResultLayout(lies, tuple(families))


def _example(node: object) -> object:
    return getattr(node, "meta", {}).get("val")


def _lie(one: object) -> Lie | None:
    if not isinstance(one, Tensor) or one.layout is not torch.strided:
        return None
    found = Lie(tuple(one.shape), tuple(one.stride()), one.storage_offset())  # type: ignore[arg-type]
    return found if all(isinstance(stride, int) for stride in found.strides) else None


def _base_of(node: Node) -> Node | None:
    """What a result is a view of, in its own dtype; None for inputs of the graph, which stay as they are."""
    example = _example(node)
    base = node
    while _is_view(base) and isinstance(base.args[0], Node):
        base = base.args[0]
    whole = _example(base)
    if base.op == "placeholder" or not isinstance(example, Tensor) or not isinstance(whole, Tensor):
        return None
    together = example.untyped_storage()._cdata == whole.untyped_storage()._cdata
    return base if together and example.dtype == whole.dtype else node


def _is_view(node: Node) -> bool:
    """By the operator, or since it is one of several views."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and _is_view(node.args[0])
    return isinstance(node.target, OpOverload) and node.target.is_view


def _laid(out: Any, lie: Lie | None) -> Any:
    if lie is None or _alike(out, lie):
        return out
    made = torch.empty_strided(out.shape, lie.strides, dtype=out.dtype, device=out.device)
    _fill(made, out)
    return made


def _fill(place: Tensor, out: Tensor) -> None:
    """Elements that are one in memory (expand's) are written once."""
    for dim, stride in enumerate(place.stride()):
        if stride == 0 and place.shape[dim] > 1:
            place, out = place.narrow(dim, 0, 1), out.narrow(dim, 0, 1)
    place.copy_(out)


def _alike(out: Tensor, lie: Lie) -> bool:
    return all(one == two for one, two, extent in zip(out.stride(), lie.strides, out.shape, strict=True) if extent > 1)
