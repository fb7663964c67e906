"""The ledger of published figures: every one has result lines that give it, of a commit in the history, and not too old."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import generate
import ledger
import pytest
import text_tables

NOT_MEASURED = {
    *("timeline", "families", "counts", "chart", "ranked", "targets"),  # follow from code
    *("t3", "ficco", "dlrm", "iso"),  # simulated studies
    "traces",  # drawn from files in docs/traces
}
"""Kinds of generated tables that are not made from result lines."""
LINE = {
    "bench": "x",
    "op": "all_gather_matmul",
    "case": "one",
    "dtype": "bfloat16",
    "world_size": 2,
    "machine": "2 x NVIDIA H200",
    "mode": "graph",
    "us": {"weft/auto": 2.0, "sequential/default": 3.0},
}


with_history = pytest.mark.skipif(not text_tables.whole_history(), reason="this checkout has not the whole history")


def get_first_commit() -> str:
    return text_tables.git("rev-list", "--max-parents=0", "HEAD").splitlines()[0]


def get_newest_commit() -> str:
    """The newest commit, or one whose day is known without the history."""
    if text_tables.whole_history():
        return text_tables.git("rev-parse", "HEAD")
    return str(next(iter(json.loads(text_tables.DAYS.read_text(encoding="utf-8")))))


class Published:
    """A document, its entries and one file of result lines, which replace the project's."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.entries: list[dict[str, Any]] = []
        self.stated: list[dict[str, Any]] = []
        patch.setattr(text_tables, "RESULTS", folder)
        patch.setattr(ledger, "read_entries", lambda: {"measured": self.entries, "stated": self.stated})

    def add_line(self, **changes: Any) -> None:
        with (self.folder / "x.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(LINE | {"commit": get_newest_commit()} | changes) + "\n")

    def add_measured_entry(self, text: str, **changes: Any) -> None:
        entry = {"document": "README.md", "text": text, "bench": "x", "where": {"mode": "graph"}, "baseline": "NCCL"}
        self.entries.append(entry | {"value": "us.sequential/default", "over": "us.weft/auto"} | changes)

    def check(self, text: str) -> list[Any]:
        self.patch.setattr(ledger, "read_documents", lambda: {"README.md": text})
        return list(ledger.check_figures())

    def find_errors(self, text: str) -> list[str]:
        return [str(one) for one in self.check(text) if isinstance(one, ledger.LedgerError)]


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    return Published(tmp_path, monkeypatch)


def test_the_projects_own_figures() -> None:
    found = list(ledger.check_figures())
    assert [str(one) for one in found if isinstance(one, ledger.LedgerError)] == []
    assert len(found) > 50


def test_each_generated_table_of_measurements_names_its_files() -> None:
    tables = {
        match[1]: match[2].split() for document in ledger.read_documents().values() for match in ledger.BLOCK.finditer(document)
    }
    assert {kind for kind, words in tables.items() if not ledger.list_files(kind, words)} <= NOT_MEASURED
    assert set(tables) <= set(generate.MAKERS)


def test_a_figure_that_its_lines_give(published: Published) -> None:
    published.add_line()
    published.add_line(mode="eager", us={"weft/auto": 1.0, "sequential/default": 9.0})
    published.add_measured_entry("1.5x as fast")
    (source,) = published.check("weft is 1.5x as fast.")
    assert (source.bench, source.baseline, source.changes, source.machine) == ("x", "NCCL", 0, "2 x NVIDIA H200")


@pytest.mark.parametrize(
    "figure",
    [
        *("3.1x", "40 us", "12%", "5 to 7 ms", "300 GB/s", "2.5 times", "2-3 ms", "-12%", "12 percent", "3 hours", "1.5-fold"),
        *("twice as fast as that", "six times as long", "a factor of 2.4", "1.3x"),
    ],
)
def test_a_number_in_no_entry(published: Published, figure: str) -> None:
    (fault,) = published.find_errors(f"weft takes {figure} there.")
    assert "is in no entry" in fault
    published.stated.append({"document": "README.md", "text": f"takes {figure}", "because": "a setting"})
    assert published.find_errors(f"weft takes {figure} there.") == []


@pytest.mark.parametrize(
    "text", ["8192 x 4096", "on 2 x H200", "`40 us`", "version 2.11", "arXiv 2401.16677", "```text\n40 us\n```"]
)
def test_numbers_that_are_no_figures(published: Published, text: str) -> None:
    assert published.find_errors(f"It is {text}\n" if "```" not in text else f"\n{text}\n") == []


def test_a_figure_that_its_lines_do_not_give(published: Published) -> None:
    published.add_line()
    published.add_measured_entry("1.6x as fast")
    (fault,) = published.find_errors("weft is 1.6x as fast.")
    assert "give 1.5" in fault


def test_both_ends_of_a_range(published: Published) -> None:
    published.add_line()
    published.add_line(us={"weft/auto": 1.0, "sequential/default": 2.0})
    published.add_measured_entry("1.5 to 2.0 times", reduce="range")
    assert published.find_errors("weft is 1.5 to 2.0 times as fast") == []
    published.add_line(us={"weft/auto": 1.0, "sequential/default": 1.1})
    assert "give 1.1" in published.find_errors("weft is 1.5 to 2.0 times as fast")[0]


def test_words_that_left_their_document(published: Published) -> None:
    published.add_line()
    published.add_measured_entry("1.5x as fast")
    assert "there 0 times" in published.find_errors("weft is fast.")[0]


@with_history
def test_a_commit_that_is_not_in_the_history(published: Published) -> None:
    published.add_line(commit="0123456789")
    published.add_measured_entry("1.5x as fast")
    assert "not in the history" in published.find_errors("weft is 1.5x as fast.")[0]


@with_history
def test_a_line_that_is_too_old(published: Published) -> None:
    published.add_line(commit=get_first_commit())
    published.add_measured_entry("1.5x as fast")
    assert f"README.md allows {ledger.OLDEST['README.md']}" in published.find_errors("weft is 1.5x as fast.")[0]


@with_history
def test_a_machine_that_nobody_can_use_now(published: Published) -> None:
    """Its lines may be of any age, but the document has to say of which day they are."""
    commit = get_first_commit()
    published.add_line(commit=commit, machine="8 x NVIDIA B200")
    published.add_measured_entry("1.5x as fast")
    day = text_tables.date_of(commit)
    assert f"has to say {day}" in published.find_errors("weft is 1.5x as fast.")[0]
    assert published.find_errors(f"On {day} weft was 1.5x as fast.") == []


def test_gains_are_computed_from_the_fastest_alternative(published: Published) -> None:
    published.add_line(us={"weft/auto": 2.0, "sequential/default": 3.0, "peer/async_tp": 2.5})
    published.entries.append(
        {
            "document": "README.md",
            "text": "1.25x as fast",
            "bench": "x",
            "where": {"case": "one|two"},
            "value": "gain",
            "baseline": "the fastest alternative",
        }
    )
    assert published.find_errors("It is 1.25x as fast.") == []


def test_every_number_of_an_entry_is_computed(published: Published) -> None:
    published.add_line()
    published.add_measured_entry("1.5 or 1.7x as fast")
    assert "give 1.5" in published.find_errors("It is 1.5 or 1.7x as fast.")[0]


def test_words_that_are_there_twice(published: Published) -> None:
    published.add_line()
    published.add_measured_entry("1.5x as fast")
    assert "there 2 times" in published.find_errors("It is 1.5x as fast. On CPUs it is 1.5x as fast.")[0]


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        ("measurd", {"document": "README.md", "text": "40 us", "because": "a setting"}),
        ("stated", {"document": "README.md", "text": "40 us"}),
        ("stated", {"document": "README.md", "text": "40 us", "because": ""}),
        ("measured", {"document": "README.md", "text": "40 us", "because": "a setting"}),
    ],
)
def test_entries_have_the_keys_of_their_kind(
    published: Published, monkeypatch: pytest.MonkeyPatch, kind: str, entry: dict[str, str]
) -> None:
    monkeypatch.setattr(ledger, "read_entries", lambda: {kind: [entry]})
    assert "is not as ledger.toml says" in published.find_errors("It takes 40 us.")[0]


def test_without_the_history_days_are_those_that_were_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    days = json.loads(text_tables.DAYS.read_text(encoding="utf-8"))
    monkeypatch.setattr(text_tables, "whole_history", lambda: False)
    commit, day = next(iter(days.items()))
    assert text_tables.date_of.__wrapped__(commit) == day
    with pytest.raises(ValueError, match="the history is not here"):
        text_tables.date_of.__wrapped__("0123456")


@with_history
def test_kept_days_are_those_of_the_history() -> None:
    for commit, day in json.loads(text_tables.DAYS.read_text(encoding="utf-8")).items():
        assert text_tables.git("log", "-1", "--format=%as", commit) == day
