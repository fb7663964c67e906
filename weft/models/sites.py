"""Where a model communicates beside a matmul, and what became of it.

Whoever puts weft's operators into a model notes a CommunicatingLayer for each place: what runs there, or why weft does not
overlap it. So a place that was left alone is listed, too, and nothing is left alone silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

_NOTED = "_weft_sites"


@dataclass(eq=False)
class LayerCalls:
    """What a place has run: (operator, rows of all ranks) of its calls. compiled: of some that is not known, since they were in
    compiled code."""

    calls: set[tuple[str, int]] = field(default_factory=set)
    compiled: bool = False

    def note(self, operators: Iterable[str], rows: int | None) -> None:
        """A call has run these, or will in its backward. Reads nothing while it is compiled: a guard would compile it again."""
        if torch.compiler.is_compiling() or not isinstance(rows, int):
            self.compiled = True
        else:
            self.calls.update((operator, rows) for operator in operators)

    def may_have(self, operator: str, served: Callable[[int], bool]) -> bool:
        """Whether a call of such rows may have been among them."""
        return self.compiled or any(one == operator and served(rows) for one, rows in self.calls)


@dataclass(frozen=True, kw_only=True)
class CommunicatingLayer:
    """One place.

    module: the module's name in the model, filled in by `sites`; parts: which of its children share the collective.
    operators: weft's that run there, by the call's sizes one or another; none if weft does not overlap it. reason: why not, or
    what else there is to know. where: file:line of the user's code, where that is known. n, k, group: of the first operator's
    problem, whole, and the process group's name, by which measured times are found; 0 and "" where there is none. schedule:
    what was asked for; "" where that is not known. ran: what it has run; None where nobody writes that down.
    """

    module: str = ""
    parts: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    reason: str = ""
    where: str = ""
    n: int = 0
    k: int = 0
    group: str = ""
    schedule: str = ""
    ran: LayerCalls | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.operators and not self.reason:
            raise ValueError("reason is empty; a site without operators says why")

    @property
    def overlapped(self) -> bool:
        return bool(self.operators)

    @property
    def name(self) -> str:
        """
        >>> CommunicatingLayer(module="layers.0.mlp", parts=("gate", "up"), operators=("all_gather_matmul",)).name
        'layers.0.mlp: gate, up'
        """
        return ": ".join(filter(None, (self.module, ", ".join(self.parts)))) or self.where

    def __str__(self) -> str:
        return f"{self.name}: " + "; ".join(filter(None, (", ".join(self.operators) or "not overlapped", self.reason)))


def note(module: nn.Module, site: CommunicatingLayer) -> None:
    """Keep a site on the module where it is. The module's other sites stay."""
    module.__dict__[_NOTED] = (*noted(module), site)


def noted(module: nn.Module) -> tuple[CommunicatingLayer, ...]:
    """The sites of this module alone, without its name."""
    found: tuple[CommunicatingLayer, ...] = module.__dict__.get(_NOTED, ())
    return found


def sites(model: nn.Module) -> Iterator[CommunicatingLayer]:
    """Every site of a model, in the order of its modules, each with its module's name."""
    for name, module in model.named_modules():
        for site in noted(module):
            yield replace(site, module=name)
