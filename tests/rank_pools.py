"""Fixtures of rank processes that the tests of a file share, where those of `ranks` will not do: interpreted kernels, GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch

from weft.runtime.ranks import SHARED, Ranks

Sizes = int | Sequence[int]
"""World sizes: one, or several, for each of which the tests run once."""


def shared_ranks(sizes: Sizes, environment: Mapping[str, str], device: str = "cpu") -> Callable[..., object]:
    """A fixture: the ranks, started for the first test that uses them."""

    def pool(request: pytest.FixtureRequest) -> Iterator[Ranks]:
        if environment.get("TRITON_INTERPRET"):
            pytest.importorskip("triton", reason="Triton is not installed")
        with Ranks(getattr(request, "param", sizes), device=device, environment=environment) as ranks:
            yield ranks

    return pytest.fixture(scope="module", params=None if isinstance(sizes, int) else sizes)(pool)


def interpreted_ranks(sizes: Sizes, timeout_s: float = 60) -> Callable[..., object]:
    """On CPUs, where kernels run under Triton's interpreter. timeout_s: how long they wait for each other."""
    return shared_ranks(sizes, {"TRITON_INTERPRET": "1", "WEFT_TIMEOUT_S": str(timeout_s)})


def ranks_on_gpus(sizes: Sizes, timeout_s: float) -> Callable[..., object]:
    """With a GPU each, or one that they share. timeout_s: how long they wait for each other."""
    return shared_ranks(sizes, {"WEFT_TIMEOUT_S": str(timeout_s)}, gpus())


def pretended_gpus() -> int:
    """WEFT_TEST_GPUS: tests on GPUs run as if there were so many, and their ranks share those that there are. 0 where there are
    none, or a rank is to have one of its own."""
    return int(os.environ.get("WEFT_TEST_GPUS", "0")) if torch.cuda.is_available() else 0


def gpus() -> str:
    """Where ranks are that need GPUs."""
    return SHARED if pretended_gpus() else "cuda"
