"""Operators before and after experts' matmuls: their gradients, and their kernels, interpreted and compiled for a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiled import for_a_gpu
from conftest import RankFixture
from ragged_work import PATTERNS, Case, close, counts_of, padded
from rank_pools import interpreted_ranks, on_ranks
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft.models.experts import Experts, Routing, _activation
from weft.ops.experts import swiglu
from weft.ops.ragged_all_to_all import ragged_gated
from weft.runtime.ragged import room
from weft.runtime.ranks import Ranks

TOKENS, TOP, EXPERTS, WIDTH = 7, 3, 5, 40


def _routing(seed: int = 0) -> Routing:
    draw = torch.Generator().manual_seed(seed)
    return Routing(torch.rand(TOKENS, EXPERTS, generator=draw).topk(TOP).indices, EXPERTS)


def _drawn(*extents: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*extents, dtype=torch.float64).to(dtype).requires_grad_()


def test_gradients() -> None:
    torch.manual_seed(0)
    routing, counts = _routing(), torch.tensor([[2, 0], [1, 2]])
    rows, weights = _drawn(TOKENS * TOP, 4), _drawn(TOKENS, TOP)
    assert torch.autograd.gradcheck(routing.spread, (_drawn(TOKENS, 4),))
    assert torch.autograd.gradcheck(routing.gather, (rows, weights))
    assert torch.autograd.gradcheck(lambda hidden: swiglu(hidden, counts), (_drawn(8, 6),))


def test_rows_past_counts_are_zeros_whatever_they_hold() -> None:
    hidden = torch.full((4, 6), torch.nan)
    hidden[:3] = 1.0
    hidden.requires_grad_()
    out = swiglu(hidden, torch.tensor([1, 2]))
    out.backward(torch.where(torch.arange(4)[:, None] < 3, 1.0, torch.nan).expand(4, 3))
    assert out[:3].allclose(torch.nn.functional.silu(torch.ones(3, 3)))
    assert hidden.grad is not None
    for found in (out, hidden.grad):
        assert found[:3].all()
        assert not found[3:].any()


def test_sorted_by_expert_for_many_experts() -> None:
    index = torch.randint(300, (20, 2), generator=torch.Generator().manual_seed(0))
    routing = Routing(index, 300)
    assert index.flatten()[routing.order].tolist() == sorted(index.flatten().tolist())
    assert routing.order[routing.place.flatten()].tolist() == list(range(40))


def test_room_is_of_few_sizes() -> None:
    assert [room(rows) for rows in (0, 7, 16, 17, 1000, 16384)] == [1, 7, 16, 18, 1024, 16384]
    sizes = {room(rows) for rows in range(1, 4097)}
    assert len(sizes) == 16 + 8 * 8
    assert all(rows <= room(rows) <= 1.125 * rows for rows in range(1, 4097))


def _sides(dtype: torch.dtype) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, by kernels, by torch) of every operator and gradient, on new data each call. Rows past counts hold NaN."""
    found = []
    for call in range(3):
        torch.manual_seed(call)
        # Counts are strided, and rows are sometimes column-major.
        routing, counts = _routing(call), torch.tensor([[2, 7, 0], [1 + call, 7, 2]], dtype=torch.int32)[:, ::2]
        rows, weights, x = _drawn(TOKENS * TOP, WIDTH, dtype=dtype), _drawn(TOKENS, TOP), _drawn(TOKENS, WIDTH, dtype=dtype)
        rows = rows.detach().t().contiguous().t() if call % 2 else rows
        hidden = _drawn(9, 2 * WIDTH, dtype=dtype).detach().clone()
        hidden[int(counts.sum()) :] = torch.nan
        works = {
            "spread": (routing.spread, (x,)),
            "gather": (routing.gather, (rows, weights.detach().float().requires_grad_())),
            "swiglu": (lambda hidden, counts=counts: swiglu(hidden, counts), (hidden.requires_grad_(),)),
        }
        for name, (work, given) in works.items():
            sides = [_both(work, [one.detach().to(wide).requires_grad_() for one in given]) for wide in (None, torch.float64)]
            found += [(name, one, other) for one, other in zip(*sides, strict=True)]
    return found


