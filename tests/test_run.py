"""`weft run` on real ranks: right results pass, wrong ones do not, times and spans make sense."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture

import weft
from weft import schedules
from weft.machine import load
from weft.models import Model
from weft.problem import OPS, Problem
from weft.run import Measured, measure_site, run_model, tolerance

pytestmark = pytest.mark.ranks
TINY = Model(name="tiny", source="this test", hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96)


def _measure(problem: Problem, spec: str, harm: float) -> Measured:
    """measure_site on ranks of which the last one's matmuls are off by `harm` of the largest element."""
    from weft.execute.host import HostProgram

    matmul = HostProgram.matmul

    def wrong(self: HostProgram, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
        matmul(self, a, b, out, accumulate=accumulate)
        out[-1:, -1:] += harm * out.abs().max()

    if dist.get_rank() == dist.get_world_size() - 1:
        HostProgram.matmul = wrong  # type: ignore[method-assign]
    try:
        return measure_site(problem, spec, 1, "cpu")
    finally:
        HostProgram.matmul = matmul  # type: ignore[method-assign]
        weft.close()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("harm", [0.0, 0.2, float("nan")])
def test_a_wrong_element_is_found(ranks: RankFixture, op: Any, harm: float) -> None:
    problem = Problem(op=op, m=40, n=24, k=64, world_size=3)
    for spec in ("hetero_fused_1d:2", "flag_gated:2"):
        measured = ranks(3).run(_measure, problem, spec, harm)
        allowed = tolerance(schedules.build(problem, *schedules.parse(spec)))
        assert (max(m.max_error for m in measured) <= allowed) == (harm == 0.0)


def test_a_run_holds_what_it_says() -> None:
    seen: list[tuple[str, int, int]] = []
    run = run_model(
        TINY,
        ranks=2,
        device="cpu",
        tokens=24,
        op=None,
        schedule="hetero_unfused_1d:2",
        machine=load("h200x8"),
        machine_ranks=8,
        machine_tokens=512,
        dtype="bfloat16",
        seed=3,
        progress=lambda *event: seen.append(event),
    )
    assert run.ok
    assert [s.problem.op for s in run.sites] == [OPS[0], OPS[1], OPS[0], OPS[1]]
    assert seen[0][1:] == (0, 8)
    assert seen[-1] == ("done", 8, 8)
    for site in run.sites:
        assert (site.schedule, site.chunks) == ("hetero_unfused_1d", 2)
        assert site.plan.problem.world_size == 8
        assert site.plan.chosen.spec == "hetero_unfused_1d:2"
        assert 0 < site.ideal_us <= max(site.sequential_us, site.computation_us, site.communication_us)
        assert site.overlapped_us > 0
        built = schedules.build(site.problem, site.schedule, site.chunks)
        assert len(site.spans) == sum(1 for _ in built)
        assert min(s.start_us for s in site.spans) == 0
        assert {(s.rank, s.lane) for s in site.spans} == {(r, lane.name) for r, lane, _, _ in built}
    assert not dataclasses.replace(run, sites=(dataclasses.replace(run.sites[0], max_error=1.0),)).ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'; use cpu or cuda"),
        ({"ranks": 0}, "ranks is 0; it must be at least 1"),
        ({"tokens": 0}, "tokens is 0; it must be at least 1"),
        ({"op": "matmul"}, "op is 'matmul'; weft has all_gather_matmul"),
        ({"dtype": "int8"}, "dtype is 'int8'; weft overlaps bfloat16"),
        ({"schedule": "best"}, "schedule is 'best'; use auto, or one of"),
    ],
)
def test_bad_requests_start_nothing(change: dict[str, Any], message: str) -> None:
    request: dict[str, Any] = {
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
        "progress": lambda *_: pytest.fail("work began"),
    }
    with pytest.raises(ValueError, match=message):
        run_model(TINY, **{**request, **change})
