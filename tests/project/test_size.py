"""What `make size` counts, and how large a room of the package may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import size

REACHED = {
    "runtime": (33, 7_160),
    "models": (23, 4_070),
    "kernels": (19, 3_560),
    "perf": (18, 2_955),
    "ops": (16, 2_890),
    "schedules": (15, 2_610),
    "overlap": (14, 2_160),
    "checker": (12, 2_150),
    "tools": (11, 2_050),
    "core": (15, 2_024),
    "planner": (11, 1_640),
    "comm": (8, 1_380),
    "cli": (9, 1_388),
    "compat": (9, 1_230),
    "report": (6, 870),
    "triton": (4, 310),
    "weft itself": (3, 240),
}
"""Files and code lines of each room, as they were when the tree was last made smaller. Lower a number with what lowers it."""
MORE_FILES, MORE_LINES = 1, 0.03
"""A room may have one more file, and 3% more code lines."""
MOST_FILES = 230
"""Of the whole wheel."""

SOURCE = '''"""A module.

Its text has three lines.
"""

# A comment.
X = 1  # a comment after code
"""What X is."""


def f() -> str:
    """A function."""
    return """a value
of two lines"""
'''


def test_what_a_code_line_is() -> None:
    assert size.code_lines(SOURCE) == len(["X", "def", "return", "of two lines"])


def test_rooms_add_up_to_the_wheel(tmp_path: Path) -> None:
    for name in ("weft/__init__.py", "weft/core/a.py", "weft/core/deep/b.py", "weft/perf/c.py", "tests/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(SOURCE, encoding="utf-8")
    files = {name: found.files for name, found in size.sizes(tmp_path)}
    assert files == {"core": 2, "perf": 1, "weft itself": 1, "the wheel": 4, "tests": 1}
    assert dict(size.sizes(tmp_path))["the wheel"] == (4, 4 * 14, 4 * 4)


def too_large(name: str, found: size.Size) -> list[str]:
    """What a room has more of than it may, each with what to do."""
    files, code = REACHED.get(name, (0, 0))
    more = {
        "files": (found.files, files, files + MORE_FILES, "merge those that a reader opens together"),
        "code lines": (found.code, code, round(code * (1 + MORE_LINES)), "delete what the new code replaces"),
    }
    return [
        f"{name} has {now:,} {what}, and had {had:,}: {do}, or raise the number in REACHED and say in the commit what it buys"
        for what, (now, had, most, do) in more.items()
        if now > most
    ]


def test_no_room_has_grown() -> None:
    found = dict(size.sizes(size.ROOT))
    wheel = found["the wheel"]
    rooms = {name: each for name, each in found.items() if name not in ("the wheel", *size.OTHERS)}
    assert [fault for name, each in rooms.items() for fault in too_large(name, each)] == []
    assert wheel.files <= MOST_FILES, f"the wheel has {wheel.files} files; merge those that a reader opens together"
    assert REACHED.keys() == rooms.keys(), "REACHED lists the rooms of the package"


@pytest.mark.parametrize(
    ("files", "code", "words"),
    [(0, 0, []), (1, 30, []), (2, 0, ["merge"]), (0, 31, ["delete"]), (2, 31, ["merge", "delete"])],
)
def test_a_room_that_grows_is_seen(monkeypatch: pytest.MonkeyPatch, files: int, code: int, words: list[str]) -> None:
    monkeypatch.setitem(REACHED, "core", (10, 1_000))
    faults = too_large("core", size.Size(10 + files, 5_000, 1_000 + code))
    assert [word in fault for word, fault in zip(words, faults, strict=True)] == [True] * len(words)


def test_a_room_that_is_not_listed_is_too_large() -> None:
    assert len(too_large("novelty", size.Size(2, 10, 10))) == 2
