"""Ways to start a job on GPUs: each gives right results, or a ValueError on every rank that names the cause."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpus import NEEDS_REAL_TWO, alarm

import weft

pytestmark = NEEDS_REAL_TWO
OVERLAPPING = ("shard_p2p", "flag_gated:2", "direct_store:1", "auto")


def _rank(rank: int, port: int, work: Callable[[torch.device], Any], environment: dict[str, str], answers: Any) -> None:
    os.environ.update(
        {"WEFT_TIMEOUT_S": "20", "WEFT_CACHE_DIR": "", **{k: v.format(rank=rank) for k, v in environment.items()}}
    )
    own = "CUDA_VISIBLE_DEVICES" in environment
    try:
        device = torch.device("cuda", 0 if own else rank)
        if "NO_SET_DEVICE" not in environment:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=60),
        )
        with alarm(100):
            answers.put((rank, work(device)))
            weft.close()
    except BaseException:
        answers.put((rank, traceback.format_exc()))
    answers.close()
    answers.join_thread()  # what is exited at once loses the answers that its queue has not sent
    os._exit(0)


def started(work: Callable[[torch.device], Any], **environment: str) -> list[Any]:
    """What two ranks answer, each in a process of its own with these variables; {rank} in a value is the rank."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    context = mp.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, port, work, environment, answers)) for rank in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        for rank, process in enumerate(processes):
            for name, value in environment.items():
                patch.setenv(name, value.format(rank=rank))  # torch reads some when it is imported
            process.start()
    found = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(20)
        process.kill()
    return [found[rank] for rank in range(2)]


def _right(device: torch.device, schedules: tuple[str, ...] = OVERLAPPING) -> str:
    """Both operators of tensor parallelism, few rows and a collective, each three times."""
    rank, size = dist.get_rank(), 2
    torch.manual_seed(0)
    a, b = torch.randn(384, 512).bfloat16(), (torch.randn(512, 256) * 512**-0.5).bfloat16()
    product = a.float() @ b.float()
    rows, inner = a.chunk(size)[rank].to(device), (a.chunk(size, 1)[rank].to(device), b.chunk(size)[rank].to(device))
    whole = b.to(device)
    for schedule in schedules:
        for _ in range(3):
            out = weft.all_gather_matmul(rows, whole, schedule=schedule)
            torch.testing.assert_close(out.float().cpu(), product, rtol=2e-2, atol=2e-2)
            back = "track_and_trigger:2" if schedule.startswith("flag_gated") else schedule
            part = weft.matmul_reduce_scatter(*inner, schedule=back)
            torch.testing.assert_close(part.float().cpu(), product.chunk(size)[rank], rtol=2e-2, atol=2e-2)
    few = weft.matmul_all_reduce(inner[0][:8], inner[1])
    torch.testing.assert_close(few.float().cpu(), product[:8], rtol=2e-2, atol=2e-2)
    summed = torch.full((1 << 12,), float(rank + 1), device=device)
    weft.collectives.all_reduce(summed)
    assert summed.unique().tolist() == [3.0]
    return "right"


def test_a_gpu_of_its_own_for_each_rank_alone() -> None:
    assert started(_right, CUDA_VISIBLE_DEVICES="{rank}") == ["right"] * 2


def test_no_set_device() -> None:
    assert started(_right, NO_SET_DEVICE="1") == ["right"] * 2


def _sequentially(device: torch.device) -> tuple[str, str]:
    try:
        weft.all_gather_matmul(torch.ones(64, 64, device=device), torch.ones(64, 64, device=device), schedule="shard_p2p")
        refused = "ran"
    except ValueError as error:
        refused = str(error)
    return refused, _right(device, ("auto", "sequential"))


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "CUDA_LAUNCH_BLOCKING"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "cudaMallocAsync"),
    ],
)
def test_what_cannot_overlap_runs_sequentially(variable: str, value: str, named: str) -> None:
    for refused, right in started(_sequentially, **{variable: value}):
        assert named in refused
        assert right == "right"


def _one_gpu(device: torch.device) -> str:
    torch.cuda.set_device(0)
    try:
        weft.all_gather_matmul(torch.ones(64, 64, device="cuda:0"), torch.ones(64, 64, device="cuda:0"))
    except ValueError as error:
        return str(error)
    return "ran"


def test_two_ranks_of_one_gpu_are_refused() -> None:
    for refused in started(_one_gpu):
        assert "ranks 0 and 1 use the same GPU" in refused


def _compiled(device: torch.device, mode: str) -> str:
    """A block under torch.compile, for several lengths, with and without gradients."""
    rank, size = dist.get_rank(), 2
    torch.manual_seed(0)
    up, down = torch.randn(256, 512) * 0.05, torch.randn(512, 256) * 0.05
    wide = up.chunk(size, 1)[rank].to(device, torch.bfloat16).contiguous().requires_grad_()
    back = down.chunk(size)[rank].to(device, torch.bfloat16).contiguous().requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return x + weft.matmul_reduce_scatter(torch.relu(weft.all_gather_matmul(x, wide)), back)

    run = torch.compile(block, mode=mode, dynamic=False)
    for grad in (False, True):
        for rows in (128, 256, 128):
            for turn in range(4):
                torch.manual_seed(turn)
                x = torch.randn(rows, 256)
                own = x.chunk(size)[rank].to(device, torch.bfloat16).contiguous().requires_grad_(grad)
                torch.compiler.cudagraph_mark_step_begin()
                with torch.set_grad_enabled(grad):
                    out = run(own)
                wanted = (x + torch.relu(x @ up) @ down).chunk(size)[rank]
                torch.testing.assert_close(out.float().cpu(), wanted, rtol=5e-2, atol=0.2)
                if grad:
                    out.float().sum().backward()
                    assert own.grad is not None
                    assert bool(own.grad.isfinite().all())
                    wide.grad = back.grad = None
    return "right"


def _reduced_overhead(device: torch.device) -> str:
    return _compiled(device, "reduce-overhead")


def test_cuda_graph_trees_of_torch_compile() -> None:
    assert started(_reduced_overhead) == ["right"] * 2
