"""What the tests on GPUs share: where they can run, ranks with a GPU each, and an alarm for what hangs."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from weft.execute.ranks import Ranks

GPUS = torch.cuda.device_count()
NEEDS_TWO = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs two or more GPUs, this machine has {GPUS}")]
NEEDS_ONE = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU, this machine has none")]
SIZES = [n for n in (2, 4, 8) if n <= max(GPUS, 2)]
"""World sizes; 2 where no test will run, so that all of them are listed."""


def ranks_on_gpus(size: int | Sequence[int], timeout_s: float) -> Callable[..., object]:
    """A fixture: rank processes that a file's tests share, once for each of several sizes. timeout_s: how long they wait."""

    def pool(request: pytest.FixtureRequest) -> Iterator[Ranks]:
        world_size = getattr(request, "param", size)
        with Ranks(world_size, device="cuda", environment={"WEFT_TIMEOUT_S": str(timeout_s)}) as ranks:
            yield ranks

    return pytest.fixture(scope="module", params=None if isinstance(size, int) else size)(pool)


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Around a function, or a block: a process that is still in it after so long prints where its threads are, and ends."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
