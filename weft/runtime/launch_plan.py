"""A launch plan is the list of launches that a call of a program enqueues on each lane of one rank.

It is built once for each site, because walking the schedule's steps in Python took 0.5 to 0.7 ms per call. A call only
inserts the addresses of its tensors. In the table, a gate is a Wait of one part of a step, and `count` is the flag that a part
signals. To lower a flag is to reset the waiter's copy of it.

    schedule step            launches
    wait                     FlagOperations: write the lane's progress, wait, lower
    signal                   FlagOperations: signal each waiter
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
    shared row counts        TorchLaunch: write them at the peers; FlagOperations: signal, wait; TorchLaunch: read them

A lane's last flag operations also record that it has passed its last wait (Site.end_words).

If the compute lane signals and has more work to do, the signal is enqueued on a separate stream (weft.runtime.cuda_resources).
Copy lanes signal on their own stream: the copies between the signals are slower otherwise (docs/lab/log.md).

Neighbouring FlagOperations become one submission. On a GPU there are two kinds:

- Stream memory operations need no SM, and waiting blocks may hold all SMs. They are used on copy lanes and network lanes, for
  signals on the separate stream, and on every lane of a CollectiveProblem, which may run concurrently with any kernel.
- On all other lanes a submission is a kernel of one warp (weft.kernels.flag_operations), which does the operations of a phase
  at once.

The launches of all lanes are enqueued in one order, which this module finds. Lane after lane could deadlock in two ways:

- A stream takes about 1000 entries (Hopper, CUDA 13). The next launch blocks the host in the driver until an entry has ended.
  A host could then block in a lane that waits for a flag, before it has enqueued the lane that raises the flag.
- CUDA has 8 hardware queues by default (CUDA_DEVICE_MAX_CONNECTIONS). If more streams are busy, two of them share a queue,
  whatever their priorities are. A wait at the head of a queue then holds up all that was enqueued there later, perhaps
  the work that raises the flag.

All ranks use one order of all events. An event is the end of a wait, or a launch that does not wait. Every event comes after
those that it waits for. So no call hangs: take the first event in that order that has not happened. All events that it waits
for have happened, and so has all that its rank has enqueued before it. If it is enqueued, it happens. If it is not, its host is
enqueuing it, and there is room, because streams and queues hold only what has happened.

This supposes that a kernel leaves its queue when it begins, and that SMs are free for it (`_plan_kernel`). Some launches last:

- A kernel whose tiles wait is enqueued at its first event. What its lane enqueues next comes after its last event.
- A collective ends when all ranks have begun it, and messages when their peers have. Their launches on all these ranks follow
  each other in the order, so that nothing between them can wait for one of them.
- A kernel that exchanges with peers is in schedules of one lane.

Calls, and the caller's own communication, must be enqueued in one order on all ranks, as NCCL demands of its collectives. A
timed call (CallTimer) also records events behind its launches, which this order does not cover.

A CUDA graph, and with it a replayed call, has no order between lanes: the driver puts its branches into queues. So a program
is bound only if there is a queue for each of its streams (weft.runtime.cuda_resources.refuse_lanes).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Protocol, TypeVar

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
    Norm,
    Part,
    Push,
    Reduce,
    Region,
    Schedule,
    SegmentCopies,
    SendReceive,
    ShareCounts,
    Signal,
    Step,
    Wait,
    signalled_flags,
    waits,
)
from weft.runtime.arithmetic import Product, Sliced, add_up, groups, look_up, normalise
from weft.runtime.bindings import Where
from weft.runtime.launches import (
    CopyLaunch,
    FlagOperations,
    IssuedCall,
    KernelLaunch,
    Launch,
    Place,
    Site,
    StepKernel,
    TorchLaunch,
)


class SignallingPart(Protocol):
    """A SignallingPart is a part of a step that may signal a flag at its end."""

    @property
    def count(self) -> Flag | None: ...


P = TypeVar("P", bound=SignallingPart)
LaneLaunch = tuple[Lane, Launch]


class LaneRun(NamedTuple):
    """A LaneRun is launches of one lane that are enqueued one after the other.

    lane: the lane.
    launches: the launches.
    by_torch: whether one of them uses torch's current stream.
    """

    lane: Lane
    launches: list[Launch]
    by_torch: bool


class LaunchPlan:
    """A LaunchPlan holds the launches of one rank.

    kernel_steps: the steps that run as kernels, because these can load the operands of the call.
    lanes: the launches of each lane.
    """

    def __init__(self, site: Site, kernel_steps: frozenset[Place]) -> None:
        self._site, self._kernel_steps = site, kernel_steps
        self._plan_by_type: dict[type[Step], Callable[..., Iterator[Launch]]] = {
            Wait: lambda step, where: _set_stage(stage_after_waits(0), self._wait_and_lower([step], where)),
            Signal: lambda step, where: iter([self._signal_flag(step.flag, where)]),
            Copy: lambda step, where: self._plan_copies(step.src, step.dst, where),
            Push: self._plan_push,
            Gemm: self._plan_matmuls,
            Reduce: self._plan_sums,
            Norm: self._plan_norm,
            Lookup: self._plan_lookups,
            Collective: self._plan_collective,
            SendReceive: self._plan_messages,
            ShareCounts: self._plan_row_counts,
            SegmentCopies: self._plan_segments,
            GroupedGemm: self._plan_segments,
        }
        """The function that yields the launches of a step that does not run as a kernel, by type of step."""
        self.lanes = [(lane, list(self._plan_lane(lane))) for lane in site.schedule.ranks[site.rank]]

    @cached_property
    def batches(self) -> list[LaneRun]:
        """The launches of a call, in the order in which they are enqueued."""
        return _group(self._mark_ends(_move_signals_aside(_merge(self._ordered))))

    @cached_property
    def unmerged_batches(self) -> list[LaneRun]:
        """The same launches, not merged, so that each can be timed."""
        return _group(self._mark_ends(self._ordered))

    @cached_property
    def by_lane(self) -> list[tuple[Lane, list[Launch]]]:
        """The same launches grouped by lane, for lanes that run on threads. The compute lane comes first."""
        found = [(lane, [one for run in self.batches if run.lane is lane for one in run.launches]) for lane, _ in self.lanes]
        return sorted(found, key=lambda lane_launches: lane_launches[0].kind != "compute")

    @cached_property
    def _ordered(self) -> list[LaneLaunch]:
        """The launches of all lanes, in the order that weft.runtime.launch_plan explains."""
        if len(self.lanes) == 1:  # most programs of few rows: their bind need not run the schedule on paper
            return [(lane, launch) for lane, launches in self.lanes for launch in launches]
        numbers = order(self._site.schedule, self._site.rank)
        numbered = [
            (numbers[launch.where.lane, launch.where.position, launch.stage], lane, launch)
            for lane, launches in self.lanes
            for launch in launches
        ]
        return [(lane, launch) for _, lane, launch in sorted(numbered, key=itemgetter(0))]

    def _plan_lane(self, lane: Lane) -> Iterator[Launch]:
        for position, step in enumerate(lane.steps):
            place, where = (lane.name, position), Where(self._site.rank, lane.name, position, step)
            if place in self._kernel_steps:
                yield from self._plan_kernel(self._site.kernels[place], where)
                continue
            assert type(step) in self._plan_by_type, f"{where} cannot run without a kernel, or not in a bound program"
            yield from self._plan_by_type[type(step)](step, where)

    def _plan_collective(self, step: Collective, where: Where) -> Iterator[Launch]:
        site = self._site
        work, prepare = site.collective(step, where), site.prepare_collective(step)
        yield TorchLaunch(where=where, stage=stage_after_waits(0), work=work, prepare_work=prepare)

    def _plan_messages(self, step: SendReceive, where: Where) -> Iterator[Launch]:
        stage = stage_after_waits(0)
        yield self._operations(where, (self._site.progress_word(where),), stage)
        yield TorchLaunch(where=where, stage=stage, work=self._site.messages(step, where))

    def _wait_and_lower(self, gates: Sequence[Wait], where: Where, passed: set[Flag] | None = None) -> Iterator[FlagOperations]:
        """Yield operations that wait for flags and then lower them.

        passed: the flags for which the step has already waited. They are skipped, and new ones are added.
        """
        passed = set() if passed is None else passed
        words = []
        for flag in dict.fromkeys(gate.flag for gate in gates if gate.flag not in passed and self._is_signalled(gate)):
            passed.add(flag)
            address = self._site.gate_address(flag, where)
            words += [Word("wait", address, self._site.signal_value(flag)), Word("lower", address, 0)]
        if words:
            yield self._operations(where, (self._site.progress_word(where), *words))

    def _is_signalled(self, gate: Wait) -> bool:
        """Return whether the gate has to be waited for. A gate on the previous call may have a flag that no step signals."""
        return not gate.on_previous_call or self._site.flags.raised(gate.flag)

    def _signal_flag(self, flag: Flag, where: Where) -> FlagOperations:
        """Return the operations that signal a flag at all of its waiters."""
        value = self._site.signal_value(flag)
        return self._operations(where, tuple(Word("signal", address, value) for address in self._site.waiters(flag)))

    def _plan_push(self, step: Push, where: Where) -> Iterator[Launch]:
        for part in step.parts:
            yield from self._plan_copies(part.src, part.dst, where)
            yield self._signal_flag(part.count, where)

    def _plan_copies(self, src: Region, dst: Region, where: Where) -> Iterator[CopyLaunch]:
        if src.size == 0:
            return
        to_output = self._site.schedule.buffer[dst.buffer].kind == "output"
        copy, prepare = self._site.copier(src, dst), self._site.prepare_copy(src, dst)
        yield CopyLaunch(where=where, src=src, dst=dst, copy=copy, prepare_copy=prepare, to_output=to_output)

    def _plan_kernel(self, kernel: StepKernel, where: Where) -> Iterator[Launch]:
        """Yield the launches of a step that runs as a kernel.

        A GEMM's tiles wait for the flags of this call inside the kernel. The lane waits for all other gates before the kernel
        starts. It waits for flags of the previous call, because those may be signalled again while the kernel runs. It waits
        for the gates of other kernels, because their blocks would fill all SMs while they wait. Copies of a few KiB, which are
        kernels, could then never run. This hung on 4 x H200.
        """
        gates = () if kernel.manages_own_flags else waits(where.step)
        gates_in_kernel = [gate for gate in gates if kernel.waits_in_kernel and not gate.on_previous_call]
        last = stage_after_waits(len(turns(where.step)) - 1)
        begin = last if gates and not gates_in_kernel else 0
        yield from _set_stage(begin, self._wait_and_lower([gate for gate in gates if gate not in gates_in_kernel], where))
        if gates_in_kernel:
            yield self._operations(where, (self._site.progress_word(where),))
        yield KernelLaunch(
            where=where,
            stage=begin,
            kernel=kernel,
            sms=self._site.sms_for_pushes if isinstance(where.step, Push) else self._site.sms_for_kernels,
            tries=self._site.tries,
        )
        if gates_in_kernel:
            addresses = dict.fromkeys(self._site.gate_address(gate.flag, where) for gate in gates_in_kernel)
            yield self._operations(where, tuple(Word("lower", address, 0) for address in addresses), last)

    def _plan_matmuls(self, step: Gemm, where: Where) -> Iterator[Launch]:
        passed: set[Flag] = set()
        turn = 0
        for group in groups(step.parts):
            yield from _set_stage(stage_after_waits(turn), self._wait_and_lower(group[0].gates, where, passed))
            if group[0].inner:
                yield from self._plan_slices(step, group[0], where, passed, turn)
            else:
                product, stage = Product(step, group), stage_after_waits(turn)
                work, prepare = partial(product.multiply, where.lane), partial(product.prepare, where.lane)
                yield TorchLaunch(where=where, stage=stage, work=work, prepare_work=prepare)
            turn += len(group) + len(group[0].inner)
            if group[-1].count is not None:
                yield from _set_stage(stage_after_waits(turn - 1), [self._signal_flag(group[-1].count, where)])

    def _plan_slices(self, step: Gemm, part: Part, where: Where, passed: set[Flag], turn: int) -> Iterator[Launch]:
        """Yield the launches of a part whose gates have been waited for: each slice of K after its inner gate.

        turn: the turn of the first slice (weft.runtime.launch_plan.turns).
        """
        sliced = Sliced(step, part)

        def work(number: int, call: IssuedCall) -> None:
            sliced.multiply(call.bindings, number, call.matmuls[where.lane])

        gates: list[tuple[Wait, ...]] = [(), *((gate,) for _, gate in part.inner)]
        for number, inner in enumerate(gates):
            yield from _set_stage(stage_after_waits(turn + number), self._wait_and_lower(inner, where, passed))
            yield TorchLaunch(where=where, stage=stage_after_waits(turn + number), work=partial(work, number))

    def _plan_sums(self, step: Reduce, where: Where) -> Iterator[Launch]:
        yield from self._plan_parts(step.parts, where, lambda part, call: add_up(call.bindings, part, step.divide_by))

    def _plan_norm(self, step: Norm, where: Where) -> Iterator[Launch]:
        yield TorchLaunch(where=where, work=lambda call: normalise(call.bindings, step))

    def _plan_lookups(self, step: Lookup, where: Where) -> Iterator[Launch]:
        problem = self._site.schedule.problem
        assert isinstance(problem, LookupProblem), f"{problem} has no tables"
        yield from self._plan_parts(step.parts, where, lambda part, call: look_up(call.bindings, part.bags, part.out, problem))

    def _plan_row_counts(self, step: ShareCounts, where: Where) -> Iterator[Launch]:
        rows, ranks = self._site.row_counts, [flag.rank for flag in step.flags]
        yield TorchLaunch(where=where, work=lambda call: rows.share(call.bindings, ranks))
        for flag in step.flags:
            yield self._signal_flag(flag, where)
        yield from _set_stage(stage_after_waits(0), self._wait_and_lower(step.gates, where))
        yield TorchLaunch(where=where, stage=stage_after_waits(0), work=lambda call: rows.lay_out(call.bindings))

    def _plan_segments(self, step: SegmentCopies | GroupedGemm, where: Where) -> Iterator[Launch]:
        rows = self._site.row_counts
        yield from self._plan_parts(
            step.parts, where, lambda part, call: rows.run(part, call.bindings, call.matmuls[where.lane])
        )

    def _plan_parts(self, parts: Sequence[P], where: Where, work: Callable[[P, IssuedCall], None]) -> Iterator[Launch]:
        """Yield for each part in turn: the waits for its gates, its work, and the signal of its count."""
        passed: set[Flag] = set()
        for part in parts:
            gates: Sequence[Wait] = getattr(part, "gates", ())
            yield from _set_stage(stage_after_waits(0), self._wait_and_lower(gates, where, passed))
            yield TorchLaunch(where=where, stage=stage_after_waits(0), work=partial(work, part))
            if part.count is not None:
                yield from _set_stage(stage_after_waits(0), [self._signal_flag(part.count, where)])

    def _mark_ends(self, ordered: list[LaneLaunch]) -> list[LaneLaunch]:
        """Return the launches with the words that record when a lane has passed its last wait.

        They are in the last flag operations of the lane, so that they cost no launch. After messages a further launch has them.
        """
        marked = list(ordered)
        for lane, _ in self.lanes:
            words, places = self._site.end_words(lane.name), [at for at, (other, _) in enumerate(marked) if other is lane]
            flags = [(at, one) for at in places if isinstance(one := marked[at][1], FlagOperations) and not one.aside]
            if not words or not any(word.kind == "progress" for _, one in flags for word in one.words):
                continue
            (last, operations), end = flags[-1], places[-1]
            if any(isinstance(marked[at][1].where.step, SendReceive) for at in places if at > last):
                marked.insert(end + 1, (lane, self._operations(marked[end][1].where, words, marked[end][1].stage)))
            else:
                marked[last] = (lane, replace(operations, words=operations.words + words))
        return marked

    def _operations(self, where: Where, words: tuple[Word, ...], stage: int = 0) -> FlagOperations:
        return FlagOperations(where=where, words=words, stage=stage, submitter=self._site.submitter)


def _group(ordered: Sequence[LaneLaunch]) -> list[LaneRun]:
    """Return the launches as runs of launches of one lane."""
    runs = [list(run) for _, run in groupby(ordered, key=lambda lane_launch: lane_launch[0].name)]
    return [LaneRun(run[0][0], [launch for _, launch in run], any(launch.by_torch for _, launch in run)) for run in runs]


def _merge(ordered: Sequence[LaneLaunch]) -> list[LaneLaunch]:
    """Return the launches with FlagOperations of a lane merged where they are neighbours in that order."""
    return [(run.lane, launch) for run in _group(ordered) for launch in merge_flag_operations(run.launches)]


def _move_signals_aside(ordered: Sequence[LaneLaunch]) -> list[LaneLaunch]:
    """Return the launches with signals of the caller's stream moved to a separate stream if work of the lane follows them."""
    last_work = max(
        (at for at, (lane, one) in enumerate(ordered) if lane.kind == "compute" and not isinstance(one, FlagOperations)),
        default=0,
    )
    result: list[LaneLaunch] = []
    for at, (lane, launch) in enumerate(ordered):
        if not isinstance(launch, FlagOperations):
            result.append((lane, launch))
            continue
        signals = _count_leading_signals(launch) if lane.kind == "compute" and at < last_work else 0
        if signals:
            result.append((lane, replace(launch, words=launch.words[:signals], aside=True)))
        if launch.words[signals:]:
            result.append((lane, replace(launch, words=launch.words[signals:])))
    return result


