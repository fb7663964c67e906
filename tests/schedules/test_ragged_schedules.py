"""Schedules of calls with splits: they print, round-trip, and are proved for all row counts; damaged ones are refused."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from weft.checker import ScheduleError, check
from weft.core import codec
from weft.core.problem import RAGGED_OPS, Problem, RaggedProblem, Scaling
from weft.core.schedule import (
    Copy,
    Flag,
    GroupedGemm,
    Lane,
    Region,
    Schedule,
    Segment,
    SegmentCopies,
    SegmentCopy,
    SegmentProduct,
    ShareCounts,
    Signal,
    Step,
    Wait,
    signalled_flags,
)
from weft.core.span import total_us
from weft.perf import simulate
from weft.schedules import build, ragged
from weft.schedules.timelines import timeline

KINDS: list[dict[str, Any]] = [
    {"op": "ragged_all_to_all_matmul"},
    {"op": "ragged_all_to_all_matmul", "return_received": True},
    {"op": "ragged_matmul_all_to_all"},
]
BOTH = [(kind, name) for kind in KINDS for name in ragged.FAMILIES]


def problem_of(kind: dict[str, Any], world_size: int = 2, experts: int = 2, **sizes: Any) -> RaggedProblem:
    return RaggedProblem(**{"m": 6, "n": 8, "k": 8, "capacity": 5, **sizes}, world_size=world_size, experts=experts, **kind)


@pytest.mark.parametrize(("kind", "name"), BOTH)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_families_are_proved_print_and_round_trip(kind: dict[str, Any], name: str, world_size: int) -> None:
    schedule = ragged.build(problem_of(kind, world_size), name)
    check(schedule)
    assert codec.loads(Schedule, codec.dumps(schedule)) == schedule
    drawn = timeline(schedule, width=200)
    assert "grouped gemm" in drawn
    assert "never" not in drawn


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_families_of_fp8_rows(kind: dict[str, Any], name: str) -> None:
    """FP8 rows travel with their scales, and their products are of the problem's dtype."""
    problem = problem_of(kind | {"scaling": Scaling(recipe="blockwise")}, n=256, k=256)
    schedule = ragged.build(problem, name)
    check(schedule)
    assert codec.loads(Schedule, codec.dumps(schedule)) == schedule
    assert {one.name for one in schedule.buffers if one.operand == "a"} == {one.name for one in schedule.buffers} - {
        "out",
        "product",
    }
    for buffer in ("a", "landing", "received", "out"):
        if buffer in schedule.buffer:
            other = replace(schedule.buffer[buffer], operand="" if schedule.buffer[buffer].operand else "a")
            with pytest.raises(ScheduleError, match=r"FP8 elements|operand"):
                check(replace(schedule, buffers=tuple(other if one.name == buffer else one for one in schedule.buffers)))


@pytest.mark.parametrize(("change", "words"), [
    ({"scaling": Scaling(recipe="tensorwise")}, "each row of a has a scale of its own: use rowwise"),
    ({"scaling": Scaling(recipe="blockwise"), "k": 64}, "K is 64 on rank 0; blockwise FP8 operands need a multiple of 128"),
    ({"scaling": Scaling(recipe="blockwise"), "n": 192, "gated": True}, "N is 384, in halves of 192 columns"),
])  # fmt: skip
def test_fp8_problems_that_cannot_be(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        problem_of(KINDS[0], **({"n": 256, "k": 256} | change))


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="other"):
        build(problem_of(KINDS[0]), "other")
    with pytest.raises(ValueError, match="chunks"):
        build(problem_of(KINDS[0]), "fused", 4)


def predicted(op: str, family: str, **numbers: Any) -> float:
    sizes = {"m": 8192, "n": 4096, "k": 4096, "capacity": 8192, "experts": 2, "world_size": 4} | numbers
    return total_us(simulate(build(RaggedProblem(op=op, dtype="bfloat16", **sizes), family), "h200x8"))  # type: ignore[arg-type]


@pytest.mark.parametrize("op", RAGGED_OPS)
def test_a_fused_schedule_is_predicted_between_its_longer_half_and_a_sequential_one(op: str) -> None:
    whole = predicted(op, "fused")
    assert whole < predicted(op, "sequential")
    assert whole > predicted(op, "fused", world_size=1), "the products alone"
    assert whole > 0.75 * 8192 * 4096 * 2 / 390e3, "what leaves a rank of 4, at the rate of its link"


