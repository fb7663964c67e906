"""The pass for torch.compile, experts and tables over ranks, on GPUs: with Inductor, in bfloat16, in graphs."""

from __future__ import annotations

import copy
import faulthandler
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_gpus import NEEDS_TWO, SIZES, alarm
from rank_pools import ranks_on_gpus
from test_compile_pass import Block
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import weft
from weft.models.experts import Experts
from weft.runtime.ranks import Ranks

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from dlrm_model import DLRM

pytestmark = NEEDS_TWO
pool = ranks_on_gpus(SIZES[-1:], 20)


class Wide(Block):
    """The block of the tests on CPUs, as wide as kernels want it."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.gate, self.up, self.down = nn.Linear(512, 1024), nn.Linear(512, 1024), nn.Linear(1024, 512)


@alarm(85)
def _inductor() -> str:
    torch.manual_seed(0)
    plain, mesh = Wide().to("cuda", torch.bfloat16), dist.init_device_mesh("cuda", (dist.get_world_size(),))
    layout = Shard(1)
    column, row = ColwiseParallel(input_layouts=layout), RowwiseParallel(output_layouts=layout)
    plan: dict[str, ParallelStyle] = {"gate": column, "up": column, "down": row}
    parallelize_module(plain, mesh, plan)
    overlap = weft.CompilePass()
    compiled = torch.compile(plain, options=overlap.options, dynamic=False)
    for call in range(3):
        torch.manual_seed(10 * call + dist.get_rank())
        x = torch.randn(2, 128, 512, device="cuda", dtype=torch.bfloat16)
        found = []
        for model in (plain, compiled):
            plain.zero_grad()
            given = x.clone().requires_grad_()
            y = model(given)
            y.float().square().mean().backward()
            found.append([y.detach(), given.grad, *(p.grad.to_local() for p in plain.parameters())])
        for one, other in zip(*found, strict=True):
            difference = (one.float() - other.float()).abs().max() / one.float().abs().max()
            assert difference < 0.03, difference
    return overlap.report()


def test_pass_with_inductor(pool: Ranks) -> None:
    for report in pool.run(_inductor, timeout_s=120):
        assert report.startswith("overlapped 4 of 4 places in 2 graphs")


def _both(size: int) -> tuple[Experts, Experts]:
    """(two experts for each rank, the same over ranks)."""
    torch.manual_seed(0)
    alone = Experts(2 * size, 256, 512).to("cuda", torch.bfloat16)
    shared = copy.deepcopy(alone)
    parallelize_module(shared, dist.init_device_mesh("cuda", (size,)), weft.ExpertParallel())
    return alone, shared


def _routed(size: int, call: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, experts, weights) of every rank; in each call one expert gets nothing."""
    torch.manual_seed(call)
    x = torch.randn(size, 96, 256, device="cuda", dtype=torch.bfloat16)
    scores = torch.rand(size, 96, 2 * size, device="cuda")
    scores[..., call % (2 * size)] = -1
    weights, index = scores.topk(2)
    return x, index, weights


@alarm(60)
def _experts() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, shared = _both(size)
    for call in range(6):
        x, index, weights = _routed(size, call)
        if call % size == rank:
            torch.cuda._sleep(9_000_000)
        got = shared(x[rank], index[rank], weights[rank])
        wanted = [alone(*one) for one in zip(x, index, weights, strict=True)]
        _assert_close(got, wanted[rank])
        for model, out in ((shared, got), (alone, torch.stack(wanted))):
            model.zero_grad()
            out.float().square().sum().backward()
        for name, parameter in shared.named_parameters():
            _assert_close(parameter.grad.full_tensor(), alone.get_parameter(name).grad)  # type: ignore[union-attr, operator]
    weft.close()


def _changing() -> list[float]:
    """Experts in float32 under autocast, with another number of tokens in each call: as on one rank. MiB that are free after
    each round of sizes, of which fewer programs are kept than there are."""
    weft.close()
    os.environ["WEFT_PROGRAM_MEMORY_GB"] = "0.05"  # their overhead alone takes 8 MiB each
    rank, size, free = dist.get_rank(), dist.get_world_size(), []
    torch.manual_seed(0)
    alone = Experts(2 * size, 256, 512).cuda()
    shared = copy.deepcopy(alone)
    parallelize_module(shared, dist.init_device_mesh("cuda", (size,)), weft.ExpertParallel())
    for round_ in range(4):
        faulthandler.dump_traceback_later(40, exit=True)
        for tokens in (96, 33, 64):
            x, index, weights = (part[rank, :tokens] for part in _routed(size, round_))
            with torch.autocast("cuda", torch.bfloat16):
                got, wanted = shared(x.float(), index, weights), alone(x.float(), index, weights)
            assert got.dtype == wanted.dtype == torch.bfloat16
            _assert_close(got, wanted)
            got.float().sum().backward()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0] / 2**20)
    assert shared.gate_up_proj.grad.dtype == torch.float32  # type: ignore[union-attr]
    del os.environ["WEFT_PROGRAM_MEMORY_GB"]
    weft.close()
    faulthandler.cancel_dump_traceback_later()
    return free


