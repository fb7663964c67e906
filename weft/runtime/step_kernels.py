"""This module has the interface of all kernels that run steps, and the table of the steps that have a kernel.

The table `KERNELS` names what makes each kernel. These modules need Triton, so they are imported only if a program has such a
step and its device runs kernels. All ranks choose kernels for the same steps. So each rank knows the value that a
signalled flag has (`SIGNAL_VALUES`): the number of tiles if a kernel counts them, else 1. If a kernel cannot load a rank's
tensors, the rank runs the step part by part and signals the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from weft.core.logs import warn_once
from weft.core.schedule import (
    Flag,
    FusedCollective,
    Gemm,
    GroupedGemm,
    Lookup,
    Push,
    Reduce,
    Region,
    SegmentCopies,
    ShareCounts,
    Step,
    Wait,
)
from weft.kernels.launch import record_launches
from weft.runtime.bindings import Bindings, Where
from weft.runtime.launches import NotPreparedError, in_turn

if TYPE_CHECKING:
    from weft.runtime.bound import BoundProgram
    from weft.runtime.call_tensors import CallTensors, Issue

T = TypeVar("T")
Place = tuple[str, int]
"""The place of a step of a rank: the lane's name, and the position in the lane."""

KERNELS: dict[type[Step], str] = {
    Gemm: "fused.kernel_of",
    Reduce: "fused.kernel_of_sum",
    Push: "pushes.kernel_of",
    Lookup: "lookups.FusedLookup",
    FusedCollective: "fused_collective.FusedCollectiveKernel",
    ShareCounts: "ragged_kernels.RaggedStepKernel",
    SegmentCopies: "ragged_kernels.RaggedStepKernel",
    GroupedGemm: "ragged_kernels.RaggedStepKernel",
    Wait: "ragged_kernels.RaggedStepKernel",
}
"""The module of this package and its class or function that makes the kernel, by type of step. It takes the program, the place
and the step. A function returns None if the step has no kernel in that program."""
SIGNAL_VALUES: dict[type[Step], str] = {Gemm: "fused", Push: "pushes", Lookup: "lookups"}
"""The module whose `signal_values(program, rank, step)` returns the values of the step's flags, by type of step that counts."""


class MovableTables(Generic[T]):
    """MovableTables caches tables with addresses of the buffers of regions, and makes them anew if the buffers move.

    Symmetric memory never moves on a GPU. On a CPU it may grow and move.
    """

    def __init__(self, regions: Sequence[Region], make: Callable[[Bindings], T]) -> None:
        self._buffers, self._make = dict.fromkeys((region.buffer, region.rank) for region in regions), make
        self._cached: tuple[tuple[int, ...], T] | None = None

    def of(self, bindings: Bindings) -> T:
        moved = tuple(bindings.tensors[key][0][0].data_ptr() for key in self._buffers)
        if self._cached is None or self._cached[0] != moved:
            self._cached = moved, self._make(bindings)
        return self._cached[1]


class StepKernel:
    """A StepKernel runs one step of one rank as a kernel. Each call launches it.

    tables: what the kernel reads besides the tensors of a call.
    """

    waits_in_kernel = False
    """True if the kernel itself waits for the gates of this call. The launch plan lowers them after the kernel."""
    manages_own_flags = False
    """True if the kernel keeps its flags in words of its own, and raises, waits for and lowers them itself."""
    tabled: tuple[str, ...] = ()
    """The names of the caller's tensors whose addresses are in tables of the kernel. These tensors seldom move."""

    def __init__(self, program: BoundProgram, where: Where) -> None:
        self.program, self.where = program, where
        self.tables: MovableTables[Any] = MovableTables((), lambda bindings: None)
        self._logged: set[str] = set()

    def runs(self, bindings: Bindings) -> bool:
        """Return whether the kernel can load this call's operands. It is called before any part of a call is enqueued.

        It logs once for each reason that torch runs the step part by part, which overlaps less than one kernel.
        """
        reason = self.reason_against(bindings)
        if reason and reason not in self._logged:
            self._logged.add(reason)
            kind = type(self.where.step).__name__
            warn_once(f"lane {self.where.lane}: a {kind} runs part by part, by torch instead of one kernel: {reason}")
        return not reason

    def reason_against(self, bindings: Bindings) -> str:
        """Return why the kernel cannot run the tensors of a call, or "" if it can."""
        return ""

    def lay_out(self, bindings: Bindings) -> None:
        """Make the tables that the kernel reads in a call. It copies to the device, so call it outside of a graph capture."""
        self.tables.of(bindings)

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        """Launch the kernel.

        silent: it neither waits nor signals, for a rehearsal.
        tries: how often it reads a flag before it gives up.
        sms: the number of SMs that it may use.
        stream: by default torch's current stream.
        """
        raise NotImplementedError

    def prepare(self, tensors: CallTensors, *, tries: int, sms: int) -> Issue:
        """Return a function that launches the kernel for calls of one layout. Raises NotPreparedError if only `launch` can."""
        if not self.can_be_prepared(tensors.bindings):
            raise NotPreparedError(f"{self.where}: it reads tables that change, or copies")
        launches = record_launches(lambda: self.launch(tensors.bindings, silent=False, tries=tries, sms=sms))
        found = [one for one in (launch.prepare(tensors) for launch in launches) if one is not None]
        if len(found) < len(launches):
            raise NotPreparedError(f"{self.where}: a kernel was not launched with such arguments before")
        return in_turn(found)

    def can_be_prepared(self, bindings: Bindings) -> bool:
        """Return whether later launches only need new addresses. They need more if the kernel reads a copy, or a table on the
        device with addresses of the caller's tensors. Tables of `tabled` tensors are allowed, because a BoundCall compares
        their addresses."""
        return True

    def raise_if_late(self, describe: Callable[[Flag], str]) -> None:
        """Raise WaitTimeout if a wait of the last launch ended without its flag. describe: returns who signals a flag."""

    def missing(self) -> str:
        """Return a text that says what the kernel's own words still wait for, or "" if nothing. It needs copies, but no SM."""
        return ""

    def abort(self) -> None:
        """End every wait on the kernel's own words, now and later. It is enqueued on torch's current stream and needs no SM."""


def kernel_of(program: BoundProgram, where: Where) -> StepKernel | None:
    """Return the kernel of a step, or None if torch or operations of a stream run the step."""
    if type(where.step) not in KERNELS or not program.runs_as_kernel(where.step):
        return None
    module, _, name = KERNELS[type(where.step)].partition(".")
    found: StepKernel | None = getattr(import_module(f"weft.runtime.{module}"), name)(program, where, where.step)
    return found


def signal_values(program: BoundProgram) -> dict[Flag, int]:
    """Return the value of each signalled flag that a kernel of any rank counts."""
    found: dict[Flag, int] = {}
    for rank, _, _, step in program.schedule:
        module = SIGNAL_VALUES.get(type(step))
        if module is not None and program.runs_as_kernel(step):
            found |= import_module(f"weft.runtime.{module}").signal_values(program, rank, step)
    return found
