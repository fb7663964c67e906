"""explain: parts that add up, changes that hold when they are made."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from typing import Any

import pytest

import weft
from weft.cli import main
from weft.core import codec
from weft.core.hardware import Table
from weft.core.machine import load
from weft.core.problem import OPS, LookupProblem, Problem
from weft.core.settings import changed
from weft.perf import run
from weft.perf.ranking import estimates
from weft.planner import heuristic, plan
from weft.planner.explanation import Explanation, explain_plan
from weft.planner.simulated import Signature
from weft.planner.words import us
from weft.schedules import build, parse

H200 = load("h200x8")
GATHER = Problem(op="all_gather_matmul", m=8192, n=28672, k=8192, world_size=4)
SMALL = dataclasses.replace(GATHER, m=256, world_size=8)


@functools.cache
def of_gather() -> Explanation:
    return weft.explain(GATHER, "h200x8")


@pytest.mark.parametrize("op", OPS)
def test_parts_add_up_to_the_prediction(op: Any) -> None:
    found = weft.explain(Problem(op=op, m=2048, n=8192, k=8192, world_size=2))
    assert sum(found.parts.values()) == pytest.approx(found.plan.chosen.predicted_us)
    assert found.signatures[0].spec == found.plan.chosen.spec
    assert found.signatures[0].total_us == pytest.approx(found.plan.chosen.predicted_us)
    assert parse(found.signatures[1].spec)[0] != found.plan.chosen.schedule
    assert {one.spec for one in found.signatures} == {one.spec for one in found.plan.candidates}
    assert heuristic(found.plan.problem, H200) in found.details
    assert f" {us(found.plan.chosen.predicted_us)} us" in found.details


def test_what_a_lookup_and_nothing_to_overlap_say() -> None:
    lookup = weft.explain(LookupProblem.of(batch=4096, dims=((64,) * 8,) * 2, pooling=20), H200)
    assert "lookup alone" in lookup.parts
    alone = weft.explain(dataclasses.replace(GATHER, world_size=1))
    assert (alone.parts, alone.changes, alone.signatures) == ({}, (), ())


def test_fixed_costs_are_named() -> None:
    found = of_gather()
    assert {"matmul alone", "more launches", "smaller pieces", "contention", "head, tail, waits"} == set(found.parts)
    pieces = explain_plan(plan(GATHER, H200, only="hetero_unfused_1d", chunks=4), H200)
    gemms = 1 + 3 * 4
    assert pieces.parts["more launches"] == pytest.approx((gemms - 1) * H200.launch_us)


def test_a_change_that_is_named_changes_the_choice() -> None:
    medium = dataclasses.replace(GATHER, m=2048, n=10240)
    found = weft.explain(medium, H200)
    (text,) = [text for text in found.changes if re.match(r"With (\d+) rows", text)][:1]
    rows, winner = re.match(r"With (\d+) rows (\S+) would be faster\.", text).groups()  # type: ignore[union-attr]
    changed = dataclasses.replace(medium, m=int(rows))

    def us(spec: str, problem: Problem) -> float:
        return run(build(problem, *parse(spec)), H200).total_us

    assert us(winner, changed) < us(found.plan.chosen.spec, changed)
    assert us(winner, medium) >= us(found.plan.chosen.spec, medium)


@pytest.mark.slow
def test_copies_of_lanes_that_run_together_are_paid_once() -> None:
    """A copy lane for each of seven peers: what rank 0's copies cost is a lane's, not the sum."""
    machine = load("mi300x8")
    found = weft.explain(Problem(op="all_gather_matmul", m=8192, n=4096, k=8192, world_size=8), machine)
    schedule = build(found.plan.problem, *parse(found.plan.chosen.spec), fan_out=True)
    lanes = [lane for lane in schedule.ranks[0] if lane.kind == "copy"]
    assert len(lanes) == 7
    most = max(sum(isinstance(step, weft.core.schedule.Copy) for step in lane.steps) for lane in lanes)
    assert found.parts["more copies"] == pytest.approx((most - 1) * machine.copies.copy_us, abs=0.1)
    assert sum(found.parts.values()) == pytest.approx(found.plan.chosen.predicted_us)


def test_each_family_is_held_against_the_chosen_one() -> None:
    """What is named first of links is ranked before all others' best of now; with slower ones that are not named, none is."""
    problem = Problem(op="matmul_reduce_scatter", m=2048, n=8192, k=28672, world_size=8)
    found = weft.explain(problem, H200)
    chosen, best = found.plan.chosen.spec, dict[str, str]()
    for spec in (*(one.spec for one in found.plan.candidates), *found.plan.estimates):
        best.setdefault(parse(spec)[0], spec)
    predicted = {one.spec: one.predicted_us for one in found.plan.candidates}
    missed = {spec: us / found.plan.estimates[spec] for spec, us in predicted.items()}
    for factor in (2.0, 4.0, 16.0):
        faster = H200.what_if({"links.gbps": H200.links.gbps * factor})
        us = {spec: us * missed.get(spec, 1.0) for spec, us in estimates(problem, faster, best.values()).items()}
        winner = min(us, key=us.__getitem__)
        sentences = [text for text in found.changes if text.startswith(f"With links {factor:g} times as fast ")]
        if us[winner] < 0.99 * us[chosen]:
            assert sentences == [f"With links {factor:g} times as fast {winner} would be faster."]
            break
        assert not sentences


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (10240, "since less of its communication is hidden."),
        (57344, r"since its (?:transfers take|kernels work) (\S+) us, not (\S+)\."),
    ],
)
def test_a_reason_explains_most_of_the_difference(columns: int, reason: str) -> None:
    """llama3-70b's attention QKV, and its MLP."""
    found = plan(Problem(op="all_gather_matmul", m=8192, n=columns, k=8192, world_size=8), H200)
    rival = next(one for one in found.candidates if one.schedule != found.chosen.schedule)
    slower = rival.predicted_us - found.chosen.predicted_us
    said = re.search(reason, found.why)
    assert said is not None, found.why
    if said.groups():
        assert float(said[1].replace(",", "")) - float(said[2].replace(",", "")) >= 0.5 * slower - 1


