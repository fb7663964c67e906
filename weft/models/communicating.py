"""The communicating layers of a model, recorded on its modules.

Code that puts weft's operators into a model records a CommunicatingLayer for each place: the operators that run there, or the
reason why weft does not overlap it. `weft.overlap_report` lists all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.compat.dtensors import styles_of_torch

_RECORDED = "_weft_layers"
_MOST_SEEN = 256


@dataclass(eq=False)
class LayerCalls:
    """LayerCalls records the (operator, rows of all ranks) of a layer's calls.

    compiled: some calls ran in compiled code, which does not record them.
    pending: calls of backward passes that have not run yet, or never will.
    seen: what callers know about calls that are recorded.
    remarks: why calls ran in another way than the layer's others."""

    calls: set[tuple[str, int]] = field(default_factory=set)
    compiled: bool = False
    pending: set[tuple[str, int]] = field(default_factory=set)
    seen: set[tuple[Any, ...]] = field(default_factory=set)
    remarks: set[str] = field(default_factory=set)

    def record(self, operators: Iterable[str], rows: int | None, *, eager: bool, backward: Iterable[str] = ()) -> None:
        """Record the operators that a call runs. Those of its backward pass are recorded when that runs (`watch`).

        eager: torch does not compile the call. Otherwise `rows` is not read: a guard on it would cause another compilation."""
        if not eager or not isinstance(rows, int):
            self.compiled = True
            return
        self.calls |= {(operator, rows) for operator in operators}
        self.pending |= {(operator, rows) for operator in backward} - self.calls

    def watch(self, results: Iterable[torch.Tensor], backward: Iterable[str], rows: int) -> None:
        """Record these operators once a gradient of one of the results is known, which starts the backward pass of a call."""
        for call in self.pending.intersection((operator, rows) for operator in backward):
            for result in results:
                if result.requires_grad:
                    result.register_hook(partial(self._note_backward, call))  # type: ignore[no-untyped-call]

    def _note_backward(self, call: tuple[str, int], grad: torch.Tensor) -> None:
        self.calls.add(call)
        self.pending.discard(call)

    def is_new(self, *call: Any) -> bool:
        """Return whether a call is not recorded yet. It is for eager calls. call: what determines its operators and rows."""
        if call in self.seen:
            return False
        if len(self.seen) >= _MOST_SEEN:
            self.seen.clear()
        self.seen.add(call)
        return True

    def may_have(self, operator: str, served: Callable[[int], bool]) -> bool:
        """Return whether the layer may have called this operator with a number of rows that `served` accepts."""
        return self.compiled or any(one == operator and served(rows) for one, rows in self.calls)


@dataclass(frozen=True, kw_only=True)
class CommunicatingLayer:
    """CommunicatingLayer describes one place in a model that communicates.

    module: the module's name in the model, which `communicating_layers` fills in.
    parts: the children that share the collective.
    operators: the weft operators that run there, depending on the call's sizes; empty if weft does not overlap the place.
    reason: why weft does not overlap it, or another remark.
    where: file:line of the user's code, if known.
    n, k: the full sizes of the first operator's problem; 0 if there is no operator.
    other_sizes: the n and k of that operator's other problems, if each child is multiplied alone.
    group: the process group's name. Measured times are found by n, k and group.
    schedule: the schedule that the user asked for; "" if unknown.
    ran: the calls so far; None if calls are not recorded.
    backward_only: the forward pass does not communicate there; the operators run in the backward pass.
    keeps: the gathered input is kept for the backward pass; None if nothing is gathered, or it is not known.
    """

    module: str = ""
    parts: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    reason: str = ""
    where: str = ""
    n: int = 0
    k: int = 0
    other_sizes: tuple[tuple[int, int], ...] = ()
    group: str = ""
    schedule: str = ""
    ran: LayerCalls | None = field(default=None, compare=False, repr=False)
    backward_only: bool = False
    keeps: bool | None = None

    def __post_init__(self) -> None:
        if not self.operators and not self.reason:
            raise ValueError("reason is empty; a layer without operators needs a reason")

    @property
    def overlapped(self) -> bool:
        return bool(self.operators)

    @property
    def name(self) -> str:
        """Return the name for reports.

        >>> CommunicatingLayer(module="layers.0.mlp", parts=("gate", "up"), operators=("all_gather_matmul",)).name
        'layers.0.mlp: gate, up'
        """
        return ": ".join(filter(None, (self.module, ", ".join(self.parts)))) or self.where

    def __str__(self) -> str:
        return f"{self.name}: " + "; ".join(filter(None, (", ".join(self.operators) or "not overlapped", self.reason)))


def record_layer(module: nn.Module, layer: CommunicatingLayer) -> None:
    """Add a layer to those recorded on this module."""
    module.__dict__[_RECORDED] = (*recorded_layers(module), layer)


def recorded_layers(module: nn.Module) -> tuple[CommunicatingLayer, ...]:
    """Return the layers recorded on this module, without its name."""
    found: tuple[CommunicatingLayer, ...] = module.__dict__.get(_RECORDED, ())
    return found


def communicating_layers(model: nn.Module) -> Iterator[CommunicatingLayer]:
    """Yield the communicating layers of a model in the order of its modules, each with its module's name.

    Places of torch's own styles are included.
    """
    for name, module in model.named_modules():
        recorded = recorded_layers(module)
        for layer in recorded:
            yield replace(layer, module=name)
        for style in styles_of_torch(module):
            if not any(layer.reason.startswith(f"torch's {style}") for layer in recorded):
                yield CommunicatingLayer(module=name, reason=_left_to_torch(module, style))


def _left_to_torch(module: nn.Module, style: str) -> str:
    """Return the reason why weft does not overlap a place of one of torch's styles."""
    instead = f"weft.{style}" if isinstance(module, nn.Linear) else {"PrepareModuleInput": "weft.SharedInput"}.get(style)
    advice = f"; {instead} takes its place" if instead else ", as it has no matmul of its own"
    return f"torch's {style}: left to torch{advice}"


def layers_of_places(model: nn.Module) -> dict[CommunicatingLayer, list[CommunicatingLayer]]:
    """Return the communicating layers of each place of a model.

    A place stands for the layers that differ only in the number of their block. Its module's name represents all blocks:
    model.layers.*.mlp.
    """
    found: dict[CommunicatingLayer, list[CommunicatingLayer]] = {}
    for layer in communicating_layers(model):
        place = replace(layer, module=re.sub(r"(?<=\.)\d+(?=\.|$)", "*", layer.module))
        found.setdefault(place, []).append(layer)
    return found
