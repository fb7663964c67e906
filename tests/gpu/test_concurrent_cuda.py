"""weft.concurrent on GPUs: every method right, in streams and in graphs; measured and planned choices; hooks."""

from __future__ import annotations

import faulthandler
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from concurrent_work import OPS, Exchange, Products
from on_gpus import GPUS, NEEDS_TWO, alarm
from rank_pools import ranks_on_gpus
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.core.concurrent import ConcurrentProblem
from weft.overlap.concurrent.cuda import CudaExecutor
from weft.runtime.ranks import Ranks
from weft.schedules.concurrent import candidates

pytestmark = NEEDS_TWO
SIZE = min(4, max(GPUS, 2))
BOUND_S = 20.0
PART = 300_000
"""Elements: 1.2 MB of float32."""
pool = ranks_on_gpus(SIZE, BOUND_S)


def _alarm() -> None:
    faulthandler.dump_traceback_later(40, exit=True)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _methods(op: str) -> list[str]:
    exchange = Exchange(op, _device())
    abilities = CudaExecutor(_device()).abilities((exchange.collective,))
    assert abilities.priority
    assert abilities.ctas
    assert abilities.left
    assert abilities.copy_engine
    problem = ConcurrentProblem(collectives=(exchange.collective.problem(exchange.size, ()),), world_size=exchange.size)
    return list(candidates(problem, abilities))


def _every_method(op: str) -> int:
    """Six turns of each method: eager with compute delayed, eager with the collective delayed, and replays of a graph."""
    methods = _methods(op)
    for method in methods:
        _alarm()
        exchange, products = Exchange(op, _device(), part=PART), Products(_device(), size=1024)
        for turn in range(3):
            exchange.fill(turn)
            if turn == 1:
                torch.cuda._sleep(2_000_000)
            out = weft.concurrent(products, exchange.collective, method=method)
            exchange.check(turn)
            products.check(out)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = weft.concurrent(products, exchange.collective, method=method)
        for turn in range(3, 6):
            exchange.fill(turn)
            graph.replay()
            exchange.check(turn)
            products.check(out)
        torch.cuda.synchronize()
        dist.barrier()
        del graph
    faulthandler.cancel_dump_traceback_later()
    return len(methods)


@pytest.mark.parametrize("op", OPS)
def test_every_way_is_right(pool: Ranks, op: str) -> None:
    assert min(pool.run(_every_method, op, timeout_s=120)) > 8


ChoiceRows = list[tuple[str, str, dict[str, float]]]


def _get_choices() -> ChoiceRows:
    return [(choice.key, choice.method, choice.us) for choice in weft.concurrent_choices()]


@alarm(40)
def _contest() -> ChoiceRows:
    weft.close()
    for op in OPS:
        exchange, products = Exchange(op, _device(), part=4 * PART), Products(_device(), size=2048)
        for turn in range(3):
            exchange.fill(turn)
            products.check(weft.concurrent(products, exchange.collective, key=op, repeatable=True))
            exchange.check(turn)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = weft.concurrent(products, exchange.collective, key=op, repeatable=True)
        for turn in range(3, 6):
            exchange.fill(turn)
            graph.replay()
            exchange.check(turn)
            products.check(out)
        torch.cuda.synchronize()
        dist.barrier()
    return _get_choices()


def test_a_trial_agrees_and_a_graph_keeps_its_method(pool: Ranks) -> None:
    answers = pool.run(_contest, timeout_s=120)
    assert all(answer == answers[0] for answer in answers)
    assert [key for key, _, _ in answers[0]] == list(OPS)
    for _, method, us in answers[0]:
        assert len(us) > 4
        assert us[method] <= us["sequential"]
        assert all(time > 0 for time in us.values())


