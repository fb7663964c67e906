"""benchmarks.host on CPU ranks: each part, methods that fail, the slowest rank, and streams in turn."""

from __future__ import annotations

import argparse
from typing import Any

import host_work
import pytest
import torch

from benchmarks.host import calls, training
from benchmarks.host.__main__ import PARTS, list_cases
from benchmarks.host.clock import TOLERANCE
from benchmarks.models import METHODS
from benchmarks.rows import AUTO, Row

LEARNED = {
    "training": {training.HAND, "sequential/torch", "weft/eager"},
    "compiled": {training.HAND, *(METHODS[name] for name in training.COMPILED)},
    "layer": {"computation/unsharded", "weft/eager"},
}
"""The methods of each part of steps."""


def check_row(row: Row) -> None:
    assert (row.bench, row.world_size, row.mode, row.commit) == ("host", 2, "eager", "abc")
    assert set(row.us) == set(row.host_us) == set(row.extra["p10"]) == set(row.extra["p90"])
    for name, host_us in row.host_us.items():
        assert 0 < row.extra["p10"][name] <= host_us <= row.extra["p90"][name]
        assert row.us[name] > 0


@pytest.mark.ranks
def test_calls_of_cpu_ranks(ranks: Any) -> None:
    rows, others = ranks(2).run(host_work.measure_part, "calls")
    assert [(row.op, row.state) for row in rows] == [(row.op, row.state) for row in others]
    assert [(row.op, row.case, row.state) for row in rows] == [
        (case.op, case.name, variant) for case in calls.CASES["cpu"] for variant in (calls.SAME, calls.NEW)
    ]
    for row in rows:
        check_row(row)
        own = {"peer/torch one_shot"} if row.op == "matmul_all_reduce" else {calls.OWN_OUTPUT}
        wanted = {AUTO, "weft/sequential", calls.NEW_OUTPUT, calls.MATMUL, *own} - set(row.missing)
        named = set(row.host_us) - wanted
        assert wanted < set(row.host_us)
        assert len(named) == 1  # the one by name, which overlaps
        assert set(row.missing) <= {"peer/torch one_shot"}
        assert row.chosen
        assert row.samples == 2 * calls.GROUP
        assert set(row.extra["difference"]) == set(row.host_us) - {calls.MATMUL}
        assert max(row.extra["difference"].values()) <= TOLERANCE


@pytest.mark.ranks
@pytest.mark.parametrize("part", ["training", pytest.param("compiled", marks=pytest.mark.slow), "layer"])
def test_steps_of_cpu_ranks(ranks: Any, part: str) -> None:
    if part == "layer":
        pytest.importorskip("transformers")
    rows, _ = ranks(2).run(host_work.measure_part, part)
    assert [(row.op, row.case) for row in rows] == [(part, str(case)) for case in PARTS[part].cases["cpu"]]
    for row in rows:
        check_row(row)
        assert (set(row.host_us), row.missing) == (LEARNED[part], {})
        for name, found in row.extra["difference"].items():
            assert len(found) >= 3, name
            assert max(found.values()) <= TOLERANCE


@pytest.mark.ranks
def test_a_wrong_result_is_left_out_with_its_reason(ranks: Any) -> None:
    for rows in ranks(2).run(host_work.measure_with_wrong_auto):
        for row in rows:
            assert AUTO not in row.host_us
            assert "rank 1: ArithmeticError: WRONG RESULT" in row.missing[AUTO]
            assert {"weft/sequential", calls.NEW_OUTPUT} <= set(row.host_us)


@pytest.mark.ranks
def test_methods_that_fail_on_a_rank_are_left_out_on_all(ranks: Any) -> None:
    for found, missing, log, recovered in ranks(2).run(host_work.measure_with_lost_method):
        assert list(found) == ["first", "last"]
        assert missing == {"lost": "rank 1: RuntimeError: no memory", "wrong": "rank 1: ArithmeticError: wrong result"}
        first, last = (["check " + name, "warm up " + name] for name in ("first", "last"))
        assert log == [*first, "check wrong", *first, *last]  # all that are left begin anew
        assert recovered == 1


@pytest.mark.ranks
def test_times_are_the_slowest_ranks(ranks: Any) -> None:
    for spread, wall_us, calls_made in ranks(2).run(host_work.time_two_ranks):
        assert (spread.p10, spread.median, spread.p90) == (2.0, 2.0, 2.0)
        assert wall_us > 0
        assert calls_made == 3 * 5


def test_streams_take_turns_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call waits on its stream for the event of the call before, and only the call is timed."""
    log: list[str] = []

    class Event:
        def record(self, stream: Stream) -> None:
            log.append(f"{stream.name} records")

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: Event) -> None:
            log.append(f"{self.name} waits")

        def __enter__(self) -> None:
            log.append(f"{self.name} is current")

        def __exit__(self, *reason: object) -> None:
            pass

    def call(a: torch.Tensor) -> torch.Tensor:
        log.append("call")
        return a

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter_ns", lambda: log.append("clock") or next(ticks))
    feed = calls.Feed(call, [torch.zeros(1)], streams=[Stream("one"), Stream("two")])
    assert (feed(), feed()) == (1, 1)
    assert log == [
        *("one waits", "one is current", "clock", "call", "clock", "one records"),
        *("two waits", "two is current", "clock", "call", "clock", "two records"),
    ]


def test_new_addresses_come_in_turn_and_results_stay() -> None:
    copies = [torch.full((1,), float(number)) for number in range(3)]
    feed = calls.Feed(lambda a: a + 10, copies, kept=2)
    for _ in range(4):
        feed()
    assert [float(result) for result in feed.results] == [12.0, 10.0]


def given(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"part": "calls,layer", "cases": "", "device": "cuda", "rounds": 0, **changes})


def test_options_choose_parts_cases_and_rounds() -> None:
    chosen = list_cases(given(cases="1,0", rounds=3))
    assert [(case.part, case.rounds) for case in chosen] == [("calls", 3), ("calls", 3), ("layer", 3), ("layer", 3)]
    assert [case.case for case in chosen[:2]] == [calls.CASES["cuda"][1], calls.CASES["cuda"][0]]
    assert {case.rounds * calls.GROUP for case in list_cases(given(part="calls"))} == {1000}


@pytest.mark.parametrize(
    ("changes", "says"), [({"part": "cals"}, "--part has 'cals'"), ({"cases": "9"}, "--cases has '9'"), ({"cases": "x"}, "'x'")]
)
def test_options_that_will_not_do(changes: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        list_cases(given(**changes))
