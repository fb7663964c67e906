"""A rank that raises an error before it enters a call: peers that wait for it there get the error's text, and soon. A rank that
calls again, and ranks that all raise, are waited for as before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks
from single_process_ranks import rank_groups

import weft
from weft import collectives
from weft.comm import rank_group as module
from weft.core.errors import PeerLost

A, B, SPLITS = torch.ones(4, 8), torch.ones(8, 4), torch.tensor([2, 2])
Calls = tuple[Callable[[], object], Callable[[], object]]


def _calls(what: str) -> Calls:
    """A right call, and a wrong one, which names its argument."""
    x = torch.ones(8)
    return {
        "operator": (lambda: weft.all_gather_matmul(A, B), lambda: weft.all_gather_matmul(A, B[:3])),
        "collective": (lambda: collectives.all_reduce(x), lambda: collectives.all_reduce(x, op="most")),  # type: ignore[arg-type]
        "function": (lambda: collectives.all_gather(x), lambda: collectives.all_gather(x, schedule="most")),
        "concurrent": (
            lambda: weft.concurrent(lambda: None, weft.AllReduce(x), method="nccl"),
            lambda: weft.concurrent(lambda: None, weft.AllReduce(x), method="most"),
        ),
        "splits": (
            lambda: weft.all_to_all_matmul(A, B, splits=SPLITS, max_rows=8),
            lambda: weft.all_to_all_matmul(A, B, splits=SPLITS, max_rows=0),
        ),
    }[what]


WORDS = {"operator": "b", "collective": "op", "function": "schedule", "concurrent": "method", "splits": "max_rows"}


def _alone(what: str, bound_s: float) -> tuple[str, float]:
    """The last rank makes a wrong call where the others make a right one. What each raises, and how late."""
    weft.close()
    right, wrong = _calls(what)
    right()
    from weft.runtime.groups import GROUPS

    GROUPS.state(dist.group.WORLD.group_name).rank_group.timeout_s = bound_s  # type: ignore[union-attr]
    dist.barrier()
    last = dist.get_rank() == dist.get_world_size() - 1
    began = time.monotonic()
    with pytest.raises((ValueError, PeerLost)) as caught:
        (wrong if last else right)()
    share = (time.monotonic() - began) / bound_s
    dist.barrier()
    weft.close()
    right()
    return f"{type(caught.value).__name__}: {caught.value}", share


@pytest.mark.ranks
@pytest.mark.parametrize("what", list(WORDS))
def test_peers_get_the_error_of_a_rank_that_has_not_entered_the_call(ranks: RankFixture, what: str) -> None:
    *others, (own, _) = ranks(2).run(_alone, what, 60.0)
    assert own.startswith(f"ValueError: {WORDS[what]}")
    for message, share in others:
        assert message.startswith("PeerLost: rank 1 raised an error and did not come to call ")
        assert message.endswith(own)
        assert share < 0.5


def _together(calls: int) -> Any:
    """All ranks make wrong calls, then right ones; one comes late. Then one makes wrong ones alone, and calls again at once."""
    module._RETRY_GRACE_S = 0.2
    try:
        weft.close()
        late = dist.get_rank() == 1
        for what in WORDS:
            right, wrong = _calls(what)
            right()
            for _ in range(calls):
                with pytest.raises(ValueError, match=WORDS[what]):
                    wrong()
            time.sleep(0.6 * late)
            right()
            if late:
                with pytest.raises(ValueError, match=WORDS[what]):
                    wrong()
            right()
    finally:
        module._RETRY_GRACE_S = 3.0
        weft.close()


@pytest.mark.ranks
def test_a_group_whose_ranks_all_raise_or_call_again_works_on(ranks: RankFixture) -> None:
    ranks(2).run(_together, 2)


def _first(bound_s: float) -> tuple[str, float]:
    """As `_alone`, in a group that has made no call."""
    group: Any = dist.new_group()
    last = dist.get_rank() == dist.get_world_size() - 1
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_TIMEOUT_S", str(bound_s))
        with pytest.raises((ValueError, PeerLost)) as caught:
            weft.all_gather_matmul(A, B[:3] if last else B, group)
        share = (time.monotonic() - began) / bound_s
        dist.barrier()
        assert weft.all_gather_matmul(A, B, group).shape == (4 * dist.get_world_size(), 4)
        weft.close(group)
        if not last:  # who has come once has raised nothing any more
            time.sleep(0.5)
        assert weft.all_gather_matmul(A, B, group).shape == (4 * dist.get_world_size(), 4)
        weft.close(group)
    return f"{type(caught.value).__name__}: {caught.value}", share


@pytest.mark.ranks
def test_peers_get_the_error_of_a_rank_that_raises_in_a_first_call(ranks: RankFixture) -> None:
    *others, (own, _) = ranks(3).run(_first, 60.0)
    for message, share in others:
        assert message == f"PeerLost: rank 2 raised an error and did not come to the group's first call: {own}"
        assert share < 0.5


@on_ranks(2)
def test_ranks_that_all_raise_in_a_first_call_are_waited_for() -> None:
    """All ranks raise in the place of a first call; one comes late to the right one."""
    from weft.comm import handshake

    group: Any = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "_RETRY_GRACE_S", 0.2)
        for _ in range(2):
            with pytest.raises(ValueError, match="b"):
                weft.all_gather_matmul(A, B[:3], group)
        time.sleep(1.0 * (dist.get_rank() == 1))
        assert weft.all_gather_matmul(A, B, group).shape == (4 * dist.get_world_size(), 4)
    weft.close(group)


def test_what_is_published_of_an_error_is_short() -> None:
    one, other = rank_groups()
    one.publish_error_instead(ValueError("ä" * 100_000))
    assert other._control[0].raised == 1
    assert len(other._control[0].failure.encode()) <= module._ERROR_BYTES
    assert other._control[0].failure.startswith("ValueError: ää")


def test_an_error_without_words_is_its_kind() -> None:
    one, other = rank_groups()
    one.publish_error_instead(MemoryError())
    assert other._control[0].failure == "MemoryError"