def test_numbers_of_tokens_that_change_take_no_more_memory(pool: Ranks) -> None:
    """A round binds some twelve programs of four symmetric tensors, each of 2 MiB at least: 100 MiB a round, were they kept."""
    for free in pool.run(_changing, timeout_s=100):
        assert free[1] - free[-1] < 64, free


def _assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    difference = (got.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert difference < 0.03, difference


def test_experts(pool: Ranks) -> None:
    pool.run(_experts, timeout_s=90)


@alarm(60)
def _uneven() -> None:
    """Other numbers of tokens on each rank in each call, and tokens without experts. Then an index that names no expert."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, shared = _both(size)
    for call, tokens in enumerate(((96, 0), (5, 64), (0, 0), (33, 33), (1, 96))):
        x, index, weights = _routed(size, call)
        index[:, ::5, 1] = -1
        parts = [(x[r, : tokens[r % 2]], index[r, : tokens[r % 2]], weights[r, : tokens[r % 2]]) for r in range(size)]
        got, wanted = shared(*parts[rank]), [alone(*part) for part in parts]
        assert got.shape == wanted[rank].shape
        for model, out in ((shared, got), (alone, torch.cat(wanted))):
            model.zero_grad()
            out.float().square().sum().backward()
        if tokens[rank % 2]:
            _assert_close(got, wanted[rank])
        if any(tokens):
            for name, parameter in shared.named_parameters():
                _assert_close(parameter.grad.full_tensor(), alone.get_parameter(name).grad)  # type: ignore[union-attr, operator]
    index[:, 0, 0] = 2 * size

    def refused() -> None:
        shared(x[rank], index[rank], weights[rank])  # its second call may know already what its first one has noted
        weft.synchronize()

    with pytest.raises((ValueError, weft.WeftError), match=f"top_k_index has {2 * size}"):
        refused()
    dist.barrier()
    weft.close()


def test_any_number_of_tokens_on_each_rank(pool: Ranks) -> None:
    pool.run(_uneven, timeout_s=90)


@alarm(60)
def _captured() -> None:
    """Experts in a CUDA graph, with new tokens and other counts at each replay."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, shared = _both(size)
    given = [each[rank].clone() for each in _routed(size, 0)]
    with torch.no_grad():
        shared(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = shared(*given)
        for call in range(6):
            fresh = [each[rank] for each in _routed(size, call)]
            for old, new in zip(given, fresh, strict=True):
                old.copy_(new)
            graph.replay()
            _assert_close(out, alone(*fresh))
    torch.cuda.synchronize()
    del graph
    weft.close()


def test_experts_in_a_graph(pool: Ranks) -> None:
    pool.run(_captured, timeout_s=90)


@alarm(60)
def _tables() -> None:
    """A step on GPUs and the same on CPUs, over the same ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes, pooling = [(100 + at, 16) for at in range(2 * size + 1)], [1 + at % 5 for at in range(2 * size + 1)]
    torch.manual_seed(0)
    cpu = dist.new_group(backend="gloo")
    model = DLRM(8, sizes, bottom=[32, 16], top=[32, 1], pooling=pooling, group=cpu, optimizer=weft.RowwiseAdagrad(lr=0.1))
    ours = DLRM(8, sizes, bottom=[32, 16], top=[32, 1], pooling=pooling, optimizer=weft.RowwiseAdagrad(lr=0.1)).cuda()
    ours.load_state_dict(model.state_dict())
    for call in range(6):
        draw = torch.Generator().manual_seed(call)
        indices = torch.cat(
            [torch.randint(0, r, (64 * size * p,), generator=draw) for (r, _), p in zip(sizes, pooling, strict=True)]
        )
        lengths, dense = torch.tensor(pooling).repeat_interleave(64 * size), torch.randn(64 * size, 8, generator=draw)
        for one in (model, ours):
            device = one.bags.states.get_buffer(str(one.bags.own[0])).device
            own = one.bags.own_bags(indices.to(device), lengths.to(device))
            one(dense.chunk(size)[rank].to(device), *own).square().mean().backward()
            one.zero_grad()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value.cpu(), model.state_dict()[name], rtol=2e-3, atol=2e-4)
    weft.close()
    weft.close(cpu)


def test_tables(pool: Ranks) -> None:
    pool.run(_tables, timeout_s=90)
