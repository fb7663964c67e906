"""Tiles that travel as words, as an H100 waits for them: what Triton makes of `weft.kernels.mailbox.received`."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from compiled import all_reduce_for_a_gpu

from weft.core.problem import Problem, split

_LOAD = re.compile(r"tt\.load .*isVolatile = true.* : tensor<(\d+)x(\d+)x!tt\.ptr<i32>, (#\w+)>")
_PAIR = r"\[(\d+), (\d+)\]"
_LAYOUT = f"{{}} = #ttg\\.blocked<{{{{sizePerThread = {_PAIR}, threadsPerWarp = {_PAIR}, warpsPerCTA = {_PAIR}"


def looks(text: str) -> Counter[tuple[int, int, bool]]:
    """From Triton's intermediate text: loads of words by rows, columns, and whether several threads load each."""
    found: Counter[tuple[int, int, bool]] = Counter()
    for rows, cols, layout in _LOAD.findall(text):
        numbers = re.search(_LAYOUT.format(layout), text)
        assert numbers, layout
        each = list(map(int, numbers.groups()))
        held = each[0] * each[2] * each[4] > int(rows) or each[1] * each[3] * each[5] > int(cols)
        found[int(rows), int(cols), held] += 1
    return found


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize(
    ("op", "m", "n", "world_size", "hops", "expected"),
    [
        ("matmul_all_reduce", 4, 1992, 4, "two", {(16, 4, True): 8, (16, 16, False): 1}),
        ("matmul_all_reduce", 1, 8192, 8, "two", {(16, 4, True): 16, (16, 32, False): 1}),
        ("matmul_all_reduce", 4, 1992, 4, "one", {(16, 16, False): 4}),
        ("matmul_all_reduce", 128, 8192, 4, "two", None),
        ("matmul_reduce_scatter", 16, 1992, 4, "scatter", {(4, 16, True): 8}),
    ],
)
def test_words_that_several_threads_load_are_looked_at_again(
    op: Any, m: int, n: int, world_size: int, hops: Any, expected: dict[tuple[int, int, bool], int] | None
) -> None:
    """The thread whose value counts may have looked before the one that ended the wait: a rank's part would be missing."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from weft.kernels import all_reduce as kernel

    problem = Problem(op=op, m=m, n=n, k=8 * world_size, world_size=world_size)
    owned = problem.shards if hops == "scatter" else split(problem.n, world_size)
    layout = kernel.plan(problem, 0, owned, hops=hops, multiply=True, device=torch.device("cuda"), sms=132)
    found = looks(str(all_reduce_for_a_gpu(kernel, layout).asm["ttgir"]))
    assert found
    if expected is not None:
        assert found == expected
    sources = {1, world_size}
    for (*_, shared), count in found.items():
        assert count / (2 if shared else 1) in sources
