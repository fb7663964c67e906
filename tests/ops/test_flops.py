"""FlopCounterMode counts what a rank multiplies inside of weft's operators, as it counts torch's own matmuls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from float8 import quantise
from rank_pools import on_ranks
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import weft
from weft.ops import all_reduce, all_to_all, collective, column_parallel, embedding, experts, tensor_parallel  # noqa: F401
from weft.ops.column_parallel import column_parallel_linears
from weft.ops.schema import FORMULAS

M, K, N = 8, 32, 64
Tensor = torch.Tensor
ELEMENTWISE = {
    *("collective", "rows_of_ranks", "embedding_bag_all_to_all", "embedding_bag_gradients", "embedding_bag_update"),
    *("experts_route", "experts_spread", "experts_total", "experts_total_backward", "experts_quantise"),
    *("swiglu", "swiglu_backward", "all_reduce_norm"),
}
"""The operators that multiply no matrices."""


def test_every_operator_that_multiplies_has_a_formula() -> None:
    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("weft::")}
    names = {name for name in names if not name.startswith("test")}
    bases = {name.removesuffix("_forward") for name in names}
    assert bases <= set(FORMULAS) | ELEMENTWISE, bases - set(FORMULAS) - ELEMENTWISE
    assert not set(FORMULAS) & ELEMENTWISE
    for name in names:
        counted = getattr(torch.ops.weft, name) in flop_registry
        assert counted == (name.removesuffix("_forward") in FORMULAS), name


def _of_torch(rows: int, k: int, n: int, *, backward: bool) -> int:
    """What torch counts for a product of these sizes, with its gradients."""
    a, b = torch.ones(rows, k, requires_grad=backward), torch.ones(k, n, requires_grad=backward)
    return _count(lambda: a @ b, backward=backward)


def _count(call: Callable[[], Any], *, backward: bool) -> int:
    with FlopCounterMode(display=False) as counter:
        found = call()
        if backward:
            sum(
                one.sum() for one in (found if isinstance(found, (list, tuple)) else [found]) if one.is_floating_point()
            ).backward()
    return int(counter.get_total_flops())


def _leaf(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


@on_ranks(2)
def test_a_backward_counts_the_rows_of_each_expert() -> None:
    """Forward and backward of 1 and 3 experts on each rank, one without rows: as torch counts the products of their rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 3):
        splits = [torch.tensor([[2 + of, 0, 3][:count], [1, 2, 0][:count]]) for of in range(size)]
        arriving = sum(int(each[rank].sum()) for each in splits)

        def layer(x: Tensor, up: Tensor, down: Tensor, splits: Tensor = splits[rank]) -> Tensor:
            hidden, counts = weft.all_to_all_matmul(x, up, splits=splits, max_rows=40)
            return weft.matmul_all_to_all(hidden, down, splits=counts, max_rows=40)[0]

        x = _leaf(int(splits[rank].sum()), K)
        found = _count(lambda: layer(x, _leaf(count, K, N), _leaf(count, N, K)), backward=True)  # noqa: B023
        expected = _of_torch(arriving, K, N, backward=True) + _of_torch(arriving, N, K, backward=True)
        assert found == expected, (count, found, expected)


