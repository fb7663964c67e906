"""What `make size` counts."""

from __future__ import annotations

from pathlib import Path

import size

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
