"""A launch plan is the list of launches that a call of a program enqueues on each lane of one rank.

It is built once for each program, because walking the schedule's steps in Python took 0.5 to 0.7 ms per call. A call only
inserts the addresses of its tensors. In the table, a gate is a Wait of one part of a step, `count` is the flag that a part
signals, and `lower` resets the waiter's copy of a flag.

    schedule step            launches
    wait                     FlagOperations: write the lane's progress, wait, lower
    signal                   FlagOperations: raise, at each waiter
    copy                     CopyLaunch
    any step as a kernel     FlagOperations: the gates that the kernel does not wait for itself, and the lane's progress;
                             KernelLaunch; FlagOperations: lower the gates that the kernel has waited for. A kernel with
                             flags of its own is a KernelLaunch alone
    gemm part by part        for each group of parts, FlagOperations: wait for its gates; TorchLaunch: the matmul;
                             FlagOperations: signal its count. A part with inner gates has FlagOperations and a TorchLaunch
                             for each slice of K
    sum, lookup, segments    likewise, for each part
    push                     for each part, CopyLaunch; FlagOperations: signal its count
    collective               TorchLaunch
    sends and receives       FlagOperations: write the lane's progress; TorchLaunch
    shared row counts        TorchLaunch: write them at the peers; FlagOperations: raise, wait; TorchLaunch: read them

If the compute lane signals and has more work to do, the signal is enqueued on a separate stream (weft.runtime.lane_streams).
Copy lanes signal on their own stream: the copies between the signals are slower otherwise (docs/lab/log.md).

Neighbouring FlagOperations become one submission. On a GPU there are two kinds:

- Stream memory operations need no SM, and waiting blocks may hold all SMs. They are used on copy lanes and network lanes, for
  signals on the separate stream, and on every lane of a CollectiveProblem, which may run concurrently with any kernel.
- On all other lanes a submission is a kernel of one warp (weft.kernels.flag_operations), which does the operations of a phase
  at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from weft.compat.streams import Word
from weft.core.problem import LookupProblem
from weft.core.schedule import (
    Collective,
    Copy,
    Flag,
    Gemm,
    GroupedGemm,
    Lane,
    Lookup,
    Part,
    Push,
    Reduce,
    Region,
    SegmentCopies,
    SendReceive,
    ShareCounts,
    Signal,
    Step,
    Wait,
    waits,
)
from weft.runtime.arithmetic import Product, Sliced, add_up, groups
from weft.runtime.bags import look_up
from weft.runtime.bindings import Where
from weft.runtime.launches import CopyLaunch, FlagOperations, IssuedCall, KernelLaunch, Launch, TorchLaunch
from weft.runtime.order import before, behind, order, turns
from weft.runtime.step_kernels import Place, StepKernel

if TYPE_CHECKING:
    from weft.runtime.bound import BoundProgram

MOST_IN_SEQUENCE = 256
"""If no lane has more launches than this, the lanes are enqueued one after the other. Otherwise the launches of all lanes are
interleaved, in the order of weft.runtime.order. A stream takes about 1000 entries, and a launch is a few of them."""


class Counts(Protocol):
    """Counts is a part of a step that may signal a flag at its end."""

    @property
    def count(self) -> Flag | None: ...


P = TypeVar("P", bound=Counts)


class LaneLaunches(NamedTuple):
    """LaneLaunches are launches of one lane that are enqueued one after the other.

    lane: the lane.
    launches: the launches.
    by_torch: whether one of them uses torch's current stream.
    """

    lane: Lane
    launches: list[Launch]
    by_torch: bool


class LaunchPlan:
    """A LaunchPlan holds the launches of one rank.

    running: the steps whose kernels can load the operands of the call.
    lanes: the launches of each lane.
    merged: the same with adjacent FlagOperations merged, and with signals on separate streams.
    """

    def __init__(self, program: BoundProgram, running: frozenset[Place]) -> None:
        self._program, self._running = program, running
        self._of: dict[type[Step], Callable[..., Iterator[Launch]]] = {
            Wait: self._wait,
            Signal: self._signal,
            Copy: self._copy,
            Push: self._push,
            Gemm: self._matmuls,
            Reduce: self._sums,
            Lookup: self._lookups,
            Collective: self._collective,
            SendReceive: self._messages,
            ShareCounts: self._counts,
            SegmentCopies: self._segments,
            GroupedGemm: self._segments,
        }
        """The function that yields the launches of a step that does not run as a kernel, by type of step."""
        self.lanes = [(lane, list(self._lane(lane))) for lane in program.schedule.ranks[program.rank]]
        self.merged = [(lane, _with_asides(lane, merged(launches))) for lane, launches in self.lanes]

    @cached_property
    def batches(self) -> list[LaneLaunches]:
        """The launches of a call, in the order in which they are enqueued."""
        return self._in_order(self.merged)

    @cached_property
    def unmerged_batches(self) -> list[LaneLaunches]:
        """The same launches, not merged, so that each can be timed."""
        return self._in_order(self.lanes)

    @cached_property
    def by_lane(self) -> list[tuple[Lane, list[Launch]]]:
        """The same launches grouped by lane, for lanes that run on threads. The compute lane comes first."""
        found: dict[str, tuple[Lane, list[Launch]]] = {}
        for lane, launches, _ in self.batches:
            found.setdefault(lane.name, (lane, []))[1].extend(launches)
        return sorted(found.values(), key=lambda one: one[0].kind != "compute")

    def _in_order(self, lanes: list[tuple[Lane, list[Launch]]]) -> list[LaneLaunches]:
        """Order the lanes one after the other, with the compute lane last. If a lane is long, interleave their launches."""
        if max((len(launches) for _, launches in lanes), default=0) <= MOST_IN_SEQUENCE:
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
        place = where.lane, where.position
        if place in self._running:
            return self._kernel(self._program.kernels[place], where)
        assert type(step) in self._of, f"{where} is no step of a bound program, or has no kernel here"
        return self._of[type(step)](step, where)

    def _wait(self, step: Wait, where: Where) -> Iterator[Launch]:
        return self._pass([step], where)

    def _signal(self, step: Signal, where: Where) -> Iterator[Launch]:
        yield self._raise(step.flag, where)

    def _collective(self, step: Collective, where: Where) -> Iterator[Launch]:
        yield TorchLaunch(where=where, work=self._program.collective(step, where))

    def _messages(self, step: SendReceive, where: Where) -> Iterator[Launch]:
        yield self._operations(where, (self._program.here(where),))
        yield TorchLaunch(where=where, work=self._program.messages(step, where))

    def _pass(self, gates: Sequence[Wait], where: Where, passed: set[Flag] | None = None) -> Iterator[FlagOperations]:
        """Wait for gates and lower them, each once a step. passed: the gates of the step that have been waited for."""
        passed = set() if passed is None else passed
        words = []
        for flag in dict.fromkeys(gate.flag for gate in gates if gate.flag not in passed and self._is_signalled(gate)):
            passed.add(flag)
            address = self._program.gate_address(flag, where)
            words += [Word("wait", address, self._program.signal_value(flag)), Word("lower", address, 0)]
        if words:
            yield self._operations(where, (self._program.here(where), *words))

    def _is_signalled(self, gate: Wait) -> bool:
        """Whether any step signals the gate's flag. A gate on the previous call whose flag nobody signals is left out."""
        return not gate.on_previous_call or self._program.flags.raised(gate.flag)

    def _raise(self, flag: Flag, where: Where) -> FlagOperations:
        value = self._program.signal_value(flag)
        return self._operations(where, tuple(Word("signal", address, value) for address in self._program.waiters(flag)))

    def _push(self, step: Push, where: Where) -> Iterator[Launch]:
        for part in step.parts:
            yield from self._copies(part.src, part.dst, where)
            yield self._raise(part.count, where)

    def _copy(self, step: Copy, where: Where) -> Iterator[CopyLaunch]:
        return self._copies(step.src, step.dst, where)

    def _copies(self, src: Region, dst: Region, where: Where) -> Iterator[CopyLaunch]:
        if src.size == 0:
            return
        to_output = self._program.schedule.buffer[dst.buffer].kind == "output"
        copy = self._program.copier(src, dst)
        yield CopyLaunch(where=where, src=src, dst=dst, copy=copy, to_output=to_output)

    def _kernel(self, kernel: StepKernel, where: Where) -> Iterator[Launch]:
        """A GEMM's tiles wait for the flags of this call inside the kernel. The lane waits for all other gates before it.

        For flags of the previous call, since those may be signalled again while the kernel runs. For the gates of other
        kernels, since their blocks would fill all SMs while they wait, and copies of a few KiB, which are kernels, could never
        run: this hung on 4 x H200.
        """
        gates = () if kernel.manages_own_flags else waits(where.step)
        inside = [gate for gate in gates if kernel.waits_in_kernel and not gate.on_previous_call]
        yield from self._pass([gate for gate in gates if gate not in inside], where)
        if inside:
            yield self._operations(where, (self._program.here(where),))
        sends = isinstance(where.step, Push)
        yield KernelLaunch(
            where=where,
            moment=behind(0) if gates and not inside else 0,
            kernel=kernel,
            sms=self._program.sms_for_pushes if sends else self._program.sms_for_kernels,
            tries=self._program.tries,
        )
        if inside:
            own = dict.fromkeys(self._program.gate_address(gate.flag, where) for gate in inside)
            last = behind(len(turns(where.step)) - 1)
            yield self._operations(where, tuple(Word("lower", address, 0) for address in own), last)

    def _matmuls(self, step: Gemm, where: Where) -> Iterator[Launch]:
        passed: set[Flag] = set()
        turn = 0
        for group in groups(step.parts):
            yield from _set_moment(before(turn), self._pass(group[0].gates, where, passed))
            if group[0].inner:
                yield from self._slices(step, group[0], where, passed, turn)
            else:
                work = partial(Product(step, group).multiply, where.lane)
                yield TorchLaunch(where=where, moment=behind(turn), work=work)
            turn += len(group) + len(group[0].inner)
            if group[-1].count is not None:
                yield from _set_moment(behind(turn - 1), [self._raise(group[-1].count, where)])

    def _slices(self, step: Gemm, part: Part, where: Where, passed: set[Flag], turn: int) -> Iterator[Launch]:
        """A part whose gates have been waited for, each slice behind its inner gate. turn: that of the first slice."""
        sliced = Sliced(step, part)

        def work(number: int, call: IssuedCall) -> None:
            sliced.multiply(call.bindings, number, call.matmuls[where.lane])

        gates: list[tuple[Wait, ...]] = [(), *((gate,) for _, gate in part.inner)]
        for number, inner in enumerate(gates):
            yield from _set_moment(before(turn + number), self._pass(inner, where, passed))
            yield TorchLaunch(where=where, moment=behind(turn + number), work=partial(work, number))

    def _sums(self, step: Reduce, where: Where) -> Iterator[Launch]:
        yield from self._parts(step.parts, where, lambda part, call: add_up(call.bindings, part, step.divide_by))

    def _lookups(self, step: Lookup, where: Where) -> Iterator[Launch]:
        problem = self._program.schedule.problem
        assert isinstance(problem, LookupProblem), f"{problem} has no tables"
        yield from self._parts(step.parts, where, lambda part, call: look_up(call.bindings, part.bags, part.out, problem))

    def _counts(self, step: ShareCounts, where: Where) -> Iterator[Launch]:
        rows, ranks = self._program.row_counts, [flag.rank for flag in step.flags]
        yield TorchLaunch(where=where, work=lambda call: rows.share(call.bindings, ranks))
        for flag in step.flags:
            yield self._raise(flag, where)
        yield from _set_moment(behind(0), self._pass(step.gates, where))
        yield TorchLaunch(where=where, moment=behind(0), work=lambda call: rows.lay_out(call.bindings))

    def _segments(self, step: SegmentCopies | GroupedGemm, where: Where) -> Iterator[Launch]:
        rows = self._program.row_counts
        yield from self._parts(step.parts, where, lambda part, call: rows.run(part, call.bindings, call.matmuls[where.lane]))

    def _parts(self, parts: Sequence[P], where: Where, work: Callable[[P, IssuedCall], None]) -> Iterator[Launch]:
        """Yield for one part after the other its gates, the work, and its count."""
        passed: set[Flag] = set()
        for number, part in enumerate(parts):
            gates: Sequence[Wait] = getattr(part, "gates", ())
            yield from _set_moment(behind(0) if number else before(0), self._pass(gates, where, passed))
            yield TorchLaunch(where=where, moment=behind(0), work=partial(work, part))
            if part.count is not None:
                yield from _set_moment(behind(0), [self._raise(part.count, where)])

    def _operations(self, where: Where, words: tuple[Word, ...], moment: int = 0) -> FlagOperations:
        return FlagOperations(where=where, words=words, moment=moment, submitter=self._program.submitter)


