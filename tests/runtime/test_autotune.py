"""The autotuning run of "auto": what is measured, who wins, what is left out, and that ranks agree."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import cast

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from families import TP_OPS
from rank_work import check_gather, check_scatter
from weft_log import logged, warned

import weft
from weft.core.errors import RankMismatch, WeftError
from weft.core.problem import Problem
from weft.runtime.autotune import AutotuningRun, Choice, Choices, Measurement, calls_of_a_run, leader
from weft.runtime.bound import BoundProgram
from weft.schedules import parse, spec

PROBLEM = Problem(op="all_gather_matmul", m=8, n=8, k=8, world_size=2)


@pytest.mark.parametrize(
    ("others", "winner"),
    [
        ({}, "sequential"),
        ({"shard_p2p": 100.0}, "sequential"),
        ({"shard_p2p": 99.0}, "sequential"),
        ({"shard_p2p": 98.9}, "shard_p2p"),
        ({"shard_p2p": 90.0, "flag_gated:1": 89.9}, "flag_gated:1"),
        ({"flag_gated:1": 89.9, "shard_p2p": 90.0}, "flag_gated:1"),
        ({"shard_p2p": 80.0, "flag_gated:1": 80.0}, "shard_p2p"),
        ({"shard_p2p": 120.0, "flag_gated:1": 110.0}, "sequential"),
    ],
)
def test_sequential_wins_ties(others: dict[str, float], winner: str) -> None:
    times = {"sequential": 100.0, **others}
    assert leader([Measurement(spec=text, us=us) for text, us in times.items()]).spec == winner


@pytest.mark.parametrize(
    ("overlaps", "winner"),
    [
        ({"shard_p2p": (80.0, 101.0)}, "sequential"),
        ({"shard_p2p": (101.0, 80.0)}, "sequential"),
        ({"shard_p2p": (100.0, 98.0)}, "shard_p2p"),
        ({"shard_p2p": (98.0, 100.0)}, "shard_p2p"),
        ({"shard_p2p": (99.5, 99.5)}, "sequential"),
        ({"shard_p2p": (70.0, 101.0), "flag_gated:1": (95.0, 95.0)}, "flag_gated:1"),
        ({"shard_p2p": (80.0, 90.0), "flag_gated:1": (85.0, 75.0)}, "flag_gated:1"),
    ],
)
def test_an_overlap_is_slower_by_no_clock(overlaps: dict[str, tuple[float, float]], winner: str) -> None:
    times = {"sequential": (100.0, 100.0), **overlaps}
    assert leader([Measurement(spec=text, us=us, queued_us=queued) for text, (us, queued) in times.items()]).spec == winner


@pytest.mark.parametrize(("call_us", "calls"), [(0, 20), (100, 20), (500, 10), (1000, 5), (1700, 3), (90_000, 3)])
def test_a_run_is_bounded(call_us: int, calls: int) -> None:
    assert calls_of_a_run(1000 * call_us) == calls


class Fake:
    """A program that counts its calls."""

    def __init__(self, spec: str) -> None:
        self.spec, self.calls, self.open = spec, 0, True

    def run(self) -> None:
        assert self.open
        self.calls += 1


class Ring:
    """An autotuning run of fakes on one rank. `others` returns what the peer gives to each exchange.

    times: us a call, by spec; one that is missing cannot be bound. queued: where the host is ahead. bound: every program
    made. most: bound at once.
    """

    def __init__(self, times: dict[str, Iterator[float] | float], others: Callable[[str, int], int] | None = None) -> None:
        self.times, self.others = times, others
        self.bound: list[Fake] = []
        self.exchanges: list[str] = []
        self.most = 0
        self.queued: dict[str, float] = {}

    def bind(self, text: str) -> BoundProgram:
        if text not in self.times:
            raise ValueError(f"{text} has a flag too many")
        self.bound.append(Fake(text))
        self.most = max(self.most, sum(program.open for program in self.bound))
        return cast(BoundProgram, self.bound[-1])

    def drop(self, program: object) -> None:
        assert isinstance(program, Fake)
        assert program.open
        program.open = False

    def call(self, program: object) -> None:
        assert isinstance(program, Fake)
        program.run()
        self.called = program.spec

    def timer(self, call: Callable[[], object], calls: int) -> int:
        for _ in range(1 + calls):
            call()
        us = self.times[self.called]
        return round(1e3 * (us if isinstance(us, float) else next(us)))

    def queued_timer(self, call: Callable[[], object], calls: int) -> int:
        for _ in range(2 + calls):
            call()
        return round(1e3 * self.queued[self.called])

    def exchange(self, text: str, mine: int) -> tuple[int, ...]:
        self.exchanges.append(text)
        return (mine, self.others(text, mine)) if self.others else (mine,)

    def fastest(self, specs: Sequence[str]) -> tuple[str, dict[str, float]]:
        autotuning = AutotuningRun(
            bind=self.bind,
            drop=self.drop,
            call=self.call,
            timer=self.timer,
            queued=self.queued_timer if self.queued else None,
            exchange=self.exchange,
        )
        program, measurements = autotuning.fastest(specs)
        assert [p for p in self.bound if p.open] == [program]
        return cast(Fake, program).spec, {measurement.spec: measurement.us for measurement in measurements}


SPECS = ("sequential", "shard_p2p", "flag_gated:1", "direct_store:1")


def test_the_fastest_stays_and_losers_are_closed_before_the_next_is_bound() -> None:
    ring = Ring({"sequential": 100.0, "shard_p2p": 80.0, "flag_gated:1": 90.0, "direct_store:1": 70.0})
    assert ring.fastest(SPECS) == ("direct_store:1", ring.times)
    assert ring.most == 2


def test_calls_are_bounded() -> None:
    ring = Ring({"sequential": 100.0, "shard_p2p": 2000.0})
    ring.fastest(SPECS[:2])
    assert [program.calls for program in ring.bound] == [67, 16]


def test_the_median_of_the_runs_counts() -> None:
    ring = Ring({"sequential": 100.0, "shard_p2p": iter([500.0, 90.0, 400.0, 80.0])})
    assert ring.fastest(SPECS[:2]) == ("shard_p2p", {"sequential": 100.0, "shard_p2p": 90.0})


def test_close_rivals_are_measured_again_in_turns() -> None:
    """Alone, flag_gated:1 came later, when the GPU was warm; in turns it is ahead. direct_store:1 is far behind."""
    alone, in_turns = [100.0] * 4, [95.0] * 5
    ring = Ring(
        {
            "sequential": 300.0,
            "shard_p2p": iter(alone + in_turns),
            "flag_gated:1": iter([105.0] * 4 + [80.0] * 5),
            "direct_store:1": 200.0,
        }
    )
    us = {"sequential": 300.0, "shard_p2p": 95.0, "flag_gated:1": 80.0, "direct_store:1": 200.0}
    assert ring.fastest(SPECS) == ("flag_gated:1", us)
    assert ring.most == 2
    final = [text for text in ring.exchanges if text.startswith("final")]
    assert final[:3] == ["final of shard_p2p: run 0", "final of flag_gated:1: run 0", "final of flag_gated:1: run 1"]


def _noisy(us: float, noise: float, random: Random) -> Iterator[float]:
    while True:
        yield us * (1 + random.gauss(0, noise))


def test_a_final_goes_on_until_candidates_are_apart() -> None:
    """Of three candidates within 5%, whose runs differ by 3%, the fastest is chosen in nineteen of twenty tunings. With five
    runs of each it would be in four of five. A candidate that is clearly slower is not timed again."""
    right, runs = 0, {"shard_p2p": 0, "flag_gated:1": 0, "direct_store:1": 0}
    us = {"sequential": 1500.0, "shard_p2p": 1020.0, "flag_gated:1": 1000.0, "direct_store:1": 1050.0}
    for seed in range(200):
        random = Random(seed)
        ring = Ring({name: _noisy(mean, 0.03, random) for name, mean in us.items()})
        right += ring.fastest(SPECS)[0] == "flag_gated:1"
        for name in runs:
            runs[name] += sum(text.startswith(f"final of {name}:") for text in ring.exchanges)
    assert right >= 185
    assert runs["direct_store:1"] < 0.8 * runs["flag_gated:1"]


@pytest.mark.parametrize(("call_us", "runs"), [(100.0, 25), (8000.0, 8), (40_000.0, 5)])
def test_a_final_is_bounded(call_us: float, runs: int) -> None:
    """By the number of runs, or by half a second of the GPU's work: two candidates of four calls of 8 ms are 64 ms a run."""
    ring = Ring({"sequential": 2 * call_us, "shard_p2p": call_us, "flag_gated:1": call_us})
    ring.fastest(SPECS[:3])
    assert sum(text.startswith("final of shard_p2p") for text in ring.exchanges) == runs