@alarm(40)
def _planned() -> ChoiceRows:
    """A context takes the planner's choice from the first use on, eagerly and in a graph."""
    weft.close()
    exchange, products = Exchange("all_reduce", _device(), part=4 * PART), Products(_device(), size=2048)
    seen = set()
    for turn in range(6):
        exchange.fill(turn)
        with weft.concurrent(collectives=exchange.collective, key="context", compute_us=100.0) as context:
            out = products()
        seen.add(context.method)
        exchange.check(turn)
        products.check(out)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
        weft.concurrent(collectives=exchange.collective, key="context", compute_us=100.0),
    ):
        out = products()
    for turn in range(6, 9):
        exchange.fill(turn)
        graph.replay()
        exchange.check(turn)
        products.check(out)
    torch.cuda.synchronize()
    dist.barrier()
    assert products.calls == 7
    assert len(seen) == 1
    return _get_choices()


def test_a_context_takes_the_planners_choice(pool: Ranks) -> None:
    answers = pool.run(_planned, timeout_s=90)
    assert all(answer == answers[0] for answer in answers)
    ((key, _, us),) = answers[0]
    assert (key, us) == ("context", {})


class _Stop(Exception):
    pass


@alarm(40)
def _raised() -> None:
    """An exception within leaves no SM budget behind, the collective is done, and the next use is right."""
    before = torch._C._get_sm_carveout_experimental()
    exchange, products = Exchange("all_reduce", _device(), part=PART), Products(_device(), size=256)
    for turn, method in enumerate(("nccl+priority+left=24", "nccl+late+left=8", "copy_engine+priority+ctas=8+left=8")):
        exchange.fill(turn)
        with suppress(_Stop), weft.concurrent(collectives=exchange.collective, key="raised", method=method):
            assert torch._C._get_sm_carveout_experimental() != before
            raise _Stop
        exchange.check(turn)
        assert torch._C._get_sm_carveout_experimental() == before
        exchange.fill(turn)
        products.check(weft.concurrent(products, exchange.collective, method=method))
        exchange.check(turn)
    with pytest.raises(ValueError, match="left=100000; this device has"):
        weft.concurrent(products, exchange.collective, method="nccl+left=100000")


def test_exceptions_restore_budgets(pool: Ranks) -> None:
    pool.run(_raised)


@alarm(40)
def _nested(method: str, other: str) -> None:
    """Two groups at once, one use within another, six turns."""
    second = dist.new_group(list(range(dist.get_world_size())))
    outer, inner = Exchange("all_reduce", _device(), part=PART), Exchange("all_gather", _device(), part=PART, group=second)
    products = Products(_device(), size=512)
    for turn in range(6):
        outer.fill(turn)
        inner.fill(turn)
        with weft.concurrent(collectives=outer.collective, key="outer", method=method):
            out = products()
            with weft.concurrent(collectives=inner.collective, key="inner", method=other):
                again = products()
            inner.check(turn)
        outer.check(turn)
        products.check(out)
        products.check(again)
    torch.cuda.synchronize()
    dist.barrier()
    weft.close(second)


@pytest.mark.parametrize(
    ("method", "other"),
    [("nccl+priority", "nccl"), ("nccl+priority+ctas=8", "copy_engine"), ("copy_engine+priority", "sequential")],
)
def test_uses_nest_over_two_groups(pool: Ranks, method: str, other: str) -> None:
    pool.run(_nested, method, other)


@alarm(40)
def _graph_as_computation() -> ChoiceRows:
    weft.close()
    exchange, products = Exchange("all_to_all", _device(), part=PART), Products(_device(), size=1024)
    products()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = products()
    for turn in range(6):
        exchange.fill(turn)
        weft.concurrent(graph, exchange.collective, key="graph", repeatable=True)
        exchange.check(turn)
        products.check(out)
    return _get_choices()


def test_a_graph_is_a_computation(pool: Ranks) -> None:
    answers = pool.run(_graph_as_computation, timeout_s=90)
    assert all(answer == answers[0] for answer in answers)
    ((_, _, us),) = answers[0]
    assert us
    assert not any("left" in method for method in us)


