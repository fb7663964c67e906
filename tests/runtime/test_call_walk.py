"""The path of a call that docs/design.md walks: the files that it names are those that a later call on CPUs passes through, and
each function of the table for GPUs calls the next one."""

from __future__ import annotations

import ast
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from call_walk import walked, walked_on_gpus
from conftest import RankFixture

import weft

PACKAGE = Path(weft.__file__).parent
WAITS = ("RankGroup.wait_until", "RankGroup._await_count", "HostProgram._steps")
"""Functions that wait for peers, or are called where a lane has to wait. What they call depends on when the peers come."""
MOST_CALLS = 120


def _passed_through() -> list[tuple[str, str]]:
    """(file, function) of weft's functions that a later call calls on the caller's thread, in their order, without those that
    are called within a wait for peers."""
    a, b = torch.ones(8, 16), torch.ones(16, 8)
    weft.close()
    for _ in range(3):
        weft.all_gather_matmul(a, b, schedule="flag_gated:2")
    seen: list[tuple[str, str]] = []
    waiting = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal waiting
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event not in ("call", "return") or not path.is_relative_to(PACKAGE):
            return
        if event == "return":
            waiting -= name in WAITS
            return
        if not waiting and name not in WAITS:
            seen.append((path.relative_to(PACKAGE).as_posix(), name))
        waiting += name in WAITS

    sys.setprofile(note)
    try:
        weft.all_gather_matmul(a, b, schedule="flag_gated:2")
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.ranks
def test_a_call_passes_through_the_files_of_the_walk(ranks: RankFixture) -> None:
    for found in ranks(2).run(_passed_through):
        assert list(dict.fromkeys(file for file, _ in found)) == walked(), found
        assert len(found) <= MOST_CALLS


def _functions(file: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file by name, methods as Class.method."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{method.name}": method for method in node.body if isinstance(method, ast.FunctionDef)}
    return found


def _called(function: ast.FunctionDef) -> set[str]:
    """The names of what a function calls, and the argument `launched_by`, which kernels are launched by."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            called = [node.func, *(call for call in ast.walk(node.func) if isinstance(call, ast.Name))]
            names |= {
                one.attr if isinstance(one, ast.Attribute) else one.id
                for one in called
                if hasattr(one, "attr") or hasattr(one, "id")
            }
    return names


def test_each_function_of_a_gpu_call_calls_the_next_one() -> None:
    walk = [("runtime/bound.py", "BoundProgram.run"), *walked_on_gpus()]
    assert len(walk) > 5
    for (file, function), (_, following) in pairwise(walk):
        name = following.rpartition(".")[2]
        name = "launched_by" if name == "__call__" else name
        assert name in _called(_functions(file)[function]), f"{file}: {function} does not call {following}"
    last_file, last = walk[-1]
    assert last in _functions(last_file)