@pytest.mark.parametrize("family", ["sequential", "fused"])
@pytest.mark.parametrize("op", RAGGED_OPS)
def test_more_work_is_predicted_to_take_longer(op: str, family: str) -> None:
    whole = predicted(op, family)
    assert predicted(op, family, capacity=4096) < whole
    assert predicted(op, family, k=2048) < whole
    assert predicted(op, family, m=2048) < whole, "rows that do not fit at the receiver are not moved"


@pytest.mark.parametrize("family", ["sequential", "fused"])
@pytest.mark.parametrize("op", RAGGED_OPS)
def test_fp8_is_predicted_to_be_faster(op: str, family: str) -> None:
    """Of a dispatch half of the bytes travel; of a combine products alone are faster."""
    scaled = {recipe: predicted(op, family, scaling=Scaling(recipe=recipe)) for recipe in ("rowwise", "blockwise")}  # type: ignore[arg-type]
    assert scaled["rowwise"] <= scaled["blockwise"] < predicted(op, family)
    assert scaled["blockwise"] > 0.5 * predicted(op, family)


def test_no_rank_is_predicted_apart_where_all_have_as_much() -> None:
    problem = RaggedProblem(op=RAGGED_OPS[0], m=512, n=64, k=64, capacity=512, experts=2, world_size=4, dtype="bfloat16")
    spans = simulate(build(problem, "fused"), "h200x8")
    assert len({max(span.end_us for span in spans if span.rank == rank) for rank in range(4)}) == 1
    assert [span.kind for span in spans if span.rank == 0] == ["copy", "gemm"]


def test_segments_lie_apart_and_within_the_capacity_for_all_counts() -> None:
    for kind in KINDS:
        problem = problem_of(kind, m=3, capacity=3, world_size=2, experts=1)
        names = [name for rank in range(2) for name in problem.sent_order(rank)]
        for counts in itertools.product(range(4), repeat=len(names)):
            found = problem.places(dict(zip(names, counts, strict=True)))
            for side, capacity, holder in ((0, problem.capacity, 0), (1, problem.m, 1)):
                used = [(n[holder], at) for n in names for at in range(found[n][side], found[n][side] + found[n][2])]
                assert len(set(used)) == len(used)
                assert all(at < capacity for _, at in used)


def changed(schedule: Schedule, change: Any) -> Schedule:
    """change: a step to the steps that replace it."""
    ranks = tuple(
        tuple(replace(lane, steps=tuple(new for step in lane.steps for new in change(step))) for lane in lanes)
        for lanes in schedule.ranks
    )
    return replace(schedule, ranks=ranks)


def without_gates(step: Step) -> list[Step]:
    if isinstance(step, (GroupedGemm, SegmentCopies)):
        return [type(step)(tuple(replace(part, gates=()) for part in step.parts))]  # type: ignore[arg-type]
    return [step]


def without_arrivals(step: Step) -> list[Step]:
    if isinstance(step, (GroupedGemm, SegmentCopies)):
        return [type(step)(tuple(replace(part, count=None) for part in step.parts))]  # type: ignore[arg-type]
    return [step]


def without_counts(step: Step) -> list[Step]:
    """Without waiting for those of the other ranks."""
    if not isinstance(step, ShareCounts):
        return [step]
    return [replace(step, gates=tuple(gate for gate in step.gates if gate.flag.index == gate.flag.rank))]


def copies_of(step: Step) -> list[SegmentCopy]:
    return [part for part in step.parts if isinstance(part, SegmentCopy)] if isinstance(step, GroupedGemm) else []


def wrong_segment(step: Step) -> list[Step]:
    if not copies_of(step):
        return [step]
    assert isinstance(step, GroupedGemm)
    one, two, *_ = copies_of(step)
    instead = {id(one): replace(one, src=two.src), id(two): replace(two, src=one.src)}
    return [GroupedGemm(tuple(instead.get(id(part), part) for part in step.parts))]


def twice(step: Step) -> list[Step]:
    return [step, GroupedGemm(tuple(replace(p, count=None) for p in step.parts))] if isinstance(step, GroupedGemm) else [step]


def nothing_pulled_or_pushed(step: Step) -> list[Step]:
    if not copies_of(step):
        return [step]
    assert isinstance(step, GroupedGemm)
    left_out = copies_of(step)[0]
    return [GroupedGemm(tuple(part for part in step.parts if part is not left_out))]


