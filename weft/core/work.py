"""What a step is called in a span, and how much work it is. Executors and simulator name and count alike."""

from __future__ import annotations

from collections.abc import Mapping

from weft.core.problem import Span1D
from weft.core.schedule import (
    Collective,
    Copy,
    FusedCollective,
    Gemm,
    GroupedGemm,
    Lane,
    Lookup,
    Part,
    Push,
    Reduce,
    Region,
    Schedule,
    SegmentCopies,
    SendReceive,
    ShareCounts,
    Signal,
    Step,
    UserCall,
    Wait,
)
from weft.core.span import Kind, Span

KINDS: dict[type, Kind] = {
    Wait: "wait",
    Signal: "signal",
    Copy: "copy",
    Push: "copy",
    Gemm: "gemm",
    Reduce: "reduce",
    Lookup: "lookup",
    Collective: "collective",
    FusedCollective: "collective",
    SendReceive: "message",
    UserCall: "call",
    ShareCounts: "copy",
    SegmentCopies: "copy",
    GroupedGemm: "gemm",
}


def span(schedule: Schedule, rank: int, lane: str, step: Step, start_us: float, end_us: float) -> Span:
    """A step's stretch of time on `rank`."""
    return Span(
        rank=rank,
        lane=lane,
        kind=KINDS[type(step)],
        name=label(rank, step),
        start_us=start_us,
        end_us=end_us,
        flops=flops(step),
        bytes=work_bytes(schedule, step),
    )


def region_bytes(schedule: Schedule, region: Region) -> int:
    """Bytes of a region: 4 an element in a float32 buffer, else the problem's itemsize."""
    return region.size * (4 if schedule.buffer[region.buffer].float32 else schedule.problem.itemsize_of(region.buffer))


def is_plain(part: Part, rank: int) -> bool:
    """Whether a part of a matmul waits for nothing, adds and counts nothing, and stays on its rank."""
    return not (part.waits or part.adds) and part.count is None and part.out.rank == rank == part.a.rank


def label(rank: int, step: Step) -> str:
    """A short text for one step on `rank`, such as "gemm 8192x1792x4096" or "copy a[0:128] -> 3"."""
    if isinstance(step, (Gemm, Reduce, Lookup, UserCall, ShareCounts, SegmentCopies, GroupedGemm)):
        return str(step)
    if isinstance(step, Push):
        return _push_label(step)
    if isinstance(step, Collective):
        return step.op
    if isinstance(step, FusedCollective):
        return f"{'multiply and ' * step.multiplies}{step.op} as one kernel"
    if isinstance(step, SendReceive):
        return f"send {len(step.sends)}, receive {len(step.receives)}"
    if isinstance(step, (Wait, Signal)):
        where = "" if step.flag.rank == rank else f"@{step.flag.rank}"
        verb = "wait" if isinstance(step, Wait) else "signal"
        return f"{verb} {step.flag.name}[{step.flag.index}]{where}"
    return _copy_label(rank, step)


def _push_label(step: Push) -> str:
    """Of one part its rows, of several how many rows there are; and the receivers, each once."""
    rows = [part.src.rows for part in step.parts]
    ranges = f"[{rows[0][0]}:{rows[0][1]}]" if len(rows) == 1 else f", {sum(high - low for low, high in rows)} rows,"
    receivers = ", ".join(str(rank) for rank in dict.fromkeys(part.dst.rank for part in step.parts))
    return f"push {step.source[0]}{ranges} -> {receivers}"


def _copy_label(rank: int, step: Copy) -> str:
    src, dst = step.src, step.dst
    rows = f"[{src.rows[0]}:{src.rows[1]}]"
    if src.rank != rank:
        return f"copy {dst.buffer} <- {src.buffer}{rows} of {src.rank}"
    return f"copy {src.buffer}{rows} -> {dst.buffer if dst.rank == rank else dst.rank}"


def flops(step: Step) -> int:
    """Floating-point operations of a product; 0 of a step that multiplies nothing."""
    if isinstance(step, FusedCollective) and step.multiplies:
        return 2 * step.factors[0].size * step.factors[1].shape[1]
    return sum(2 * part.a.size * step.b.shape[1] for part in step.parts) if isinstance(step, Gemm) else 0


def work_bytes(schedule: Schedule, step: Step) -> int:
    """Bytes that a step reads and writes at least; those that arrive for a Copy or a Push (once), a Collective (from peers) and
    messages. Of a FusedCollective, without those that travel."""

    def size(region: Region) -> int:
        return region_bytes(schedule, region)

    if isinstance(step, Copy):
        return size(step.src)
    if isinstance(step, Push):
        return sum(size(part.src) for part in step.parts)
    if isinstance(step, Gemm):
        times = 2 if step.accumulate else 1
        added = sum(size(add) for part in step.parts for add in part.adds)
        return size(step.b) + added + sum(size(part.a) + times * size(part.out) for part in step.parts)
    if isinstance(step, Reduce):
        return sum(size(part.out) + sum(map(size, part.srcs)) for part in step.parts)
    if isinstance(step, Lookup):
        return sum((schedule.problem.k + 1) * size(part.out) for part in step.parts)
    if isinstance(step, FusedCollective):
        return sum(map(size, (*step.factors, *step.addends, step.out)))
    if isinstance(step, SendReceive):
        return sum(size(receive.dst) for receive in step.receives)
    if isinstance(step, Collective):
        passes = 2 if step.op == "all_reduce" else 1
        return passes * collective_shard_bytes(schedule, step) * (schedule.problem.world_size - 1)
    return 0


def collective_shard_bytes(schedule: Schedule, step: Collective) -> int:
    """Bytes of the shard that each rank gives to every other one (all_gather) or receives of it (the others); of an all_reduce,
    which is a reduce_scatter and an all_gather, a rank's part of all rows."""
    if step.op in ("all_to_all", "all_reduce"):
        return -(-region_bytes(schedule, step.dst) // schedule.problem.world_size)
    if step.op == "all_to_all_columns":
        return schedule.problem.shard_bytes
    return region_bytes(schedule, step.src if step.op == "all_gather" else step.dst)


def continued(lane: Lane, kernels: Mapping[Span1D, FusedCollective] | None = None) -> frozenset[int]:
    """Positions of steps that run in the kernel of the step before them, so that they pay no launch of their own: those of a
    FusedCollective but the first, and waits and signals next to each other on a lane that runs on SMs. kernels: the ranges of
    the lane's steps that are a FusedCollective's (weft.core.fused_collective)."""
    found = {at for low, high in kernels or {} for at in range(low + 1, high)}
    if lane.kind in ("compute", "blocks"):
        flags = [isinstance(step, (Wait, Signal)) for step in lane.steps]
        found |= {at for at in range(1, len(flags)) if flags[at - 1] and flags[at]}
    return frozenset(found)