@on_ranks(2)
def test_a_rank_counts_its_own_products() -> None:
    """Forward and backward of each operator: three products of the sizes of this rank's."""
    size, rank = dist.get_world_size(), dist.get_rank()
    k, n, all_rows, world = K // size, N // size, M * size, dist.group.WORLD
    assert world is not None
    cases: dict[str, tuple[Callable[[], Any], tuple[int, int, int]]] = {
        "all_gather_matmul": (lambda: weft.all_gather_matmul(_leaf(M, K), _leaf(K, n)), (all_rows, K, n)),
        "3 dimensions": (lambda: weft.all_gather_matmul(_leaf(M // 4, 4, K), _leaf(K, n)), (all_rows, K, n)),
        "several b": (lambda: weft.all_gather_matmul(_leaf(M, K), [_leaf(K, n), _leaf(K, n)]), (all_rows, K, 2 * n)),
        "kept": (lambda: weft.all_gather_matmul(_leaf(M, K), _leaf(K, n), keep_gathered=True), (all_rows, K, n)),
        "matmul_reduce_scatter": (lambda: weft.matmul_reduce_scatter(_leaf(all_rows, k), _leaf(k, N)), (all_rows, k, N)),
        "matmul_all_reduce": (lambda: weft.matmul_all_reduce(_leaf(M, k), _leaf(k, N)), (M, k, N)),
        "matmul_all_to_all": (lambda: weft.matmul_all_to_all(_leaf(all_rows, K), _leaf(K, N)), (all_rows, K, N)),
        "all_to_all_matmul": (lambda: weft.all_to_all_matmul(_leaf(all_rows, K), _leaf(K, N)), (all_rows, K, N)),
        "to columns": (lambda: weft.matmul_all_to_all(_leaf(M, K), _leaf(K, N), split_dim=-1), (M, K, N)),
        "from columns": (lambda: weft.all_to_all_matmul(_leaf(all_rows, k), _leaf(K, N), gather_dim=-1), (M, K, N)),
        "column linears": (
            lambda: column_parallel_linears(_leaf(M, K), [_leaf(n, K), _leaf(n, K)], world.group_name, "auto"),
            (M, K, 2 * n),
        ),
    }
    for name, (call, sizes) in cases.items():
        assert _count(call, backward=True) == _of_torch(*sizes, backward=True), name
        with torch.inference_mode():
            assert _count(call, backward=False) == _of_torch(*sizes, backward=False), name
    before = _count(lambda: weft.all_gather_matmul(_leaf(M, K), _leaf(K, n), schedule="shard_p2p"), backward=False)
    assert before == _of_torch(all_rows, K, n, backward=False)
    splits = torch.tensor([2 + rank, 1] + [0] * (size - 2))
    arriving = [sum(2 + other for other in range(size)), size] + [0] * (size - 2)
    out = _count(lambda: weft.all_to_all_matmul(_leaf(M, K), _leaf(K, N), splits=splits, max_rows=40), backward=False)
    assert out == _of_torch(arriving[rank], K, N, backward=False)
    out = _count(lambda: weft.matmul_all_to_all(_leaf(M, K), _leaf(K, N), splits=splits, max_rows=40), backward=False)
    assert out == _of_torch(3 + rank, K, N, backward=False)


@on_ranks(2)
def test_products_of_fp8_count_as_any_others() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    k, n = K // size, N // size
    for op, rows, inner, columns in (
        ("all_gather_matmul", M, K, n),
        ("matmul_reduce_scatter", M * size, k, N),
        ("matmul_all_reduce", M, k, N),
        ("matmul_all_to_all", M * size, K, N),
        ("all_to_all_matmul", M * size, K, N),
    ):
        (a, of_a), (b, of_b) = (
            quantise(torch.ones(rows, inner), "rowwise", "a"),
            quantise(torch.ones(inner, columns), "rowwise", "b"),
        )
        call = getattr(weft, op)
        found = _count(lambda: call(a, b, scale_a=of_a, scale_b=of_b), backward=False)  # noqa: B023
        assert found == 2 * (rows * size if op == "all_gather_matmul" else rows) * inner * columns, op
    splits = torch.tensor([2, 1] + [0] * (size - 2))
    (a, of_a), (b, of_b) = quantise(torch.ones(M, K), "rowwise", "a"), quantise(torch.ones(K, N), "rowwise", "b")
    options: dict[str, Any] = {"splits": splits, "max_rows": 40, "scale_a": of_a, "scale_b": of_b}
    assert _count(lambda: weft.matmul_all_to_all(a, b, **options), backward=False) == 2 * 3 * K * N
    assert _count(lambda: weft.all_to_all_matmul(a, b, **options), backward=False) == 2 * (2 - rank) * size * K * N
    x, (weight, scale) = torch.ones(3, 2, K), quantise(torch.ones(K, N), "rowwise", "b")
    linears = column_parallel.quantised_linears
    assert _count(lambda: linears(x, [weight.t()], [scale], "rowwise"), backward=False) == 2 * 6 * K * N


_LATE = """
import importlib.util, sys, tempfile
import torch, torch.distributed as dist
import weft
dist.init_process_group("gloo", store=dist.FileStore(tempfile.mkstemp()[1], 1), rank=0, world_size=1)
if sys.argv[1] != "within":
    weft.all_gather_matmul(torch.ones(2, 3), torch.ones(3, 4))
    assert "torch.utils.flop_counter" not in sys.modules
if sys.argv[1] == "looked for":
    assert importlib.util.find_spec("torch.utils.flop_counter") is not None
    assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    weft.all_gather_matmul(torch.ones(2, 3), torch.ones(3, 4))
with FlopCounterMode(display=False) as again:
    weft.matmul_all_reduce(torch.ones(2, 3), torch.ones(3, 4))
print(counter.get_total_flops(), again.get_total_flops(), sum(type(one).__name__ == "_AfterImport" for one in sys.meta_path))
weft.close()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("first", ["before", "within", "looked for"])
def test_formulas_are_there_whichever_module_is_loaded_first(first: str) -> None:
    """weft's operators are defined at their first use, which may be within a FlopCounterMode."""
    done = subprocess.run([sys.executable, "-c", _LATE, first], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["48", "48", "0"]
