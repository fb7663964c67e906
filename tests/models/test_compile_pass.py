"""The pass for torch.compile: what it finds in graphs, what it leaves alone and why, and models that torch parallelized."""

from __future__ import annotations

import copy
import re
from functools import partial

import inductor_work
import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks
from torch import nn

import weft

pytestmark = pytest.mark.ranks


@on_ranks(2)
@pytest.mark.parametrize("kind", ["GATHERS", "SCATTERS"])
def test_patterns_are_found_and_give_the_same_numbers(kind: str) -> None:
    for case in getattr(inductor_work, kind):
        inductor_work.check(case)


@on_ranks(2)
def test_biases_that_ranks_add_parts_of() -> None:
    """The same on all of them or not."""
    for case in inductor_work.BIASES:
        inductor_work.check(case, reduces=1)


def _alone() -> list[tuple[str, str, list[str]]]:
    return [(case.name, case.reason, inductor_work.reasons(case)) for case in inductor_work.ALONE]


def test_what_is_left_alone_says_why(ranks: RankFixture) -> None:
    reports = ranks(2).run(_alone)
    assert reports[0] == reports[1]
    for name, wanted, reasons in reports[0]:
        assert any(re.search(wanted, reason) for reason in reasons), (name, reasons)


class Block(nn.Module):
    """Two columns and a row, as a transformer's MLP; residual."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(x).tanh() * self.up(x)) + x


def _shards(dim: int, *, replicated: bool) -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    """(a model on one rank, the same over all ranks by torch's styles, its input, this rank's part)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    alone, shared = Block(), Block()
    shared.load_state_dict(alone.state_dict())
    layout = Replicate() if replicated else Shard(dim)
    column, row = ColwiseParallel(input_layouts=layout), RowwiseParallel(output_layouts=layout)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(shared, mesh, {"gate": column, "up": column, "down": row})
    x = torch.randn(4, 6, 8)
    return alone, shared, x, x if replicated else x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def _step(model: nn.Module, compiled: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two steps of SGD: (the last result, the gradient of x)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = x.detach().clone().requires_grad_()
        y = compiled(x)
        (y * y).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert x.grad is not None
    return y.detach(), x.grad


def _model(dim: int, replicated: bool) -> list[str]:
    alone, shared, x, mine = _shards(dim, replicated=replicated)
    overlap = weft.CompilePass()
    torch._dynamo.reset()
    got, grad = _step(shared, torch.compile(shared, backend=inductor_work.eager(overlap)), mine)
    wanted, wanted_grad = _step(alone, alone, x)
    if not replicated:
        own = slice(dist.get_rank(), dist.get_rank() + 1)
        wanted, wanted_grad = (t.chunk(dist.get_world_size(), dim)[own][0] for t in (wanted, wanted_grad))
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(grad, wanted_grad)
    for name, parameter in shared.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), alone.get_parameter(name))
    return [overlap.report(), *(str(layer) for layer in overlap.layers)]


def test_a_model_that_torch_parallelized(ranks: RankFixture) -> None:
    for reports in ranks(2).run(_model, 1, False):
        assert reports[0].startswith("overlapped 4 of 4 places in 2 graphs\n  test_compile_pass.py:")
        assert [line.partition("; its bias is the mean")[0] for line in reports[1:3]] == [
            "gate, up: all_gather_matmul",
            "down: matmul_reduce_scatter",
        ]
        assert [line.partition(": ")[2].partition(";")[0] for line in reports[3:]] == [
            "all_gather_matmul",
            "matmul_reduce_scatter",
        ]


def test_a_model_whose_activations_are_whole(ranks: RankFixture) -> None:
    for reports in ranks(2).run(_model, 0, True):
        assert reports[0].startswith("overlapped 2 of 2 places in 2 graphs\n")
        assert reports[1] == "down: matmul_all_reduce; its bias is the mean of all ranks', a reduction more"


