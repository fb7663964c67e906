"""Fixtures of rank processes that the tests of a file share, where those of `ranks` will not do: interpreted kernels, GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from weft.execute.ranks import Ranks

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
    """With a GPU each. timeout_s: how long they wait for each other."""
    return shared_ranks(sizes, {"WEFT_TIMEOUT_S": str(timeout_s)}, "cuda")