def _count_leading_signals(operations: FlagOperations) -> int:
    """Return the number of signals at the begin of these operations."""
    return next((at for at, word in enumerate(operations.words) if word.kind != "signal"), len(operations.words))


def _set_stage(stage: int, launches: Iterable[FlagOperations]) -> Iterator[FlagOperations]:
    return (replace(launch, stage=stage) for launch in launches)


def merge_flag_operations(launches: Sequence[Launch]) -> list[Launch]:
    """Return the launches with adjacent FlagOperations merged."""
    merged: list[Launch] = []
    for launch in launches:
        last = merged[-1] if merged else None
        if isinstance(launch, FlagOperations) and isinstance(last, FlagOperations):
            merged[-1] = replace(last, words=_join_words(last.words, launch.words), aside=False)
        else:
            merged.append(launch)
    return merged


def _join_words(first: tuple[Word, ...], second: tuple[Word, ...]) -> tuple[Word, ...]:
    """Return the operations of one lane in sequence.

    If the first ones end with waits and the second ones begin with waits, the progress of the second ones is omitted, because
    the first ones have already reported where the lane waits.
    """
    first_waits = any(word.kind == "wait" for word in first) and first[-1].kind == "lower"
    second_waits = len(second) > 1 and second[0].kind == "progress" and second[1].kind == "wait"
    return first + second[1:] if first_waits and second_waits else first + second