def test_what_loses_where_the_host_is_ahead_is_not_chosen() -> None:
    """shard_p2p is faster from Python, and slower in a graph; direct_store:1 wins both, by less."""
    for direct_us, winner in ((92.0, "direct_store:1"), (96.0, "sequential")):
        ring = Ring({"sequential": 100.0, "shard_p2p": 70.0, "flag_gated:1": 99.8, "direct_store:1": 90.0})
        ring.queued = {"sequential": 95.0, "shard_p2p": 97.0, "flag_gated:1": 94.8, "direct_store:1": direct_us}
        assert ring.fastest(SPECS)[0] == winner
        assert any(text.startswith("final of sequential") for text in ring.exchanges)


@pytest.mark.parametrize(
    ("eager_us", "queued_us", "timed_both_ways"),
    [(310.0, 301.0, False), (310.0, 299.0, True), (540.0, 387.0, True), (2000.0, 1900.0, True), (2000.0, 1910.0, False)],
)
def test_a_call_is_timed_both_ways_unless_the_gpu_bounds_it(eager_us: float, queued_us: float, timed_both_ways: bool) -> None:
    """shard_p2p is faster than sequential when Python makes the calls, and slower when the host is ahead of the GPU."""
    ring = Ring({"sequential": eager_us, "shard_p2p": 0.8 * eager_us})
    ring.queued = {"sequential": queued_us, "shard_p2p": 1.1 * queued_us}
    assert ring.fastest(SPECS[:2])[0] == ("sequential" if timed_both_ways else "shard_p2p")


