"""torch's rendezvous in groups that share some of their ranks."""

from __future__ import annotations

import pytest
from conftest import RankFixture
from rendezvous_work import as_torch_meets, groups_that_overlap, one_stays_away, the_same_names_again, two_threads

pytestmark = pytest.mark.ranks


def test_groups_that_overlap_meet(ranks: RankFixture) -> None:
    first, second, third = ranks(3).run(groups_that_overlap)
    assert first == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert second == [[0, 1], [0, 1], [0, 1, 2], [1, 2], [0, 1, 2]]
    assert third == [[0, 1, 2], [1, 2], [0, 1, 2]]


def test_what_an_earlier_group_left_is_not_read(ranks: RankFixture) -> None:
    """A launcher's store outlives process groups, which have the same names again."""
    assert ranks(2).run(the_same_names_again) == [[[0, 1], [10, 11]]] * 2


def test_threads_come_one_after_the_other(ranks: RankFixture) -> None:
    """torch has one socket for it in a process. No rank's thread waits for one of another rank that waits for it."""
    assert ranks(2).run(two_threads, 5) == [[1, 10]] * 2


@pytest.mark.slow
def test_by_torchs_own_numbers_they_do_not(ranks: RankFixture) -> None:
    """Else weft's store is no longer needed."""
    assert all("imeout" in error for error in ranks(3).run(as_torch_meets))


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_the_bound(ranks: RankFixture) -> None:
    message, _ = ranks(2).run(one_stays_away)
    assert "rank 0 has waited for 1 s at most" in message
    assert "imeout" in message
