"""A short form of tests/campaigns/soak.py: mixed calls leave memory, descriptors and threads as they were."""

from __future__ import annotations

import gc
import os
from itertools import islice
from pathlib import Path

import pytest
import torch
from calls import LAYOUTS, Case, Wrong, check, laid
from conftest import RankFixture
from soak import Kind, Paces, Part, Soak, SoakReport, growth, kinds, leaks, line, rank_work, sequence, slowest

from weft.comm.shared_memory import SharedSegment

pytestmark = pytest.mark.slow

SHORT = Soak(calls=500, parts=10, catalogue=36, window=12, moves=25)


@pytest.mark.ranks
def test_calls_leave_nothing_behind(ranks: RankFixture) -> None:
    reports = ranks(2).run(rank_work, SHORT)
    assert leaks(reports) == []
    assert [one.parts[-1].calls for one in reports] == [500, 500]
    assert all(growth(one.parts)["rss_mib"] < 2 for one in reports)


def _leaky(soak: Soak) -> SoakReport:
    """A call of every kind opens a file that nobody closes. What tests before have left is closed now, and not meanwhile."""
    gc.collect()
    eager, opened = Kind.eager, []

    def leaking(self: Kind) -> torch.Tensor:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        return eager(self)

    Kind.eager = leaking  # type: ignore[method-assign]
    try:
        return rank_work(soak)
    finally:
        Kind.eager = eager  # type: ignore[method-assign]
        for descriptor in opened:
            os.close(descriptor)


@pytest.mark.ranks
def test_a_leak_is_seen(ranks: RankFixture) -> None:
    found = leaks(ranks(2).run(_leaky, Soak(calls=30, parts=3, catalogue=4, window=4)))
    assert found == ["rank 0: descriptors grew by 20", "rank 1: descriptors grew by 20"]


def test_growth_is_from_third_to_third() -> None:
    heights = [5.0, 9.0, 5.0, 6.0, 6.0, 7.0, 8.0, 6.0, 8.0]
    parts = [Part(calls=n, seconds=n, figures={"threads": high}) for n, high in enumerate(heights)]
    assert growth(parts) == {"threads": 3.0}
    reports = [SoakReport(parts=parts, pace={})]
    assert leaks(reports) == ["rank 0: threads grew by 3"]
    assert line(SHORT, reports)["figures"] == {"threads": (5.0, 3.0)}
    with pytest.raises(ValueError, match="at least 3"):
        growth(parts[:2])


def test_the_slowest_kind_is_of_those_with_many_calls() -> None:
    pace = {"a": (500, 10.0, 30.0), "b": (500, 10.0, 50.0), "c": (5, 1.0, 90.0)}
    assert slowest([SoakReport(parts=[], pace=pace)]) == ("b", 500, 10.0, 50.0)


def test_all_times_count_over_their_kinds_median() -> None:
    paces = Paces(3)
    assert paces.steady() == (0, 1.0)
    for kind, us in ((0, 10.0), (2, 1000.0)):
        for _ in range(98):
            paces.add(kind, us)
        paces.add(kind, 3 * us)
        paces.add(kind, 5 * us)
    timed, high = paces.steady()
    assert timed == 200
    assert 3.0 <= high <= 5.0
    assert paces.figures(["a", "b", "c"])["2 c"][:2] == (100, 1000.0)


def test_kinds_and_their_sequence_follow_from_the_seed() -> None:
    assert kinds(SHORT, 3) == kinds(SHORT, 3)
    assert {case.op for case, _ in kinds(Soak(calls=1), 3)} >= {"embedding_bag_all_to_all", "all_reduce", "matmul_all_reduce"}
    drawn = list(islice(sequence(SHORT, 36), 900))
    assert drawn == list(islice(sequence(SHORT, 36), 900))
    assert len(set(drawn[:25])) <= 12 < 30 < len(set(drawn))


def test_a_wrong_result_is_seen() -> None:
    case, right = Case(op="all_reduce", schedule="sequential", k=12), torch.ones(6, dtype=torch.float64)
    check(case, right.float(), right, 3)
    for wrong in (right.float() * (1 + 1e-3), right.float() * float("nan"), right.bfloat16(), right.float()[:3]):
        with pytest.raises(Wrong):
            check(case, wrong, right, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_values(layout: str) -> None:
    values = torch.randn(2, 5, 7)
    there = laid(values, layout)  # type: ignore[arg-type]
    assert torch.equal(there, values)
    assert (there.stride() == values.stride()) == (layout == "plain")


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def test_a_segment_keeps_no_descriptor() -> None:
    made = SharedSegment.create("test", 5000)
    opened = SharedSegment.open(made.name)
    # Others of this process may go at any time: the garbage collector closes what tests before have left.
    assert not [link for link in Path("/proc/self/fd").iterdir() if made.name in _target(link)]
    made.view_words().store(3, 77)
    assert (opened.nbytes, opened.view_words().load(3)) == (8192, 77)
    Path("/dev/shm", made.name).unlink()
    made.close()
    assert opened.view_words().load(3) == 77
    opened.close()