def test_sequential_wins_a_close_final() -> None:
    ring = Ring({"sequential": iter([100.0] * 4 + [100.0] * 5), "shard_p2p": iter([95.0] * 4 + [99.5] * 5)})
    assert ring.fastest(SPECS[:2])[0] == "sequential"


def test_the_slowest_rank_counts() -> None:
    ring = Ring({"sequential": 100.0, "shard_p2p": 80.0}, lambda text, mine: 120_000 if "shard_p2p: run" in text else mine)
    assert ring.fastest(SPECS[:2]) == ("sequential", {"sequential": 100.0, "shard_p2p": 120.0})


def test_the_slowest_rank_sets_the_calls_of_a_run() -> None:
    ring = Ring({"sequential": 100.0, "shard_p2p": 80.0}, lambda text, mine: 2_000_000 if "one call" in text else mine)
    ring.fastest(SPECS[:2])
    assert [program.calls for program in ring.bound] == [16, 16]


def test_a_spec_that_cannot_be_bound_is_left_out_aloud() -> None:
    ring = Ring({"sequential": 100.0, "flag_gated:1": 90.0})
    with warned(r"schedule shard_p2p is not a candidate of auto: shard_p2p has a flag too many") as seen:
        assert ring.fastest(SPECS[:3]) == ("flag_gated:1", ring.times)
    assert len(seen) == 1


def test_a_spec_that_a_peer_cannot_bind_is_left_out_here_too() -> None:
    ring = Ring(
        dict.fromkeys(SPECS, 90.0) | {"sequential": 100.0}, lambda text, mine: mine * (text != "autotuning of shard_p2p: bound")
    )
    with warned("shard_p2p is not a candidate of auto: another rank could not bind it"):
        assert ring.fastest(SPECS[:2]) == ("sequential", {"sequential": 100.0})
    assert [program.calls for program in ring.bound] == [67, 0]


