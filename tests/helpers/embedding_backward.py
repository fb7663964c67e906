"""What ranks do in tests of the lookup's backward: gradients against torch's of the whole program, optimizers step by step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from embedding_work import Case, Drawn, draw, options_of

import weft
from weft.core.problem import split


def flow(case: Case, seed: int, rank: int) -> torch.Tensor:
    """What flows into a rank's result."""
    low, high = split(case.batch, len(case.dims))[rank]
    generator = torch.Generator().manual_seed(77 * seed + rank)
    return torch.randn(high - low, sum(map(sum, case.dims)), generator=generator).to(case.dtype)


def home(case: Case, seed: int, rank: int) -> list[torch.Tensor]:
    """The gradient of each table's pooled rows, of the whole batch, in float64."""
    whole = torch.cat([flow(case, seed, r) for r in range(len(case.dims))]).double()
    first = sum(sum(own) for own in case.dims[:rank])
    return list(whole[:, first : first + sum(case.dims[rank])].split(list(case.dims[rank]), 1))


def reference(case: Case, seed: int, rank: int) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """By torch in float64: the gradient of each table, and of the weights."""
    drawn = draw(case, seed, rank)
    tables = [table.cpu().double().requires_grad_() for table in drawn.tables]
    weights = None if drawn.weights is None else drawn.weights.cpu().double().requires_grad_()
    pooled = Drawn(tables=tables, indices=drawn.indices.cpu(), offsets=drawn.offsets.cpu(), weights=weights).pooled(case)
    torch.autograd.backward(pooled, home(case, seed, rank))
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in tables]
    return grads, None if weights is None or weights.grad is None else weights.grad


def looked_up(case: Case, seed: int, drawn: Drawn, **options: Any) -> torch.Tensor:
    out = weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, **options_of(case, drawn), **options)
    out.backward(flow(case, seed, dist.get_rank()).to(out.device))
    return out


def ready(case: Case, seed: int) -> Drawn:
    drawn = draw(case, seed, dist.get_rank())
    for tensor in (*drawn.tables, *((drawn.weights,) if drawn.weights is not None else ())):
        tensor.requires_grad_()
    return drawn


def check_gradients(case: Case, schedule: str, seed: int, *, sparse: bool = False) -> None:
    drawn = ready(case, seed)
    looked_up(case, seed, drawn, schedule=schedule, sparse=sparse)
    grads, of_weights = reference(case, seed, dist.get_rank())
    for table, wanted in zip(drawn.tables, grads, strict=True):
        assert table.grad is not None
        assert table.grad.is_sparse == sparse
        close(table.grad.to_dense(), wanted, case.dtype)
    if drawn.weights is not None and of_weights is not None:
        assert drawn.weights.grad is not None
        close(drawn.weights.grad, of_weights, case.dtype)


def check_optimizer(case: Case, schedule: str, seed: int, kind: str) -> None:
    """Three steps; the tables, and the states, are those of the optimizer written out."""
    drawn, lr, eps = ready(case, seed), 0.1, 1e-3
    optimizer = weft.SGD(lr=lr) if kind == "sgd" else weft.RowwiseAdagrad(lr=lr, eps=eps)
    tables = [table.detach().double().cpu() for table in drawn.tables]
    states = [torch.zeros(table.shape[0], dtype=torch.float64) for table in tables]
    grads = [grad.cpu() for grad in reference(case, seed, dist.get_rank())[0]]
    for _ in range(3):
        looked_up(case, seed, drawn, schedule=schedule, optimizer=optimizer)
        for at, grad in enumerate(grads):
            states[at] += grad.square().mean(1)
            scale = states[at].sqrt() + eps if kind == "adagrad" else torch.ones_like(states[at])
            tables[at] -= lr * grad / scale[:, None]
    for table, wanted in zip(drawn.tables, tables, strict=True):
        assert table.grad is None
        close(table.detach(), wanted, case.dtype)
    if isinstance(optimizer, weft.RowwiseAdagrad):
        for state, wanted in zip(optimizer.states, states, strict=True):
            close(state, wanted, torch.float32)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of the largest element."""
    largest = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    error = float((found.double().cpu() - wanted.cpu()).abs().max()) if wanted.numel() else 0.0
    assert error <= 4 * largest * max(torch.finfo(dtype).eps, 1e-6), error
