"""What-if machines: what goes along with a number that is set, and what cannot be said."""

from __future__ import annotations

import pytest

from weft.core.hardware import Table
from weft.core.machine import load
from weft.core.problem import Problem
from weft.perf import run
from weft.perf.terms import collective_us
from weft.schedules import build

H200 = load("h200x8")


def test_links_take_copies_stores_and_collectives_along() -> None:
    faster = H200.what_if(links__gbps=780.0)
    assert (faster.copies.gbps, faster.copies.several_gbps) == (740.0, 460.0)
    assert faster.stores.rate(132) == 2 * H200.stores.rate(132)
    gather, before = faster.collectives["all_gather"], H200.collectives["all_gather"]
    assert isinstance(gather, Table)
    assert isinstance(before, Table)
    assert gather.points[0] == before.points[0]
    assert gather.points[-1][1] < 0.51 * before.points[-1][1]
    assert gather.also[0].points[-1][1] < 0.51 * before.also[0].points[-1][1]
    assert faster.sources["copies.gbps"].startswith("scaled with what was set by hand; before: measured")
    assert faster.sources["links.gbps"] == "set by hand"
    assert faster.description == "8 x NVIDIA H200 SXM on NVSwitch; what if links.gbps 780.0"


def test_what_is_set_itself_goes_along_with_nothing() -> None:
    found = H200.what_if({"links.gbps": "195", "copies.gbps": "370", "collectives.all_gather.points": "[[1024, 9.0]]"})
    assert (found.copies.gbps, found.copies.several_gbps) == (370.0, 115.0)
    gather = found.collectives["all_gather"]
    assert isinstance(gather, Table)
    assert gather.points == ((1024, 9.0),)
    assert gather.also == H200.collectives["all_gather"].also  # type: ignore[union-attr]


@pytest.mark.parametrize("topology", ["ring", "mesh"])
def test_another_topology_has_no_more_links_in_all(topology: str) -> None:
    """Sequential programs must not gain by links that came from nowhere."""
    found = H200.what_if({"links.topology": topology})
    for op in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce"):
        assert collective_us(found, op, 1 << 24, 8) >= 0.999 * collective_us(H200, op, 1 << 24, 8)
    schedule = build(Problem(op="all_gather_matmul", m=8192, n=3584, k=8192, world_size=8), "sequential")
    assert run(schedule, found).total_us >= 0.999 * run(schedule, H200).total_us


def test_sms_take_the_matrix_peak_along() -> None:
    found = H200.what_if(gpu__sms=264)
    assert found.tflops("bfloat16") == 2 * H200.tflops("bfloat16")
    assert found.stores.rate(264) == H200.stores.rate(132)
    few = H200.what_if(gpu__sms=17)
    assert (few.stores.sms, few.stores.sms_alone) == (4, 8)
    assert few.stores.rate(17) == pytest.approx(H200.stores.rate(17))
    schedule = build(Problem(op="matmul_reduce_scatter", m=4096, n=4096, k=4096, world_size=8), "direct_store")
    assert run(schedule, few).total_us < 132 / 17 * 1.5 * run(schedule, H200).total_us


def test_links_and_sms_go_together() -> None:
    found = H200.what_if(links__gbps=780.0, gpu__sms=66)
    assert found.stores.rate(66) == pytest.approx(2 * H200.stores.rate(66))
    assert found.stores.gbps[-1][0] == 66


def test_more_gpus_are_named() -> None:
    assert H200.what_if(world_size=64).description.startswith("64 x NVIDIA H200")


def test_latency_can_be_nothing() -> None:
    schedule = build(Problem(op="all_gather_matmul", m=4096, n=3584, k=4096, world_size=4), "flag_gated")
    assert run(schedule, H200.what_if(links__latency_us=0)).total_us < run(schedule, H200).total_us


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("copies.engines", 0, "direct_store"),
        ("gpu.sms", 1, "2 or more"),
        ("stores.sms", 131, "at most 66"),
        ("links.topology", "torus", "links.topology is 'torus'"),
        ("links.topology", "pcie", "links.host_gbps is missing"),
        ("links.gbps", -1, "above zero"),
        ("links.gbps", "fast", "it must be a number"),
        ("gpu.speed", 2, "is no number of machine h200x8; it has .*gpu.sms"),
        ("link.gbps", 2, r"is no number of machine h200x8; did you mean links\.gbps.*\?$"),
        ("gbps", 2, r"is no number of machine h200x8; did you mean \w+\.gbps( or \w+\.gbps)*\?$"),
    ],
)
def test_what_cannot_be_says_what_would_work(path: str, value: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        H200.what_if({path: value})