def test_a_mismatch_of_ranks_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring({"sequential": 100.0})

    def differ(text: str) -> BoundProgram:
        if text == "shard_p2p":
            raise RankMismatch("ranks disagree")
        return Ring.bind(ring, text)

    monkeypatch.setattr(ring, "bind", differ)
    with pytest.raises(RankMismatch):
        ring.fastest(SPECS[:2])


def test_sequential_that_cannot_be_bound_ends_the_trial() -> None:
    with pytest.raises(ValueError, match="sequential has a flag too many"):
        Ring({"shard_p2p": 1.0}).fastest(SPECS)


def test_a_choice_prints_what_was_measured() -> None:
    measurements = (Measurement(spec="sequential", us=100.2), Measurement(spec="shard_p2p", us=80.0))
    choice = Choice(problem=PROBLEM, spec="shard_p2p", measurements=measurements)
    assert choice.us == {"sequential": 100.2, "shard_p2p": 80.0}
    assert str(choice) == f"{PROBLEM}: shard_p2p, overlapped (sequential 100 us, shard_p2p 80 us)"
    planned = Choice(problem=PROBLEM, spec="sequential_stores", predicted_for="h200x8")
    assert str(planned) == f"{PROBLEM}: sequential_stores, not overlapped (predicted for h200x8)"
    assert str(Choice(problem=PROBLEM, spec="sequential")) == f"{PROBLEM}: sequential (not measured)"
    assert str(Choices([choice, planned])) == f"{choice}\n{planned}"


Found = tuple[list[tuple[str, dict[str, float]]], list[str], int, list[str]]
"""What "auto" chose and measured, the names of programs that stay, how many were bound, and what was warned of."""


LISTED = ("sequential", "shard_p2p", "hetero_fused_1d:2", "flag_gated:1", "direct_store:2")


def _measured(fault: str = "") -> Found:
    """Let "auto" measure on the host executor, by a clock that says something else on each rank, and call it.

    fault: a family that rank 1 cannot bind.
    """
    from weft.runtime import groups, tuner
    from weft.runtime.programs import Programs

    bind, timer_for, auto_candidates = Programs._bind, tuner.timer_for, tuner.auto_candidates
    made: list[BoundProgram] = []
    rank = dist.get_rank()
    weft.close()

    def noted(self: Programs, schedule: weft.schedule.Schedule, device: torch.device) -> BoundProgram:
        program = bind(self, schedule, device)
        if rank == 1 and schedule.name == fault:
            program.close()
            raise ValueError("this rank has no room")
        made.append(program)
        return program

    def clock(call: Callable[[], object], calls: int) -> int:
        for _ in range(1 + calls):
            call()
        # Alone, each rank would choose a spec that is fast there and slow elsewhere. flag_gated is fair on all.
        turn = LISTED.index(spec(made[-1].schedule.name, made[-1].schedule.chunks)) % dist.get_world_size()
        return 1_000_000 * (4 if made[-1].schedule.name == "flag_gated" else 3 + 3 * (turn != rank))

    Programs._bind = noted  # type: ignore[method-assign]
    tuner.timer_for = lambda device: clock  # type: ignore[assignment]
    tuner.auto_candidates = lambda problem, device: LISTED
    try:
        with logged() as seen:
            for call in range(3):
                check_gather(64, 48, 32, torch.float32, "auto", call)
                check_scatter(64, 48, 32, torch.float32, "auto", call)
    finally:
        Programs._bind, tuner.timer_for = bind, timer_for  # type: ignore[method-assign]
        tuner.auto_candidates = auto_candidates
    group = dist.group.WORLD
    assert group is not None
    specs = [spec(s.name, s.chunks) for s in groups.GROUPS.state(group.group_name).schedules()]
    found = [(choice.spec, choice.us) for choice in weft.choices()]
    weft.close()
    return found, specs, len(made), seen


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_choose_alike_and_are_right(ranks: RankFixture, world_size: int) -> None:
    answers = ranks(world_size).run(_measured)
    assert all(answer == answers[0] for answer in answers)
    choices, specs, made, seen = answers[0]
    assert seen == []
    assert [text for text, _ in choices] == specs
    assert [parse(text)[0] for text in specs] == ["flag_gated"] * len(TP_OPS)
    assert made == len(TP_OPS) * len(LISTED)
    for _, us in choices:
        assert us == dict.fromkeys(LISTED, 6000.0) | {"flag_gated:1": 4000.0}