@pytest.mark.parametrize(("path", "value"), [("links.gbps", 1e15), ("copies.copy_us", 1e-12), ("points", 30.0)])
def test_machines_at_the_ends_of_what_there_may_be_are_varied(path: str, value: float) -> None:
    """A free copy, links of no cost; and a collective whose smallest size was measured to take longer than the next."""
    gather = H200.collectives["all_gather"]
    assert isinstance(gather, Table)
    if path == "points":
        noisy = dataclasses.replace(gather, points=((gather.points[0][0], value), *gather.points[1:]))
        machine = dataclasses.replace(H200, collectives={**H200.collectives, "all_gather": noisy})
    else:
        machine = changed(H200, path, str(value), known=(path,), what="it")
    slower, faster = (machine.what_if({"links.gbps": min(1e15, machine.links.gbps * factor)}) for factor in (1 / 16, 16.0))
    us = [run(build(SMALL, "sequential"), one).total_us for one in (slower, machine, faster)]
    assert us == sorted(us, reverse=True)
    assert weft.explain(dataclasses.replace(SMALL, m=8, n=8, k=8, world_size=2), machine).parts


def test_plan_why(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "llama3-8b", "--ranks", "2", "--op", "all_gather_matmul", "--why"]
    assert main(options) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "matmul alone +" not in text
    assert text.count("as fast. The") == len(["attention QKV", "MLP gate/up"])
    assert main([*options, "--details"]) == 0
    assert "matmul alone +" in " ".join(capsys.readouterr().out.split())
    assert main([*options, "--json", "-"]) == 0
    why = json.loads(capsys.readouterr().out)["why"]
    assert set(why) == {"attention QKV", "MLP gate/up"}
    assert "head, tail, waits" in why["MLP gate/up"]["parts"]
    assert codec.load(Signature, why["MLP gate/up"]["losses"][0]).gemm_dil > 0


@pytest.mark.parametrize(
    ("problem", "gains", "reason"),
    [
        (GATHER, True, "The matmul alone takes"),
        (dataclasses.replace(GATHER, m=8, n=512, k=512), True, "The next best, "),
        (LookupProblem.of(batch=8192, dims=((64,) * 8,) * 8), False, "it could hide the "),
    ],
)
def test_an_explanation_is_what_was_chosen_and_the_largest_cost(problem: Any, gains: bool, reason: str) -> None:
    found = weft.explain(problem, H200)
    said, why = re.split(r"(?<=[a-z])\. ", str(found).removesuffix("."))
    chosen = found.plan.chosen
    assert said.startswith(f"{chosen.spec} takes {us(chosen.predicted_us)} us")
    assert (f"{found.plan.sequential_us / chosen.predicted_us:.2f}x as fast" in said) == gains
    assert why.startswith("The ")
    assert reason in why
    assert str(found) not in found.details


def test_one_name_for_one_quantity() -> None:
    """Three figures of one schedule, one name each: all three were called exposed."""
    found = of_gather()
    chosen, losses = found.plan.chosen, found.signatures[0]
    assert chosen.over_ideal_us == pytest.approx(losses.total_us - losses.ideal_us)
    assert losses.exposed_us == pytest.approx(losses.total_us - max(losses.pieces_us, losses.transfers_us))
    waits_us = found.parts["head, tail, waits"]
    assert waits_us + found.parts["contention"] == pytest.approx(losses.exposed_us)
    assert not {"exposed", "exposed_us"} & {*found.parts, *vars(chosen)}
