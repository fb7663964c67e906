"""What was measured before, by an earlier process; and how it is compared with sequential in use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_work import check_gather, told_with
from timed_autotuning import autotuning_by_a_clock

import weft
from weft.core.errors import PeerLost
from weft.core.problem import Problem
from weft.runtime.plan_cache import Cache

PROBLEM = Problem(op="all_gather_matmul", m=64, n=48, k=32, world_size=2)


@contextmanager
def _new_process(folder: str) -> Iterator[None]:
    """What a rank does within is done as if by a process that has just begun, and keeps its plans in a folder."""
    os.environ["WEFT_CACHE_DIR"] = folder
    try:
        weft.close()
        yield
        weft.close()
    finally:
        os.environ["WEFT_CACHE_DIR"] = ""


def _first_calls(folders: list[str]) -> tuple[list[tuple[str, bool, dict[str, float]]], int]:
    """Two calls of auto in a process whose cache is its rank's: what was chosen, and how many schedules were bound."""
    with autotuning_by_a_clock() as made, _new_process(folders[dist.get_rank()]):
        check_gather(64, 48, 32, torch.float32, "auto", 0)
        check_gather(64, 48, 32, torch.float32, "auto", 1)
        return [(choice.spec, choice.from_cache, choice.us) for choice in weft.choices()], len(made)


@pytest.mark.ranks
def test_a_second_process_needs_no_trial_and_rank_0_decides(ranks: RankFixture, tmp_path: Path) -> None:
    mine, theirs = str(tmp_path / "mine"), str(tmp_path / "theirs")
    pool = ranks(2)
    times = {"sequential": 4000.0, "shard_p2p": 1000.0}
    for found, binds in pool.run(_first_calls, [mine, mine]):
        assert (found, binds) == ([("shard_p2p", False, times)], 2)
    assert len(list((tmp_path / "mine" / "plans").iterdir())) == 1
    for found, binds in pool.run(_first_calls, [mine, mine]):
        assert (found, binds) == ([("shard_p2p", True, times)], 1)
    for found, binds in pool.run(_first_calls, [theirs, mine]):
        assert (found, binds) == ([("shard_p2p", False, times)], 2), "rank 0 knows of none: all measure"
    (first, binds), (second, _) = pool.run(_first_calls, [mine, str(tmp_path / "none")])
    assert (first, binds) == ([("shard_p2p", True, times)], 1)
    assert second == [("shard_p2p", True, {})], "rank 1 has read nothing, and runs what rank 0 has"


def _one_cannot_read() -> list[str]:
    """Rank 1 has a profile that is not there; then the group goes on."""
    return told_with([{"WEFT_MACHINE": machine} for machine in ("nothing.json" if dist.get_rank() == 1 else "", "")], "auto")


@pytest.mark.ranks
def test_a_profile_that_one_rank_cannot_read_is_told_to_all(ranks: RankFixture) -> None:
    first, second = ranks(2).run(_one_cannot_read)
    assert first == ["rank 1 cannot read its machine profile (WEFT_MACHINE): see the error there", "right"]
    assert second[0].startswith("cannot read nothing.json")
    assert second[1] == "right"


def _strict(folder: str) -> str:
    """Rank 0 has no memory to read a kept plan."""
    os.environ["WEFT_CACHE_DIR"] = folder if dist.get_rank() == 0 else ""
    try:
        with autotuning_by_a_clock("shard_p2p"):
            weft.close()
            with mock.patch.object(Cache, "read", side_effect=MemoryError("planted")):
                try:
                    check_gather(64, 48, 32, torch.float32, "auto", 0)
                except (MemoryError, PeerLost) as error:
                    return f"{type(error).__name__}: {error}"
        return "right"
    finally:
        os.environ["WEFT_CACHE_DIR"] = ""
        weft.close()


@pytest.mark.ranks
def test_what_one_rank_raises_on_reading_a_plan_is_told_to_all(ranks: RankFixture, tmp_path: Path) -> None:
    first, second = ranks(2).run(_strict, str(tmp_path), timeout_s=15)
    assert first == "MemoryError: planted"
    assert second == "PeerLost: rank 0 failed: planted"