@triton.jit
def _repeated_kernel(x_ptr, out_ptr, count, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    """out = x + 1, TURNS times over: work that takes a while."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < count)
    for _ in range(TURNS):
        x += 1.0
    tl.store(out_ptr + at, x, at < count)


@alarm(40)
def _named_kernels() -> ChoiceRows:
    weft.close()
    exchange = Exchange("all_reduce", _device(), part=PART)
    x = torch.zeros(1 << 22, device="cuda")

    def compute(kernel: Any) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), TURNS=64, BLOCK=256)
        return out

    for turn in range(6):
        exchange.fill(turn)
        x.fill_(turn)
        out = weft.concurrent(compute, exchange.collective, key="named", kernels=[_repeated_kernel], repeatable=True)
        exchange.check(turn)
        assert torch.equal(out, x + 64)
        method = "nccl+priority+resident=2"
        out = weft.concurrent(compute, exchange.collective, method=method, kernels=[_repeated_kernel])
        assert torch.equal(out, x + 64)
    return _get_choices()


def test_named_kernels_are_capped(pool: Ranks) -> None:
    answers = pool.run(_named_kernels, timeout_s=90)
    assert all(answer == answers[0] for answer in answers)
    ((_, _, us),) = answers[0]
    assert any("resident" in method for method in us)


def _losses(kind: str, method: str | None) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    if kind == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=1)
    else:
        mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
    trial = (
        {"ddp": weft.hooks.ddp, "fsdp": weft.hooks.fsdp}[kind](model, method=method, key=f"{kind} {method}") if method else None
    )  # type: ignore[operator]
    return _descended(model, 30), trial.method if trial else ""


def _descended(model: torch.nn.Module, steps: int) -> list[float]:
    """The losses of so many steps."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(64, 512, generator=draw).cuda()
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(float(loss))
    return seen


def _offloaded(method: str | None) -> list[float]:
    """Losses with parameters on CPUs, gathered on GPUs."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    if method:
        weft.hooks.fsdp(model, method=method, key=f"offloaded {method}")
    return _descended(model, 6)


def _all_offloaded() -> None:
    _alarm()
    weft.close()
    plain = _offloaded(None)
    for method in ("nccl+ahead=1", "nccl+unsharded"):
        _alarm()
        mine = _offloaded(method)
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(plain), rtol=1e-4, atol=1e-5)
    torch.cuda.synchronize()
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()


def test_offloaded_parameters_train_as_pytorch_does(pool: Ranks) -> None:
    pool.run(_all_offloaded, timeout_s=90)


def _trained(kind: str, methods: list[str]) -> ChoiceRows:
    _alarm()
    weft.close()
    plain, _ = _losses(kind, None)
    for method in methods:
        _alarm()
        mine, taken = _losses(kind, method)
        assert method in ("auto", taken)
        torch.testing.assert_close(torch.tensor(mine[: len(plain)]), torch.tensor(plain), rtol=1e-4, atol=1e-5)
    torch.cuda.synchronize()
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    return _get_choices()


@pytest.mark.parametrize(
    ("kind", "methods"),
    [
        (
            "ddp",
            ["auto", "sequential", "nccl+priority+ctas=8+left=8", "copy_engine+priority+ctas=8", "copy_engine+pull+ctas=8"],
        ),
        ("fsdp", ["auto", "nccl+ahead=2", "nccl+unsharded+ahead=1"]),
    ],
)
def test_hooks_train_as_pytorch_does(pool: Ranks, kind: str, methods: list[str]) -> None:
    answers = pool.run(_trained, kind, methods, timeout_s=120)
    assert all(answer == answers[0] for answer in answers)
    assert [us for _, _, us in answers[0]] == [{}] * len(methods)
    (method,) = [method for key, method, _ in answers[0] if key == f"{kind} auto"]
    assert method.startswith(("nccl", "sequential"))