@pytest.mark.ranks
def test_what_one_rank_cannot_bind_all_leave_out(ranks: RankFixture) -> None:
    answers = ranks(2).run(_measured, "flag_gated")
    assert answers[0][:2] == answers[1][:2]
    choices, specs, _, _ = answers[0]
    assert specs == ["sequential"] * len(TP_OPS)
    assert all(parse(text)[0] != "flag_gated" for _, us in choices for text in us)
    for (_, _, _, seen), reason in zip(answers, ["another rank could not bind it", "this rank has no room"], strict=True):
        (text,) = seen
        assert "flag_gated" in text
        assert text.endswith(reason)


def _broken_in_a_trial() -> str:
    """Rank 1's clock breaks; then the group goes on."""
    from weft.runtime import tuner

    timer_for = tuner.timer_for
    weft.close()

    def clock(call: Callable[[], object], calls: int) -> int:
        call()
        if dist.get_rank() == 1:
            raise OSError("the clock stands still")
        return 1000

    tuner.timer_for = lambda device: clock  # type: ignore[assignment]
    message = "right"
    try:
        check_gather(64, 48, 32, torch.float32, "auto", 0)
    except (WeftError, OSError) as error:
        message = f"{type(error).__name__}: {error}"
    finally:
        tuner.timer_for = timer_for
    dist.barrier()
    weft.close()
    gc.collect()
    check_gather(64, 48, 32, torch.float32, "auto", 1)
    weft.close()
    return message


@pytest.mark.ranks
def test_a_failure_in_a_trial_is_told_to_all(ranks: RankFixture) -> None:
    messages = ranks(2).run(_broken_in_a_trial)
    assert messages[1] == "OSError: the clock stands still"
    assert messages[0].startswith("PeerLost: rank 1 failed: the clock stands still")


def _planned() -> list[tuple[str, dict[str, float]]]:
    """On CPUs nothing is measured: auto and planned are the prediction, and choices of each."""
    weft.close()
    assert weft.choices() == []
    for text in ("planned", "auto"):
        check_gather(64, 48, 32, torch.float32, text, 0)
        check_scatter(64, 48, 32, torch.float32, text, 0)
    found = [(choice.spec, choice.us) for choice in weft.choices()]
    from weft.runtime.groups import GROUPS

    group = dist.group.WORLD
    assert group is not None
    built = [spec(s.name, s.chunks) for s in GROUPS.state(group.group_name).schedules()]
    assert built == [text for text, _ in found]
    assert {choice.predicted_for for choice in weft.choices()} == {"h200x8"}
    weft.close()
    return found


@pytest.mark.ranks
def test_planned_is_the_prediction_and_so_is_auto_on_cpus(ranks: RankFixture) -> None:
    for found in ranks(2).run(_planned):
        assert len(found) == 2 * len(TP_OPS)
        assert all(us == {} for _, us in found)


def test_mistakes_name_planned() -> None:
    from weft.ops.common import schedule_to_spec

    assert schedule_to_spec("planned", "all_gather_matmul") == "planned"
    with pytest.raises(ValueError, match=r"schedule is 'plan'; all_gather_matmul takes .*planned"):
        schedule_to_spec("plan", "all_gather_matmul")
    with pytest.raises(ValueError, match="schedule is 'ring'") as refused:
        schedule_to_spec("ring", "embedding_bag_all_to_all")
    assert "flag_gated" not in str(refused.value), "lookups have no such family"
    with pytest.raises(ValueError, match=r"families that have chunks$"):
        schedule_to_spec("flag_gated:0", "all_gather_matmul")
    assert schedule_to_spec("flag_gated_2d:4", "all_gather_matmul") == "flag_gated_2d:4"
    with pytest.raises(ValueError, match=r"is for all_gather_matmul alone; matmul_reduce_scatter has .*, node_slices$"):
        schedule_to_spec("flag_gated_2d:4", "matmul_reduce_scatter")