def _with_asides(lane: Lane, launches: list[Launch]) -> list[Launch]:
    """Return the launches with signals of the caller's stream moved to a separate stream if work follows them."""
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
    """Return the number of signals at the begin of these operations."""
    return next((at for at, word in enumerate(operations.words) if word.kind != "signal"), len(operations.words))


def _set_moment(moment: int, operations: Iterable[FlagOperations]) -> Iterator[FlagOperations]:
    return (replace(one, moment=moment) for one in operations)


def merged(launches: Sequence[Launch]) -> list[Launch]:
    """Return the launches with adjacent FlagOperations merged."""
    found: list[Launch] = []
    for one in launches:
        last = found[-1] if found else None
        if isinstance(one, FlagOperations) and isinstance(last, FlagOperations):
            found[-1] = replace(last, words=_join_words(last.words, one.words), aside=False)
        else:
            found.append(one)
    return found


def _join_words(before: tuple[Word, ...], words: tuple[Word, ...]) -> tuple[Word, ...]:
    """Return the operations of one lane in sequence.

    If both wait, the progress of the second ones is omitted, because the first ones have already reported where the lane waits.
    """
    passing = any(word.kind == "wait" for word in before) and before[-1].kind == "lower"
    waits_on = len(words) > 1 and words[0].kind == "here" and words[1].kind == "wait"
    return before + words[1:] if passing and waits_on else before + words