def waiting_parts_first(step: Step) -> list[Step]:
    """Parts that wait hold all SMs, on every rank, while those that they wait for come later."""
    return [GroupedGemm(tuple(sorted(step.parts, key=lambda p: not p.gates)))] if isinstance(step, GroupedGemm) else [step]


DAMAGE = [
    without_gates,
    without_arrivals,
    without_counts,
    wrong_segment,
    twice,
    nothing_pulled_or_pushed,
    waiting_parts_first,
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_schedules_are_refused(kind: dict[str, Any], damage: Any) -> None:
    damaged = changed(ragged.build(problem_of(kind), "fused"), damage)
    with pytest.raises(ScheduleError):
        check(damaged)


def test_a_schedule_without_its_output_is_refused() -> None:
    schedule = ragged.build(problem_of(KINDS[0]), "fused")
    with pytest.raises(ScheduleError, match="out"):
        check(replace(schedule, buffers=tuple(b for b in schedule.buffers if b.name != "out")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_lanes_is_refused(kind: dict[str, Any]) -> None:
    for world_size in (1, 2):
        schedule = ragged.build(problem_of(kind, world_size), "fused")
        with pytest.raises(ScheduleError, match="rank 0 "):
            check(replace(schedule, ranks=((),) * world_size))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_flag_on_no_rank_is_refused(rank: int) -> None:
    def signalled(step: Step) -> list[Step]:
        return [step, Signal(Flag("never", rank))] if isinstance(step, ShareCounts) else [step]

    schedule = ragged.build(problem_of(KINDS[0]), "fused")
    damaged = replace(schedule, ranks=(changed(schedule, signalled).ranks[0], schedule.ranks[1]))
    with pytest.raises(ScheduleError, match=r"rank 0, lane compute, step 1 .*never"):
        check(damaged)


def test_a_segment_that_does_not_fit_the_columns_of_its_target_is_refused() -> None:
    """A combine may let its rows, which are 8 columns wide, be stored temporarily in a peer's products, which have 4."""

    def through_products(step: Step) -> list[Step]:
        if not isinstance(step, GroupedGemm):
            return [step]
        segments = [part.a for part in step.parts if isinstance(part, SegmentProduct) and part.a.dst != part.a.src]
        return [SegmentCopies(tuple(SegmentCopy(one, replace(one, buffer="product")) for one in segments)), step]

    schedule = ragged.build(problem_of(KINDS[2], n=8), "fused")
    check(changed(schedule, through_products))
    with pytest.raises(ScheduleError, match=r"8 columns .* 4"):
        check(changed(ragged.build(problem_of(KINDS[2], n=4), "fused"), through_products))


def test_steps_on_another_lane_than_the_counts_are_refused() -> None:
    """An executor reads the counts where they are shared."""
    schedule = ragged.build(problem_of(KINDS[0]), "sequential")
    ranks = []
    for rank, (lane,) in enumerate(schedule.ranks):
        ready, (share, *others) = Flag("ready", rank), lane.steps
        first = replace(lane, steps=(share, Signal(ready)))
        ranks.append((first, Lane("blocks", "blocks", (Wait(ready), *others))))
    with pytest.raises(ScheduleError, match="rank 0, lane blocks, step 1 "):
        check(replace(schedule, ranks=tuple(ranks)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_may_wait_for_the_counts_of_another_before_it_shares_its_own(kind: dict[str, Any]) -> None:
    def later(step: Step) -> list[Step]:
        return [Wait(Flag("counted", 0, 1)), step] if isinstance(step, ShareCounts) else [step]

    for name in ragged.FAMILIES:
        schedule = ragged.build(problem_of(kind), name)
        schedule = replace(schedule, ranks=(changed(schedule, later).ranks[0], schedule.ranks[1]))
        check(schedule)
        assert isinstance(schedule.problem, RaggedProblem)
        for seed in range(20):
            assert played(schedule, some_counts(schedule.problem, random.Random(seed)), seed)


def test_ranks_that_wait_for_each_others_counts_before_they_share_are_refused() -> None:
    def later(step: ShareCounts) -> list[Step]:
        return [Wait(Flag("counted", step.gates[0].flag.rank, 1 - step.gates[0].flag.rank)), step]

    schedule = ragged.build(problem_of(KINDS[0]), "fused")
    with pytest.raises(ScheduleError, match="deadlock: rank 0"):
        check(changed(schedule, lambda step: later(step) if isinstance(step, ShareCounts) else [step]))


def first(step: type[Step], *before: Step, rank: int) -> Any:
    """A change of a rank's schedule: these steps come before each of that type."""

    def change(schedule: Schedule) -> Schedule:
        inserted = changed(schedule, lambda one: [*before, one] if isinstance(one, step) else [one]).ranks
        return replace(schedule, ranks=tuple(inserted[r] if r == rank else old for r, old in enumerate(schedule.ranks)))

    return change


@pytest.mark.parametrize("kind", KINDS)
def test_a_flag_is_lowered_before_it_is_signalled_again(kind: dict[str, Any]) -> None:
    """Flags have one sense in all schedules. A rank learns that a peer has ended the call before where it has its counts."""
    schedule, extra = ragged.build(problem_of(kind), "sequential"), Flag("extra", 1)
    (lane,) = schedule.ranks[1]
    late = replace(schedule, ranks=(schedule.ranks[0], (replace(lane, steps=(*lane.steps, Wait(extra))),)))
    check(first(GroupedGemm, Signal(extra), rank=0)(late))
    with pytest.raises(ScheduleError, match=r"extra\[0\]@1 may be signalled again before rank 1, lane compute, step \d"):
        check(first(ShareCounts, Signal(extra), rank=0)(late))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_move_after_all_counts_have_come(kind: dict[str, Any]) -> None:
    for family in ragged.FAMILIES:
        with pytest.raises(ScheduleError, match=r"it reads the counts of rank 1 on rank 0, but no write"):
            check(changed(ragged.build(problem_of(kind), family), without_counts))


def test_what_a_segment_holds_is_named() -> None:
    """K and N are equal, so a combine may pull rows where it should pull products, and multiply what is a product already."""

    def unmultiplied(step: Step) -> list[Step]:
        if not isinstance(step, GroupedGemm):
            return [step]
        parts = (SegmentCopy(p.a, p.out, p.gates, p.count) if isinstance(p, SegmentProduct) else p for p in step.parts)
        return [GroupedGemm(tuple(parts))]

    schedule = ragged.build(problem_of(KINDS[2]), "fused")
    with pytest.raises(
        ScheduleError, match="with the rows of 0->0, expert 0; the result there is the product of the rows of 0->0"
    ):
        check(changed(schedule, unmultiplied))


def test_steps_of_other_problems_are_refused() -> None:
    schedule = ragged.build(problem_of(KINDS[0]), "fused")
    region = Region("a", 0, (0, 1), (0, 8))
    with pytest.raises(ScheduleError, match=r"rank 0, lane compute, step 0 .*does not support this step"):
        check(first(ShareCounts, Copy(region, region), rank=0)(schedule))
    dense = build(Problem(op="all_gather_matmul", m=4, n=4, k=4, world_size=2), "sequential")
    (lane, *others), *ranks = dense.ranks
    for step in schedule.ranks[0][0].steps:
        wrong = replace(lane, kind="compute", steps=(step, *lane.steps))
        with pytest.raises(ScheduleError, match=f"rank 0, lane {lane.name}, step 0 .*RaggedProblem"):
            check(replace(dense, ranks=((wrong, *others), *ranks)))


def test_a_segment_of_a_peer_is_symmetric() -> None:
    """A combine may store products at a peer, but not into its result."""

    def pushed(step: Step) -> list[Step]:
        if not isinstance(step, GroupedGemm):
            return [step]
        products = (part for part in step.parts if isinstance(part, SegmentProduct))
        return [GroupedGemm(tuple(replace(p, out=replace(p.out, buffer="out", rank=p.out.dst)) for p in products))]

    with pytest.raises(ScheduleError, match=r"out@1\[0->1, expert 0\] is on another rank"):
        check(changed(ragged.build(problem_of(KINDS[2]), "sequential"), pushed))


def test_counts_are_shared_once_by_a_rank() -> None:
    again = ShareCounts((Flag("again", 1),))
    with pytest.raises(ScheduleError, match="rank 0 shares its counts in several steps"):
        check(first(GroupedGemm, again, rank=0)(ragged.build(problem_of(KINDS[0]), "fused")))


def played(schedule: Schedule, counts: dict[tuple[int, int, int], int], seed: int, calls: int = 3) -> bool:
    """Run a schedule row by row for concrete counts, in a random order of lanes; whether all results were right."""
    problem, chance = schedule.problem, random.Random(seed)
    assert isinstance(problem, RaggedProblem)
    places = problem.places(counts)
    memory: dict[tuple[str, int, int], object] = {}
    seen: dict[Any, int] = {}
    shared: dict[tuple[int, int], int] = {}
    lanes = [[r, i, 0, 0, []] for r, ls in enumerate(schedule.ranks) for i in range(len(ls))]
    """Rank, lane, call, position, parts that are left."""

    def rows(segment: Segment) -> list[tuple[str, int, int]]:
        side = 0 if segment.buffer in ("a", "product") else 1
        begin, count = places[segment.name][side], places[segment.name][2]
        return [(segment.buffer, segment.rank, at) for at in range(begin, begin + count)]

    def act(part: Any, call: int, rank: int) -> bool:
        if any(shared.get((rank, s), -1) < call for s in range(problem.world_size)):
            return False
        src, dst = (part.src, part.dst) if isinstance(part, SegmentCopy) else (part.a, part.out)
        for nth, (one, two) in enumerate(zip(rows(src), rows(dst), strict=True)):
            held: Any = ("rows", src.name, nth, call) if src.buffer == "a" else memory.get(one)
            memory[two] = ("product", *held[1:]) if isinstance(part, SegmentProduct) and held else held
        for flag in (part.count,) if part.count else ():
            seen[flag] = seen.get(flag, 0) + 1
        return True

    def right(rank: int, call: int) -> bool:
        for buffer in (b for b in schedule.buffers if b.kind == "output"):
            kind = "product" if buffer.name == "out" else "rows"
            for name in problem.received_order(rank):
                for nth, row in enumerate(rows(Segment(buffer.name, rank, *name))):
                    if memory.get(row) != (kind, name, nth, call):
                        return False
        return True

    while alive := [lane for lane in lanes if lane[2] < calls]:
        chance.shuffle(alive)
        for lane in alive:
            rank, index, call, position, left = lane
            steps = schedule.ranks[rank][index].steps
            if any(other[0] == rank and other[2] < call for other in lanes):
                continue
            step: Any = steps[position]
            if isinstance(step, Wait):
                if seen.get(step.flag, 0) <= call:
                    continue
            elif isinstance(step, ShareCounts):
                if not left:
                    left.append("shared")
                    for flag in step.flags:
                        seen[flag] = seen.get(flag, 0) + 1
                        shared[flag.rank, rank] = call
                    break
                if any(seen.get(gate.flag, 0) <= call for gate in step.gates):
                    continue
                left.clear()
            elif isinstance(step, (GroupedGemm, SegmentCopies)):
                if not left:
                    left.extend(step.parts)
                ready = [p for p in left if all(seen.get(g.flag, 0) > call for g in p.gates)]
                if not ready:
                    continue
                part = chance.choice(ready)
                if not act(part, call, rank):
                    return False
                left.remove(part)
                if left:
                    break
            else:
                for flag in signalled_flags(step):
                    seen[flag] = seen.get(flag, 0) + 1
            lane[3] += 1
            if lane[3] == len(steps):
                lane[2], lane[3] = call + 1, 0
                if all(other[2] > call for other in lanes if other[0] == rank) and not right(rank, call):
                    return False
            break
        else:
            return False
    return True


def some_counts(problem: RaggedProblem, chance: random.Random) -> dict[tuple[int, int, int], int]:
    return {name: chance.randrange(4) for rank in range(problem.world_size) for name in problem.sent_order(rank)}


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_what_is_proved_is_right_for_concrete_counts(kind: dict[str, Any], name: str) -> None:
    problem = problem_of(kind)
    for seed in range(60):
        assert played(ragged.build(problem, name), some_counts(problem, random.Random(seed)), seed)


@pytest.mark.parametrize("damage", [without_gates, without_counts, nothing_pulled_or_pushed])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_goes_wrong_for_concrete_counts(kind: dict[str, Any], damage: Any) -> None:
    problem = problem_of(kind, m=40, capacity=40)
    damaged = changed(ragged.build(problem, "fused"), damage)
    chance = random.Random(1)
    assert not all(played(damaged, some_counts(problem, chance), seed) for seed in range(200))
