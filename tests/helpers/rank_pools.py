"""Fixtures of rank processes that the tests of a file share, where those of `ranks` will not do: interpreted kernels, GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from weft.runtime.ranks import SHARED, RankFailed, Ranks

Sizes = int | Sequence[int]
"""World sizes: one, or several, for each of which the tests run once."""


class Pool:
    """Rank processes that are started when they are needed, and anew after some of them have died, hung or been ended: a test
    that breaks its ranks fails alone."""

    def __init__(self, world_size: int, **options: Any) -> None:
        self.world_size, self._options = world_size, options
        self._ranks: Ranks | None = None

    @property
    def processes(self) -> list[Any]:
        return self._living().processes

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 600.0) -> list[Any]:
        """As Ranks.run."""
        self.start(function, *args)
        return self.finish(timeout_s=timeout_s)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """As Ranks.start."""
        self._living().start(function, *args)

    def finish(self, *, timeout_s: float = 600.0) -> list[Any]:
        """As Ranks.finish."""
        assert self._ranks is not None, "start comes first"
        try:
            return self._ranks.finish(timeout_s=timeout_s)
        except RankFailed as error:
            if error.lost:
                self.close(grace_s=0)
            raise
        except BaseException:
            self.close(grace_s=0)
            raise

    def close(self, *, grace_s: float = 10.0) -> None:
        if self._ranks is not None:
            self._ranks.close(grace_s=grace_s)
        self._ranks = None

    def _living(self) -> Ranks:
        if self._ranks is not None and not all(process.is_alive() for process in self._ranks.processes):
            self.close(grace_s=0)
        self._ranks = self._ranks or Ranks(self.world_size, **self._options)
        return self._ranks


def shared_ranks(sizes: Sizes, environment: Mapping[str, str], device: str = "cpu") -> Callable[..., object]:
    """A fixture: the ranks, started for the first test that uses them, and anew for the test after one that lost some."""

    def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
        if environment.get("TRITON_INTERPRET"):
            pytest.importorskip("triton", reason="Triton is not installed")
        ranks = Pool(getattr(request, "param", sizes), device=device, environment=dict(environment))
        yield ranks
        ranks.close()

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
