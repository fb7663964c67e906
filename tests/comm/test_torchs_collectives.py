"""Waits on CPUs in torch's collectives that weft's modules and gradients begin are bounded, and say which rank is lost.

Also connections to the store of a group whose host ends after the handshake.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft.ops.parts import gathered, with_summed_gradient
from weft.runtime.groups import GROUPS
from weft.runtime.ranks import RankFailed, Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]
BOUND_S, LATE_S = 1.0, 3.0
WITHOUT = 1
"""The rank that does not come to the collective."""


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _gathers() -> None:
    gathered(torch.ones(2, 3), _group(), 0, 2 * dist.get_world_size())


def _sums() -> None:
    with_summed_gradient(torch.ones(3, requires_grad=True), _group().group_name).sum().backward()


def _normalises() -> None:
    _NORMS[0](torch.ones(1, 2, 4)).sum().backward()


_NORMS: list[nn.Module] = []


def _without_a_rank(call: Callable[[], None], used: bool, ends: str) -> tuple[str, float]:
    """One rank leaves a collective out, after the group's first call of weft or before it, and ends, or works elsewhere."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))  # type: ignore[attr-defined]
    _NORMS[:] = [parallelize_module(nn.LayerNorm(4), mesh, weft.SequenceParallel())]
    if used:
        weft.all_gather_matmul(torch.ones(2, 4), torch.ones(4, 3))
    call()
    dist.barrier()
    if dist.get_rank() == WITHOUT:
        if ends == "dies":
            os._exit(1)
        if ends == "raises":
            with suppress(KeyboardInterrupt), GROUPS.fail_group_on_error(_group().group_name):
                raise KeyboardInterrupt
        time.sleep(BOUND_S + LATE_S)
        return "", 0.0
    began = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", 0.0


@pytest.mark.parametrize(
    ("call", "used", "ends", "says"),
    [
        (_gathers, False, "elsewhere", r"WaitTimeout: .*not all ranks have taken part after 1 s"),
        (_gathers, True, "dies", r"PeerLost: rank 1 \(process \d+\) died"),
        (_sums, True, "elsewhere", r"WaitTimeout: rank 0: .*not all ranks have taken part.* after 1 s"),
        (_normalises, True, "raises", r"PeerLost: rank 1 failed: KeyboardInterrupt"),
    ],
)
def test_a_rank_that_does_not_come_ends_the_wait(call: Callable[[], None], used: bool, ends: str, says: str) -> None:
    with Ranks(2, environment={"WEFT_TIMEOUT_S": str(BOUND_S)}) as pool:
        if ends == "dies":
            with pytest.raises(RankFailed) as caught:
                pool.run(_without_a_rank, call, used, ends, timeout_s=60)
            found = caught.value.results[0]
        else:
            found = pool.run(_without_a_rank, call, used, ends, timeout_s=60)[0]
    said, seconds = found
    assert re.match(says, said), said
    assert seconds < BOUND_S + LATE_S


_OPENED: list[Any] = []


def _meets(port: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    _OPENED[:] = [GROUPS.state(_group().group_name).rank_group.open_store("relay")]


def _connects(opened: bool) -> tuple[str, float]:
    """Open a store, or begin to relay by one that was opened before, when the store is gone."""
    rank_group = GROUPS.state(_group().group_name).rank_group
    if opened:
        rank_group.open_store = lambda name: _OPENED[0]  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        rank_group._start_relay()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", 0.0


@pytest.mark.parametrize("opened", [False, True])
def test_a_store_that_ends_after_the_handshake_is_named(opened: bool) -> None:
    """This process hosts it. With one rank, no lost rank is found first."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Ranks(1, environment={"WEFT_TIMEOUT_S": "40"}) as pool:
        pool.run(_meets, store.port, timeout_s=60)
        del store
        ((said, seconds),) = pool.run(_connects, opened, timeout_s=60)
    assert said.startswith("PeerLost: the store of the group is lost, and with it the process that hosts it"), said
    assert seconds < 10