def _both(work: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result, and the gradients of what was given."""
    out = work(*given)
    flow = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, flow)]


def _kernels() -> int:
    import triton

    from weft.ops.experts import _by_kernels

    assert triton.knobs.runtime.interpret
    compared = 0
    for dtype, tolerance in ((torch.float16, 3e-3), (torch.float32, 1e-5)):
        assert _by_kernels(torch.empty(1, dtype=dtype))
        assert not _by_kernels(torch.empty(1, dtype=torch.float64))
        for name, got, wanted in _sides(dtype):
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
            compared += 1
    return compared


interpreted = interpreted_ranks(1)


@pytest.mark.ranks
def test_kernels_interpreted(interpreted: Ranks) -> None:
    """Against torch in float64: 2 dtypes, 3 calls, 7 results and gradients."""
    assert interpreted.run(_kernels) == [42]


def _gated(dtype: torch.dtype, k: int, n: int, patterns: Sequence[str]) -> None:
    """Calls with other counts each, against the product in float64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for seed, pattern in enumerate(patterns):
        case, max_rows = Case(counts_of(pattern, 3, seed), k, n, dtype, seed), 150 * size
        b = case.b[rank] if seed % 2 else case.b[rank].transpose(1, 2).contiguous().transpose(1, 2)
        out, counts = ragged_gated(case.rows[rank], b, None, case.counts[rank], max_rows)
        gate, up = case.dispatched(rank)[1].chunk(2, 1)
        assert torch.equal(counts.long(), case.counts[:, rank].t())
        close(out, padded(torch.nn.functional.silu(gate) * up, max_rows, out), dtype, k)


@pytest.mark.ranks
def test_gated_dispatch_on_hosts(ranks: RankFixture) -> None:
    ranks(2).run(_gated, torch.float32, 7, 10, PATTERNS)


@on_ranks(2, interpreted=True)
@pytest.mark.slow
def test_gated_dispatch_interpreted() -> None:
    _gated(torch.float16, 24, 48, ("all_to_one", "empty_experts"))
    _gated(torch.float16, 8, 80, ("random",))  # the last tile of columns is short
    with pytest.raises(ValueError, match="N is 24; with splits on GPUs it must be a multiple of 16"):
        _gated(torch.float16, 8, 24, ("random",))
    dist.barrier()
    weft.close()


@on_ranks(2)
def test_experts_without_gradients() -> None:
    """Experts give the same with the activation in the dispatch, and by itself."""
    torch.manual_seed(0)
    shared = Experts(4, 8, 12)
    parallelize_module(shared, dist.init_device_mesh("cpu", (2,)), weft.ExpertParallel())
    routing = torch.rand(10, 4).topk(2)
    given = torch.randn(10, 8), routing.indices, routing.values
    with torch.no_grad():
        alone = shared(*given)
    torch.testing.assert_close(alone, shared(*given).detach())


@on_ranks(2)
def test_no_gradient_of_rows_that_nobody_used() -> None:
    """Received rows that are only saved for a weight's gradient have no gradient themselves."""
    size, eye = dist.get_world_size(), torch.eye
    a, b = torch.randn(4 * size, 8, requires_grad=True), torch.randn(2, 8, 12, requires_grad=True)

    def unasked(*extents: Any, **options: Any) -> torch.Tensor:
        raise AssertionError("a product with 1 for what nobody has used")

    calls = {
        "rows": lambda: weft.all_to_all_matmul(a, b[0], return_received=True)[0],
        "columns": lambda: weft.all_to_all_matmul(a, torch.cat([b[0]] * size), gather_dim=-1, return_received=True)[0],
        "splits": lambda: weft.all_to_all_matmul(
            a, b, splits=torch.full((size, 2), 2), max_rows=8 * size, return_received=True
        )[0],
    }
    for call in calls.values():
        torch.eye = unasked  # type: ignore[assignment]
        try:
            call().square().sum().backward()
        finally:
            torch.eye = eye
        assert a.grad is not None
        assert bool(a.grad.any())
        a.grad = None


def _compiled(name: str, pointers: str, **constants: int) -> Any:
    """A kernel as it is launched on a GPU with bfloat16 and widths that are multiples of 16."""
    from weft.kernels import experts

    kernel = getattr(experts, name)
    types = dict(zip(kernel.arg_names, pointers.split(), strict=False))
    return for_a_gpu(kernel, constants, types, multiples=("width",), warps=experts._WARPS)


@pytest.mark.parametrize(
    ("name", "pointers", "constants"),
    [
        ("_permute_kernel", "*bf16 *i64 *bf16", {"TOP": 2}),
        ("_unpermute_kernel", "*bf16 *i64 *fp32 *bf16", {"TOP": 2, "WEIGHED": 1}),
        ("_unpermute_backward_kernel", "*bf16 *bf16 *i64 *fp32 *bf16 *fp32", {"TOP": 2}),
        ("_swiglu_kernel", "*bf16 *i32 *bf16", {"COUNTS": 8}),
        ("_swiglu_backward_kernel", "*bf16 *bf16 *i32 *bf16", {"COUNTS": 8}),
    ],
)
def test_kernels_move_16_bytes_at_once(name: str, pointers: str, constants: dict[str, int]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    made = _compiled(name, pointers, **constants, COLS=2048)
    moved = re.findall(r"(?:ld|st)\.global\S*\.(v4\.b32|b16|v2\.b32|v8\.b16)", made.asm["ptx"])
    assert set(moved) == {"v4.b32"}, moved
    assert not re.search(r"st\.local", made.asm["ptx"])


def test_only_the_usual_activation_is_the_kernels() -> None:
    class Clamped(Experts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return super()._apply_gate(gate_up).clamp(max=1.0)

    assert _activation(Experts(2, 4, 4)) is swiglu
    assert _activation(Experts(2, 4, 4, torch.nn.SiLU())) is swiglu
    hidden, counts = torch.ones(1, 4), torch.tensor([1])
    for experts in (Experts(2, 4, 4, torch.nn.functional.relu), Clamped(2, 4, 4)):
        assert _activation(experts)(hidden, counts).equal(experts._apply_gate(hidden))
