"""Rank processes that all tests of a run share: one pool for each world size, device and environment."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from weft.runtime.ranks import SHARED, Ranks

Sizes = int | Sequence[int]
"""World sizes: one, or several, for each of which the tests run once."""
INTERPRETED = {"TRITON_INTERPRET": "1", "WEFT_TIMEOUT_S": "600"}
"""The environment in which ranks on CPUs run weft's kernels, by Triton's interpreter."""
MOST_PROCESSES = 16
"""What all pools together may have. The pool that was used longest ago ends first."""


class Pool:
    """Rank processes that are started when they are needed, and anew after a test in which one raised, died or hung: none
    infects the next."""

    def __init__(self, world_size: int, **options: Any) -> None:
        self.world_size, self._options = world_size, options
        self._ranks: Ranks | None = None

    @property
    def runs(self) -> bool:
        return self._ranks is not None

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
        except BaseException:
            self.close(grace_s=0)
            raise

    def close(self, *, grace_s: float = 10.0) -> None:
        if self._ranks is not None:
            self._ranks.close(grace_s=grace_s)
        self._ranks = None

    def _living(self) -> Ranks:
        codes = [process.exitcode for process in self._ranks.processes] if self._ranks else []
        if codes != [None] * len(codes):
            warnings.warn(f"of {self.world_size} idle ranks some had ended, with exit codes {codes}", stacklevel=3)
            self.close(grace_s=0)
        self._ranks = self._ranks or Ranks(self.world_size, **self._options)
        return self._ranks


class Pools:
    """Pools by what their processes differ in, the one used last at the end."""

    def __init__(self) -> None:
        self._pools: OrderedDict[tuple[Any, ...], Pool] = OrderedDict()

    def get(self, world_size: int, environment: Mapping[str, str], device: str = "cpu") -> Pool:
        key = (world_size, device, *sorted(environment.items()))
        if key not in self._pools:
            self._pools[key] = Pool(world_size, device=device, environment=dict(environment))
        self._pools.move_to_end(key)
        *others, last = self._pools.values()
        for pool in others:
            if last.world_size + sum(other.world_size for other in others if other.runs) > MOST_PROCESSES:
                pool.close()
        return last

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


POOLS = Pools()
"""Of this process. The session's fixture in conftest.py closes them."""


def interpreting(world_size: int) -> Pool:
    """Ranks whose kernels are interpreted."""
    pytest.importorskip("triton", reason="Triton is not installed")
    return POOLS.get(world_size, INTERPRETED)


def on_ranks(*sizes: int, interpreted: bool = False, pool: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated test runs on every rank, and once with each number of ranks. Its arguments, which are values of parametrize
    or of fixtures, are pickled.

    interpreted: the ranks interpret weft's kernels. pool: the fixture whose ranks they are, in place of sizes.
    """

    def on_each_rank(work: Callable[..., None]) -> Callable[..., None]:
        def test(request: pytest.FixtureRequest, **given: Any) -> None:
            if pool:
                ranks = given.pop(pool)
            else:
                size = given.pop("world_size") if len(sizes) > 1 else sizes[0]
                ranks = interpreting(size) if interpreted else request.getfixturevalue("ranks")(size)
            ranks.run(_on_this_rank, work.__module__, work.__name__, given)

        names = ["request", *["world_size"] * (len(sizes) > 1), *[pool] * bool(pool), *inspect.signature(work).parameters]
        made: Any = functools.update_wrapper(test, work)
        made.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
        made.pytestmark = [*getattr(work, "pytestmark", ()), pytest.mark.ranks.mark]
        return pytest.mark.parametrize("world_size", sizes)(made) if len(sizes) > 1 else made  # type: ignore[no-any-return]

    return on_each_rank


def _on_this_rank(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**given)


def shared_ranks(sizes: Sizes, environment: Mapping[str, str], *, slow: Sequence[int] = ()) -> Callable[..., object]:
    """A fixture: ranks with this environment. slow: world sizes of slow tests."""

    def pool(request: pytest.FixtureRequest) -> Pool:
        if environment.get("TRITON_INTERPRET"):
            pytest.importorskip("triton", reason="Triton is not installed")
        return POOLS.get(getattr(request, "param", sizes), environment)

    params = None if isinstance(sizes, int) else [*sizes, *(pytest.param(size, marks=pytest.mark.slow) for size in slow)]
    return pytest.fixture(scope="module", params=params)(pool)


def interpreted_ranks(sizes: Sizes, *, slow: Sequence[int] = ()) -> Callable[..., object]:
    """A fixture: ranks whose kernels are interpreted. slow: world sizes of slow tests."""
    return shared_ranks(sizes, INTERPRETED, slow=slow)


def ranks_on_gpus(sizes: Sizes, timeout_s: float) -> Callable[..., object]:
    """A fixture: ranks with a GPU each, or one that they share. They are the module's own, so that what a file leaves on GPUs
    ends with it. timeout_s: how long they wait for each other."""

    def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
        ranks = Pool(getattr(request, "param", sizes), device=gpus(), environment={"WEFT_TIMEOUT_S": str(timeout_s)})
        yield ranks
        ranks.close()

    return pytest.fixture(scope="module", params=None if isinstance(sizes, int) else sizes)(pool)


def pretended_gpus() -> int:
    """WEFT_TEST_GPUS: tests on GPUs run as if there were so many, and their ranks share those that there are. 0 where there are
    none, or a rank is to have one of its own."""
    return int(os.environ.get("WEFT_TEST_GPUS", "0")) if torch.cuda.is_available() else 0


def gpus() -> str:
    """Where ranks are that need GPUs."""
    return SHARED if pretended_gpus() else "cuda"
