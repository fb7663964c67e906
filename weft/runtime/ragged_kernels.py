"""The steps of a call with splits run as kernels on any device whose memory has addresses (weft.kernels.exchange).

    ShareCounts     layout_kernel: exchanges counts, and computes where all rows are stored
    GroupedGemm     dispatch_kernel or combine_kernel, copies included
    SegmentCopies   push_kernel, pull_kernel, or collect_kernel, which copies the received rows to the caller
    Wait            await_kernel, with the waits that follow it

The schedule says what each part does, waits for and signals, and in which order. The counts and the flags
are stored in symmetric memory that only these kernels use.

RankOrders translates the schedule of a call with splits for its kernels: the order of parts, and a word for each flag.

A flag that ShareCounts signals is a word of `notified` on its rank, at the number of the rank that signals it. A flag that a
part signals is a word of `arrived`: the n-th such flag of a rank, by name and index, is its n-th word. weft.kernels.exchange
takes a `RankOrders` for each rank.

The kernels run checked schedules within these limits. Other schedules are refused with an error that names the step.

- A rank has one lane. It first shares its counts with all ranks, and waits for the counts of all.
- A step copies from one buffer to one other buffer.
- In a dispatch the copies of a GroupedGemm come before its products, and in a combine after them.
- One step multiplies all segments of an expert, because tiles are cut from an expert's rows regardless of segments.
- A part signals the rank that receives its rows.

A dispatch multiplies a rank's own rows directly from `a`, in tiles that contain no other rows, and does not wait for their
flag, because `landing` only has a copy of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any

import torch

from weft.compat.device import capabilities
from weft.compat.streams import Word
from weft.core.errors import WaitTimeout
from weft.core.problem import RaggedProblem
from weft.core.schedule import (
    Flag,
    GroupedGemm,
    Lane,
    Schedule,
    SegmentCopies,
    SegmentCopy,
    SegmentProduct,
    ShareCounts,
    Step,
    Wait,
    places_of,
    steps_of,
    waits,
)
from weft.kernels.exchange import (
    MOST_SEGMENTS,
    Orders,
    RaggedExchange,
    RaggedScales,
    SegmentPart,
    Shape,
    StepParts,
    symmetric_bytes,
)
from weft.kernels.segments import CUT, IN_A, LATE, NEGATIVE
from weft.perf.shapes import shapes_for
from weft.runtime.bindings import Bindings, Where, scales_name
from weft.runtime.host_resources import below_zero, no_room
from weft.runtime.launches import Site, StepKernel

_RAISED = 0x3FFFFFFF
"""Every word is set to this value after a failure. It is more than any wait needs, and less than where the comparison wraps."""


class RaggedStepKernel(StepKernel):
    """A RaggedStepKernel is the kernel of one step. All ranks rehearse it by running it.

    The first step of a program allocates the memory that all share, which is collective.
    """

    manages_own_flags = True

    def __init__(self, site: Site, where: Where, step: Step) -> None:
        super().__init__(site, where)
        self._kernels = site.ragged = site.ragged or RaggedKernels(site)

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        self._kernels.launch(self.where.step, self.where, bindings)

    def can_be_prepared(self, bindings: Bindings) -> bool:
        return self._kernels.can_be_prepared(bindings)

    def missing(self) -> str:
        return self._kernels.missing() if isinstance(self.where.step, ShareCounts) else ""


class RaggedKernels:
    """RaggedKernels holds the kernels of one rank's steps. Collective, because it allocates memory on all ranks.

    Raises ValueError for a problem or a schedule that the kernels cannot run.
    """

    def __init__(self, site: Site) -> None:
        problem, rank, device = site.schedule.problem, site.rank, site.device
        assert isinstance(problem, RaggedProblem), f"{problem} has no segments"
        _check_kernels(problem, site.dtype, device)
        self._problem, self._rank, self._plan = problem, rank, RankOrders(site.schedule, rank)
        shape = Shape(
            rank=rank,
            world_size=problem.world_size,
            experts=problem.experts,
            max_rows=problem.m,
            a_rows=problem.capacity,
            n=problem.n,
            k=problem.k,
            dtype=site.dtype,
            dispatch=problem.dispatches,
            gated=problem.gated,
            scaling=problem.scaling,
            device=device,
            machine=site.machine,
        )
        addresses, words = site.mailbox(symmetric_bytes(shape))
        self.exchange = RaggedExchange(shape, self._plan.orders, addresses, words, sms=site.blocks, tries=site.tries)
        self._waits = {
            at: torch.tensor(waited, dtype=torch.int32, device=device) for at, waited in self._plan.waits.items() if waited
        }
        self._seen = self.exchange.host_notes.numpy()
        self._launches: dict[type, Callable[[Any, int, Bindings], None]] = {
            Wait: self._wait,
            ShareCounts: self._share,
            SegmentCopies: self._copy,
            GroupedGemm: self._multiply,
        }
        """The function that launches a step, by type of step. Its arguments are the step, its position and a call's tensors."""

    @property
    def has_error(self) -> bool:
        """Whether kernels of an earlier call have written an error to the host's memory: wrong splits, or a late peer."""
        return bool(self._seen[LATE] or self._seen[CUT])

    def check_before(self, a: torch.Tensor) -> None:
        """Raise the errors of earlier calls, and check the number of rows. It is called before each call.

        Products of a combine are stored in shared memory whose size the first call fixed. Raises ValueError if a has more rows.
        """
        self.raise_noted()
        if not self._problem.dispatches and a.shape[0] > self._problem.capacity:
            raise ValueError(
                f"a has {a.shape[0]} rows, but the first call with max_rows={self._problem.m} reserved memory for "
                f"{self._problem.capacity}; make the first call with the largest number of rows that a will have on any rank"
            )

    def launch(self, step: Step, where: Where, bindings: Bindings) -> None:
        """Run one step, on torch's current stream."""
        self._launches[type(step)](step, where.position, bindings)

    def _matrix(self, name: str, bindings: Bindings) -> torch.Tensor:
        ((matrix, _),) = bindings.tensors[name, self._rank]
        return matrix

    def can_be_prepared(self, bindings: Bindings) -> bool:
        """Return whether the kernels read the caller's operands themselves, and no copies."""
        (b,), scales = bindings.loose["b"], bindings.scales.get(("a", self._rank), ())
        rows = [self._matrix("a", bindings), *scales]
        pairs = [(b, _unit_stride(b)), *[(one, _aligned(one)) for one in rows if one.shape[0]]]
        return all(one.data_ptr() == read.data_ptr() for one, read in pairs)

    def _wait(self, step: Wait, at: int, bindings: Bindings) -> None:
        if at in self._waits:
            self.exchange.wait_for_flags(self._waits[at])

    def _share(self, step: ShareCounts, at: int, bindings: Bindings) -> None:
        (splits,), (counts,) = bindings.loose["splits"], bindings.loose["counts"]
        self.exchange.start(splits.contiguous(), counts, a_rows=self._matrix("a", bindings).shape[0])

    def _multiply(self, step: GroupedGemm, at: int, bindings: Bindings) -> None:
        a, out, (b,) = self._matrix("a", bindings), self._matrix("out", bindings), bindings.loose["b"]
        self._pass_addresses(bindings)
        number, a, b, scales = self._plan.steps[at], _aligned(a), _unit_stride(b), self._scales(bindings)
        if self._problem.dispatches:
            self.exchange.dispatch(number, a, b, out, keep_own=self._problem.return_received, scales=scales)
        else:
            self.exchange.combine(number, a, b, out, scales=scales)

    def _scales(self, bindings: Bindings) -> RaggedScales | None:
        """Return the scales of FP8 operands, or None for other operands."""
        if self._problem.scaling is None:
            return None
        (of_a,), (of_b,) = bindings.scales["a", self._rank], bindings.loose[scales_name("b")]
        return RaggedScales(_aligned(of_a), of_b)

    def _copy(self, step: SegmentCopies, at: int, bindings: Bindings) -> None:
        number = self._plan.steps[at]
        self._pass_addresses(bindings)
        if not self._problem.dispatches:
            self.exchange.pull(number, self._matrix("out", bindings))
        elif step.parts[0].dst.buffer == "received":
            of_rows = bindings.scales.get(("received", self._rank))
            self.exchange.collect(number, self._matrix("received", bindings), of_rows[0] if of_rows else None)
        else:
            a, scales = _aligned(self._matrix("a", bindings)), self._scales(bindings)
            scale_a = None if scales is None else scales.a
            self.exchange.push(number, a, keep_own=self._problem.return_received, scale_a=scale_a)

    def _pass_addresses(self, bindings: Bindings) -> None:
        """Pass the address of every rank's buffer for rows or products to the kernels. On CPUs it may change between calls."""
        name = "landing" if self._problem.dispatches else "product"
        ranks = range(self._problem.world_size)
        scales = [scale for rank in ranks for scale in bindings.scales.get((name, rank), ())]
        self.exchange.lay_out([bindings.tensors[name, rank][0][0] for rank in ranks], scales)

    def raise_cut(self) -> None:
        """Raise the ValueError of wrong splits if a call has noted them. Every rank notes the same."""
        if self._seen[CUT]:
            self.raise_noted()

    def raise_noted(self, *, ended: bool = False) -> None:
        """Raise what earlier calls have noted: ValueError for wrong splits, WaitTimeout for a peer that did not arrive.

        ended: the calls have ended on the device, so the notes are read from the device.
        """
        if not (ended or self.has_error):
            return
        notes = (self.exchange.notes if ended else self.exchange.host_notes).tolist()
        if notes[CUT]:
            self.exchange.host_notes.zero_()
            self.exchange.notes.zero_()
            raise ValueError(_describe_wrong_splits(self._problem, *notes[CUT : CUT + 4]))
        if notes[LATE]:
            raise WaitTimeout(f"rank {self._rank}: {self._name_word(notes[LATE])}: expected {notes[1]}, seen {notes[2]}")

    def _name_word(self, address: int) -> str:
        """Return a text that says what the word at an address counts."""
        rank = (address - self.exchange.notified.local.data_ptr()) // 4
        if 0 <= rank < self._problem.world_size:
            return f"counts of rank {rank}"
        arrived = (address - self.exchange.arrived.local.data_ptr()) // 4
        return f"rows of rank {self._plan.counted_from[arrived]}"

    def missing(self) -> str:
        """Return a text that says what the call in flight waits for, or "" if it does not wait. It needs copies, but no SM."""
        call, calls_of_ranks = int(self.exchange.calls.cpu()), self.exchange.notified.local.cpu().tolist()
        # A call is counted once it has the counts of all ranks.
        late = [rank for rank, seen in enumerate(calls_of_ranks) if seen <= call and calls_of_ranks[self._rank] > call]
        if late:
            return f"rank {self._rank}: call {call + 1} with splits: rank {late[0]} has not shared its counts"
        arrived, goals = self.exchange.arrived.local.cpu(), self.exchange.goals.cpu()
        short = (goals - arrived > 0).nonzero().flatten().tolist()
        if short:
            source = self._plan.counted_from[short[0]]
            return f"rank {self._rank}: call {call} with splits: not all rows of rank {source} have arrived"
        return ""

    def releases(self) -> list[Word]:
        """Return the operations that end all waits of the kernels, now and later.

        The first one sets the note by which peers know that later data is invalid. The others raise the words that kernels wait
        for.
        """
        words = [Word("signal", self.exchange.notes.data_ptr() + 8 * LATE, 1)]
        for memory in (self.exchange.notified.local, self.exchange.arrived.local):
            words += [Word("signal", memory.data_ptr() + 4 * at, _RAISED) for at in range(memory.numel())]
        return words


