"""Prints how large the tree is (`make size`): files, lines and code lines of each room of the wheel, and of what is not in it.

A code line is not blank, and holds neither only a comment nor a docstring. A string after an assignment that explains a
constant or a field counts as a docstring, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
OTHERS = ("studies", "tests", "benchmarks")
"""Folders with code that is not in the wheel."""


class Size(NamedTuple):
    """The size of some Python files."""

    files: int = 0
    lines: int = 0
    code: int = 0


def code_lines(source: str) -> int:
    """Return the number of code lines of a module."""
    held = [bool(line.strip()) and not line.strip().startswith("#") for line in source.splitlines()]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held[node.lineno - 1 : node.end_lineno] = [False] * ((node.end_lineno or 0) - node.lineno + 1)
    return sum(held)


def size(paths: Iterable[Path]) -> Size:
    """Return the size of these files together."""
    sources = [path.read_text(encoding="utf-8") for path in paths]
    return Size(len(sources), sum(len(source.splitlines()) for source in sources), sum(map(code_lines, sources)))


def sizes(root: Path) -> list[tuple[str, Size]]:
    """Return the size of each room, largest first, of the wheel, and of each folder that is not in it."""
    package = root / "weft"
    rooms = [(path.name, size(path.rglob("*.py"))) for path in package.iterdir() if path.is_dir() and any(path.rglob("*.py"))]
    rooms.append(("weft itself", size(package.glob("*.py"))))
    others = [(name, size((root / name).rglob("*.py"))) for name in OTHERS]
    wheel = size(package.rglob("*.py"))
    return [*sorted(rooms, key=lambda room: -room[1].code), ("the wheel", wheel), *(each for each in others if each[1].files)]


def main() -> None:
    print(f"{'':12} {'files':>6} {'lines':>8} {'code lines':>11}")
    for name, found in sizes(ROOT):
        print(f"{name:12} {found.files:6} {found.lines:8,} {found.code:11,}")


if __name__ == "__main__":
    main()