Key = tuple[object, ...]
TimedPlace = tuple[str, int, int]
"""A lane, a position in it, and a stage of that step: `stage_before_waits` or `stage_after_waits` of one of its turns."""


def stage_before_waits(turn: int) -> int:
    """Return the stage in which a step has reached the waits of a turn."""
    return 2 * turn


def stage_after_waits(turn: int) -> int:
    """Return the stage in which a step has passed the waits of a turn."""
    return 2 * turn + 1


def turns(step: Step) -> list[tuple[list[Wait], list[Flag]]]:
    """Return the turns of a step. Each is a list of waits, and the flags that the step raises after them.

    A GEMM has a turn for each part, or for each slice of a part with inner gates. A sum has one turn, because it may be one
    kernel after all of its gates.
    """
    if isinstance(step, Gemm):
        found: list[tuple[list[Wait], list[Flag]]] = []
        for part in step.parts:
            slices = [list(part.gates), *([wait] for _, wait in part.inner)]
            found += [(waits, []) for waits in slices[:-1]] + [(slices[-1], [] if part.count is None else [part.count])]
        return found
    return [(list(waits(step)), list(signalled_flags(step)))]


class _SharedStep(NamedTuple):
    """A _SharedStep is a collective, or messages, of one rank that has begun.

    kind: the type of the step.
    ranks: the ranks that take part in it.
    needs: (counter, the least count): it ends when these ranks have begun theirs.
    """

    kind: type[Step]
    ranks: Set[int]
    needs: list[tuple[Key, int]]


