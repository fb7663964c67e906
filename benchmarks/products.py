"""How much faster is a product by the algorithm of cuBLAS that weft finds fastest than by the one that torch takes?

Protocol: one GPU, bfloat16, normal data, k and n of Llama 3, Qwen 3 and Mixtral as a rank of 2, 4 or 8 has them, weights as
matmul's b (k x n) and as a linear's (n x k, transposed); numbers of rows that batches and prompts have. torch.mm and weft's
product, found beforehand, in a CUDA graph of several calls each, replayed in turn; medians of GPU event times. Results are
compared with float64's of some rows. Traps: a and b stay the same, so that small weights stay in the L2 cache; which is
fastest is found by a measurement of its own, so that what is shown is no minimum over what is timed here.

    python -m benchmarks.products --json benchmarks/results/products.jsonl
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import statistics

import torch

import weft
from benchmarks.checked_options import appended
from benchmarks.rows import Row, append, geomean
from weft.runtime.products import Products
from weft.runtime.versions import versions

SHAPES = (
    (4096, 28672),
    (5120, 25600),
    (14336, 4096),
    (14336, 8192),
    (4096, 8192),
    (8192, 29568),
    (8192, 10240),
    (8192, 3584),
    (2048, 7168),
    (4096, 5120),
)
"""(k, n) of a rank's product."""
ROWS = (16, 64, 112, 128, 192, 224, 256, 320, 393, 400, 448, 512, 544, 640, 704, 832, 1024, 1856, 2048, 4096, 8192)
_MOST_FLOPS = 2 * 8192 * 8192 * 14336
_ROUNDS, _WARM_UP, _SAMPLE_US, _MOST_CALLS = 9, 2, 1000.0, 10


def case(m: int, n: int, k: int, linear: bool) -> tuple[list[torch.Tensor], Products]:
    """a, b, out, and weft's products, which have found the fastest way. Raises AssertionError if that is wrong."""
    device = torch.device("cuda")
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16) if linear else None
    b = torch.randn(k, n, device=device, dtype=torch.bfloat16) if weight is None else weight.t()
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    products = Products(device)
    products.multiply(a, b, out, accumulate=False, times=True)
    out.fill_(math.nan)
    products.multiply(a, b, out, accumulate=False, times=False)
    some = torch.arange(0, m, max(1, m // 7), device=device)
    torch.testing.assert_close(out[some].double(), a[some].double() @ b.double(), rtol=1e-2, atol=1e-2 * math.sqrt(k))
    return [a, b, out], products


def measure(matrices: list[torch.Tensor], products: Products) -> tuple[float, float]:
    """Median time by torch, and by weft, in us."""
    a, b, out = matrices
    flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
    calls = max(2, min(_MOST_CALLS, round(_SAMPLE_US / (20 + flops / 6e8))))
    graphs = []
    for work in (
        lambda: torch.mm(a, b, out=out),
        lambda: products.multiply(a, b, out, accumulate=False, times=False),
    ):
        with torch.cuda.stream(torch.cuda.Stream()):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                work()
        graphs.append(graph)
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(_ROUNDS + _WARM_UP):
        for graph, found in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if round_ >= _WARM_UP:
                found.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=appended, help="append a row for each product (rows.py)")
    parser.add_argument("--commit", default="", help="what the tree is, for the rows")
    arguments = parser.parse_args()
    found: dict[int, list[float]] = {}
    for m in ROWS:
        for k, n in SHAPES:
            if 2 * m * n * k > _MOST_FLOPS:
                continue
            for linear in (False, True):
                faulthandler.dump_traceback_later(60, exit=True)
                matrices, products = case(m, n, k, linear)
                choice = weft.matmul_choices()[-1]
                vendor_us, us = measure(matrices, products)
                found.setdefault(m, []).append(vendor_us / us)
                row = Row(
                    bench="products",
                    op="matmul",
                    case=f"{m}x{k}x{n}" + (" linear" if linear else ""),
                    dtype="bfloat16",
                    world_size=1,
                    mode="graph",
                    machine=f"1 x {torch.cuda.get_device_name()}",
                    versions=versions("cuda"),
                    commit=arguments.commit,
                    samples=_ROUNDS,
                    us={"computation/cublas": vendor_us, "weft/auto": us},
                    chosen=None if choice.algorithm is None else str(choice.algorithm),
                    extra={"rows": m, "tried": len(choice.us)},
                )
                append(arguments.json, row)
        ratios = found[m]
        print(f"{m} rows: {geomean(ratios):.3f} of torch.mm's speed, {min(ratios):.2f} to {max(ratios):.2f}", flush=True)
    every = [ratio for ratios in found.values() for ratio in ratios]
    slower = sum(ratio < 0.99 for ratio in every)
    print(f"all {len(every)}: {geomean(every):.3f}, {min(every):.3f} to {max(every):.2f}; below 0.99: {slower}")


if __name__ == "__main__":
    main()
