"""What the tests on GPUs share: where they can run, an alarm for what hangs, and ranks that come late."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from rank_pools import pretended_gpus

GPUS = pretended_gpus() or torch.cuda.device_count()
NEEDS_TWO = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs two or more GPUs, this machine has {GPUS}")]
NEEDS_ONE = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU, this machine has none")]
SIZES = [n for n in (2, 4, 8) if n <= max(GPUS, 2)]
"""World sizes; 2 where no test will run, so that all of them are listed."""


SHARED = bool(pretended_gpus())
"""Ranks share GPUs: a wait in a kernel may last until the GPU's next turn for the other rank, some milliseconds."""
NEEDS_REAL_TWO = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that no ranks share: it uses one for each rank"),
]


def fewer(count: int, divided_by: int = 20) -> int:
    """Repetitions of a test: fewer where ranks share GPUs."""
    return max(1, count // divided_by) if SHARED else count


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Around a function, or a block: a process that is still in it after so long prints where its threads are, and ends. Three
    times as long where ranks share GPUs."""
    seconds *= 3 if SHARED else 1
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def late(call: int) -> None:
    """This rank's GPU, where it is its turn: 5 ms in which its stream does nothing."""
    if call % dist.get_world_size() == dist.get_rank():
        torch.cuda._sleep(9_000_000)
