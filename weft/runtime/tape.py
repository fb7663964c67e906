"""One rank's lanes as what CUDA streams are given, prepared once: a call only fills in where its tensors lie.

    Words   memory operations on flags: waits and writes at addresses that never change
    Work    a copy, a kernel, a matmul: enqueued with this call's tensors

    schedule step            items of the tape
    wait                     Words: say where we are, wait, lower
    copy                     Work: a peer copy, by a copy engine
    push                     Work: one kernel; of a dtype that kernels do not take, as copies and signals
    fused steps              Work: one kernel, waits included
    sends and receives       Words: say where we are; Work: the vendor's
    signal                   Words: raise, at each waiter
    gemm as a kernel         Words: waits for previous calls; Work; Words: lower its gates
    gemm part by part        for each group of parts: Words: its gates; Work: a matmul; Words: its count. Of a part with inner
                             gates: Words and Work for each slice

What the compute lane signals while it has more to do goes aside, on a stream that waits for the work before: a word in a peer's
memory takes 10 us or more where the links are full, and the next matmul need not wait for it. Not so on copy lanes: copies that
something hangs on between them are slower than the signals (docs/log.md).

Neighbouring Words become one submission: of memory operations on copy lanes, which must not need an SM that waiting blocks
may hold, and on all lanes of a collective alone, which other kernels run beside; of a kernel of one warp (weft.kernels.words)
on the others, which does those of a phase at once. A copy of rows that do not follow each other is one two-dimensional copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING

from weft.compat.streams import Word
from weft.core.schedule import (
    Collective,
    Copy,
    Flag,
    FusedCollective,
    Gemm,
    Lane,
    Lookup,
    Part,
    Push,
    Reduce,
    Region,
    SendReceive,
    Signal,
    Step,
    Wait,
    waits,
)
from weft.runtime.arithmetic import Sliced, add_up, groups, multiply
from weft.runtime.bindings import Bindings, Where
from weft.runtime.order import before, behind, order, turns

if TYPE_CHECKING:
    from weft.runtime.cuda import CudaProgram
    from weft.runtime.fused import FusedStep
    from weft.runtime.fused_collective import FusedCollectiveKernel


@dataclass(frozen=True, slots=True)
class Words:
    """Memory operations, in this order. moment: of the step, at which they are given (weft.runtime.order). aside: signals that
    what comes after them in the lane does not wait for."""

    where: Where
    words: tuple[Word, ...]
    moment: int = 0
    aside: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Enqueue something on a stream. by_torch: on torch's current one, which must then be the lane's. moment: as of Words."""

    where: Where
    run: Callable[[Bindings, int], None]
    by_torch: bool
    moment: int = 0


Item = Words | Work
AHEAD = 256
"""Items of a lane that may be given before other lanes have theirs: a stream takes some 1000 entries, an item is a few."""


