"""The launch plan: what a call of one program enqueues on one rank's streams, prepared once, lane by lane.

A call only fills in where its tensors lie. To walk the steps of the schedule in Python in each call took 0.5 to 0.7 ms.

    schedule step            launches
    wait                     FlagOperations: write how far the lane has come, wait, lower
    copy                     CopyLaunch
    push                     PushLaunch; for a dtype that kernels do not take, copies and signals
    fused collective         FusedCollectiveLaunch, waits included
    with counts on devices   RaggedLaunch, waits included
    sends and receives       FlagOperations: write how far the lane has come; MessageLaunch
    collective               CollectiveLaunch
    signal                   FlagOperations: raise, at each waiter
    gemm as a kernel         FlagOperations: wait for previous calls; KernelLaunch; FlagOperations: lower its gates
    gemm part by part        for each group of parts, FlagOperations: its gates; MatmulLaunch; FlagOperations: its count. A part
                             with inner gates has FlagOperations and a SliceLaunch for each slice

What the compute lane signals while it has more to do goes aside, to a stream of its own (weft.runtime.lane_streams). Copy lanes
signal on their own stream: the copies between the signals are slower otherwise (docs/log.md).

Neighbouring FlagOperations become one submission. On copy lanes, and on all lanes of a collective alone, beside which other
kernels run, it consists of memory operations, which need no SM: waiting blocks may hold all SMs. On other lanes it is a kernel
of one warp (weft.kernels.words), which does the operations of a phase at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from weft.compat.streams import Driver, Word
from weft.core.schedule import (
    Collective,
    Copy,
    Flag,
    FusedCollective,
    Gemm,
    Lane,
    Part,
    Push,
    Reduce,
    Region,
    Schedule,
    SendReceive,
    Signal,
    Step,
    Wait,
    waits,
)
from weft.runtime.arithmetic import Sliced, groups
from weft.runtime.bindings import Bindings, Where
from weft.runtime.flag_words import WaiterWords
from weft.runtime.launches import (
    CollectiveLaunch,
    CopyLaunch,
    FlagOperations,
    FlagSubmitter,
    FusedCollectiveLaunch,
    KernelLaunch,
    Launch,
    MatmulLaunch,
    MessageLaunch,
    PushLaunch,
    RaggedLaunch,
    SliceLaunch,
    SumLaunch,
)
from weft.runtime.nccl import NcclCollective
from weft.runtime.network import CudaWire
from weft.runtime.order import before, behind, order, turns
from weft.runtime.products import Products

if TYPE_CHECKING:
    from weft.runtime.fused import FusedStep
    from weft.runtime.fused_collective import FusedCollectiveKernel
    from weft.runtime.pushes import FusedPush
    from weft.runtime.ragged_kernels import RaggedKernels

AHEAD = 256
"""How many launches of a lane may be enqueued before other lanes have theirs. A stream takes about 1000 entries, and a launch
is a few of them."""


class LaunchDevice(Protocol):
    """What the launches of a program use of its GPU. tries: how often a kernel looks at a flag before it gives up."""

    @property
    def device(self) -> torch.device: ...

    @property
    def driver(self) -> Driver: ...

    @property
    def wire(self) -> CudaWire | None: ...

    @property
    def tries(self) -> int: ...


class Planned(Protocol):
    """A program, as its launch plan needs it. sms_for_kernels, sms_for_pushes: how many blocks they have."""

    schedule: Schedule
    rank: int
    flags: WaiterWords
    fixed: Bindings
    kernels: dict[int, FusedStep]
    pushes: dict[tuple[str, int], FusedPush]
    fused_collectives: dict[tuple[str, int], FusedCollectiveKernel]
    ragged: RaggedKernels | None
    sms_for_kernels: int
    sms_for_pushes: int

    @property
    def space(self) -> LaunchDevice: ...

    @property
    def streams(self) -> FlagSubmitter: ...

    @property
    def products(self) -> Mapping[str, Products]: ...

    @property
    def collectives(self) -> Mapping[int, NcclCollective]: ...

    def growth_of(self, flag: Flag) -> int: ...

    def itemsize(self, region: Region) -> int: ...

    def here(self, where: Where) -> Word: ...

    def gate_address(self, flag: Flag, where: Where) -> int: ...

    def waiters(self, flag: Flag) -> list[int]: ...


class LaneLaunches(NamedTuple):
    """Launches of one lane that are enqueued one after the other. by_torch: one of them goes to torch's current stream."""

    lane: Lane
    launches: list[Launch]
    by_torch: bool


