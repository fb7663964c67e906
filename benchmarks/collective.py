"""How fast are collectives by copy engines, alone, by size?

all_gather, all_to_all, reduce_scatter and all_reduce of bfloat16 tensors that are 64 KiB to 512 MiB as a whole: what an
all_gather ends with, what each rank gives to the others.

    communication/...         NCCL, by each transport (nccl.py)
    copy_engine:C             weft.collectives, C pieces a part, sums on 32 SMs
    copy_engine:2, N SMs      the same with sums on N SMs
    copy_engine_pull:C        all_gather and all_reduce: peers pull
    copy_engine:C, straight   the result lies in collectives.empty: nothing is staged, or copied on arrival

Protocol: measure.py's; graphs; every first result is compared with torch.distributed's, exactly where nothing is summed. Traps:
weft copies what arrives to the caller's tensor, as NCCL does from plain buffers; NCCL's registered transports get tensors in
their windows from the start. An all_reduce is in place, so that its values grow from call to call; after the first one only
time counts.

    timeout 85 torchrun --nproc-per-node 2 -m benchmarks.collective --json benchmarks/results/h200x2/dma.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.measure import Job, Work, WrongResult, bytes_text, close_to, each_mode, parser, start, stop, trial
from benchmarks.nccl import REGISTERED, Transport, transports
from benchmarks.rows import Row
from benchmarks.runner import run_jobs
from weft import collectives
from weft.core.problem import CollectiveProblem

ROUNDS = 7
SIZES = tuple(1 << power for power in (29, 26, 23, 20, 16))
OPS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
CHUNKS = (1, 2, 4)
SMS = (8, 32)
REPEAT, REPEAT_SMALL = 2, 20
SMALL_BYTES = 1 << 23


def reference(op: str, given: torch.Tensor) -> torch.Tensor:
    """What torch.distributed makes of a rank's tensor; of an all_gather, of its part."""
    size, out = dist.get_world_size(), torch.empty_like(given)
    if op == "all_gather":
        dist.all_gather_into_tensor(out, given[: given.numel() // size])
    elif op == "all_to_all":
        dist.all_to_all_single(out, given)
    else:
        out = given.float()
        dist.all_reduce(out)
        if op == "reduce_scatter":
            out = out.view(size, -1)[dist.get_rank()]
    return out


def ours(op: str, given: torch.Tensor, spec: str, sms: int | None = None, *, straight: bool = False) -> Work:
    """One call of weft on tensors of its own. straight: the result in symmetric memory."""
    part = given.numel() // dist.get_world_size()
    if op == "all_reduce":
        tensor = (_symmetric(given) if straight else torch.empty_like(given)).copy_(given)
        return _returning(tensor, partial(collectives.all_reduce, tensor, schedule=spec, sms=sms))
    if op == "reduce_scatter":
        out = given.new_empty(part)
        return _returning(out, partial(collectives.reduce_scatter_tensor, out, given, schedule=spec, sms=sms))
    out = _symmetric(given) if straight else torch.empty_like(given)
    if op == "all_gather":
        return _returning(out, partial(collectives.all_gather_into_tensor, out, given[:part], schedule=spec))
    return _returning(out, partial(collectives.all_to_all_single, out, given, schedule=spec))


def _symmetric(like: torch.Tensor) -> torch.Tensor:
    return collectives.empty(like.numel(), dtype=like.dtype, device=like.device)


def _returning(out: torch.Tensor, call: Callable[[], object]) -> Work:
    def work() -> torch.Tensor:
        call()
        return out

    return work


def theirs(op: str, given: torch.Tensor, transport: Transport) -> Work:
    """One call of NCCL by one transport, on buffers of its own."""
    part = given.numel() // dist.get_world_size()
    if op == "all_reduce":
        tensor = transport.whole(1, given.numel()).view(-1).copy_(given)
        return _returning(tensor, partial(dist.all_reduce, tensor, group=transport.group))
    if op == "reduce_scatter":
        whole, out = transport.whole(1, given.numel()).view(-1).copy_(given), transport.shard(1, part).view(-1)
        return partial(transport.reduce_scatter, out, whole)
    elements = part if op == "all_gather" else given.numel()
    mine, whole = transport.shard(1, elements).view(-1).copy_(given[:elements]), transport.whole(1, given.numel()).view(-1)
    return partial(transport.all_gather if op == "all_gather" else transport.all_to_all, whole, mine)


def methods(op: str, given: torch.Tensor, found: Sequence[Transport]) -> dict[str, Work]:
    """By name."""
    works = {f"communication/{transport.name}": theirs(op, given, transport) for transport in found if transport.runs(op)}
    works |= {f"weft/copy_engine:{chunks}": ours(op, given, f"copy_engine:{chunks}") for chunks in CHUNKS}
    if op in ("all_gather", "all_reduce"):
        works |= {f"weft/copy_engine_pull:{c}": ours(op, given, f"copy_engine_pull:{c}") for c in CHUNKS[:2]}
    if op != "reduce_scatter":
        works["weft/copy_engine:2, straight"] = ours(op, given, "copy_engine:2", straight=True)
    if op in ("reduce_scatter", "all_reduce"):
        works |= {f"weft/copy_engine:2, {sms} SMs": ours(op, given, "copy_engine:2", sms) for sms in SMS}
    return works


def measured(op: str, nbytes: int, found: Sequence[Transport], arguments: argparse.Namespace) -> list[Row]:
    """One collective of one size, in every mode."""
    torch.manual_seed(dist.get_rank() + nbytes)
    given = torch.randn(nbytes // 2, device="cuda", dtype=torch.bfloat16)
    expected = reference(op, given)
    near = close_to(expected) if expected.dtype == torch.float32 else None
    checked: set[str] = set()

    def check(name: str, result: object) -> None:
        torch.cuda.synchronize()
        if name in checked:  # a trial that begins anew calls again, and what works in place has changed
            return
        checked.add(name)
        assert isinstance(result, torch.Tensor)
        if near:
            near(name, result)
        elif not torch.equal(result, expected):
            raise WrongResult(f"{name}: {op} of {nbytes} bytes on rank {dist.get_rank()} is not what torch.distributed has")

    times, missing = trial(
        methods(op, given, found),
        arguments.modes.split(","),
        check=check,
        needed=("communication/default",),
        rounds=arguments.rounds,
        repeat=REPEAT_SMALL if nbytes <= SMALL_BYTES else REPEAT,
    )
    return each_mode(
        times,
        bench="dma",
        op=op,
        case=bytes_text(nbytes),
        problem=CollectiveProblem(op=op, m=nbytes // 2, world_size=dist.get_world_size()),  # type: ignore[arg-type]
        dtype="bfloat16",
        missing=missing,
        extra={"bytes": nbytes},
        arguments=arguments,
    )


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS, modes="graph")
    options.add_argument("--sizes", default="", help="only these bytes, with commas")
    options.add_argument("--ops", default=",".join(OPS), help="only these collectives (%(default)s)")
    options.add_argument(
        "--nccl", default=",".join(REGISTERED), help="NCCL's transports in addition to the default (%(default)s)"
    )
    arguments = options.parse_args()
    sizes = [int(text) for text in arguments.sizes.split(",") if text] or list(SIZES)
    asked = arguments.ops.split(",")
    if unknown := [op for op in asked if op not in OPS]:
        raise ValueError(f"--ops has {unknown[0]!r}; use {', '.join(OPS)}")
    start()
    unit = 16 * dist.get_world_size()
    if any(nbytes <= 0 or nbytes % unit for nbytes in sizes):
        raise ValueError(f"--sizes is {arguments.sizes!r}; each must be a multiple of {unit}")
    found, missing = transports(arguments.nccl, max(sizes), max(sizes))
    jobs = [
        Job(name=f"{op} of {bytes_text(nbytes)}", run=partial(measured, op, nbytes, found, arguments))
        for nbytes in sizes
        for op in asked
    ]
    _, left_out = run_jobs(jobs, arguments, missing=missing)
    for transport in found:
        transport.close()
    stop(left_out)


if __name__ == "__main__":
    main()
