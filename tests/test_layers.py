"""The layers of weft: a module imports only from its own layer or a lower one, and each layer from few other packages.

The test reads every import of every module, also those inside functions and behind TYPE_CHECKING: an import put off is
still a dependency. The package's own `__init__` is the front door. It hands out names from any layer, but only when asked
for one, so it is held to the standard library at import time by test_import; and no module of weft goes in through it.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "weft").rglob("*.py"))
FRONT_DOOR = "weft"
OUTER = 7

LAYERS: dict[str, int] = {
    **dict.fromkeys(["codec", "errors", "machine", "problem", "settings", "span", "version"], 0),
    **dict.fromkeys(["between", "cache", "checker", "pieces", "rules", "schedule", "schedules"], 1),
    **dict.fromkeys(["shapes", "timelines", "together", "work"], 1),
    **dict.fromkeys(["models", "planner", "results", "sim"], 2),
    **dict.fromkeys(["arrival", "driver", "kernels", "memory", "rendezvous", "team", "triton"], 3),
    **dict.fromkeys(["controls"], 4),
    **dict.fromkeys(["execute"], 5),
    **dict.fromkeys(["beside", "calibrate", "characterize", "collectives", "doctor", "hooks", "inductor"], 6),
    **dict.fromkeys(["library", "nn", "ops", "run"], 6),
    **dict.fromkeys(["__main__", "cli", "report"], OUTER),
}
"""Layer by name below weft. `team` stands for team.py, team_x.py and team/*."""

PACKAGES: dict[int, set[str]] = {
    2: {"numpy", "simpy"},
    3: {"atomicshm", "cuda", "torch", "triton"},
    OUTER: {"google", "plotly", "rich", "typer"},
}
"""Packages beside the standard library that may be imported from this layer on."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def layer(module: str) -> int | None:
    """The layer of a module of weft, or None where LAYERS does not say."""
    name = module.split(".")[1]
    return LAYERS.get(name, LAYERS.get(name.split("_")[0]))


def imports(source: str, module: str, *, package: bool) -> set[str]:
    """Full names of what `source` imports: modules where weft has one of that name, else the module they come from."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, package=package)
            found.update(f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names)
    return found


def _absolute(node: ast.ImportFrom, module: str, *, package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + package]
    return ".".join([*base, node.module] if node.module else base)


def faults(module: str, imported: set[str]) -> list[str]:
    """Every import of `module` that the rules forbid, in words."""
    own = OUTER if module == FRONT_DOOR else layer(module)
    if own is None:
        return [f"{module} has no layer; name it in LAYERS"]
    allowed = set(sys.stdlib_module_names).union(*(names for low, names in PACKAGES.items() if low <= own))
    return [fault for name in sorted(imported) if (fault := _fault(module, own, name, allowed))]


def _fault(module: str, own: int, name: str, allowed: set[str]) -> str | None:
    top = name.split(".")[0]
    if top != "weft":
        return None if top in allowed else f"{module} (layer {own}) imports {name}, which its layer may not"
    if name == FRONT_DOOR:
        return None if own == OUTER else f"{module} imports weft itself; import from the module that has the name"
    other = layer(name)
    if other is None:
        return f"{module} imports {name}, which has no layer; name it in LAYERS"
    return f"{module} (layer {own}) imports {name} (layer {other})" if other > own else None


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_from_its_layer_or_below(module: str) -> None:
    path = MODULES[module]
    imported = imports(path.read_text(encoding="utf-8"), module, package=path.name == "__init__.py")
    assert faults(module, imported) == []


def test_the_design_has_these_layers() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d|outer) \| ([^|]*) \|", text.partition("\n## Layers\n")[2], re.MULTILINE)
    named = {name: OUTER if row == "outer" else int(row) for row, names in rows for name in re.findall(r"`(\w+)", names)}
    assert named == {name: number for name, number in LAYERS.items() if name != "__main__"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("weft.problem", "import numpy"),
        ("weft.schedule", "def f():\n    import torch"),
        ("weft.schedules.builder", "from ..sim.engine import run"),
        ("weft.schedule", "from weft import Problem"),
        ("weft.planner.choose", "from weft.execute.trial import measure"),
        ("weft.execute.host", "from weft.report import write_report"),
        ("weft.ops", "import plotly.graph_objects"),
        ("weft.novelty", "import json"),
        ("weft.problem", "from weft.novelty import x"),
    ],
)
def test_forbidden_imports_are_seen(module: str, source: str) -> None:
    assert len(faults(module, imports(source, module, package=False))) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("weft.schedules.builder", "from ..problem import split\nfrom . import build"),
        ("weft.sim.cost", "import numpy as np\nfrom weft.schedule import Gemm"),
        ("weft.execute.trial", "import torch\nfrom weft.planner import values"),
        ("weft.team_relay", "from weft.schedule import Wait"),
        ("weft.cli.run", "import typer\nfrom weft.report import write_report"),
    ],
)
def test_allowed_imports_pass(module: str, source: str) -> None:
    assert faults(module, imports(source, module, package=False)) == []
