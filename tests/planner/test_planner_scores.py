"""The drawn problems, the lines of benchmarks/planner.py, and what is made of them: scores and fitted weights."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.core import machine
from weft.core.problem import LookupProblem, Problem
from weft.perf.rules import heuristic

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
H200 = machine.load("h200x8")


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_are_found() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


def line(us: dict[str, float], m: int = 4096) -> Any:
    from scores import Line

    problem = Problem(op="all_gather_matmul", m=m, n=8192, k=8192, world_size=4)
    return Line(case="", problem=problem, us=us, machine="by hand", simulated=False)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_sets_are_large_even_and_apart(world_size: int) -> None:
    from problems import ALL_OPS, MOST_FLOPS, drawn

    unseen, fit = drawn("unseen", world_size), drawn("fit", world_size)
    problems = [problem for _, problem in unseen]
    assert len(set(problems)) == len(problems) >= 96
    assert set(problems).isdisjoint(problem for _, problem in fit)
    for op in ALL_OPS:
        assert abs(sum(p.op == op for p in problems[:96]) - 16) <= 3
    assert sum(p.m & (p.m - 1) != 0 for p in problems) > len(problems) / 2
    assert max(p.flops for p in problems) <= MOST_FLOPS
    assert drawn("unseen", world_size, 10) == unseen[:10]


def test_what_is_tried_can_be_built() -> None:
    from problems import ALL_OPS, drawn, tried

    import weft
    from weft.schedules import parse

    for op in ALL_OPS:
        problem = next(problem for _, problem in drawn("unseen", 4) if problem.op == op)
        specs = tried(problem)
        assert specs[0] == "sequential"
        assert len(set(specs)) == len(specs)
        for spec in specs:
            assert weft.build(problem, *parse(spec)).problem == problem


def test_a_verdict_counts() -> None:
    from scores import verdict

    lines = [
        line({"sequential": 100.0, "flag_gated:1": 80.0, "shard_p2p": 83.0}),
        line({"sequential": 100.0, "flag_gated:1": 120.0, "shard_p2p": 83.0}, 8192),
        line({"sequential": 100.0, "shard_p2p": 90.0}, 2048),
    ]
    found = verdict(lines, lambda _: "flag_gated:1")
    assert found.losses == (0.0, pytest.approx(120 / 83 - 1))
    assert (found.count, found.exact, found.near, found.slower, found.unmeasured) == (3, 1, 1, 1, 1)
    assert found.wrong_loss == pytest.approx(120 / 83 - 1)
    near = verdict(lines, lambda _: "shard_p2p")
    assert (near.exact, near.near, near.slower, near.unmeasured) == (2, 3, 0, 0)


def test_errors_and_percentiles() -> None:
    from scores import errors, percentile, predictions

    one = line({"sequential": 1.0, "shard_p2p": 1.0})
    predicted = predictions(one, H200)
    right = line(dict(predicted))
    assert errors([right], {right.problem: predicted}) == [0.0, 0.0]
    twice = line({spec: us / 2 for spec, us in predicted.items()})
    assert errors([twice], {twice.problem: predicted}) == [pytest.approx(1.0)] * 2
    assert [percentile(range(1, 101), share) for share in (0.5, 0.95, 1.0)] == [50, 95, 100]


def test_a_line_comes_back(tmp_path: Path) -> None:
    from planner import line_of
    from scores import read_lines, report

    problems = (line({}).problem, LookupProblem.of(batch=64, dims=((8,), (8, 8))))
    path = tmp_path / "lines.jsonl"
    written = []
    for problem in problems:
        us = {"sequential": 10.0, "direct_store:1": 8.0, "communication": 3.0}
        written.append({"machine": "by hand"} | line_of("unseen", "case", problem, us, {"shard_p2p": "failed"}))
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    assert [found.problem for found in read_lines(path)] == list(problems)
    assert read_lines(path)[0].us == {"sequential": 10.0, "direct_store:1": 8.0}
    assert (written[0]["schedule"], written[0]["overlapped_us"], written[0]["communication_us"]) == ("direct_store:1", 8.0, 3.0)
    failed = written[0] | {"candidates": {}, "failed": "rank 1: no memory"}
    path.write_text("".join(json.dumps(row) + "\n" for row in (*written, failed)))
    assert [found.failed for found in read_lines(path)] == ["", "", "rank 1: no memory"]
    assert "NOT MEASURED all_gather_matmul M=4096" in report(read_lines(path), H200, model=False)
    path.write_text(json.dumps(written[0] | {"problem": {"op": "all_gather_matmul"}}))
    with pytest.raises(ValueError, match=r"lines.jsonl, line 1: m is missing"):
        read_lines(path)


def test_weights_come_back_from_times_that_have_them() -> None:
    """Times made of known weights give them back; problems of the sets to hold to, and operators without lines, are refused."""
    from fit_heuristic import fitted, weights
    from problems import drawn

    from weft.perf.rules import TERMS, terms

    true = (1.1, 0.4, 0.0, 0.0, 0.0, 1.5, 2.0)
    problems = [problem for _, problem in drawn("fit", 4, 240) if problem.op == "all_gather_matmul"]
    times = [sum(a * b for a, b in zip(true, terms(problem, H200, "shard_p2p", 1), strict=True)) for problem in problems]
    lines = [dataclasses.replace(line({"shard_p2p": us}, 8), problem=one) for one, us in zip(problems, times, strict=True)]
    found = weights("shard_p2p", lines, H200)
    assert found is not None
    again = [
        sum(a * b for a, b in zip(found.weights, terms(problem, H200, "shard_p2p", 1), strict=True)) for problem in problems
    ]
    assert again == pytest.approx(times, rel=0.05)
    assert found.error < 0.03
    assert len(found.weights) == len(TERMS)
    assert weights("flag_gated:1", lines, H200) is None
    with pytest.raises(ValueError, match="files have no problem of matmul_reduce_scatter"):
        fitted(lines, H200)
    unseen = drawn("unseen", 4)[0][1]
    with pytest.raises(ValueError, match="is of a set that weights are held to"):
        fitted([dataclasses.replace(lines[0], problem=unseen)], H200)


def test_choices_among_ficcos_and_the_quick_tuners() -> None:
    from scores import by_sizes, ficco_specs, quick

    one = line({"sequential": 100.0, "uniform_fused_1d:4": 90.0, "shard_p2p": 60.0, "hetero_fused_1d:2": 50.0}, 8192)
    paper = one.among(ficco_specs(one.problem))
    assert paper.us == {"sequential": 100.0, "uniform_fused_1d:4": 90.0}
    assert by_sizes(paper, H200) in paper.us
    assert ficco_specs(dataclasses.replace(one.problem, op="all_to_all_matmul")) == ("sequential", "hetero_unfused_1d:4")
    # What is predicted to be more than twice as slow as the best is not measured.
    predicted = {"sequential": 100.0, "uniform_fused_1d:4": 90.0, "shard_p2p": 60.0, "hetero_fused_1d:2": 500.0}
    assert quick(one, predicted, H200) == "shard_p2p"


def test_a_program_under_two_names_is_one_candidate() -> None:
    """By its simplest name, with the mean of its times; a pick by another of its names is a pick of it."""
    from scores import Line, by_sizes, ficco_specs, pooled, verdict

    us = {"sequential": 20.0, "hetero_unfused_1d:2": 12.0, "hetero_fused_1d:2": 10.0, "uniform_fused_1d:2": 13.0}
    for size, names in ((2, ("sequential", "hetero_fused_1d:2", "uniform_fused_1d:2")), (4, tuple(us))):
        problem = Problem(op="all_gather_matmul", m=4096, n=512, k=512, world_size=size)
        found = pooled(Line(case="", problem=problem, us=us, machine="by hand", simulated=False))
        assert set(found.us) == set(names)
        assert found.us["hetero_fused_1d:2"] == (11.0 if size == 2 else 10.0)
        assert by_sizes(found, H200) in found.us
        named = verdict([found], lambda _: "hetero_unfused_1d:2")
        assert (named.exact, named.unmeasured) == ((1, 0) if size == 2 else (0, 0))
        among = found.among(("sequential", "hetero_unfused_1d:2")).us
        assert set(among) == {"sequential", "hetero_fused_1d:2" if size == 2 else "hetero_unfused_1d:2"}
        assert len(found.among(ficco_specs(problem)).us) == (3 if size == 2 else 1)


def unseen_lines() -> list[Any]:
    """Committed ones, measured on 2 and 4 x H200, of problems that nothing was fitted to, each program once."""
    from scores import pooled, read_lines

    return [pooled(one) for one in read_lines(RESULTS / "planner.jsonl") if one.us]


def test_the_measured_set_is_large_and_unseen() -> None:
    from problems import HELD, drawn
    from scores import read_lines

    lines = unseen_lines()
    assert len(lines) >= 96
    for size in (2, 4):
        held = {problem for name in HELD for _, problem in drawn(name, size)}
        assert {one.problem for one in lines if one.problem.world_size == size} <= held
    assert not {one.problem for one in lines} & {one.problem for one in read_lines(RESULTS / "planner_fit.jsonl")}


def test_the_heuristic_holds_on_what_was_measured() -> None:
    from scores import by_sizes, ficco_specs, verdict

    lines = unseen_lines()
    paper = [one for one in (line.among(ficco_specs(line.problem)) for line in lines) if len(one.us) > 1]
    found = verdict(paper, lambda one: by_sizes(one, H200))
    assert found.exact >= 0.85 * found.count
    assert found.tied >= 0.85 * found.count
    assert found.near >= 0.90 * found.count
    assert found.wrong_loss <= 0.06
    found = verdict(lines, lambda one: heuristic(one.problem, H200))
    assert found.near >= 0.8 * found.count
    assert found.slower <= 0.06 * found.count
    assert found.unmeasured == 0


@pytest.mark.slow
def test_the_cost_model_and_the_quick_tuner_hold_on_what_was_measured() -> None:
    from scores import errors, percentile, predictions, quick, verdict

    some = unseen_lines()[::3]
    predicted = {one.problem: predictions(one, H200) for one in some}
    found = verdict(some, lambda one: min(predicted[one.problem], key=predicted[one.problem].__getitem__))
    assert found.near >= 0.8 * found.count
    assert percentile(errors(some, predicted), 0.5) <= 0.09
    tuned = verdict(some, lambda one: quick(one, predicted[one.problem], H200))
    assert tuned.tied >= 0.95 * tuned.count
    assert tuned.slower == 0
