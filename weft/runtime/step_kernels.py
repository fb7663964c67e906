"""The kernels of steps: one interface for all of them, and the table that says which steps have one.

A kernel's own module makes it (`KERNELS`). It is imported where a program has such a step and its device runs kernels, since
it needs Triton. Which steps may run as kernels is the same on every rank, so each rank knows the value that a flag has once it
is signalled (`SIGNAL_VALUES`): the number of tiles where a kernel counts, else 1. A rank whose tensors a kernel cannot load
runs the step part by part, and signals the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from weft.core.errors import WaitTimeout
from weft.core.logs import warn_once
from weft.core.schedule import (
    Flag,
    FusedCollective,
    Gemm,
    GroupedGemm,
    Lookup,
    Push,
    Reduce,
    SegmentCopies,
    ShareCounts,
    Step,
    Wait,
    waits,
)
from weft.runtime.bindings import Bindings, Where

if TYPE_CHECKING:
    import torch

    from weft.runtime.bound import BoundProgram

Place = tuple[str, int]
"""A step of a rank: its lane's name, and its position there."""

KERNELS: dict[type[Step], str] = {
    Gemm: "fused.kernel_of",
    Reduce: "fused.kernel_of_sum",
    Push: "pushes.kernel_of",
    Lookup: "lookups.kernel_of",
    FusedCollective: "fused_collective.kernel_of",
    ShareCounts: "ragged_kernels.kernel_of",
    SegmentCopies: "ragged_kernels.kernel_of",
    GroupedGemm: "ragged_kernels.kernel_of",
    Wait: "ragged_kernels.kernel_of",
}
"""By type of step, the module of this package and its function that makes the kernel of a step, from the program, the place and
the step; or returns None where the step has none in that program."""
SIGNAL_VALUES: dict[type[Step], str] = {Gemm: "fused", Push: "pushes", Lookup: "lookups"}
"""By type of step that counts, the module whose `signal_values(program, rank, step)` gives the value of each of its flags."""


class StepKernel:
    """One step of one rank as a kernel, ready to launch call after call."""

    waits_in_kernel = False
    """Whether the kernel waits for the gates on this call itself. The launch plan lowers them after the kernel."""
    manages_own_flags = False
    """Whether the kernel has words of its own for its flags, and raises, waits for and lowers them itself."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self._logged: set[str] = set()

    def runs(self, bindings: Bindings) -> bool:
        """Whether it can load this call's operands. Asked before any of a call is enqueued."""
        return True

    def lay_out(self, bindings: Bindings) -> None:
        """Make the tables that the kernel reads in a call. Not while a graph is captured: they are copied to the device."""

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        """Run it on so many SMs. silent: neither wait nor signal, for a rehearsal. tries: how often it looks at a flag before
        it gives up. stream: default, torch's current one."""
        raise NotImplementedError

    def raise_if_late(self, describe: Callable[[Flag], str]) -> None:
        """Raise WaitTimeout if a wait of the last launch ended without its flag. describe: who signals a flag."""

    def missing(self) -> str:
        """What the call under way has yet to receive in words of the kernel's own; nothing if it waits for nothing. Takes
        copies, and no SM."""
        return ""

    def abort(self) -> None:
        """End every wait on words of its own, now and later. Enqueued on torch's current stream; takes no SM."""

    def log_fallback(self, reason: str) -> None:
        """Log once that the step does not run as one kernel, and so overlaps less."""
        if reason not in self._logged:
            self._logged.add(reason)
            kind = type(self.where.step).__name__
            warn_once(f"lane {self.where.lane}: a {kind} runs part by part, by torch instead of one kernel: {reason}")


class GatedKernel(StepKernel):
    """A kernel that looks at the schedule's flags itself, and says in `status` which it gave up."""

    def __init__(self, where: Where, device: torch.device) -> None:
        import torch

        super().__init__(where)
        self.status = torch.zeros(2, dtype=torch.int32, device=device)

    def raise_if_late(self, describe: Callable[[Flag], str]) -> None:
        gate, seen = self.status.tolist()
        if gate:
            self.status.zero_()
            wait = waits(self.where.step)[gate - 1]
            raise WaitTimeout(f"{self.where}: {wait.flag}: expected more than the {seen} seen; {describe(wait.flag)}")


def kernel_of(program: BoundProgram, where: Where) -> StepKernel | None:
    """The kernel of a step of a program; None where the step runs by torch, or as operations of a stream."""
    if type(where.step) not in KERNELS or not program.runs_as_kernel(where.step):
        return None
    module, _, name = KERNELS[type(where.step)].partition(".")
    found: StepKernel | None = getattr(import_module(f"weft.runtime.{module}"), name)(program, where, where.step)
    return found


def signal_values(program: BoundProgram) -> dict[Flag, int]:
    """By flag of the schedule that a kernel counts, on any rank: its value once it is signalled."""
    found: dict[Flag, int] = {}
    for rank, _, _, step in program.schedule:
        module = SIGNAL_VALUES.get(type(step))
        if module is not None and program.runs_as_kernel(step):
            found |= import_module(f"weft.runtime.{module}").signal_values(program, rank, step)
    return found
