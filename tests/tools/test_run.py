"""`weft run` on real ranks: right results pass, wrong ones do not, times and spans make sense."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from families import TP_OPS

import weft
from weft import schedules
from weft.checker import ScheduleError
from weft.core.machine import load
from weft.core.problem import GATHERS, OPS, RECIPES, Problem, Recipe, Scaling
from weft.core.span import Kind, Span
from weft.planner import plan
from weft.planner.models import Model
from weft.tools.run import ROUNDS, Measured, Round, _layer_run, measure_layer, run_model, tolerance

pytestmark = pytest.mark.ranks
TINY = Model(name="tiny", source="this test", hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96)
REQUEST: dict[str, Any] = {
    "ranks": 2,
    "device": "cpu",
    "tokens": 8,
    "op": None,
    "schedule": "auto",
    "machine": load("h200x8"),
    "machine_ranks": 8,
    "machine_tokens": 8,
    "dtype": "bfloat16",
    "seed": 0,
    "progress": lambda *_: None,
}


def _measure(problem: Problem, spec: str, harm: float) -> Measured:
    """measure_layer on ranks of which the last one's matmuls are off by `harm` of the largest element."""
    from weft.runtime.host import HostProgram

    matmul = HostProgram.multiply

    def wrong(self: HostProgram, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        matmul(self, a, b, out, **options)
        out[-1:, -1:] += harm * out.abs().max()

    if dist.get_rank() == dist.get_world_size() - 1:
        HostProgram.multiply = wrong  # type: ignore[method-assign]
    try:
        return measure_layer(problem, spec, 1, "cpu")
    finally:
        HostProgram.multiply = matmul  # type: ignore[method-assign]
        weft.close()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("harm", [0.0, float("nan")])
def test_a_wrong_element_is_found(ranks: RankFixture, op: Any, harm: float) -> None:
    problem = Problem(op=op, m=40, n=24, k=64, world_size=2)
    for spec in (spec for spec in ("hetero_unfused_1d:2", "direct_store:2") if schedules.parse(spec)[0] in schedules.names(op)):
        measured = ranks(2).run(_measure, problem, spec, harm)
        allowed = tolerance(schedules.build(problem, *schedules.parse(spec)))
        assert (max(m.max_error for m in measured) <= allowed) == (harm == 0.0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("harm", [0.0, float("nan")])
def test_a_wrong_element_is_found_in_fp8(ranks: RankFixture, recipe: Recipe, harm: float) -> None:
    for op in (op for op in OPS if recipe != "tensorwise" or op not in GATHERS):
        problem = Problem(op=op, m=40, n=288, k=512, world_size=2, scaling=Scaling(recipe=recipe))
        measured = ranks(2).run(_measure, problem, "sequential", harm)
        allowed = tolerance(schedules.build(problem, "sequential"))
        assert (max(m.max_error for m in measured) <= allowed) == (harm == 0.0), op


def _calls_of_a_site(problem: Problem, spec: str) -> tuple[list[tuple[str, bool]], Measured]:
    """What measure_layer calls, in order: (schedule, is it recorded); and what it finds."""
    from weft.tools import run

    calls: list[tuple[str, bool]] = []
    call = run._run

    def noted(problem: Problem, spec: str, given: run.Inputs, spans: list[Span] | None = None) -> torch.Tensor:
        calls.append((spec, spans is not None))
        return call(problem, spec, given, spans)

    run._run = noted
    try:
        return calls, measure_layer(problem, spec, 1, "cpu")
    finally:
        run._run = call
        weft.close()


@pytest.mark.parametrize("spec", ["flag_gated:2", "sequential"])
def test_every_round_sees_every_method(ranks: RankFixture, spec: str) -> None:
    problem = Problem(op="matmul_reduce_scatter", m=40, n=24, k=64, world_size=2)
    one = [*dict.fromkeys((("sequential", False), (spec, False))), ("sequential", True)]
    for calls, measured in ranks(2).run(_calls_of_a_site, problem, spec):
        assert calls == [(spec, False), *one * (ROUNDS["cpu"] + 1), (spec, True)]
        assert len(measured.rounds) == ROUNDS["cpu"]
        equal = [r.sequential_us == r.overlapped_us for r in measured.rounds]
        assert all(equal) == (spec == "sequential"), "two times may be equal by chance"
        for r in measured.rounds:
            assert [s.kind for s in r.sequential_spans] == ["gemm", "collective"]
            assert sum(s.duration_us for s in r.sequential_spans) > 0 < min(r.sequential_us, r.overlapped_us)


def test_auto_says_what_ran(ranks: RankFixture) -> None:
    """On GPUs what auto stands for is known after a call; the rounds are of that schedule."""
    problem = Problem(op="all_gather_matmul", m=40, n=24, k=64, world_size=2)
    for calls, measured in ranks(2).run(_calls_of_a_site, problem, "auto"):
        schedules.parse(measured.spec)
        assert calls[0] == ("auto", False)
        assert {spec for spec, _ in calls[1:]} == {"sequential", measured.spec}


def _lanes(problem: Problem, spec: str, fan_out: bool) -> tuple[Measured, set[str]]:
    try:
        measured = measure_layer(problem, spec, 1, "cpu", fan_out)
    finally:
        weft.close()
    return measured, {span.lane for span in measured.spans}


@pytest.mark.parametrize("machine", ["h200x8", "mi300x8"])
def test_copy_lanes_are_those_of_the_machine_that_is_predicted(ranks: RankFixture, machine: str) -> None:
    """Not those of the profile that stands for the device."""
    problem = Problem(op="all_gather_matmul", m=40, n=24, k=64, world_size=3)
    fan_out = load(machine).fans_out
    for spec in ("hetero_unfused_1d:2", "sequential"):
        built = schedules.build(problem, *schedules.parse(spec), fan_out=fan_out)
        for rank, (measured, lanes) in enumerate(ranks(3).run(_lanes, problem, spec, fan_out)):
            assert lanes == {lane.name for lane in built.ranks[rank] if lane.steps}
            assert measured.spec == spec
            assert measured.max_error <= tolerance(built)


def _measured(rank: int, *rounds: tuple[float, float, float, float, float]) -> Measured:
    """A rank's rounds: sequential, overlapped, the end of a matmul that starts at 0, start and end of a collective."""

    def span(kind: Kind, start: float, end: float) -> Span:
        return Span(rank=rank, lane="compute", kind=kind, name="made", start_us=start, end_us=end)

    made = tuple(
        Round(sequential_us=s, overlapped_us=o, sequential_spans=(span("gemm", 0, gemm), span("collective", start, end)))
        for s, o, gemm, start, end in rounds
    )
    return Measured(spec="sequential", max_error=rank / 10, rounds=made, spans=(span("gemm", 100 + rank, 200),), tried={})


def test_times_are_medians_over_rounds_of_the_slowest_rank() -> None:
    """One rank is slow in the first round, the other in the second: neither rank's own median shows it."""
    problem = Problem(op="matmul_reduce_scatter", m=40, n=24, k=64, world_size=2)
    ranks = [
        _measured(0, (40, 30, 20, 20, 40), (10, 9, 5, 5, 41), (10, 9, 5, 5, 10)),
        _measured(1, (10, 9, 5, 5, 40), (42, 32, 22, 22, 41), (10, 9, 5, 5, 10)),
    ]
    built = schedules.build(problem, "sequential", 1)
    layer = _layer_run("made", built, ranks, plan(problem, load("h200x8")))
    assert layer.speeds is not None
    assert (layer.speeds.sequential_us, layer.speeds.overlapped_us) == (40, 30)
    assert layer.speeds.computation_us == 20
    assert layer.speeds.communication_us == 41 - 22
    assert layer.max_error == 0.1
    assert [(s.rank, s.start_us, s.end_us) for s in layer.spans] == [(0, 0, 100), (1, 1, 100)]


def test_a_run_holds_what_it_says() -> None:
    seen: list[tuple[str, int, int]] = []
    asked = {"tokens": 24, "schedule": "hetero_unfused_1d:2", "machine_tokens": 512, "seed": 3}
    run = run_model(TINY, **{**REQUEST, **asked, "progress": lambda *event: seen.append(event)})
    assert run.ok
    assert [layer.problem.op for layer in run.layers] == [*TP_OPS, *TP_OPS]
    assert seen[0][1:] == (0, 8)
    assert seen[-1] == ("done", 8, 8)
    for layer in run.layers:
        assert (layer.schedule, layer.chunks) == ("hetero_unfused_1d", 2)
        assert layer.plan.problem.world_size == 8
        assert layer.plan.chosen.spec == "hetero_unfused_1d:2"
        assert layer.speeds is None
        built = schedules.build(layer.problem, layer.schedule, layer.chunks)
        assert len(layer.spans) == sum(1 for _ in built)
        assert min(s.start_us for s in layer.spans) == 0
        assert {(s.rank, s.lane) for s in layer.spans} == {(r, lane.name) for r, lane, _, _ in built}
    assert not dataclasses.replace(run, layers=(dataclasses.replace(run.layers[0], max_error=1.0),)).ok


def test_cpu_ranks_run_what_is_predicted_for_the_machine() -> None:
    """And not what would be chosen for their own small problem, on which nothing overlaps."""
    model = dataclasses.replace(TINY, hidden=512, intermediate=8192)
    request = {**REQUEST, "op": "matmul_reduce_scatter", "machine_tokens": 65536}
    run = run_model(model, **request)
    assert run.ok
    assert not run.unpredicted_layers
    assert any(schedules.overlaps(layer.schedule) for layer in run.layers)
    here = plan(dataclasses.replace(run.layers[-1].problem, world_size=2), load("h200x8"))
    assert here.chosen.spec != run.layers[-1].spec


def test_a_schedule_that_cannot_be_proved_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise ScheduleError("rank 0 reads what has not arrived")

    monkeypatch.setattr("weft.tools.run.check", refuse)
    monkeypatch.setattr("weft.tools.run.Ranks", _NoRanks)
    with pytest.raises(ScheduleError):
        run_model(TINY, **REQUEST)


class _Asked(Exception):
    """In the place of ranks: their work ends here."""


class _NoRanks:
    def __init__(self, world_size: int, *, device: str) -> None: ...

    def __enter__(self) -> _NoRanks:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def run(self, work: object, problem: Problem, spec: str, *rest: object) -> None:
        raise _Asked(problem.nodes, schedules.parse(spec)[0])


@pytest.mark.parametrize(("ranks_", "nodes"), [(3, (2, 1)), (2, ())])
def test_what_ranks_of_several_nodes_run_is_chosen_for_them(
    monkeypatch: pytest.MonkeyPatch, ranks_: int, nodes: tuple[int, ...]
) -> None:
    monkeypatch.setenv("WEFT_RANKS_PER_NODE", "2")
    monkeypatch.setattr("weft.tools.run.Ranks", _NoRanks)
    with pytest.raises(_Asked) as asked:
        run_model(TINY, **{**REQUEST, "ranks": ranks_, "op": "matmul_all_reduce"})
    assert asked.value.args[0] == nodes
    assert not nodes or asked.value.args[1] in ("sequential", "node_slices")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"ranks": 0}, "ranks is 0"),
        ({"tokens": 0}, "tokens is 0"),
        ({"op": "matmul"}, "op is 'matmul'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"schedule": "best"}, "schedule is 'best'"),
    ],
)
def test_bad_requests_start_nothing(change: dict[str, Any], message: str) -> None:
    began = {"progress": lambda *_: pytest.fail("work began")}
    with pytest.raises(ValueError, match=message):
        run_model(TINY, **{**REQUEST, **began, **change})
