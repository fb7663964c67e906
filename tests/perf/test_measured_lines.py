"""Predictions against what was measured: the lines are all read, and the simulator is held to them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import simulated
from benchmarks.rows import read
from weft.core.machine import load


@pytest.fixture(scope="module")
def found() -> tuple[simulated.Compared, ...]:
    """Of every twentieth line."""
    machine = load(simulated.MACHINE)
    some = list(simulated.measured())[::20]
    return tuple(simulated.Compared(of=one, predicted_us=simulated.predict(one, machine)) for one in some)


def test_every_line_in_a_graph_is_read() -> None:
    """Those of ragged cases, and of problems that could not be measured, have no Schedule or no time."""
    found = {(one.bench, one.problem.op, one.case) for one in simulated.measured()}
    for bench in simulated.FILES:
        for row in read(simulated.RESULTS / f"{bench}.jsonl"):
            if row.mode == "graph" and "experts" not in row.case and row.us:
                assert (bench, row.op, row.case) in found


def test_a_line_is_what_it_says() -> None:
    one = next(one for one in simulated.measured() if one.bench == "h200x8/all_to_all" and one.spec == "track_and_trigger:1")
    assert (one.problem.m, one.problem.k, one.problem.n, one.problem.world_size) == (4096, 14336, 4096, 8)
    assert one.us == pytest.approx(727.79, abs=0.05)
    assert Counter(one.spec for one in simulated.measured())["sequential"] > 100


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (simulated.RESULTS / "h200x2/tp.jsonl").read_text(encoding="utf-8").splitlines()[0]
    (tmp_path / "h200x2").mkdir()
    (tmp_path / "h200x2/tp.jsonl").write_text(f"{text}\n" + text.replace('"m": ', '"rows": ') + "\n", encoding="utf-8")
    monkeypatch.setattr(simulated, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=r"tp\.jsonl, line 2"):
        list(simulated.measured())


@pytest.mark.slow
def test_predictions_are_near_what_was_measured() -> None:
    found = simulated.compared(load(simulated.MACHINE))
    total = simulated.errors(simulated.held(found))
    assert total.count > 1000
    assert total.median <= simulated.GOAL[0]
    assert total.p95 <= simulated.GOAL[1]
    assert abs(total.bias) <= 0.05
    for op in {one.of.problem.op for one in found}:
        some = simulated.errors(one for one in simulated.held(found) if one.of.problem.op == op)
        assert some.median <= simulated.GOAL[0], op


def test_what_the_profile_was_fitted_to_is_no_test_of_it(found: tuple[simulated.Compared, ...]) -> None:
    assert any(one.of.family in simulated.FITTED for one in found)
    assert all(one.of.family not in simulated.FITTED for one in simulated.held(found))
    by_family, by_file = simulated.rows(found, "family"), simulated.rows(found, "file")
    assert by_family[-1] == by_file[-1]
    assert any("(fitted)" in row[0] for row in by_family)
    assert sum(int(row[1]) for row in by_file[1:-1]) == int(by_file[-1][1])


def test_errors_are_what_they_are_called(found: tuple[simulated.Compared, ...]) -> None:
    """Predictions of 0.9, 1.0 and 1.3 times what was measured."""
    one = found[0]
    three = [dataclasses.replace(one, predicted_us=factor * one.of.us) for factor in (1.3, 0.9, 1.0)]
    made = simulated.errors(three)
    assert (made.count, round(made.median, 6), round(made.p95, 6), round(made.bias, 6)) == (3, 0.1, 0.3, 0.0)
    assert not made.good
    with pytest.raises(ValueError, match="nothing to compare"):
        simulated.errors([])