class Tape:
    """The items of one rank's lanes. running: which of its kernels (by id of the step) can load this call's operands."""

    def __init__(self, program: CudaProgram, running: frozenset[int]) -> None:
        self._program, self._running = program, running
        self.lanes = [(lane, list(self._lane(lane))) for lane in program.schedule.ranks[program.rank]]
        self.merged = [(lane, _with_asides(lane, merged(items))) for lane, items in self.lanes]

    @cached_property
    def runs(self) -> list[tuple[Lane, list[Item]]]:
        """The items with neighbouring Words as one, as streams are given them."""
        return self._in_order(self.merged)

    @cached_property
    def runs_apart(self) -> list[tuple[Lane, list[Item]]]:
        """The same with every item for itself, so that each can be timed."""
        return self._in_order(self.lanes)

    def _in_order(self, lanes: list[tuple[Lane, list[Item]]]) -> list[tuple[Lane, list[Item]]]:
        """Lane after lane, that of the caller's stream last; where one is long, in turns."""
        if max((len(items) for _, items in lanes), default=0) <= AHEAD:
            return sorted(lanes, key=lambda one: one[0].kind == "compute")
        places = order(self._program.schedule, self._program.rank)
        # An item may be of several steps, and is given with the first.
        given = [(places[i.where.lane, i.where.position, i.moment], lane, i) for lane, items in lanes for i in items]
        found: list[tuple[Lane, list[Item]]] = []
        for _, lane, item in sorted(given, key=itemgetter(0)):
            if not found or found[-1][0] is not lane:
                found.append((lane, []))
            found[-1][1].append(item)
        return found

    def _lane(self, lane: Lane) -> Iterator[Item]:
        for position, step in enumerate(lane.steps):
            yield from self._step(step, Where(self._program.rank, lane.name, position, step))

    def _fused_collective(self, kernel: FusedCollectiveKernel) -> Work:
        run = self._program.fused_collective
        return Work(kernel.where, lambda bindings, stream: run(kernel, bindings, stream), by_torch=True)

    def _step(self, step: Step, where: Where) -> Iterator[Item]:
        if isinstance(step, Wait):
            yield from self._pass([step], where)
        elif isinstance(step, Signal):
            yield self._raise(step.flag, where)
        elif isinstance(step, Copy):
            yield from self._copy(step, where)
        elif isinstance(step, Push):
            yield from self._push(step, where)
        elif isinstance(step, FusedCollective):
            yield self._fused_collective(self._program.fused_collectives[where.lane, where.position])
        elif isinstance(step, Collective):
            yield Work(where, lambda bindings, _: self._program.collective(step, bindings), by_torch=True)
        elif isinstance(step, SendReceive):
            yield Words(where, (self._program.here(where),))
            yield Work(where, lambda bindings, _: self._program.send_receive(step, where, bindings), by_torch=True)
        elif id(step) in self._running:
            yield from self._kernel(self._program.kernels[id(step)], where)
        elif isinstance(step, Gemm):
            yield from self._matmuls(step, where)
        else:
            assert not isinstance(step, Lookup), "a lookup runs as a kernel"
            yield from self._sums(step, where)

    def _pass(self, gates: Sequence[Wait], where: Where, passed: set[Flag] | None = None) -> Iterator[Words]:
        """Wait for gates and lower them, each once a step. passed: gates of the step that have been."""
        passed = set() if passed is None else passed
        words = []
        for flag in dict.fromkeys(gate.flag for gate in gates if gate.flag not in passed and self._ever(gate)):
            passed.add(flag)
            address = self._program.gate_address(flag, where)
            words += [Word("wait", address, self._program.growth_of(flag)), Word("lower", address, 0)]
        if words:
            yield Words(where, (self._program.here(where), *words))

    def _ever(self, gate: Wait) -> bool:
        """Whether it can ever be open: previous calls may have nothing to signal."""
        return gate.at_least > 0 or self._program.flags.raised(gate.flag)

    def _raise(self, flag: Flag, where: Where) -> Words:
        value = self._program.growth_of(flag)
        return Words(where, tuple(Word("signal", address, value) for address in self._program.waiters(flag)))

    def _push(self, step: Push, where: Where) -> Iterator[Item]:
        push = self._program.pushes.get((where.lane, where.position))
        if push is not None:
            yield Work(where, lambda bindings, stream: self._program.push(push, bindings, stream), by_torch=True)
            return
        for part in step.parts:
            yield from self._copy(Copy(part.src, part.dst), where)
            yield self._raise(part.count, where)

    def _copy(self, step: Copy, where: Where) -> Iterator[Work]:
        height, width = step.src.shape
        if height * width == 0:
            return
        item = self._program.itemsize(step.src)
        (src, src_pitch), (dst, dst_pitch) = self._place(step.src), self._place(step.dst)
        copy = self._program.space.driver.copier(rows=height, row_bytes=width * item, pitches=(src_pitch, dst_pitch))
        kept = self._program.schedule.buffer[step.dst.buffer].kind == "output"

        def run(bindings: Bindings, stream: int) -> None:
            there, here = dst(bindings), src(bindings)
            if there != here and not (kept and self._program.keeps_outputs):
                copy(there, here, stream)

        yield Work(where, run, by_torch=False)

    def _place(self, region: Region) -> tuple[Callable[[Bindings], int], int]:
        """(the address of a region's first element in a call, bytes from row to row)."""
        program, key = self._program, (region.buffer, region.rank)
        buffer, item = program.schedule.buffer[region.buffer], program.itemsize(region)
        pitch = buffer.cols[region.rank] * item
        offset = region.rows[0] * pitch + region.cols[0] * item
        if buffer.kind in ("symmetric", "local"):
            fixed = program.fixed.tensors[key][0][0].data_ptr() + offset
            return lambda _: fixed, pitch
        return lambda bindings: bindings.tensors[key][0][0].data_ptr() + offset, pitch

    def _kernel(self, kernel: FusedStep, where: Where) -> Iterator[Item]:
        """A GEMM's tiles wait for this call's chunks themselves; for all else the stream waits before the kernel.

        What previous calls left may be raised again while the kernel runs. And a sum's blocks would fill every SM while they
        wait: copies of a few KiB, which are kernels, then never ran (a hang on 4 x H200).
        """
        gates = waits(kernel.step)
        inside = [gate for gate in gates if gate.at_least and isinstance(kernel.step, Gemm)]
        yield from self._pass([gate for gate in gates if gate not in inside], where)
        if inside:
            yield Words(where, (self._program.here(where),))
        moment = 0 if inside else behind(0)
        yield Work(where, lambda bindings, stream: self._program.launch(kernel, bindings, stream), True, moment)
        if inside:
            own = dict.fromkeys(self._program.gate_address(gate.flag, where) for gate in inside)
            last = behind(len(turns(kernel.step)) - 1)
            yield Words(where, tuple(Word("lower", address, 0) for address in own), last)

    def _matmuls(self, step: Gemm, where: Where) -> Iterator[Item]:
        passed: set[Flag] = set()
        turn = 0
        for group in groups(step.parts):
            yield from _given(before(turn), self._pass(group[0].gates, where, passed))
            if group[0].inner:
                yield from self._slices(step, group[0], where, passed, turn)
            else:
                run = partial(multiply, step=step, parts=group, matmul=partial(self._program.matmul, where.lane))
                yield Work(where, lambda bindings, _, run=run: run(bindings), True, behind(turn))  # type: ignore[misc]
            turn += len(group) + len(group[0].inner)
            if group[-1].count is not None:
                yield from _given(behind(turn - 1), [self._raise(group[-1].count, where)])

    def _slices(self, step: Gemm, part: Part, where: Where, passed: set[Flag], turn: int) -> Iterator[Item]:
        """A part whose gates have been waited for, each slice behind its inner gate. turn: of the first."""
        sliced = Sliced(step, part, partial(self._program.matmul, where.lane))
        gates: list[tuple[Wait, ...]] = [(), *((gate,) for _, gate in part.inner)]
        for number, inner in enumerate(gates):
            yield from _given(before(turn + number), self._pass(inner, where, passed))
            run = partial(sliced.multiply, number=number)
            yield Work(where, lambda bindings, _, run=run: run(bindings), True, behind(turn + number))  # type: ignore[misc]

    def _sums(self, step: Reduce, where: Where) -> Iterator[Item]:
        passed: set[Flag] = set()
        for number, part in enumerate(step.parts):
            yield from _given(behind(0) if number else before(0), self._pass(part.gates, where, passed))
            run = partial(add_up, part=part, divide_by=step.divide_by)
            yield Work(where, lambda bindings, _, run=run: run(bindings), True, behind(0))  # type: ignore[misc]
            if part.count is not None:
                yield from _given(behind(0), [self._raise(part.count, where)])