def _describe_wrong_splits(problem: RaggedProblem, kind: int, rows: int, capacity: int, rank: int) -> str:
    if kind == NEGATIVE:
        return below_zero(rows, problem, f"on rank {rank} in an earlier call")
    if kind == IN_A:
        cut = f"but a had {capacity} rows; {rows - capacity} were not sent"
        return f"splits of an earlier call add up to {rows} on rank {rank}, {cut}"
    return no_room(problem, rows, f"at rank {rank} in an earlier call")


def _check_kernels(problem: RaggedProblem, dtype: torch.dtype, device: torch.device) -> None:
    """Check what the kernels need in addition to the checks of every call. It is the same on every rank. Raises ValueError."""
    if dtype not in (torch.float16, torch.bfloat16):
        name = "a" if problem.scaling is None else "output_dtype"
        raise ValueError(f"{name} is {dtype}; with splits on GPUs, use bfloat16 or float16")
    if problem.scaling is not None and device.type == "cuda" and not shapes_for(capabilities(device), problem.scaling):
        raise ValueError(f"a is {problem.scaling.a}; with splits, {device} needs tensor cores for FP8, which it does not have")
    for name, extent, of in (("K", problem.k, 8), ("N", problem.n * (2 if problem.gated else 1), 16 if problem.gated else 8)):
        if extent % of:
            raise ValueError(f"{name} is {extent}; with splits on GPUs it must be a multiple of {of}")
    if problem.experts * problem.world_size > MOST_SEGMENTS:
        raise ValueError(
            f"b has {problem.experts} experts on each of {problem.world_size} ranks; "
            f"with splits, at most {MOST_SEGMENTS} in all"
        )


