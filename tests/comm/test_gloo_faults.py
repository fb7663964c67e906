"""Ranks that are lost, late or raise where gloo moves the data, or in the middle of a call with splits: every other rank is
told whose fault it is, within the bound.

Afterwards, once all have closed the group, it works again, and so does the process group of the caller's.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.core.errors import PeerLost, WaitTimeout
from weft.runtime import network
from weft.runtime.host_resources import HostWire, RowsOfCall
from weft.runtime.ranks import RankFailed, Ranks

pytestmark = pytest.mark.ranks
BOUND_S, LATE_S = 4.0, 120.0
"""Of waits; and after it, at most, that a rank says so: a machine that is full may hold it up."""
VICTIM = 1


def _dispatch() -> Callable[[], torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = torch.full((2 * size, 4), float(rank)), torch.eye(4).expand(1, 4, 4).contiguous()
    splits = torch.full((size, 1), 2, dtype=torch.int32)

    def call() -> torch.Tensor:
        return weft.all_to_all_matmul(a, b, splits=splits, max_rows=2 * size)[0]

    return call


def _backward() -> Callable[[], torch.Tensor]:
    size = dist.get_world_size()
    table = torch.ones(8, 4, requires_grad=True)
    indices, offsets = torch.arange(2 * size) % 8, torch.arange(2 * size + 1)

    def call() -> torch.Tensor:
        table.grad = None
        weft.embedding_bag_all_to_all(indices, offsets, [table]).sum().backward()
        assert table.grad is not None
        return table.grad

    return call


def _concurrent() -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        summed = torch.ones(64)
        with weft.concurrent(collectives=weft.AllReduce(summed), key="faults", method="nccl"):
            pass
        return summed

    return call


def _averaged() -> Callable[[], torch.Tensor]:
    """Gradients in three buckets, averaged beside the backward pass."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(3)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
    weft.hooks.ddp(model, method="nccl")

    def call() -> torch.Tensor:
        model.zero_grad()
        model(torch.full((2, 64), 1.0 + dist.get_rank())).sum().backward()
        grad = layers[0].weight.grad
        assert grad is not None
        return grad

    call()  # DistributedDataParallel has one bucket then
    return call


def _sparse() -> Callable[[], torch.Tensor]:
    """Gradients of some rows of a table, other ones on each rank."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(8, 4, sparse=True)
    model = DistributedDataParallel(table)
    weft.hooks.ddp(model, method="nccl")

    def call() -> torch.Tensor:
        model.zero_grad()
        model(torch.tensor([dist.get_rank()])).sum().backward()
        assert table.weight.grad is not None
        return table.weight.grad.to_dense()

    return call


CALLS = {
    "dispatch": _dispatch,
    "backward": _backward,
    "concurrent": _concurrent,
    "averaged": _averaged,
    "sparse": _sparse,
}


_MOVES: dict[str, tuple[Any, str]] = {
    "dispatch": (RowsOfCall, "moved"),
    "backward": (HostWire, "begin"),
    "concurrent": (dist, "all_reduce"),
    "averaged": (dist, "all_reduce"),
    "sparse": (dist, "all_reduce"),
}
"""What moves data in each call."""


@contextmanager
def _struck_within(what: str, strike: Callable[[], object], skip: int) -> Iterator[None]:
    """On the victim, something happens while a call moves data, once it has begun to move so many times."""
    left = skip
    owner, name = _MOVES[what]
    plain = getattr(owner, name)

    def struck(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            strike()
        return plain(*arguments, **options)

    with mock.patch.object(owner, name, struck) if dist.get_rank() == VICTIM else mock.patch.object(network, "_REPORT_S", 5.0):
        yield


def _lost(what: str, how: int, skip: int) -> tuple[str, float, float]:
    """The victim is killed or stopped within a call. What the others are told, how soon, and how long weft.close() takes."""
    call = CALLS[what]()
    call()
    dist.barrier()
    began = time.monotonic()
    message = "right"
    try:
        with _struck_within(what, lambda: os.kill(os.getpid(), how), skip):
            for _ in range(2):
                call()
    except (PeerLost, WaitTimeout) as error:
        message = f"{type(error).__name__}: {error}"
    raised_s = time.monotonic()
    weft.close()
    return message, raised_s - began, time.monotonic() - raised_s


@pytest.mark.parametrize(
    ("what", "skip"), [("dispatch", 0), ("dispatch", 5), ("backward", 0), ("concurrent", 0), ("averaged", 1), ("sparse", 0)]
)
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_is_named_in_time(what: str, skip: int, how: int) -> None:
    with Ranks(3, environment={"WEFT_TIMEOUT_S": str(BOUND_S)}) as pool:
        pool.start(_lost, what, how, skip)
        others = [pipe for rank, pipe in enumerate(pool._pipes) if rank != VICTIM]
        assert all(pipe.poll(BOUND_S + LATE_S) for pipe in others)
        pool.processes[VICTIM].kill()
        with pytest.raises(RankFailed) as caught:
            pool.finish(timeout_s=20)
    for rank, answer in enumerate(caught.value.results):
        if rank != VICTIM:
            message, seconds, closing = answer
            # Who gives up tells the others, which then name that rank and its words.
            assert re.search(rf"rank {VICTIM}\b(?!, )", message), message
            assert ("died" in message) == (how == signal.SIGKILL), message
            assert seconds < BOUND_S + LATE_S
            assert closing < LATE_S


def _raises_between(what: str, skip: int) -> str:
    """The victim raises between two exchanges of a call; then all close, and go on with other sizes."""
    call = CALLS[what]()
    expected = call()
    raises = mock.Mock(side_effect=KeyboardInterrupt)
    try:
        with _struck_within(what, raises, skip):
            call()
            call()
        said = "right"
    except (PeerLost, KeyboardInterrupt) as error:
        said = f"{type(error).__name__}: {error}"
    weft.close()
    for size in (3, 1000):
        summed = torch.ones(size)
        dist.all_reduce(summed)
        assert bool((summed == dist.get_world_size()).all()), "the process group of the caller's is as it was"
    for _ in range(2):
        torch.testing.assert_close(call(), expected)
    weft.close()
    return said


@pytest.mark.parametrize(("what", "skip"), [("dispatch", 5), ("backward", 0), ("concurrent", 0)])
def test_an_error_between_exchanges_leaves_nothing_posted(what: str, skip: int) -> None:
    with Ranks(3, environment={"WEFT_TIMEOUT_S": "20"}) as pool:
        messages = pool.run(_raises_between, what, skip, timeout_s=60)
    assert messages.pop(VICTIM).startswith("KeyboardInterrupt")
    reason = rf"PeerLost: (rank \d failed: )?rank {VICTIM} failed: KeyboardInterrupt"
    assert all(re.fullmatch(reason, one) for one in messages), messages
