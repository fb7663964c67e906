"""One name, one meaning: no two classes of weft share a public name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
BOTH_PUBLIC = {"SendReceive"}
"""weft.SendReceive is what a user passes to weft.concurrent. The step of a Schedule that it becomes has the same name in the
JSON of schedules."""


def shared(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """By name of a public class, wherever it is defined, the files that have one of that name, where these are several."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_no_two_classes_share_a_name() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted((ROOT / "weft").rglob("*.py"))}
    assert {name: paths for name, paths in shared(sources).items() if name not in BOTH_PUBLIC} == {}


def test_a_pair_is_seen() -> None:
    sources = {"a.py": "class Run: ...", "b.py": "class Other:\n    class Run: ...", "c.py": "class _Run: ...\nclass One: ..."}
    assert shared(sources) == {"Run": ["a.py", "b.py"]}