def _aligned(a: torch.Tensor) -> torch.Tensor:
    """Return a as a contiguous matrix at a multiple of 16 bytes, with at least one row."""
    if not a.shape[0]:
        return a.new_zeros(1, a.shape[1])
    a = (a[0][None] if a.shape[0] == 1 else a).contiguous()
    return a if a.data_ptr() % 16 == 0 else a.clone()


def _unit_stride(b: torch.Tensor) -> torch.Tensor:
    """Return b with one of the last two dimensions contiguous, and all other strides at multiples of 16 bytes.

    For FP8 the dimension of the rows is contiguous.
    """
    if b.shape[0] == 1:
        b = b[0][None]  # the stride between experts is arbitrary for one expert, and contiguous() does not change it
    (expert_stride, *strides), unit = b.stride(), 16 // b.element_size()
    fits = (
        1 in strides
        and all(s == 1 or (s > 0 and s % unit == 0) for s in strides)
        and expert_stride > 0
        and expert_stride % unit == 0
    )
    if fits and b.data_ptr() % 16 == 0:
        return b
    by_columns = b.element_size() == 1
    copied = (b.mT if by_columns else b).clone(memory_format=torch.contiguous_format)
    return copied.mT if by_columns else copied


Moving = SegmentCopies | GroupedGemm
_MOVING: tuple[type[Moving], ...] = (SegmentCopies, GroupedGemm)