def _with_asides(lane: Lane, items: list[Item]) -> list[Item]:
    """The same items, with signals of the caller's stream aside where work follows."""
    last = max((at for at, item in enumerate(items) if isinstance(item, Work)), default=0)
    found: list[Item] = []
    for at, item in enumerate(items):
        first = _signals(item) if lane.kind == "compute" and at < last else 0
        if isinstance(item, Words) and first:
            found.append(replace(item, words=item.words[:first], aside=True))
            item = replace(item, words=item.words[first:])
        if isinstance(item, Work) or item.words:
            found.append(item)
    return found


def _signals(item: Item) -> int:
    """How many signals an item begins with."""
    words = item.words if isinstance(item, Words) else ()
    return next((at for at, word in enumerate(words) if word.kind != "signal"), len(words))


def _given(moment: int, words: Iterable[Words]) -> Iterator[Words]:
    return (replace(one, moment=moment) for one in words)


def merged(items: Sequence[Item]) -> list[Item]:
    """The same items, neighbouring Words as one."""
    found: list[Item] = []
    for item in items:
        last = found[-1] if found else None
        if isinstance(item, Words) and isinstance(last, Words):
            found[-1] = Words(last.where, _joined(last.words, item.words), last.moment)
        else:
            found.append(item)
    return found


def _joined(before: tuple[Word, ...], words: tuple[Word, ...]) -> tuple[Word, ...]:
    """Operations of one lane. Where waits follow waits, the lane has said where it is: from there on it waits for all."""
    passing = any(word.kind == "wait" for word in before) and before[-1].kind == "lower"
    waits_on = len(words) > 1 and words[0].kind == "here" and words[1].kind == "wait"
    return before + words[1:] if passing and waits_on else before + words
