"""This kernel of one warp waits for flags, lowers them and raises them. It replaces a stream's own memory operations.

A stream takes about 2 us for each operation on a flag, one after the other. This kernel does all operations of a phase
concurrently. It occupies one warp of one SM, so it is used on lanes that hold no SM while they wait.

    phase: record the position -> wait for all flags -> lower them -> signal -> next phase

Order: a wait acquires and a signal releases, both at system scope, with a block barrier between them. So a peer that sees any
signal also sees everything that any thread saw before it. A phase may lower all its flags after its last wait, because no
other rank can observe that a wait has passed before the phase signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from weft.compat.streams import Word
from weft.kernels.launch import Launcher
from weft.triton.flags import look, table

Operation = tuple[int, int]
"""The address of an int32 flag, and a value."""
_KINDS, _LEAST = 4, 32


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Flag operations that run concurrently, kind by kind.

    progress: written first; the step that the lane has reached, for the watchdog.
    waits: each flag must reach at least its value.
    lowers: written after all waits.
    signals: written last.
    """

    progress: list[Operation] = field(default_factory=list)
    waits: list[Operation] = field(default_factory=list)
    lowers: list[Operation] = field(default_factory=list)
    signals: list[Operation] = field(default_factory=list)

    @property
    def kinds(self) -> tuple[list[Operation], ...]:
        return self.progress, self.waits, self.lowers, self.signals


@dataclass(frozen=True, kw_only=True)
class FlagTable:
    """A FlagTable holds phases in device memory.

    operations: (address, value) by phase, kind and position. Address 0 marks an unused position.
    """

    operations: torch.Tensor
    phases: int
    size: int


def make_flag_table(phases: Sequence[Phase], device: torch.device) -> FlagTable:
    """Store phases in device memory for the kernel."""
    size = triton.next_power_of_2(max((len(kind) for phase in phases for kind in phase.kinds), default=1))
    size = max(size, _LEAST)
    rows = [[*kind, *[(0, 0)] * (size - len(kind))] for phase in phases for kind in phase.kinds]
    return FlagTable(operations=table(rows, torch.int64, device), phases=len(phases), size=size)


def run_flag_operations(plan: FlagTable, *, tries: int, launched_by: Launcher | None = None, stream: int | None = None) -> None:
    """Launch the kernel on a table.

    tries: a phase gives up after this many looks at its flags, and the kernel continues. 0 only loads the kernel.
    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    arguments = (plan.operations, plan.phases if tries else 0, tries)
    constants = {"KINDS": _KINDS, "SIZE": plan.size}
    (launched_by or Launcher())(_flag_kernel, 1, arguments, constants, key=plan.size, stream=stream, num_warps=1)


def split_into_phases(operations: Sequence[Word]) -> list[Phase]:
    """Group a lane's flag operations into phases: consecutive waits form one phase, which its signals end.

    The flags of a phase are lowered after its last wait. That is safe because the lane signals nothing between its waits: a
    peer can raise a flag again only after a later signal of this lane.
    """
    found = [Phase()]
    closed = False
    for operation in operations:
        if operation.kind in ("progress", "wait") and (closed or (operation.kind == "progress" and found[-1] != Phase())):
            found.append(Phase())
            closed = False
        phase = found[-1]
        waited_for = {address for address, _ in phase.waits}
        if operation.kind == "signal" or (operation.kind == "lower" and operation.address not in waited_for):
            closed = True
        lists = {"progress": phase.progress, "wait": phase.waits, "lower": phase.lowers, "signal": phase.signals}
        lists[operation.kind].append((operation.address, operation.value))
    return found


@triton.jit
def _load(operations_ptr, row, SIZE: tl.constexpr):
    """Return the flags, values and mask of one kind of operation in one phase."""
    fields = operations_ptr + 2 * (row * SIZE + tl.arange(0, SIZE))
    addresses = tl.load(fields)
    return addresses.to(tl.pointer_type(tl.int32)), tl.load(fields + 1).to(tl.int32), addresses != 0


@triton.jit(do_not_specialize=["phases", "tries"])
def _flag_kernel(operations_ptr, phases, tries, KINDS: tl.constexpr, SIZE: tl.constexpr):
    for phase in range(phases):
        # Load all four kinds first, so that their latencies overlap.
        progress, positions, written = _load(operations_ptr, KINDS * phase, SIZE)
        flags, needs, waited = _load(operations_ptr, KINDS * phase + 1, SIZE)
        lowers, lows, lowered = _load(operations_ptr, KINDS * phase + 2, SIZE)
        signals, raised, signalled = _load(operations_ptr, KINDS * phase + 3, SIZE)
        tl.store(progress, positions, mask=written)
        looks = 0
        late = tl.max(waited.to(tl.int32), axis=0)
        while (late > 0) & (looks < tries):
            seen = look(flags, waited)
            late = tl.max((waited & (seen < needs)).to(tl.int32), axis=0)
            looks += 1
        tl.debug_barrier()
        tl.store(lowers, lows, mask=lowered)
        tl.debug_barrier()
        tl.atomic_xchg(signals, raised, mask=signalled, sem="release", scope="sys")
