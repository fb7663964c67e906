"""The planner on GPUs: the heuristic's choices are right, kept plans need no trial, probes see what a GPU can do."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
import torch.distributed as dist
from on_gpus import GPUS, NEEDS_TWO, alarm
from rank_pools import ranks_on_gpus
from rank_work import check_gather, check_scatter

import weft
from weft.core import codec
from weft.core.machine import load
from weft.core.schedule import Schedule
from weft.runtime.choose import profile_for
from weft.runtime.programs import Programs
from weft.runtime.ranks import Ranks
from weft.tools.calibrate import common, gpu_probes
from weft.tools.calibrate.common import ProbeSample

pytestmark = NEEDS_TWO
BOUND_S = 20.0
ALARM_S = 40
pool = ranks_on_gpus(min(4, GPUS), BOUND_S)


@alarm(ALARM_S)
def _planned() -> int:
    for m, n, k in ((256, 1024, 512), (4096, 8192, 4096), (253, 136, 72)):
        for call in range(6):
            check_gather(m, n, k, torch.bfloat16, "planned", call)
            check_scatter(m, n, k, torch.bfloat16, "planned", call)
    measured = sum(len(choice.us) for choice in weft.choices())
    weft.close()
    return measured


def test_planned_is_right_and_measures_nothing(pool: Ranks) -> None:
    assert set(pool.run(_planned, timeout_s=80)) == {0}


@alarm(ALARM_S)
def _auto(folder: str) -> tuple[list[tuple[str, bool, dict[str, float]]], int]:
    """What auto stands for, in a group that is new, and how many schedules were bound."""
    os.environ["WEFT_CACHE_DIR"] = folder
    bind, bound = Programs._bind, []

    def binding(self: Programs, schedule: Schedule, device: torch.device) -> object:
        bound.append(schedule.name)
        return bind(self, schedule, device)

    Programs._bind = binding  # type: ignore[method-assign, assignment]
    try:
        for call in range(6):
            check_gather(2048, 2048, 1024, torch.bfloat16, "auto", call)
        found = [(choice.spec, choice.from_cache, choice.us) for choice in weft.choices()]
    finally:
        Programs._bind = bind  # type: ignore[method-assign]
        os.environ["WEFT_CACHE_DIR"] = ""
        weft.close()
    return found, len(bound)


def test_a_kept_plan_needs_no_trial(pool: Ranks, tmp_path: Path) -> None:
    first, second = (pool.run(_auto, str(tmp_path), timeout_s=80) for _ in range(2))
    ((spec, from_cache, us),), bound = first[0]
    assert not from_cache
    assert len(us) > 1
    assert bound >= len(us)
    assert all(answer == ([(spec, True, us)], 1) for answer in second), "the same choice, one schedule bound"


@alarm(ALARM_S)
def _elsewhere(file: str) -> str:
    """A profile of another GPU serves, with a warning (tests/runtime/test_modes.py)."""
    os.environ["WEFT_MACHINE"] = file
    try:
        name = profile_for(torch.device("cuda", torch.cuda.current_device())).name
        for call in range(6):
            check_gather(512, 1024, 512, torch.bfloat16, "planned", call)
    finally:
        del os.environ["WEFT_MACHINE"]
        weft.close()
    return name


def test_a_profile_of_another_gpu_serves(pool: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(codec.dumps(dataclasses.replace(load("h200x8"), name="other", device="a GPU of another name")))
    assert set(pool.run(_elsewhere, str(file), timeout_s=80)) == {"other"}


@alarm(ALARM_S)
def _probed() -> list[ProbeSample]:
    found = [*gpu_probes.launches("cuda"), *gpu_probes.flags("cuda"), *gpu_probes.hops("cuda")]
    found += [*gpu_probes.copies("cuda", "push"), *gpu_probes.several("cuda"), *gpu_probes.stores("cuda")]
    found += gpu_probes.power("cuda")
    found += common.gemms("cuda", [(2048, 2048, 2048)], "bfloat16")
    for op in common.COLLECTIVES:
        found += common.collectives("cuda", op, (1 << 14, 1 << 20))
    found += gpu_probes.concurrent("cuda")
    dist.barrier()
    return found


def test_probes_see_what_a_gpu_can_do(pool: Ranks) -> None:
    answers = pool.run(_probed, timeout_s=80)
    assert all(answer == answers[0] for answer in answers)
    us = {(sample.what, sample.key): sample.median_us for sample in answers[0]}
    assert all(0.05 < time < 100_000 for time in us.values())
    assert us["copy push", (1 << 26, 1)] > us["copy push", (1 << 20, 1)] > us["copy push", (1 << 16, 1)] / 2
    assert us["launch", (16,)] < 50
    assert us["power", (40,)] > 0.8 * us["power", (1,)]
    assert 2 * 2048**3 / us["gemm bfloat16", (2048, 2048, 2048)] / 1e6 > 10, "TFLOP/s"