class _Run:
    """A _Run executes one call of all ranks on paper, every lane as far as its waits permit.

    Waits for previous calls are over, because all that belongs to those comes before this call.

    passed: the places that one rank reached, in this order.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._rank, self.passed = rank, list[TimedPlace]()
        self._shared: dict[tuple[int, TimedPlace], _SharedStep] = {}
        """The shared steps that have begun and not passed, by rank and place."""
        self._done: Counter[Key] = Counter()
        self._waiting: defaultdict[Key, list[Iterator[Key]]] = defaultdict(list)
        self._ready = deque(self._lane(rank, lane) for rank, lanes in enumerate(schedule.ranks) for lane in lanes)
        self._all = frozenset(range(len(schedule.ranks)))
        while self._ready or self._pass_shared(together=False):
            lane = self._ready.popleft()
            key = next(lane, None)
            if key is not None:
                self._waiting[key].append(lane)
        assert not any(self._waiting.values()), f"schedule {schedule.name} was not checked: {dict(self._waiting)}"

    def _lane(self, rank: int, lane: Lane) -> Iterator[Key]:
        """Run a lane. Yield the key that it waits for, each time that it must wait."""
        for position, step in enumerate(lane.steps):
            for turn, (gates, raised) in enumerate(turns(step)):
                self._reach(rank, (lane.name, position, stage_before_waits(turn)))
                for wait in gates:
                    while not wait.on_previous_call and not self._done["flag", wait.flag]:
                        yield ("flag", wait.flag)
                place = (lane.name, position, stage_after_waits(turn))
                if isinstance(step, (Collective, SendReceive)):
                    self._shared[rank, place] = self._begin(rank, step)
                    self._pass_shared()
                    while (rank, place) in self._shared:
                        yield ("shared", rank, place)
                else:
                    self._reach(rank, place)
                for flag in raised:
                    self._count("flag", flag)

    def _begin(self, rank: int, step: Collective | SendReceive) -> _SharedStep:
        """Count a shared step of a rank as begun."""
        if isinstance(step, Collective):
            number = self._count("collectives of", rank)
            return _SharedStep(Collective, self._all, [(("collectives of", other), number) for other in self._all])
        sent = [(("received", rank, send.to), self._count("sent", rank, send.to)) for send in step.sends]
        got = [(("sent", one.source, rank), self._count("received", one.source, rank)) for one in step.receives]
        return _SharedStep(SendReceive, frozenset(step.peers), [*sent, *got])

    def _pass_shared(self, *, together: bool = True) -> bool:
        """Pass the shared steps that can end, one directly after the other. Return whether there was one.

        together: pass a step only with those of the ranks that take part in it, so that nothing comes between them. If two such
            steps depend on each other's ends, they cannot pass together.
        """
        can_end = {at for at, one in self._shared.items() if all(self._done[key] >= least for key, least in one.needs)}
        while together:
            late = [(rank, one.kind) for (rank, place), one in self._shared.items() if (rank, place) not in can_end]
            held = {
                at for at in can_end for rank, kind in late if self._shared[at].kind is kind and rank in self._shared[at].ranks
            }
            if not held:
                break
            can_end -= held
        for at in [at for at in self._shared if at in can_end]:
            del self._shared[at]
            self._reach(*at)
            self._ready.extend(self._waiting.pop(("shared", *at), ()))
        return bool(can_end)

    def _reach(self, rank: int, place: TimedPlace) -> None:
        if rank == self._rank:
            self.passed.append(place)

    def _count(self, *key: object) -> int:
        self._done[key] += 1
        self._ready.extend(self._waiting.pop(key, ()))
        return self._done[key]


def order(schedule: Schedule, rank: int) -> dict[TimedPlace, int]:
    """Return the stages of all steps of a rank, numbered in one order of all events of all ranks."""
    return {place: number for number, place in enumerate(_Run(schedule, rank).passed)}
