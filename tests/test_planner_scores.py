"""The drawn problems, the lines of benchmarks/planner.py, and what is made of them: scores and fitted trees."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from weft import codec, machine
from weft.problem import LookupProblem, Problem
from weft.rules import heuristic

ROOT = Path(__file__).parents[1]
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


def test_a_tree_finds_the_threshold() -> None:
    from fit_heuristic import fitted, grown, sample
    from problems import TRIED

    def known(m: int) -> Any:
        best = "shard_p2p" if m >= 5000 else "flag_gated:1"
        return line({"sequential": 100.0, "shard_p2p": 90.0, "flag_gated:1": 90.0} | {best: 80.0}, m)

    lines = [known(1000 * step) for step in range(1, 13)]
    samples = [sample(one, H200, 1.0) for one in lines]
    assert set(samples[0].losses) == set(TRIED["all_gather_matmul"])
    assert samples[0].losses["track_and_trigger:1"] == 100 / 80 - 1
    tree = codec.dump(grown(samples, 3, 0.01))
    assert (tree["then"]["spec"], tree["otherwise"]["spec"]) == ("shard_p2p", "flag_gated:1")
    assert tree["then"]["problems"] == 8
    assert codec.dump(grown(samples, 3, 10.0))["spec"] == "shard_p2p"
    with pytest.raises(ValueError, match="files have no problem of matmul_reduce_scatter"):
        fitted(lines, H200)


def test_known_problems_are_read() -> None:
    from fit_heuristic import known
    from problems import ALL_OPS

    found = list(known())
    assert {one.problem.op for one in found} == set(ALL_OPS)
    assert all("sequential" in one.us and len(one.us) > 2 for one in found)


def measured_lines() -> list[Any]:
    """Committed ones: of problems never used to fit where they are there, and of the other benchmarks."""
    from fit_heuristic import known
    from scores import read_lines

    unseen = RESULTS / "planner.jsonl"
    return [*known(), *(one for one in (read_lines(unseen) if unseen.exists() else ()) if one.us)]


def test_the_heuristic_holds_on_what_was_measured() -> None:
    from scores import verdict

    found = verdict(measured_lines(), lambda one: heuristic(one.problem, H200))
    assert found.count >= 40
    assert found.near >= 0.75 * found.count
    assert found.slower <= 0.05 * found.count
    assert found.unmeasured <= 0.05 * found.count


def test_the_cost_model_holds_on_what_was_measured() -> None:
    from scores import errors, percentile, predictions, verdict

    some = measured_lines()[::6]
    predicted = {one.problem: predictions(one, H200) for one in some}
    found = verdict(some, lambda one: min(predicted[one.problem], key=predicted[one.problem].__getitem__))
    assert found.near >= 0.7 * found.count
    assert percentile(errors(some, predicted), 0.5) <= 0.15
