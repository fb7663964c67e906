"""What do the first calls of a program cost, in seconds and in GPU memory?

The four matmuls of a Llama 3 8B layer at 8192 tokens (bfloat16), each called for the first time in this process by
`schedule="auto"`, then once more. A first call compiles kernels, measures a few schedules and binds the fastest. Memory is
what is taken of the GPU, less what torch's allocator has reserved: weft's symmetric buffers, flags and streams, and the kernels
and graphs that were loaded meanwhile. Nothing else may run on the GPU.

Run it twice with the same empty folders for WEFT_CACHE_DIR and TRITON_CACHE_DIR: the second run is what a restarted program
pays, which finds the choices and the compiled kernels of the first.

    export WEFT_CACHE_DIR=/tmp/plans TRITON_CACHE_DIR=/tmp/triton
    torchrun --nproc-per-node 2 -m benchmarks.first_call --label "nothing cached" --json benchmarks/results/first_call.jsonl
    torchrun --nproc-per-node 2 -m benchmarks.first_call --label restarted --json benchmarks/results/first_call.jsonl
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import weft
from benchmarks import measure
from benchmarks.measure import append, parser, row, say, start, stop

HIDDEN, WIDTH, HEADS, TOKENS = 4096, 14336, 6144, 8192


def drawn(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * columns**-0.5


def layer() -> dict[str, Callable[[], object]]:
    """The layer's matmuls on this rank, by name."""
    size = dist.get_world_size()
    tokens, both = TOKENS // size, 2 * WIDTH // size
    return {
        "qkv": partial(weft.all_gather_matmul, drawn(tokens, HIDDEN), drawn(HIDDEN, HEADS // size)),
        "o": partial(weft.matmul_reduce_scatter, drawn(TOKENS, HIDDEN // size), drawn(HIDDEN // size, HIDDEN)),
        "gate, up": partial(weft.all_gather_matmul, drawn(tokens, HIDDEN), drawn(HIDDEN, both)),
        "down": partial(weft.matmul_reduce_scatter, drawn(TOKENS, WIDTH // size), drawn(WIDTH // size, HIDDEN)),
    }


def seconds(call: Callable[[], object]) -> float:
    """Of the slowest rank, until the GPU is done."""
    torch.cuda.synchronize()
    dist.barrier()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    took = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def outside_torch() -> int:
    """Bytes of the GPU that are taken, but not by torch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def main() -> None:
    options = parser(__doc__, rounds=1, modes="eager")
    options.add_argument("--label", default="", help="what is cached when the run begins")
    arguments = options.parse_args()
    measure.PLANS = os.environ.get("WEFT_CACHE_DIR", "")
    start()
    calls = layer()
    warm = drawn(256, 256)
    warm @ warm  # cuBLAS and NCCL are loaded by any program
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    before = outside_torch()
    first_s = {name: seconds(call) for name, call in calls.items()}
    again_s = {name: seconds(call) for name, call in calls.items()}
    held = outside_torch() - before
    chosen = {str(choice.problem): choice.spec for choice in weft.choices()}
    made = row(
        bench="first_call",
        op="layer",
        case="llama3-8b layer",
        dtype="bfloat16",
        mode="eager",
        state=arguments.label,
        extra={"first_s": first_s, "again_s": again_s, "held_bytes": held, "chosen": chosen},
        arguments=arguments,
    )
    append(arguments.json, made)
    for name, took in first_s.items():
        say(f"{arguments.label}: {name}: first call {took:.2f} s, second {again_s[name] * 1e3:.2f} ms")
    say(f"{arguments.label}: all four {sum(first_s.values()):.1f} s; {held / 2**20:.0f} MiB of GPU memory held")
    stop()


if __name__ == "__main__":
    main()
