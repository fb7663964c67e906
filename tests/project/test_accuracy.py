"""What commands and pages say of the accuracy of predictions is what the committed results say."""

from __future__ import annotations

from dataclasses import replace

import kept_accuracy
import pytest

from weft.core import codec
from weft.core.machine import Machine, load
from weft.core.problem import Problem
from weft.planner import plan
from weft.planner.accuracy import accuracy_notes
from weft.planner.values import NO_CLEAR_GAIN, SLOWER, median_error
from weft.schedules import FAMILIES, NOT_OVERLAPPED, OVERLAPPED, VERDICTS
from weft.schedules.concurrent import PLAIN

H200 = load("h200x8")
MEASURED = Problem(op="matmul_reduce_scatter", m=8192, n=4096, k=14336, world_size=8)
NOT_MEASURED = replace(MEASURED, m=4096)


def test_the_kept_figures_are_those_of_the_results() -> None:
    assert kept_accuracy.FILE.read_text(encoding="utf-8") == kept_accuracy.text(), "stale: run make docs"


def _notes(problem: Problem, machine: Machine) -> tuple[str, ...]:
    return accuracy_notes(machine, [("MLP down", plan(problem, machine, only="shard_p2p"))])


def test_a_prediction_stands_beside_the_measurement_of_the_same_call() -> None:
    (row,) = (one for one in kept_accuracy.gains() if "H200" in one["gpu"] and codec.load(Problem, one["problem"]) == MEASURED)
    error, measured = _notes(MEASURED, H200)
    assert f"{median_error(8):.0%}" in error
    assert f"{row['sequential_us'] / row['auto_us']:.2f}x" in measured
    assert row["commit"] in measured
    assert measured.startswith("MLP down was measured")
    assert len(_notes(NOT_MEASURED, H200)) == 1


def test_what_was_measured_on_the_same_gpus_stands_beside_a_profile_of_several_sources() -> None:
    error, measured = _notes(replace(MEASURED, world_size=4), load("h100x8"))
    assert error.startswith("Nobody has measured how wrong")
    assert measured.startswith("MLP down was measured: 1.36x")


def test_another_machine_has_no_measurement() -> None:
    for machine in (H200.what_if({"links.gbps": 100.0}), load("mi300x8")):
        (error,) = _notes(MEASURED, machine)
        assert error.startswith("Nobody has measured how wrong")
    assert _notes(replace(MEASURED, world_size=1), H200) == ()


@pytest.mark.parametrize(("gain", "verdict"), [(1.42, OVERLAPPED), (1.01, NO_CLEAR_GAIN), (0.99, NO_CLEAR_GAIN), (0.8, SLOWER)])
def test_a_gain_within_the_error_is_not_called_overlapped(gain: float, verdict: str) -> None:
    found = plan(MEASURED, H200, only="shard_p2p")
    assert replace(found, sequential_us=gain * found.chosen.predicted_us).verdict == verdict


def test_a_verdict_is_no_name_of_a_schedule() -> None:
    assert not {*VERDICTS, NO_CLEAR_GAIN, SLOWER} & {*FAMILIES, str(PLAIN)}
    assert plan(MEASURED, H200, only="sequential").verdict == NOT_OVERLAPPED
