"""Ranks come to a group's first call: who does not is named, and the others end."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from lone_ranks import wait_for
from torch.distributed.distributed_c10d import _set_pg_timeout

import weft
from weft.comm import arrival
from weft.core.errors import PeerLost, WaitTimeout

pytestmark = pytest.mark.ranks


def _call(group: dist.ProcessGroup) -> None:
    a, b = torch.full((2, 4), 1.0 + dist.get_rank()), torch.ones(4, 3)
    expected = torch.cat([torch.full((2, 3), 4.0 * (1 + rank)) for rank in range(group.size())])
    torch.testing.assert_close(weft.all_gather_matmul(a, b, group=group), expected)


def _one_raised_before() -> str:
    """Ranks 0 and 1 give up when both have come."""
    group, pair = dist.new_group(), dist.new_group([0, 1])
    _set_pg_timeout(timedelta(seconds=2), group)
    if dist.get_rank() == 2:
        dist.barrier()
        return "did not come"
    tell = dist.all_gather_object

    def both_first(told: list[object], mine: object, group: dist.ProcessGroup) -> None:
        dist.barrier(pair)
        tell(told, mine, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", both_first)
        try:
            _call(group)
        except PeerLost as error:
            return str(error)
        finally:
            dist.barrier()
    return "right"


def test_who_does_not_come_is_named(ranks: RankFixture) -> None:
    first, second, _ = ranks(3).run(_one_raised_before)
    assert first.startswith("rank 2 has not come to the group's first call: ")
    assert second.startswith("rank 2 has not come to the group's first call: ")


def _one_is_late(told: Path) -> list[str]:
    """Rank 1 comes when rank 0 has said that it waits."""
    say, group = arrival._Meeting._say, dist.group.WORLD
    assert group is not None

    def saying(meeting: arrival._Meeting) -> None:
        say(meeting)
        told.touch()

    weft.close()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        patch.setattr(arrival, "SAYS_S", 0.2)
        patch.setattr(arrival._Meeting, "_say", saying)
        assert dist.get_rank() == 0 or wait_for(told.exists, 60)
        _call(group)
    weft.close()
    return [str(warning.message) for warning in said]


def test_a_late_rank_is_named_and_waited_for(ranks: RankFixture, tmp_path: Path) -> None:
    first, second = ranks(2).run(_one_is_late, tmp_path / "told")
    assert first == ["for 0.2 s rank 1 has not come to the group's first call; did it raise? rank 0 waits"]
    assert second == []


class _Backends:
    """A group of one backend, which torch does not have."""

    _device_types = (torch.device("cuda"),)

    def _get_backend(self, device: torch.device) -> object:
        return object()


def test_a_backend_that_does_not_tell_its_timeout_has_torchs() -> None:
    assert arrival.bound_s(_Backends()) == 1800  # type: ignore[arg-type]


def _in_the_store() -> str:
    """As where NCCL is the group's only backend: rank 0 gives up, and rank 1 after it; then all come, twice, with calls of
    weft's between."""
    group = dist.new_group(timeout=timedelta(seconds=100))
    assert arrival.bound_s(group) == 100
    message = ""
    for rank in range(2):
        if dist.get_rank() == rank:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(arrival, "bound_s", lambda group: 1.0)
                try:
                    with arrival._Meeting(group).begun() as meeting:
                        meeting.await_all()
                except WaitTimeout as error:
                    message = str(error)
        dist.barrier()
    for _ in range(2):
        with arrival._Meeting(group).begun() as meeting:
            meeting.await_all()
        _call(group)
    weft.close(group)
    return message


def test_a_group_whose_rank_gave_up_can_meet_later(ranks: RankFixture) -> None:
    message, other = ranks(2).run(_in_the_store)
    assert other.endswith("rank 0 has given up the group's first call; did it raise, or leave a call out?")
    assert message.startswith(
        "within 1 s, the process group's timeout, rank 1 has not come to the group's first call; did it raise"
    )


def _interrupted() -> None:
    """On rank 0 alone, when all have come: the meeting counts on both, so that the next one is the same to both."""
    group = dist.new_group()
    try:
        with arrival._Meeting(group).begun() as meeting:
            meeting.await_all()
            dist.barrier()
            if dist.get_rank() == 0:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    _call(group)
    weft.close(group)


def test_a_meeting_that_took_place_counts_whatever_comes_of_it(ranks: RankFixture) -> None:
    ranks(2).run(_interrupted)


def test_a_group_of_an_earlier_ones_name_has_not_met(tmp_path: Path) -> None:
    """Else its ranks, some of which were in the earlier one, would wait for each other at different meetings."""
    for number in range(2):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / str(number)}", rank=0, world_size=1)
        group = dist.group.WORLD
        assert group is not None
        assert arrival._Meeting(group)._number == 0
        assert arrival.told_by_all(group, "mine") == ["mine"]
        assert arrival._Meeting(group)._number == 1
        dist.destroy_process_group()
