"""The tables of docs/design.md on the path of a call."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _table(heading: str) -> str:
    """The table whose last column has this heading."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.partition("\n## The path of a call\n")[2].partition("\n## ")[0]
    return section.partition(f"| {heading} |\n")[2].partition("\n\n")[0]


def walked() -> list[str]:
    """The files of the walk on CPUs, in its order."""
    return re.findall(r"^\| `([\w/.]+\.py)` \|", _table("what it does in a later call"), re.MULTILINE)


def walked_when_warm() -> list[tuple[str, str]]:
    """(file, function) of a warm call on a GPU, in its order."""
    return re.findall(r"^\| `([\w/.]+\.py)` \| `([\w.]+)` \|", _table("what it does in a warm call"), re.MULTILINE)