class LaunchPlan:
    """The launches of one rank. running: the ids of the steps whose kernels can load the operands of the call.

    lanes: by lane, every launch for itself. merged: with neighbouring FlagOperations as one, and with signals aside.
    """

    def __init__(self, program: Planned, running: frozenset[int]) -> None:
        self._program, self._running = program, running
        self.lanes = [(lane, list(self._lane(lane))) for lane in program.schedule.ranks[program.rank]]
        self.merged = [(lane, _with_asides(lane, merged(launches))) for lane, launches in self.lanes]

    @cached_property
    def runs(self) -> list[LaneLaunches]:
        """What a call enqueues, in this order."""
        return self._in_order(self.merged)

    @cached_property
    def runs_apart(self) -> list[LaneLaunches]:
        """The same with every launch for itself, so that each can be timed."""
        return self._in_order(self.lanes)

    def _in_order(self, lanes: list[tuple[Lane, list[Launch]]]) -> list[LaneLaunches]:
        """Lane after lane, that of the caller's stream last; where a lane is long, the lanes take turns."""
        if max((len(launches) for _, launches in lanes), default=0) <= AHEAD:
            found = sorted(lanes, key=lambda one: one[0].kind == "compute")
        else:
            found = self._in_turns(lanes)
        return [LaneLaunches(lane, launches, any(one.by_torch for one in launches)) for lane, launches in found]

    def _in_turns(self, lanes: list[tuple[Lane, list[Launch]]]) -> list[tuple[Lane, list[Launch]]]:
        places = order(self._program.schedule, self._program.rank)
        # A launch may be of several steps, and is enqueued with the first of them.
        placed = [(places[one.where.lane, one.where.position, one.moment], lane, one) for lane, some in lanes for one in some]
        found: list[tuple[Lane, list[Launch]]] = []
        for _, lane, one in sorted(placed, key=itemgetter(0)):
            if not found or found[-1][0] is not lane:
                found.append((lane, []))
            found[-1][1].append(one)
        return found

    def _lane(self, lane: Lane) -> Iterator[Launch]:
        for position, step in enumerate(lane.steps):
            yield from self._step(step, Where(self._program.rank, lane.name, position, step))

    def _step(self, step: Step, where: Where) -> Iterator[Launch]:
        if self._program.ragged is not None:
            yield RaggedLaunch(where=where, step=step, kernels=self._program.ragged)
        elif isinstance(step, Wait):
            yield from self._pass([step], where)
        elif isinstance(step, Signal):
            yield self._raise(step.flag, where)
        elif isinstance(step, Copy):
            yield from self._copy(step, where)
        elif isinstance(step, Push):
            yield from self._push(step, where)
        elif isinstance(step, FusedCollective):
            kernel = self._program.fused_collectives[where.lane, where.position]
            yield FusedCollectiveLaunch(where=where, kernel=kernel, tries=self._program.space.tries)
        elif isinstance(step, Collective):
            collective = self._program.collectives[id(step)]
            yield CollectiveLaunch(where=where, step=step, collective=collective, device=self._program.space.device)
        elif isinstance(step, SendReceive):
            yield self._operations(where, (self._program.here(where),))
            yield MessageLaunch(where=where, step=step, wire=self._program.space.wire)
        elif id(step) in self._running:
            yield from self._kernel(self._program.kernels[id(step)], where)
        elif isinstance(step, Gemm):
            yield from self._matmuls(step, where)
        else:
            assert isinstance(step, Reduce), "a lookup runs as a kernel, and a user's call is none of a bound program"
            yield from self._sums(step, where)

    def _pass(self, gates: Sequence[Wait], where: Where, passed: set[Flag] | None = None) -> Iterator[FlagOperations]:
        """Wait for gates and lower them, each once a step. passed: the gates of the step that have been waited for."""
        passed = set() if passed is None else passed
        words = []
        for flag in dict.fromkeys(gate.flag for gate in gates if gate.flag not in passed and self._ever(gate)):
            passed.add(flag)
            address = self._program.gate_address(flag, where)
            words += [Word("wait", address, self._program.growth_of(flag)), Word("lower", address, 0)]
        if words:
            yield self._operations(where, (self._program.here(where), *words))

    def _ever(self, gate: Wait) -> bool:
        """Whether it can ever be open: previous calls may have nothing to signal."""
        return gate.at_least > 0 or self._program.flags.raised(gate.flag)

    def _raise(self, flag: Flag, where: Where) -> FlagOperations:
        value = self._program.growth_of(flag)
        return self._operations(where, tuple(Word("signal", address, value) for address in self._program.waiters(flag)))

    def _push(self, step: Push, where: Where) -> Iterator[Launch]:
        push = self._program.pushes.get((where.lane, where.position))
        if push is not None:
            yield PushLaunch(where=where, push=push, sms=self._program.sms_for_pushes)
            return
        for part in step.parts:
            yield from self._copy(Copy(part.src, part.dst), where)
            yield self._raise(part.count, where)

    def _copy(self, step: Copy, where: Where) -> Iterator[CopyLaunch]:
        height, width = step.src.shape
        if height * width == 0:
            return
        item = self._program.itemsize(step.src)
        (src, src_pitch), (dst, dst_pitch) = self._place(step.src), self._place(step.dst)
        copy = self._program.space.driver.copier(rows=height, row_bytes=width * item, pitches=(src_pitch, dst_pitch))
        to_output = self._program.schedule.buffer[step.dst.buffer].kind == "output"
        yield CopyLaunch(where=where, src=src, dst=dst, copy=copy, to_output=to_output)

    def _place(self, region: Region) -> tuple[Callable[[Bindings], int], int]:
        """A function that finds the address of a region's first element in a call; and the bytes from row to row."""
        program, key = self._program, (region.buffer, region.rank)
        buffer, item = program.schedule.buffer[region.buffer], program.itemsize(region)
        pitch = buffer.cols[region.rank] * item
        offset = region.rows[0] * pitch + region.cols[0] * item
        if buffer.kind in ("symmetric", "local"):
            fixed = program.fixed.tensors[key][0][0].data_ptr() + offset
            return lambda _: fixed, pitch
        return lambda bindings: bindings.tensors[key][0][0].data_ptr() + offset, pitch

    def _kernel(self, kernel: FusedStep, where: Where) -> Iterator[Launch]:
        """A GEMM's tiles wait for the chunks of this call themselves. For everything else the stream waits before the kernel.

        A flag of previous calls may be raised again while the kernel runs. And the blocks of a sum would fill every SM while
        they wait: copies of a few KiB, which are kernels, then never ran (a hang on 4 x H200).
        """
        gates = waits(kernel.step)
        inside = [gate for gate in gates if gate.at_least and isinstance(kernel.step, Gemm)]
        yield from self._pass([gate for gate in gates if gate not in inside], where)
        if inside:
            yield self._operations(where, (self._program.here(where),))
        moment = 0 if inside else behind(0)
        sms, tries = self._program.sms_for_kernels, self._program.space.tries
        yield KernelLaunch(where=where, moment=moment, kernel=kernel, sms=sms, tries=tries)
        if inside:
            own = dict.fromkeys(self._program.gate_address(gate.flag, where) for gate in inside)
            last = behind(len(turns(kernel.step)) - 1)
            yield self._operations(where, tuple(Word("lower", address, 0) for address in own), last)

    def _matmuls(self, step: Gemm, where: Where) -> Iterator[Launch]:
        passed: set[Flag] = set()
        turn = 0
        for group in groups(step.parts):
            yield from _given(before(turn), self._pass(group[0].gates, where, passed))
            if group[0].inner:
                yield from self._slices(step, group[0], where, passed, turn)
            else:
                products = self._program.products[where.lane]
                yield MatmulLaunch(where=where, moment=behind(turn), step=step, parts=group, products=products)
            turn += len(group) + len(group[0].inner)
            if group[-1].count is not None:
                yield from _given(behind(turn - 1), [self._raise(group[-1].count, where)])

    def _slices(self, step: Gemm, part: Part, where: Where, passed: set[Flag], turn: int) -> Iterator[Launch]:
        """A part whose gates have been waited for, each slice behind its inner gate. turn: that of the first slice."""
        sliced, products = Sliced(step, part), self._program.products[where.lane]
        gates: list[tuple[Wait, ...]] = [(), *((gate,) for _, gate in part.inner)]
        for number, inner in enumerate(gates):
            yield from _given(before(turn + number), self._pass(inner, where, passed))
            yield SliceLaunch(where=where, moment=behind(turn + number), sliced=sliced, number=number, products=products)

    def _sums(self, step: Reduce, where: Where) -> Iterator[Launch]:
        passed: set[Flag] = set()
        for number, part in enumerate(step.parts):
            yield from _given(behind(0) if number else before(0), self._pass(part.gates, where, passed))
            yield SumLaunch(where=where, moment=behind(0), part=part, divide_by=step.divide_by)
            if part.count is not None:
                yield from _given(behind(0), [self._raise(part.count, where)])

    def _operations(self, where: Where, words: tuple[Word, ...], moment: int = 0) -> FlagOperations:
        return FlagOperations(where=where, words=words, moment=moment, submitter=self._program.streams)


