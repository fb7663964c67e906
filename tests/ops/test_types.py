"""What a type checker makes of the operators: the result's type follows from the arguments'."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_overloads

import pytest

from weft import ops

USES = """
from collections.abc import Sequence
from typing import assert_type

import torch
from torch import Tensor

import weft

def uses(a: Tensor, b: Tensor, bs: Sequence[Tensor], listed: list[Tensor]) -> None:
    assert_type(weft.all_gather_matmul(a, b), Tensor)
    assert_type(weft.all_gather_matmul(a, b, return_gathered=False), Tensor)
    assert_type(weft.all_gather_matmul(a, b, None, schedule="auto", return_gathered=True), tuple[Tensor, Tensor])
    assert_type(weft.all_gather_matmul(a, bs, gather_dim=1), list[Tensor])
    assert_type(weft.all_gather_matmul(a, (b, b)), list[Tensor])
    assert_type(weft.all_gather_matmul(a, listed, rows=3, return_gathered=True), tuple[list[Tensor], Tensor])
    assert_type(weft.matmul_reduce_scatter(a, b), Tensor)
"""


@pytest.mark.slow
def test_the_result_follows_from_the_arguments(tmp_path: Path) -> None:
    """In a process of its own: mypy lets Python's stack grow for good, and has its garbage collected seldom."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "uses.py").write_text(USES, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(tmp_path / "uses.py")]
    root = Path(__file__).parents[2]  # where the configuration is
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_overloads_take_what_the_operator_takes() -> None:
    """The scales of FP8 operands are taken by the last one alone."""

    def shape(function: object) -> list[tuple[str, object]]:
        return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]  # type: ignore[arg-type]

    found = get_overloads(ops.all_gather_matmul)
    assert len(found) == 5
    whole = shape(ops.all_gather_matmul)
    assert [shape(each) for each in found] == [whole[:-1]] * 4 + [whole]
