"""matmul_all_to_all and all_to_all_matmul on CPU ranks: every family, both ways, beside the plain program."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from launch_counts import counting
from rank_pools import interpreted_ranks, on_ranks
from rank_work import bound, here

import weft
from weft.core.problem import split
from weft.schedules import names

pytestmark = pytest.mark.ranks
COMBINE, DISPATCH = names("matmul_all_to_all"), names("all_to_all_matmul")


def drawn(m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every rank's a and b, the same on all."""
    generator = torch.Generator().manual_seed(seed)
    size = dist.get_world_size()
    a = [torch.randn(m, k, generator=generator).to(here(), dtype) for _ in range(size)]
    b = [(torch.randn(k, n, generator=generator) * k**-0.5).to(here(), dtype) for _ in range(size)]
    return a, b


def check_both(m: int, n: int, k: int, dtype: torch.dtype, combine: str, dispatch: str, seed: int) -> None:
    """Both operators against float64 on one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = drawn(m, n, k, dtype, seed)
    mine = slice(*split(m, size)[rank])
    received = torch.cat([each[mine] for each in a])
    for out, expected in (
        (
            weft.matmul_all_to_all(a[rank], b[rank], schedule=combine),
            torch.cat([x[mine].double() @ y.double() for x, y in zip(a, b, strict=True)]),
        ),
        (weft.all_to_all_matmul(a[rank], b[rank], schedule=dispatch), received.double() @ b[rank].double()),
    ):
        assert out.shape == expected.shape
        assert out.dtype == dtype
        error = (out.double() - expected).abs().max().item() if out.numel() else 0.0
        assert error <= bound(dtype, k, 0, expected), (combine, dispatch, (m, n, k), error)
    out, handed = weft.all_to_all_matmul(a[rank], b[rank], schedule=dispatch, return_received=True)
    assert torch.equal(handed, received)


interpreted = interpreted_ranks([2], slow=[4])


@on_ranks(pool="interpreted")
def test_kernels_interpreted() -> None:
    from weft.runtime import fused, pushes

    with counting(fused.FusedGemm, fused.FusedSum, pushes.FusedPush) as launches:
        for m, n, k in ((37, 40, 48), (72, 64, 32), (37, 40, 48)):
            for combine, dispatch in (
                ("track_and_trigger:2", "flag_gated:2"),
                ("direct_store:2",) * 2,
                ("sequential_stores",) * 2,
            ):
                for call in range(1 + (m == 72 and dist.get_world_size() == 2)):
                    check_both(m, n, k, torch.float16, combine, dispatch, call)
    assert launches.count >= 3 * (3 + 5 + 3)


def _second(outs: list[torch.Tensor], factors: list[torch.Tensor]) -> torch.Tensor:
    """What second derivatives are asked of."""
    grads = torch.autograd.grad(sum((out.square().sum() for out in outs), torch.zeros(())), factors, create_graph=True)
    return sum((grad.square().sum() for grad in grads), torch.zeros(()))


@on_ranks(2, 3)
def test_second_gradients() -> None:
    """Also of results that some ranks have no rows of: they take part in what the second backward exchanges."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for m in (size + 1, 1):
        a, b = drawn(m, 4, 3, torch.float32, m)
        for x in (*a, *b):
            x.requires_grad_()
        shards = [slice(*s) for s in split(m, size)]
        combined = [torch.cat([x[s] @ y for x, y in zip(a, b, strict=True)]) for s in shards]
        dispatched = [torch.cat([x[s] for x in a]) @ b[r] for r, s in enumerate(shards)]
        for outs, run in ((combined, weft.matmul_all_to_all), (dispatched, weft.all_to_all_matmul)):
            wanted = torch.autograd.grad(_second(outs, [*a, *b]), (a[rank], b[rank]))
            mine = [t.detach().clone().requires_grad_() for t in (a[rank], b[rank])]
            _second([run(*mine)], mine).backward()  # type: ignore[operator]
            for one, want in zip(mine, wanted, strict=True):
                torch.testing.assert_close(one.grad, want)


@on_ranks(2)
def test_what_flows_into_received_goes_back() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = drawn(8, 3, 4, torch.float32, 5)
    x, y = a[rank].requires_grad_(), b[rank].requires_grad_()
    out, received = weft.all_to_all_matmul(x, y, return_received=True)
    (out.sum() + (received * (rank + 1)).sum()).backward()
    through = torch.cat([(b[d].detach().sum(1) + d + 1).expand(8 // size, 4) for d in range(size)])
    torch.testing.assert_close(x.grad, through)


@on_ranks(2)
def test_ulysses_and_middle_dimensions() -> None:
    """From parts of the sequence to heads, as the docstring of matmul_all_to_all has it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, heads, dim, hidden = 6, 2 * size, 4, 10
    (x, *_), _ = drawn(size * tokens, 1, hidden, torch.float32, 8)
    (weight, *_), _ = drawn(heads * dim, 1, hidden, torch.float32, 9)
    mine = x[rank * tokens : (rank + 1) * tokens]
    out = weft.matmul_all_to_all(weight, mine.t()).view(size, 2, dim, tokens)
    whole = (x @ weight.t()).view(size * tokens, heads, dim)[:, 2 * rank : 2 * rank + 2]
    torch.testing.assert_close(out.permute(0, 3, 1, 2).reshape(size * tokens, 2, dim), whole)
    batched = torch.stack([mine, mine + 1], 1)
    got = weft.all_to_all_matmul(batched, weight.t())
    (wanted,) = weft.all_to_all_matmul(batched[:, 1].contiguous(), weight.t()).unsqueeze(0)
    torch.testing.assert_close(got[:, 1], wanted)


def _mistakes() -> list[str]:
    rank = dist.get_rank()
    with pytest.raises(
        ValueError,
        match=r"schedule is 'track_and_trigger', which is for .* alone; all_to_all_matmul has sequential, .*direct_store",
    ):
        weft.all_to_all_matmul(torch.ones(4, 4), torch.ones(4, 2), schedule="track_and_trigger")
    with pytest.raises(ValueError, match="b has 5 rows, a has 4 columns"):
        weft.matmul_all_to_all(torch.ones(4, 4), torch.ones(5, 2))
    with pytest.raises(weft.RankMismatch, match=r"M: rank . has (4|5)"):
        weft.matmul_all_to_all(torch.ones(4 + rank, 4), torch.ones(4, 2))
    dist.barrier()
    weft.close()
    check_both(8, 6, 4, torch.float32, "direct_store", "flag_gated", 2)
    return []


def test_mistakes_are_told(ranks: RankFixture) -> None:
    ranks(2).run(_mistakes)
