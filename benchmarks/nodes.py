"""How much of what goes between nodes do slices hide?

Protocol: measure.py's; bf16 (lookups: float32), normal data; results are compared with sequential's before anything is timed.
The GPUs of one host are cut into nodes of --per-node ranks, which reach each other by NCCL's messages alone. Baselines of the
same run, all by weft or by what it stands for: sequential (cuBLAS, or weft's lookup, and NCCL over all ranks), NCCL alone, and
cuBLAS or weft's lookup alone. ideal = the larger of these two.

Traps: here the "network" is NVLink. So this says whether slices leave while the rest is computed, and what a slice costs; it
does not say what an adapter of 50 GB/s gives, behind which there is far more to hide. NCCL's sequential program knows of no
nodes, and uses all links alike.

    torchrun --nproc-per-node 4 -m benchmarks.nodes --json benchmarks/results/nodes.jsonl
    torchrun --nproc-per-node 4 -m benchmarks.nodes --ops matmul_all_to_all,embedding_bag_all_to_all --modes graph
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import weft
from benchmarks import measure
from benchmarks.embedding import Case as Bags
from benchmarks.embedding import Site
from benchmarks.measure import Job, Work, check_of, each_mode, parser, say, start, stop, together, trial
from benchmarks.parts import run_jobs
from benchmarks.rows import Row, summary
from weft import schedules
from weft.core.problem import Op

ROUNDS, REPEAT = 7, 3
measure.ALARM_S = 40
SPECS = ("node_slices:1", "node_slices:2", "node_slices:4")
Matmul = tuple[int, int, int]
"""M, N, K as a Problem has them."""
MATMULS: dict[Op, tuple[Matmul, ...]] = {
    "matmul_all_to_all": ((8192, 7168, 2048), (4096, 4096, 4096)),
    "all_to_all_matmul": ((8192, 7168, 2048), (4096, 4096, 4096)),
    "all_gather_matmul": ((8192, 14336, 4096),),
    "matmul_reduce_scatter": ((8192, 4096, 14336),),
    "matmul_all_reduce": ((64, 8192, 14336),),
}
LOOKUPS = (Bags(tables=8, dim=128, pooling=32, batch=8192), Bags(tables=32, dim=128, pooling=32, batch=8192))
Made = tuple[dict[str, Work], Callable[[str], Work]]
"""Baselines by name, and what calls the operator by a schedule."""


def drawn(*extents: int) -> torch.Tensor:
    return torch.randn(*extents, device="cuda", dtype=torch.bfloat16)


def exchange(sizes: Matmul) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, n, k = sizes
    return drawn(m, k), drawn(k, n) * k**-0.5, drawn(m, n)


def combine(sizes: Matmul) -> Made:
    a, b, product = exchange(sizes)
    landed = torch.empty_like(product)
    alone: dict[str, Work] = {
        "communication/default": lambda: dist.all_to_all_single(landed, product),
        "computation/cublas": lambda: a @ b,
    }
    return alone, lambda spec: partial(weft.matmul_all_to_all, a, b, schedule=spec)


def dispatch(sizes: Matmul) -> Made:
    a, b, _ = exchange(sizes)
    landed = torch.empty_like(a)
    alone: dict[str, Work] = {
        "communication/default": lambda: dist.all_to_all_single(landed, a),
        "computation/cublas": lambda: a @ b,
    }
    return alone, lambda spec: partial(weft.all_to_all_matmul, a, b, schedule=spec)


def gather(sizes: Matmul) -> Made:
    (m, n, k), size = sizes, dist.get_world_size()
    a, b, a_full = drawn(m // size, k), drawn(k, n // size) * k**-0.5, drawn(m, k)
    alone: dict[str, Work] = {
        "communication/default": lambda: dist.all_gather_into_tensor(a_full, a),
        "computation/cublas": lambda: a_full @ b,
    }
    return alone, lambda spec: partial(weft.all_gather_matmul, a, b, schedule=spec)


def scatter(sizes: Matmul) -> Made:
    (m, n, k), size = sizes, dist.get_world_size()
    a, b, partial_sums, out = drawn(m, k // size), drawn(k // size, n) * k**-0.5, drawn(m, n), drawn(m // size, n)
    alone: dict[str, Work] = {
        "communication/default": lambda: dist.reduce_scatter_tensor(out, partial_sums),
        "computation/cublas": lambda: a @ b,
    }
    return alone, lambda spec: partial(weft.matmul_reduce_scatter, a, b, schedule=spec)


def all_reduce(sizes: Matmul) -> Made:
    (m, n, k), size = sizes, dist.get_world_size()
    a, b, sums = drawn(m, k // size), drawn(k // size, n) * k**-0.5, torch.zeros(m, n, device="cuda", dtype=torch.bfloat16)
    alone: dict[str, Work] = {"communication/default": lambda: dist.all_reduce(sums), "computation/cublas": lambda: a @ b}
    return alone, lambda spec: partial(weft.matmul_all_reduce, a, b, schedule=spec)


def lookups(case: Bags) -> Made:
    site = Site(case)
    alone: dict[str, Work] = {
        "communication/default": lambda: dist.all_to_all_single(site.recv, site.pooled),
        "computation/weft": site.lookup(),
    }
    return alone, site.overlapped


MAKERS: dict[Op, Callable[[Matmul], Made]] = {
    "matmul_all_to_all": combine,
    "all_to_all_matmul": dispatch,
    "all_gather_matmul": gather,
    "matmul_reduce_scatter": scatter,
    "matmul_all_reduce": all_reduce,
}


def measured(op: Op, case: str, dtype: str, make: Callable[[], Made], arguments: argparse.Namespace) -> list[Row]:
    """One case in every mode. make: its methods, which take memory."""
    torch.manual_seed(dist.get_rank())
    alone, call = make()
    specs = arguments.specs.split(",")
    works = alone | {"sequential/default": call("sequential")} | {f"weft/{spec}": call(spec) for spec in (*specs, "auto")}
    expected = together("sequential/default", works["sequential/default"])
    check = check_of(expected.float())  # type: ignore[attr-defined]
    needed, modes = ("sequential/default", *alone), arguments.modes.split(",")
    times, missing = trial(works, modes, check=check, needed=needed, rounds=arguments.rounds, repeat=REPEAT)
    extra = {"nodes": made_of(dist.get_world_size(), arguments.per_node)}
    return each_mode(times, bench="nodes", op=op, case=case, dtype=dtype, missing=missing, extra=extra, arguments=arguments)


def made_of(world_size: int, per_node: int) -> tuple[int, ...]:
    """Ranks on each node."""
    return tuple(min(per_node, world_size - first) for first in range(0, world_size, per_node))


def jobs(arguments: argparse.Namespace) -> list[Job]:
    """What is to be measured."""
    found: list[tuple[Op, str, str, Callable[[], Made]]] = []
    for op, cases in MATMULS.items():
        found += [(op, "M={} N={} K={}".format(*sizes), "bfloat16", partial(MAKERS[op], sizes)) for sizes in cases]
    found += [("embedding_bag_all_to_all", case.name, "float32", partial(lookups, case)) for case in LOOKUPS]
    asked = [case for case in found if any(word in case[0] for word in arguments.ops.split(","))]
    return [Job(name=f"{op} {case}", run=partial(measured, op, case, *rest, arguments)) for op, case, *rest in asked]


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS)
    options.add_argument("--ops", default="", help="only operators whose name contains one of these, with commas")
    options.add_argument("--specs", default=",".join(SPECS), help="the schedules to try beside auto (%(default)s)")
    options.add_argument("--per-node", type=int, default=2, help="ranks that are taken for a node (%(default)s)")
    arguments = options.parse_args()
    for spec in arguments.specs.split(","):
        schedules.parse(spec)
    os.environ["WEFT_RANKS_PER_NODE"] = str(arguments.per_node)
    start()
    found, left_out = run_jobs(jobs(arguments), arguments)
    say(summary(found))
    stop(left_out)


if __name__ == "__main__":
    main()