def _with_asides(lane: Lane, launches: list[Launch]) -> list[Launch]:
    """The same launches, with signals of the caller's stream aside where work follows."""
    last = max((at for at, one in enumerate(launches) if not isinstance(one, FlagOperations)), default=0)
    found: list[Launch] = []
    for at, one in enumerate(launches):
        if not isinstance(one, FlagOperations):
            found.append(one)
            continue
        first = _signals(one) if lane.kind == "compute" and at < last else 0
        if first:
            found.append(replace(one, words=one.words[:first], aside=True))
        if one.words[first:]:
            found.append(replace(one, words=one.words[first:]))
    return found


def _signals(operations: FlagOperations) -> int:
    """How many signals these operations begin with."""
    return next((at for at, word in enumerate(operations.words) if word.kind != "signal"), len(operations.words))


def _given(moment: int, operations: Iterable[FlagOperations]) -> Iterator[FlagOperations]:
    return (replace(one, moment=moment) for one in operations)


def merged(launches: Sequence[Launch]) -> list[Launch]:
    """The same launches, neighbouring FlagOperations as one."""
    found: list[Launch] = []
    for one in launches:
        last = found[-1] if found else None
        if isinstance(one, FlagOperations) and isinstance(last, FlagOperations):
            found[-1] = replace(last, words=_joined(last.words, one.words), aside=False)
        else:
            found.append(one)
    return found


def _joined(before: tuple[Word, ...], words: tuple[Word, ...]) -> tuple[Word, ...]:
    """Operations of one lane, one after the other. Where waits follow waits, the lane has said where it is: from there on it
    waits for all of them."""
    passing = any(word.kind == "wait" for word in before) and before[-1].kind == "lower"
    waits_on = len(words) > 1 and words[0].kind == "here" and words[1].kind == "wait"
    return before + words[1:] if passing and waits_on else before + words