@on_ranks(2)
def test_with_inductor() -> None:
    """Matmuls and collectives alone: Inductor writes no kernel, which would take a compiler half a minute. The second turn has
    graphs from the cache."""
    torch.manual_seed(dist.get_rank())
    x, w, v = torch.randn(4, 6, 8, requires_grad=True), torch.randn(8, 5), torch.randn(5, 8)

    def block(x: torch.Tensor) -> torch.Tensor:
        return inductor_work.scatter(inductor_work.gather(x) @ w @ v)

    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        for turn in range(2):
            torch._dynamo.reset()
            overlap = weft.CompilePass(schedule={"all_gather_matmul": "flag_gated:2"})
            y = torch.compile(block, fullgraph=True, options=overlap.options)(x)
            torch.testing.assert_close(y, block(x))
            x.grad = None
            y.sum().backward()
            grad = x.grad
            x.grad = None
            block(x).sum().backward()
            torch.testing.assert_close(grad, x.grad)
            assert ("came from torch.compile's caches" in overlap.report()) == (turn == 1)
            if turn == 0:
                found = [layer.operators for layer in overlap.layers]
                assert found[:2] == [("all_gather_matmul",), ("matmul_reduce_scatter",)]


def _moved() -> list[str]:
    """DTensor's own all-to-all, from one sharded dimension to another, before a matmul; torch has it on GPUs alone."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def work(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, dist.group.WORLD.group_name) @ w

    overlap = weft.CompilePass()
    overlap(make_fx(work, tracing_mode="fake")(torch.ones(4, 6, 8), torch.ones(8, 5)).graph)
    return [layer.reason for layer in overlap.layers]


def test_moves_of_dtensor_are_listed(ranks: RankFixture) -> None:
    assert ranks(2).run(_moved)[0] == ["shard_dim_alltoall: no operator of weft replaces it"]


class Parallel(nn.Module):
    """Two columns and two rows, whose results are added, as in GPT-J and Falcon; checkpointed, but for reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.up1, self.up2 = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down1, self.down2 = nn.Linear(12, 8, bias=False), nn.Linear(12, 8, bias=False)

    def _inside(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down1(self.up1(x).tanh()) + self.down2(self.up2(x).relu())).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        c10d = torch.ops._c10d_functional
        saved_ops = [c10d.reduce_scatter_tensor.default, c10d.all_reduce.default, torch.ops.aten.mm.default]
        contexts = partial(create_selective_checkpoint_contexts, saved_ops)
        return checkpoint(self._inside, x, use_reentrant=False, context_fn=contexts)


def _saved() -> list[str]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    alone, x = Parallel(), torch.randn(4, 6, 8)
    shared = copy.deepcopy(alone)
    plan = {"up1": ColwiseParallel(), "up2": ColwiseParallel(), "down1": RowwiseParallel(), "down2": RowwiseParallel()}
    parallelize_module(shared, dist.init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    overlap = weft.CompilePass()
    torch._dynamo.reset()
    torch.testing.assert_close(
        _step(shared, torch.compile(shared, backend=inductor_work.eager(overlap)), x), _step(alone, alone, x)
    )
    for name, parameter in shared.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), alone.get_parameter(name))
    return [str(layer) for layer in overlap.layers]


def test_reductions_that_a_checkpoint_saves_stay_two(ranks: RankFixture) -> None:
    for reports in ranks(2).run(_saved):
        assert reports == [
            "down1: matmul_all_reduce",
            "down2: matmul_all_reduce",
            "up2, up1: matmul_all_reduce; 2 reductions of which the sum is used are one",
        ]


def _marked() -> list[list[str]]:
    """What is said of places whose weights have one extent that is not known: columns, and rows that are summed over."""
    gathered, reduced = (lambda x, w: inductor_work.gather(x) @ w), (lambda x, w: inductor_work.reduced(x @ w))
    reports = []
    for work, extents in ((gathered, (None, 1)), (reduced, (1, 0))):
        given = torch.randn(4, 8), torch.randn(8, 6)
        for one, extent in zip(given, extents, strict=True):
            if extent is not None:
                torch._dynamo.mark_dynamic(one, extent)
        torch._dynamo.reset()
        overlap = weft.CompilePass()
        torch.testing.assert_close(torch.compile(work, backend=inductor_work.eager(overlap))(*given), work(*given))
        reports.append([layer.reason.partition(";")[0] for layer in overlap.layers])
    return reports


