"""The rooms of weft: a module imports only from its own room or from one above it in ROOMS, and each room from few packages.
weft_studies comes after all rooms: no room imports from it.

The test reads every import of every module, also those inside functions and behind TYPE_CHECKING: an import put off is
still a dependency. The package's own `__init__` and weft.schedule are the front doors. They hand out names from any room,
but only when asked for one, so test_import holds them to the standard library at import time. No module imports from them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "studies"
SOURCES = sorted((*(ROOT / "weft").rglob("*.py"), *(STUDIES / "weft_studies").rglob("*.py")))
FRONT_DOORS = ("weft", "weft.schedule")

ROOMS = [
    "core",
    "schedules",
    "checker",
    "perf",
    "planner",
    "compat",
    "comm",
    "triton",
    "kernels",
    "runtime",
    "ops",
    "overlap",
    "models",
    "tools",
    "report",
    "cli",
    "__main__",
    "weft_studies",
]
"""From the room that all others may import from, to the one that nothing imports. The last one is a distribution of its own."""

PACKAGES: dict[str, set[str]] = {
    "perf": {"numpy", "simpy"},
    "compat": {"atomicshm", "cuda", "torch", "triton"},
    "report": {"plotly"},
    "cli": {"rich", "typer"},
}
"""Packages beside the standard library that may be imported from this room on."""
OPTIONAL = {f"weft.planner.models.{name}": {"torch", "transformers"} for name in ("config", "modules")}
OPTIONAL["weft.models.float8"] = {"torchao"}
"""Modules that may import packages which their room may not: inside functions, and only where they are installed. A config of a
model is read with the modules that transformers builds from it. weft.models.float8 is itself imported inside functions."""


def module_name(path: Path) -> str:
    parts = path.relative_to(STUDIES if STUDIES in path.parents else ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def room(module: str) -> int | None:
    """Where a module's room stands in ROOMS; None if it is in none of them."""
    name = "weft_studies" if module.startswith("weft_studies") else module.split(".")[1]
    return ROOMS.index(name) if name in ROOMS else None


def imports(source: str, module: str, *, package: bool, types: bool = True) -> set[str]:
    """Full names of what `source` imports: modules where weft has one of that name, else the module they come from. types:
    also what is behind TYPE_CHECKING."""
    found: set[str] = set()
    for node in _nodes(ast.parse(source), types=types):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, package=package)
            found.update(f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names)
    return found


def _nodes(tree: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    """All nodes of a module; without `types` those behind TYPE_CHECKING are left out."""
    yield tree
    behind = isinstance(tree, ast.If) and ast.unparse(tree.test).endswith("TYPE_CHECKING")
    for child in tree.orelse if isinstance(tree, ast.If) and behind and not types else ast.iter_child_nodes(tree):
        yield from _nodes(child, types=types)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, in any number of steps."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, rest = set[str](), [start]
        while rest:
            new = graph.get(rest.pop(), set()) - found
            found |= new
            rest += new
        reached[start] = found
    inside = {module: sorted(other for other in found if module in reached.get(other, ())) for module, found in reached.items()}
    return sorted({tuple(found): found for module, found in inside.items() if module in found}.values())


def _absolute(node: ast.ImportFrom, module: str, *, package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + package]
    return ".".join([*base, node.module] if node.module else base)


def faults(module: str, imported: set[str]) -> list[str]:
    """Every import of `module` that the rules forbid, in words."""
    own = len(ROOMS) if module in FRONT_DOORS else room(module)
    if own is None:
        return [f"{module} is in no room; put it into one of ROOMS"]
    allowed = set(sys.stdlib_module_names).union(*(names for first, names in PACKAGES.items() if ROOMS.index(first) <= own))
    allowed |= OPTIONAL.get(module, set())
    return [fault for name in sorted(imported) if (fault := _fault(module, own, name, allowed))]


def _fault(module: str, own: int, name: str, allowed: set[str]) -> str | None:
    top = name.split(".")[0]
    if top not in ("weft", "weft_studies"):
        return None if top in allowed else f"{module} imports {name}, which its room may not"
    if name in FRONT_DOORS:
        return None if own == len(ROOMS) else f"{module} imports {name} itself; import from the module that has the name"
    other = room(name)
    if other is None:
        return f"{module} imports {name}, which is in no room; put it into one of ROOMS"
    return f"{module} imports {name}, whose room comes later" if other > own else None


def test_imports_only_from_its_room_or_one_above() -> None:
    found = []
    for module, path in MODULES.items():
        found += faults(module, imports(path.read_text(encoding="utf-8"), module, package=path.name == "__init__.py"))
    assert found == []


def test_no_modules_import_each_other() -> None:
    """Also behind TYPE_CHECKING. Packages are left out: what their __init__ hands out comes from the module that has it."""
    graph = {
        module: imports(path.read_text(encoding="utf-8"), module, package=False) & MODULES.keys()
        for module, path in MODULES.items()
        if path.name != "__init__.py"
    }
    assert circles(graph) == []


def test_circles_are_seen() -> None:
    source = "if TYPE_CHECKING:\n    import weft.a\nelse:\n    import weft.b\ndef f():\n    import weft.c"
    assert imports(source, "weft.d", package=False, types=False) == {"weft.b", "weft.c"}
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert circles(graph) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("weft.core.problem", "import numpy"),
        ("weft.core.schedule", "def f():\n    import torch"),
        ("weft.schedules.builder", "from ..perf.engine import run"),
        ("weft.core.schedule", "from weft import Problem"),
        ("weft.runtime.host", "from weft.report import write_report"),
        ("weft.cli.simulate", "def f():\n    import weft_studies"),
        ("weft_studies.t3.evaluation", "import pandas"),
        ("weft.novelty", "import json"),
    ],
)
def test_forbidden_imports_are_seen(module: str, source: str) -> None:
    assert len(faults(module, imports(source, module, package=False))) == 1
