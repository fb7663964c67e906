"""Process groups that have NCCL alone: their ranks, too, come together through the store."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from on_gpus import NEEDS_TWO, alarm
from rank_pools import gpus

import weft
from weft.core.errors import WaitTimeout
from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2, device=gpus()) as ranks:
        yield ranks


def _call(group: dist.ProcessGroup, schedule: str) -> None:
    mine = torch.full((256, 128), 1.0 + dist.get_rank(), device="cuda").bfloat16()
    out = weft.all_gather_matmul(mine, torch.ones(128, 64, device="cuda").bfloat16(), group=group, schedule=schedule)
    expected = torch.cat([torch.full((256, 64), 128.0 * (1 + rank)) for rank in range(group.size())])
    torch.testing.assert_close(out.float().cpu(), expected)


@alarm(60)
def _one_is_late() -> float:
    group = dist.new_group(backend="nccl")
    assert all(device.type == "cuda" for device in group._device_types)
    time.sleep(1.0 if dist.get_rank() == 1 else 0.0)
    began = time.monotonic()
    for schedule in ("auto", "flag_gated:2", "sequential", "uniform_fused_1d:2"):
        for _ in range(3):
            _call(group, schedule)
    took = time.monotonic() - began
    weft.close()
    dist.destroy_process_group(group)
    return took


def test_a_group_of_nccl_alone_waits_for_a_late_rank(pool: Ranks) -> None:
    first, second = pool.run(_one_is_late)
    assert first > second + 0.5


@alarm(60)
def _one_does_not_come() -> tuple[str, float]:
    group = dist.new_group(backend="nccl")
    message, began = "", time.monotonic()
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WEFT_TIMEOUT_S", "3")
            with pytest.raises(WaitTimeout) as caught:
                _call(group, "flag_gated:2")
        message = str(caught.value)
    seconds = time.monotonic() - began
    dist.barrier()
    _call(group, "flag_gated:2")
    weft.close()
    dist.destroy_process_group(group)
    return message, seconds


def test_who_does_not_come_is_named_and_the_group_can_meet_later(pool: Ranks) -> None:
    (message, seconds), _ = pool.run(_one_does_not_come)
    assert "within 3 s" in message
    assert "rank 1 has not come" in message
    assert 2.9 < seconds < 5