def test_symbolic_extents_of_weights_are_left_alone(ranks: RankFixture) -> None:
    for gathered, reduced in ranks(2).run(_marked):
        assert gathered == ["all_gather_into_tensor: shapes are symbolic"]
        assert reduced == ["all_reduce: shapes are symbolic"]


def _identities() -> list[str]:
    return [one.uuid() for one in (weft.CompilePass(), weft.CompilePass(), weft.CompilePass(schedule="sequential"))]


def test_caches_tell_ranks_and_schedules_apart(ranks: RankFixture) -> None:
    (first, again, other), (far, *_) = ranks(2).run(_identities)
    assert first == again
    assert len({first, other, far}) == 3


def _asked() -> list[str]:
    from torch.fx.experimental.proxy_tensor import make_fx

    overlap = weft.CompilePass(operators=["matmul_all_reduce"], schedule="one_shot")
    case = next(case for case in inductor_work.SCATTERS if case.name == "both")
    graph = make_fx(case.work, tracing_mode="fake")(torch.ones(4, 6, 8), torch.ones(8, 5), torch.ones(5)).graph
    overlap(graph)
    return [layer.reason for layer in overlap.layers]


def test_only_the_operators_asked_for(ranks: RankFixture) -> None:
    reports = ranks(2).run(_asked)[0]
    assert reports == [
        "all_gather_into_tensor: all_gather_matmul is not among the operators to put in",
        "reduce_scatter_tensor: matmul_reduce_scatter is not among the operators to put in",
    ]


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="operators has 'matmul'; use all_gather_matmul"):
        weft.CompilePass(operators=["matmul"])
    with pytest.raises(ValueError, match="schedule has 'all_to_all_matmul'"):
        weft.CompilePass(schedule={"all_to_all_matmul": "auto"})
    with pytest.raises(ValueError, match="one_shot"):
        weft.CompilePass(schedule="one_shot")
    assert weft.CompilePass().report() == "overlapped 0 of 0 places in 0 graphs"


def _in_place() -> list[str]:
    """What the report says of collectives into the caller's tensors. Inductor writes no kernel here either."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    x, w = torch.randn(8, 16), torch.randn(16, 12)
    rows, own = x.chunk(size)[rank].contiguous(), (x.chunk(size, 1)[rank].contiguous(), w.chunk(size)[rank].contiguous())

    def gathered() -> torch.Tensor:
        whole = rows.new_empty(8, 16)
        dist.all_gather_into_tensor(whole, rows)
        return whole @ w

    def scattered() -> torch.Tensor:
        part = rows.new_empty(8 // size, 12)
        dist.reduce_scatter_tensor(part, own[0] @ own[1])
        return part @ w.t()

    def reduced() -> torch.Tensor:
        out = own[0] @ own[1]
        dist.all_reduce(out)
        return out @ w.t()

    from torch._inductor.utils import fresh_cache

    found = []
    with fresh_cache():  # a graph from a cache would not pass through the pass again
        for work, wanted in ((gathered, x @ w), (scattered, (x @ w).chunk(size)[rank] @ w.t()), (reduced, x @ w @ w.t())):
            torch._dynamo.reset()
            overlap = weft.CompilePass()
            with torch.no_grad():
                found_here = torch.compile(work, options=overlap.options)()
            torch.testing.assert_close(found_here, wanted, rtol=1e-4, atol=1e-4)
            found.append(str(overlap.report()).partition(" places")[0])
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_collectives_into_tensors_of_the_caller_are_overlapped(ranks: RankFixture) -> None:
    assert ranks(2).run(_in_place) == [["overlapped 1 of 1"] * 3] * 2
