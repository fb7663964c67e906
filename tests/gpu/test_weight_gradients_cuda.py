"""The backward of all_gather_matmul as one call on GPUs: every family, as graphs and launch by launch, ranks late in turn."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_gpus import GPUS, NEEDS_TWO, alarm, late
from rank_pools import ranks_on_gpus

import weft
from weft import schedules
from weft.core.problem import split
from weft.ops import tensor_parallel
from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO
SIZE = 4 if GPUS >= 4 else 2
WIDTHS = (512, 384)
K = 768
pool = ranks_on_gpus(SIZE, 10)


class Case:
    """The tensors of a rank, drawn from the same seed on all ranks, and the gradients that it must get."""

    def __init__(self, rows: int, seed: int, dtype: torch.dtype) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        random = torch.Generator("cuda").manual_seed(seed)

        def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=random).mul(scale).to(dtype)

        self.whole = drawn(rows, K)
        every = [[(drawn(rows, n), drawn(n, K, scale=n**-0.5)) for n in WIDTHS] for _ in range(size)]
        low, high = split(rows, size)[rank]
        self.a = self.whole[low:high].clone()
        self.grads, self.weights = [grad for grad, _ in every[rank]], [weight for _, weight in every[rank]]
        total = torch.stack([grad.double() @ weight.double() for some in every for grad, weight in some]).sum(0)
        self.of_a, self.of_weights = total[low:high], [grad.double().t() @ self.whole.double() for grad in self.grads]

    def check(self, where: str, of_a: torch.Tensor, of_weights: list[torch.Tensor]) -> None:
        for found, wanted in ((of_a, self.of_a), *zip(of_weights, self.of_weights, strict=True)):
            assert found.is_contiguous()
            error = float((found.double() - wanted).abs().max() / wanted.abs().max())
            assert error < 2e-2, (where, error)


@alarm(120)
def _every_family(x: str, rows: int, dtype: torch.dtype) -> None:
    """Two calls at the same addresses are replayed as a graph; other addresses are enqueued."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    cases = [Case(rows, seed, dtype) for seed in range(3)]
    for name in schedules.names("matmul_reduce_scatter"):
        for call in range(9):
            case = cases[min(call // 3, 2)]
            given = case.whole if x == "whole" else case.a
            late(call)
            options = (group.group_name, rank, size, 1, name, x)
            of_a, *of_weights = tensor_parallel._all_gather_matmul_backward(case.grads, case.weights, given, *options)
            case.check(f"{name}, x {x}, call {call}", of_a, of_weights)


@pytest.mark.parametrize("x", ["whole", "shard"])
@pytest.mark.parametrize("rows", [1024, 999])
def test_every_family_computes_both_gradients(pool: Ranks, x: str, rows: int) -> None:
    pool.run(_every_family, x, rows, torch.bfloat16)


def test_float32(pool: Ranks) -> None:
    pool.run(_every_family, "shard", 512, torch.float32)


@alarm(120)
def _steps(keep: bool) -> None:
    """Steps of training with `auto`, which measures both; the gradients accumulate without a copy."""
    weft.close()  # and forget the choices of other tests
    for rows in (2048, 300):
        case = Case(rows, 5, torch.bfloat16)
        weights = [torch.nn.Parameter(one) for one in case.weights]
        for step in range(6):
            a = case.a.detach().requires_grad_()
            for weight in weights:
                weight.grad = None
            outs = weft.all_gather_matmul(a, [one.t() for one in weights], rows=rows, keep_gathered=keep)
            torch.autograd.backward(outs, case.grads)
            assert a.grad is not None
            found = [weight.grad for weight in weights]
            case.check(f"step {step}", a.grad, [one for one in found if one is not None])
    chosen = [choice for choice in weft.choices() if choice.problem.weight_gradients]
    assert {choice.problem.weight_gradients for choice in chosen} == {"whole" if keep else "shard"}
    assert all(choice.us for choice in chosen)


@pytest.mark.parametrize("keep", [True, False])
def test_steps_of_training(pool: Ranks, keep: bool) -> None:
    pool.run(_steps, keep)