class RankOrders:
    """RankOrders is one rank's part of a schedule. Raises ValueError for a schedule that the kernels cannot run.

    steps: the number of each step that moves or multiplies rows, by position in the lane.
    waits: the words of a Wait and the Waits that follow it, by position. It is empty if an earlier Wait includes it.
    counted_from: the rank whose rows a word of `arrived` counts.
    orders: the orders that the kernels take.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        for each, lanes in enumerate(schedule.ranks):
            for where, why in _find_refusals(schedule, each, lanes):
                raise ValueError(f"schedule is {schedule.name}, but {where}: {why}")
        counted = _words(schedule)
        problem = schedule.problem
        assert isinstance(problem, RaggedProblem), f"{problem} has no segments"
        (lane,) = schedule.ranks[rank]
        first = next(steps_of(ShareCounts, [lane]))
        self.counted_from: dict[int, int] = {}
        arriving = [-1] * (problem.world_size * problem.experts)
        for part in _parts(schedule):
            if part.count is not None and part.count.rank == rank:
                src, _, expert = _target(part)
                self.counted_from[counted[part.count]] = src
                arriving[expert * problem.world_size + src] = counted[part.count]
        self.waits = dict(_words_waited_for(lane, counted))
        moving = {at: step for kind in _MOVING for _, at, step in places_of(kind, [lane])}
        self.steps = {at: number for number, at in enumerate(sorted(moving))}
        self.orders = Orders(
            shares=tuple(flag.rank for flag in first.flags),
            arriving=tuple(arriving),
            steps=tuple(_step_parts(moving[at], rank, counted) for at in sorted(moving)),
        )


def _words(schedule: Schedule) -> dict[Flag, int]:
    """Return the number of the word of each flag that a part signals, among those of its rank."""
    flags = sorted({part.count for part in _parts(schedule) if part.count}, key=lambda f: (f.rank, f.name, f.index))
    used: Counter[int] = Counter()
    words = dict[Flag, int]()
    for flag in flags:
        words[flag] = used[flag.rank]
        used[flag.rank] += 1
    return words


def _parts(schedule: Schedule) -> Iterator[SegmentCopy | SegmentProduct]:
    lanes = list(chain(*schedule.ranks))
    for kind in _MOVING:
        for step in steps_of(kind, lanes):
            yield from step.parts


def _target(part: SegmentCopy | SegmentProduct) -> tuple[int, int, int]:
    return part.ends[1].name


def _words_waited_for(lane: Lane, counted: dict[Flag, int]) -> Iterator[tuple[int, list[int]]]:
    """Yield the position of each Wait and the words of `RankOrders.waits`."""
    for waiting, steps in groupby(enumerate(lane.steps), key=lambda placed: isinstance(placed[1], Wait)):
        if waiting:
            run = list(steps)
            words = [counted[wait.flag] for _, step in run for wait in waits(step) if wait.flag in counted]
            yield from ((at, [] if number else words) for number, (at, _) in enumerate(run))


def _step_parts(step: Moving, rank: int, counted: dict[Flag, int]) -> StepParts:
    def words(part: SegmentCopy | SegmentProduct) -> SegmentPart:
        src, dst, expert = _target(part)
        # The lane has waited for the counts of all ranks before.
        waits = tuple(counted[gate.flag] for gate in part.gates if gate.flag in counted)
        return SegmentPart(expert, dst if src == rank else src, -1 if part.count is None else counted[part.count], waits)

    copies = [part for part in step.parts if isinstance(part, SegmentCopy)]
    handed_back = bool(copies) and copies[0].dst.buffer == "received"
    products = copies if handed_back else [part for part in step.parts if isinstance(part, SegmentProduct)]
    return StepParts(copies=() if handed_back else tuple(map(words, copies)), products=tuple(map(words, products)))


def _find_refusals(schedule: Schedule, rank: int, lanes: Sequence[Lane]) -> Iterator[tuple[str, str]]:
    """Yield (where, why) for everything that the kernels cannot run."""
    problem = schedule.problem
    assert isinstance(problem, RaggedProblem), f"{problem} has no segments"
    if len(lanes) != 1:
        yield f"rank {rank} has {len(lanes)} lanes", "on GPUs, a call with splits has one"
        return
    (lane,) = lanes
    for at, step in enumerate(lane.steps):
        why = _why_not(problem, step, first=at == 0)
        if why:
            yield f"rank {rank}, lane {lane.name}, step {at} ({step})", f"on GPUs, {why}"
    if not lane.steps:
        yield f"rank {rank}, lane {lane.name}", "on GPUs, a call with splits has steps"


def _why_not(problem: RaggedProblem, step: Step, *, first: bool) -> str:
    if isinstance(step, ShareCounts) != first:
        return "a lane shares its counts once, in its first step"
    why_not = _WHY_NOT.get(type(step))
    return why_not(problem, step) if why_not else "flags are signalled by parts alone"


def _why_not_shared(problem: RaggedProblem, step: ShareCounts) -> str:
    ranks = set(range(problem.world_size))
    if len(step.flags) != len(ranks) or {flag.rank for flag in step.flags} != ranks or len(step.gates) != len(ranks):
        return "it shares its counts with each rank once, and waits for those of all"
    return ""


def _why_not_moved(problem: RaggedProblem, step: Moving) -> str:
    for part in step.parts:
        if part.count is not None and (part.count.rank != _target(part)[1] or _source_and_target(part) in _SILENT):
            return f"this part cannot signal {part.count}: {part}"
        if part.gates and _source_and_target(part) == ("a", "landing"):
            return f"a push waits for nothing: {part}"
    kinds = [_source_and_target(part) for part in step.parts]
    allowed = _ALLOWED[problem.dispatches][type(step)]
    if not kinds or list(dict.fromkeys(kinds)) not in allowed or kinds != sorted(kinds, key=kinds.index):
        return "its parts are " + ", or ".join(
            ", then ".join(f"{src} -> {dst}" for src, dst in parts) for parts in allowed if parts
        )
    cut = Counter(
        _target(part)[2] for part in step.parts if isinstance(part, SegmentProduct) or _source_and_target(part)[1] == "received"
    )
    for expert, segments in cut.items():
        if segments != problem.world_size:
            return f"it has {segments} of the {problem.world_size} segments of expert {expert}; tiles are cut from all of them"
    return ""


def _source_and_target(part: SegmentCopy | SegmentProduct) -> tuple[str, str]:
    """Return the source and the target buffer. Products of a combine have two targets, which are one here."""
    source, target = part.ends
    return source.buffer, target.buffer if isinstance(part, SegmentCopy) else "out"


_PUSH, _PULL, _BACK = ("a", "landing"), ("product", "out"), ("landing", "received")
_SILENT = (_PULL, _BACK, ("landing", "out"))
"""Parts that no step waits for."""
_ALLOWED: dict[bool, dict[type, list[list[tuple[str, str]]]]] = {
    True: {
        SegmentCopies: [[_PUSH], [_BACK]],
        GroupedGemm: [[("landing", "out")], [_PUSH, ("landing", "out")]],
    },
    False: {
        SegmentCopies: [[_PULL]],
        GroupedGemm: [[("a", "out")], [("a", "out"), _PULL]],
    },
}
"""The sources and targets that the parts of a step may have, in this order, by whether rows are dispatched and by step."""
_WHY_NOT: dict[type, Callable[[RaggedProblem, Any], str]] = {
    ShareCounts: _why_not_shared,
    Wait: lambda problem, step: "",
    SegmentCopies: _why_not_moved,
    GroupedGemm: _why_not_moved,
}
"""Functions that return why the kernels cannot run a step, or "" if they can, by type of step."""
