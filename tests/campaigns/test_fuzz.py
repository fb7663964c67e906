"""Every operator by every family, over extents, layouts, dtypes and numbers of ranks that nobody chose: against float64.

WEFT_FUZZ_EXAMPLES: how many; 10,000 take some minutes. Ranks are started once for each world size. And a short form of
tests/campaigns/fuzz.py, which asks the same of GPUs, without shrinking.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import redirect_stderr

import calls
import fuzz
import pytest
import torch
import torch.distributed as dist
from calls import DTYPES, EVERY, LAYOUTS, Case, Drawn, even
from conftest import RankFixture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.schedules import FAMILIES, spec

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("WEFT_FUZZ_EXAMPLES", "500"))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Case]:
    """(world size, case)."""
    world_size = draw(st.integers(1, 4))
    op, name = draw(st.sampled_from(EVERY))
    case = Case(
        op=op,
        schedule=spec(name, draw(st.sampled_from((1, 2, 3, 8)))) if FAMILIES[name].chunked and draw(st.booleans()) else name,
        m=draw(st.integers(0, 40)),
        n=draw(st.integers(0, 24)),
        k=draw(st.integers(1, 40)),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        a=draw(st.sampled_from(LAYOUTS)),
        b=draw(st.sampled_from(LAYOUTS)),
        entries=draw(st.integers(1, 3)),
        dim=draw(st.integers(0, 1)),
    )
    return world_size, even(case, world_size)


def _called(case: Case, seed: int) -> None:
    call, expected = calls.work(case, seed, torch.device("cpu"))
    calls.check(case, call(), expected, dist.get_world_size())


@pytest.mark.ranks
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 500, suppress_health_check=list(HealthCheck), database=None
)
@given(given=cases(), seed=st.integers(0, 1000))
def test_any_call_is_right(ranks: RankFixture, given: tuple[int, Case], seed: int) -> None:
    world_size, case = given
    ranks(world_size).run(_called, case, seed)


SHORT = fuzz.Fuzz(trials=24, device="cpu", seed=5)


@pytest.mark.ranks
def test_trials_are_right_with_operands_that_change(ranks: RankFixture) -> None:
    reports = ranks(2).run(fuzz.rank_work, SHORT)
    assert [(one.trials, one.calls, one.findings) for one in reports] == [(24, 48, ())] * 2


def _stale(given: fuzz.Fuzz) -> fuzz.FuzzReport:
    """Every call returns what the first of its trial did."""
    work = Drawn.work

    def remembering(self: Drawn) -> calls.Work:
        call, expected = work(self)
        results: list[torch.Tensor] = []

        def again() -> torch.Tensor:
            results.append(call().clone())
            return results[0]

        return again, expected

    Drawn.work = remembering  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryFile("w+") as file, redirect_stderr(file):  # a real one, for faulthandler
            reports = fuzz.rank_work(given)
            file.seek(0)
            said = file.read()
    finally:
        Drawn.work = work  # type: ignore[method-assign]
    # At once: what ends a run takes with it what the run was to tell at its end.
    assert said.splitlines() == [f"rank {dist.get_rank()}: {what}" for what in reports.findings]
    return reports


@pytest.mark.ranks
def test_a_stale_result_is_found_and_the_run_goes_on(ranks: RankFixture) -> None:
    reports = ranks(2).run(_stale, SHORT)
    assert [one.trials for one in reports] == [24, 24]
    assert all("call 2, eager" in what for one in reports for what in one.findings)
    # A rank whose part of a result is empty has nothing stale.
    assert min(len(one.findings) for one in reports) > 18


def test_trials_follow_from_seed_and_number() -> None:
    given = fuzz.Fuzz(seed=7)
    trials = [fuzz.drawn(given, number, 2) for number in range(300)]
    assert trials[40] == fuzz.drawn(given, 40, 2) != fuzz.drawn(fuzz.Fuzz(seed=8), 40, 2)
    assert len({(trial.case.op, trial.case.schedule.partition(":")[0]) for trial in trials}) > 55
    assert {trial.ways for trial in trials} >= {("eager", "stream", "graph"), ("graph", "stream", "eager")}
    assert {trial.second for trial in trials} == {True, False}


def test_a_line_has_the_slowest_rank_and_every_rank_s_findings() -> None:
    reports = [
        fuzz.FuzzReport(trials=3, calls=6, seconds=seconds, findings=found) for seconds, found in ((60, ()), (90, ("off",)))
    ]
    line = fuzz.line(SHORT, reports)
    assert (line["minutes"], line["findings"], line["ranks"]) == (1.5, ["rank 1: off"], 2)
