"""What each part of benchmarks.baseline times. runs.py starts each rank by `python -m benchmarks.baseline.parts PART FILE`.

Names of rows stay what they are, so that rows of earlier commits can be compared. Kernels are imported where they are timed:
a first call of a process is to load them itself.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

import weft
from benchmarks import cases, measure
from benchmarks.baseline.calls import first, host
from benchmarks.baseline.ranks import Method, World, agreed, graph_times, method
from benchmarks.baseline.runs import PARTS
from benchmarks.rows import append, name_of

ALARM_S = 75


def memory(world: World) -> None:
    """What is held once a problem is bound and has been called three times, of one program in a group of its own."""
    for op, spec, m, n, k in (
        ("all_gather_matmul", "flag_gated:2", 8192, 8192, 8192),
        ("all_gather_matmul", "shard_p2p", 8192, 8192, 8192),
        ("matmul_reduce_scatter", "track_and_trigger:2", 8192, 8192, 8192),
        ("matmul_all_reduce", "two_shot", 8, 8192, 8192),
    ):
        name = f"{spec} {m}x{n}x{k}"
        # Once before, so that what CUDA loads with a kernel is not counted.
        for counts in (False, True):
            found, reason = agreed(world, lambda: _held(world, op, spec, m, n, k))  # noqa: B023 - called at once
            if reason:
                world.leave_out(op, name, reason)
                weft.close()
                break
            for what, nbytes in found.items() if counts else ():
                most = max(world.everyone(nbytes))
                world.keep(op, f"{name}, {what}", "bytes", {"value": most}, dtype="bfloat16")


def _held(world: World, op: str, spec: str, m: int, n: int, k: int) -> dict[str, int]:
    """Bytes that a program takes: of symmetric memory, of torch's allocator, and of the GPU."""
    gather, size = op == "all_gather_matmul", world.size
    a = torch.zeros(m // size if gather else m, k if gather else k // size, device=world.on, dtype=torch.bfloat16)
    b = torch.zeros(a.shape[1], n // size if gather else n, device=world.on, dtype=torch.bfloat16)
    symmetric, usual = list[int](), symmetric_memory.empty

    def counted(*given: Any, **options: Any) -> torch.Tensor:
        found = usual(*given, **options)
        symmetric.append(found.nbytes)
        return found

    before = _used(world)
    with mock.patch.object(symmetric_memory, "empty", counted):
        for _ in range(3):
            out = getattr(weft, op)(a, b, schedule=spec)
            world.idle()
    del out
    allocated, reserved, driver = (now - then for now, then in zip(_used(world), before, strict=True))
    weft.close()
    rest, _, driver_rest = (now - then for now, then in zip(_used(world), before, strict=True))
    return {
        "symmetric": sum(symmetric),
        "torch, allocated": allocated,
        "torch, reserved": reserved,
        "driver, both ranks": driver,
        "torch, allocated, after close": rest,
        "driver, both ranks, after close": driver_rest,
    }


def _used(world: World) -> tuple[int, int, int]:
    """(torch's allocations, what torch's allocator holds, what the driver has given to all)."""
    gc.collect()
    torch.cuda.empty_cache()
    world.wait()
    free, total = torch.cuda.mem_get_info()
    found = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free
    world.wait()
    return found


def replay_methods(world: World, m: int, n: int, k: int) -> list[Method]:
    """Tensor parallel operators of these global extents; an exchange and a decode step of the like."""
    size, dtype = world.size, "bfloat16"
    shard, right = world.tensor(m // size, k, dtype=dtype), world.tensor(k, n // size, dtype=dtype)
    left, below = world.tensor(m, n // size, dtype=dtype), world.tensor(n // size, k, dtype=dtype)
    some = world.tensor(8, n // size, dtype=dtype)
    made = []
    for op, a, b, specs in (
        ("all_gather_matmul", shard, right, ("flag_gated:2", "shard_p2p", "sequential_stores")),
        ("matmul_reduce_scatter", left, below, ("track_and_trigger:2", "direct_store:1", "shard_p2p")),
        ("matmul_all_reduce", some, below, ("one_shot", "two_shot")),
        ("matmul_all_to_all", shard, right, ("track_and_trigger:1", "direct_store:1")),
        ("all_to_all_matmul", shard, right, ("flag_gated:1",)),
    ):
        sizes = f"M={a.shape[0] * (size if op == 'all_gather_matmul' else 1)} {a.shape[1]}x{b.shape[1]}"
        made += [method(op, f"{sizes} {spec}", getattr(weft, op), a, b, schedule=spec) for spec in specs]
    return [*made, method("torch", f"mm {m}x{k}x{n // size}", torch.mm, left, below)]


def replay(world: World) -> None:
    graph_times(world, replay_methods(world, 2048, 4096, 4096), "bfloat16", 1)


def replay1(world: World) -> None:
    """As one of 8 ranks of Llama 3 70B has it."""
    graph_times(world, replay_methods(world, 2048, 3584, 8192), "bfloat16", 5)


def gemm(world: World) -> None:
    from benchmarks.kernels import gemm as bench
    from benchmarks.kernels.operands import ROUNDS
    from benchmarks.kernels.single_gpu import medians

    wanted = {
        *(("all_gather_matmul", f"llama3-70b M={m}") for m in (8192, 2048, 512)),
        ("matmul_reduce_scatter", "llama3-70b M=8192"),
        ("matmul_reduce_scatter", "t-nlg M=8192"),
    }
    for case in cases.CASES:
        if (case.op, case.name) in wanted:
            measure.alarm()
            for method_name, us in medians(bench.calls(case, False), rounds=ROUNDS).items():
                name = name_of(method_name)
                about: dict[str, Any] = {"dtype": "bfloat16", "mode": "graph", "control": name == "cublas"}
                world.keep("gemm", f"{case.op} {case.name}, {name}", "us", {"value": us}, **about)


def products(world: World) -> None:
    from benchmarks.kernels import products as bench

    for k, n in ((8192, 3584), (14336, 4096), (4096, 5120)):
        for m, linear in itertools.product((16, 128, 512, 2048, 8192), (False, True)):
            measure.alarm()
            us = bench.measure(m, n, k, linear)
            algorithm, case = [weft.matmul_choices()[-1].algorithm], bench.name_of(m, n, k, linear)
            about: dict[str, Any] = {"dtype": "bfloat16", "mode": "graph"}
            world.keep("matmul", f"{case}, weft", "us", {"value": us[bench.WEFT]}, algorithm=algorithm, **about)
            world.keep("matmul", f"{case}, torch", "us", {"value": us[bench.TORCH]}, control=True, **about)


def lookup(world: World) -> None:
    from benchmarks import lookups

    for number in (0, 1, 4):
        case = cases.LOOKUPS[number]
        works = lookups.Tables(case).works(())
        methods = [
            method("lookup", f"bags {case.name}, weft", works["computation/weft"]),
            method("torch", f"bags {case.name}, torch", works["computation/torch as one"]),
        ]
        graph_times(world, methods, "float32", lookups.REPEAT)
        del works, methods
        gc.collect()
        torch.cuda.empty_cache()


def ragged(world: World) -> None:
    """The pieces of a Mixtral layer in a world of one rank, which has all experts."""
    from benchmarks import moe

    wanted = ("spread", "dispatch", "dispatch, gated", "swiglu", "combine", "gather", "torch up", "torch down")
    for tokens in (512, 8192):
        torch.manual_seed(0)
        layer = moe.Layer(tokens, 1.25)
        works = {name.partition("/")[2]: work for name, work in layer.works("pieces").items()}
        ops = {name: "torch" if name.startswith("torch") else "experts" for name in wanted}
        methods = [method(ops[name], f"mixtral-8x7b layer tokens={tokens}, {name}", works[name]) for name in wanted]
        graph_times(world, methods, "bfloat16", 2)
        del layer, works, methods
        gc.collect()
        torch.cuda.empty_cache()


WORK = {one.__name__: one for one in (host, first, memory, replay, replay1, gemm, products, lookup, ragged)}


def main(name: str, raw: Path) -> None:
    """This process is one rank of a part: its rows go to `raw`."""
    measure.ALARM_S = ALARM_S
    measure.alarm()
    part = PARTS[name]
    world = World(name, part.device, part.note)
    WORK[part.work](world)
    world.wait()
    weft.close()
    for row in world.rows if world.rank == 0 else ():
        append(raw, row)
    world.wait()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
