"""One kernel of one warp that does memory operations on flags: what a stream does itself elsewhere, at less latency.

A stream looks at a word, or writes one, in some two microseconds each, one after the other; this kernel does those of a phase
at once. It needs room for one warp on one SM, so it is for lanes that hold no SM while they wait.

    phase: say where we are -> wait for all words -> lower them -> signal -> next phase

Order: a wait acquires and a signal releases, at system scope; a barrier of the block stands between, so that what any thread
has seen, a peer that sees any signal sees too. A phase may lower words only after all its waits: nobody learns that one of
them has passed before the phase signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from weft.compat.streams import Word
from weft.kernels.launch import Launcher
from weft.triton.flags import table

Operation = tuple[int, int]
"""Address of an int32 word, and a value."""
_KINDS, _LEAST = 4, 32


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Operations that are done together: first `here` is written, then `waits` must hold at least their values, then `lowers`
    and last `signals` are written."""

    here: list[Operation] = field(default_factory=list)
    waits: list[Operation] = field(default_factory=list)
    lowers: list[Operation] = field(default_factory=list)
    signals: list[Operation] = field(default_factory=list)

    @property
    def kinds(self) -> tuple[list[Operation], ...]:
        return self.here, self.waits, self.lowers, self.signals


@dataclass(frozen=True, kw_only=True)
class WordsTable:
    """Phases on the device. operations: address and value by phase, kind and place; the address 0 where there is none."""

    operations: torch.Tensor
    phases: int
    size: int


def words_table(phases: Sequence[Phase], device: torch.device) -> WordsTable:
    """Lay phases out for the kernel."""
    size = triton.next_power_of_2(max((len(kind) for phase in phases for kind in phase.kinds), default=1))
    size = max(size, _LEAST)
    rows = [[*kind, *[(0, 0)] * (size - len(kind))] for phase in phases for kind in phase.kinds]
    return WordsTable(operations=table(rows, torch.int64, device), phases=len(phases), size=size)


def launcher() -> Launcher:
    """For `do_words`, call after call."""
    return Launcher(_words_kernel)


def do_words(plan: WordsTable, *, tries: int, launched_by: Launcher | None = None, stream: int | None = None) -> None:
    """Do a table's phases. tries: how often a phase looks at its words before it gives up and goes on; 0: only load the kernel.

    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    arguments = (plan.operations, plan.phases if tries else 0, tries)
    constants = {"KINDS": _KINDS, "SIZE": plan.size}
    (launched_by or launcher())(1, arguments, constants, key=plan.size, stream=stream, num_warps=1)


def phases(words: Sequence[Word]) -> list[Phase]:
    """Flag operations of one lane in phases: waits that follow each other are one phase, lowered together. Signals end it.

    The waits may be lowered after the last of them instead of each at once, since the lane signals nothing between them:
    whatever raises one of them again has to come after a later signal of this lane.
    """
    found = [Phase()]
    closed = False
    for word in words:
        if word.kind in ("here", "wait") and (closed or (word.kind == "here" and found[-1] != Phase())):
            found.append(Phase())
            closed = False
        phase = found[-1]
        if word.kind == "signal" or (word.kind == "lower" and word.address not in {address for address, _ in phase.waits}):
            closed = True
        lists = {"here": phase.here, "wait": phase.waits, "lower": phase.lowers, "signal": phase.signals}
        lists[word.kind].append((word.address, word.value))
    return found


@triton.jit
def _load(operations_ptr, row, SIZE: tl.constexpr):
    """The words, values and mask of one kind in one phase."""
    fields = operations_ptr + 2 * (row * SIZE + tl.arange(0, SIZE))
    addresses = tl.load(fields)
    return addresses.to(tl.pointer_type(tl.int32)), tl.load(fields + 1).to(tl.int32), addresses != 0


@triton.jit(do_not_specialize=["phases", "tries"])
def _words_kernel(operations_ptr, phases, tries, KINDS: tl.constexpr, SIZE: tl.constexpr):
    for phase in range(phases):
        # All of them first: one after the other, each would wait for the memory again.
        here, places, told = _load(operations_ptr, KINDS * phase, SIZE)
        words, needs, waited = _load(operations_ptr, KINDS * phase + 1, SIZE)
        lowers, lows, lowered = _load(operations_ptr, KINDS * phase + 2, SIZE)
        signals, raised, signalled = _load(operations_ptr, KINDS * phase + 3, SIZE)
        tl.store(here, places, mask=told)
        looks = 0
        late = tl.max(waited.to(tl.int32), axis=0)
        while (late > 0) & (looks < tries):
            seen = tl.atomic_add(words, 0, mask=waited, sem="acquire", scope="sys")
            late = tl.max((waited & (seen < needs)).to(tl.int32), axis=0)
            looks += 1
        tl.debug_barrier()
        tl.store(lowers, lows, mask=lowered)
        tl.debug_barrier()
        tl.atomic_xchg(signals, raised, mask=signalled, sem="release", scope="sys")
