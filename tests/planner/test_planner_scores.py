"""The drawn problems, the lines of benchmarks/planner.py, and the scores that are made of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scores as module
from benchmarks.planner import simulated
from benchmarks.problems import ALL_OPS, HELD, MOST_FLOPS, drawn, tried
from benchmarks.rows import CASE, append
from benchmarks.scores import Line, Predicted, ficco_specs, half, like_ficco, percentile, pooled, predicted, read_lines
from weft.core import machine
from weft.core.problem import LookupProblem, Problem

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
H200 = machine.load("h200x8")


def line(us: dict[str, float], m: int = 4096) -> Any:
    problem = Problem(op="all_gather_matmul", m=m, n=8192, k=8192, world_size=4)
    return Line(case="", problem=problem, us=us, machine="by hand", simulated=False)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_sets_are_large_even_and_apart(world_size: int) -> None:
    unseen, fit, latest, estimated = (drawn(name, world_size) for name in ("unseen", "fit", "latest", "estimated"))
    problems = [problem for _, problem in unseen]
    assert len(set(problems)) == len(problems) >= 96
    assert set(problems).isdisjoint(problem for _, problem in (*fit, *latest))
    assert {problem for _, problem in fit}.isdisjoint(problem for _, problem in latest)
    assert {problem for _, problem in estimated}.isdisjoint(problem for _, problem in (*unseen, *fit, *latest))
    for op in ALL_OPS:
        assert abs(sum(p.op == op for p in problems[:96]) - 16) <= 3
    assert sum(p.m & (p.m - 1) != 0 for p in problems) > len(problems) / 2
    assert max(p.flops for p in problems) <= MOST_FLOPS
    assert drawn("unseen", world_size, 10) == unseen[:10]


def test_what_is_tried_can_be_built() -> None:
    import weft
    from weft.schedules import parse

    for op in ALL_OPS:
        problem = next(problem for _, problem in drawn("unseen", 4) if problem.op == op)
        specs = tried(problem)
        assert specs[0] == "sequential"
        assert len(set(specs)) == len(specs)
        for spec in specs:
            assert weft.schedule.build(problem, *parse(spec)).problem == problem


def predictions(us: dict[str, float], m: int = 4096, **of: dict[str, float]) -> Any:
    """A line with what the ranking and the simulator say: what was measured, where nothing is given."""
    return Predicted(line=line(us, m), ranking=of.get("ranking", us), simulated=of.get("simulated", us))


def test_picks_and_losses() -> None:
    us = {"sequential": 100.0, "flag_gated:1": 80.0, "shard_p2p": 83.0}
    wrong = us | {"sequential": 70.0}
    right, off = predictions(us), predictions(us, 8192, simulated=wrong)
    assert right.picks == {
        "ranking": "flag_gated:1",
        "plan": "flag_gated:1",
        "simulation": "flag_gated:1",
        "sequential": "sequential",
        "auto": "flag_gated:1",
    }
    assert (off.picks["ranking"], off.picks["plan"]) == ("flag_gated:1", "sequential")
    assert (right.loss("sequential"), off.errors[0]) == (pytest.approx(0.25), pytest.approx(-0.3))
    methods = {score.method: score for score in scores([right, off], [right])}
    assert (methods["ranking"].exact, methods["plan"].exact, methods["plan"].loss) == (1.0, 0.5, pytest.approx(0.125))
    assert methods["one schedule"].exact == 1.0


def scores(some: list[Any], fitted: list[Any]) -> list[Any]:
    return module.scores(some, fitted)  # type: ignore[no-any-return]


def test_the_tuner_measures_the_best_of_the_ranking_alone() -> None:
    us = {"sequential": 100.0} | {f"flag_gated:{count}": 90.0 - count for count in (1, 2, 3, 4, 5, 6)}
    ranking = {name: 100.0 - time for name, time in us.items()}  # the other way round
    assert predictions(us, ranking=ranking).picks["auto"] == "flag_gated:4"


def test_halves_are_for_good_and_about_as_large() -> None:
    problems = [Problem(op="all_gather_matmul", m=m, n=64, k=64, world_size=2) for m in range(1, 201)]
    assert 70 < sum(half(problem) == "test" for problem in problems) < 130
    assert "".join(half(problem)[0] for problem in problems[:16]) == "ftftftfttffftftt"


def test_percentiles() -> None:
    assert [percentile(range(1, 101), share) for share in (0.5, 0.95, 1.0)] == [50, 95, 100]


def test_a_line_comes_back(tmp_path: Path) -> None:
    problems = (line({}).problem, LookupProblem.of(batch=64, dims=((8,), (8, 8))))
    path = tmp_path / "lines.jsonl"
    written = [simulated("unseen", "h200x8", ("case", problem)) for problem in problems]
    failed = dataclasses.replace(written[0], us={}, missing={CASE: "rank 1: no memory"})
    for row in (*written, failed):
        append(path, row)
    found = read_lines(path)
    assert [one.problem for one in found] == [*problems, problems[0]]
    assert found[0].us["sequential"] == written[0].us["weft/sequential"]
    assert found[0].us.keys() == {name.removeprefix("weft/") for name in written[0].us} - {
        "computation/cublas",
        "communication/default",
    }
    assert all(one.simulated for one in found)
    assert [one.failed for one in found] == ["", "", "rank 1: no memory"]
    append(path, dataclasses.replace(failed, problem={"op": "all_gather_matmul"}))
    with pytest.raises(ValueError, match=r"lines.jsonl, line 4: m is missing"):
        read_lines(path)


def test_like_the_paper_are_problems_of_all_five_options() -> None:
    problem = line({}).problem
    five = dict.fromkeys(ficco_specs(problem), 100.0)
    assert len(five) == 5
    whole, part = predictions(five | {"shard_p2p": 50.0}), predictions({"sequential": 1.0, "shard_p2p": 2.0}, 8192)
    (one,) = like_ficco([whole, part])
    assert one.line.us == five
    assert ficco_specs(dataclasses.replace(problem, op="all_to_all_matmul")) == ("sequential", "hetero_unfused_1d:4")


def test_a_program_under_two_names_is_one_candidate() -> None:
    """By its simplest name, with the mean of its times; a pick by another of its names is a pick of it."""
    us = {"sequential": 20.0, "hetero_unfused_1d:2": 12.0, "hetero_fused_1d:2": 10.0, "uniform_fused_1d:2": 13.0}
    for size, names in ((2, ("sequential", "hetero_fused_1d:2", "uniform_fused_1d:2")), (4, tuple(us))):
        problem = Problem(op="all_gather_matmul", m=4096, n=512, k=512, world_size=size)
        found = pooled(Line(case="", problem=problem, us=us, machine="by hand", simulated=False))
        assert set(found.us) == set(names)
        assert found.us["hetero_fused_1d:2"] == (11.0 if size == 2 else 10.0)
        among = found.among(("sequential", "hetero_unfused_1d:2")).us
        assert set(among) == {"sequential", "hetero_fused_1d:2" if size == 2 else "hetero_unfused_1d:2"}
        assert len(found.among(ficco_specs(problem)).us) == (3 if size == 2 else 1)


def unseen_lines() -> list[Any]:
    """Committed ones, measured on 2 and 4 x H200, of problems that nothing was fitted to, each program once."""
    return [pooled(one) for one in read_lines(RESULTS / "planner.jsonl") if one.us]


def test_the_measured_set_is_large_and_unseen() -> None:
    lines = unseen_lines()
    assert len(lines) >= 96
    for size in (2, 4):
        held = {problem for name in HELD for _, problem in drawn(name, size)}
        assert {one.problem for one in lines if one.problem.world_size == size} <= held
    assert not {one.problem for one in lines} & {one.problem for one in read_lines(RESULTS / "planner_fit.jsonl")}


def test_choices_hold_on_what_was_measured() -> None:
    """Of a third of the problems of the half that nothing is fitted to."""
    some = [predicted(one, H200) for one in unseen_lines() if half(one.problem) == "test"][::3]
    methods = {score.method: score for score in scores(some, some)}
    assert methods["plan"].near >= 0.8
    assert methods["plan"].loss <= 0.03
    assert methods["ranking"].loss <= 0.03
    assert methods["auto"].near >= 0.98
