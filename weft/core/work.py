"""The label, kind and amount of work of a step in a span, shared by executors and simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from weft.core.concurrent import ConcurrentProblem
from weft.core.problem import Span1D
from weft.core.schedule import (
    Collective,
    Copy,
    FusedCollective,
    Gemm,
    GroupedGemm,
    Lane,
    Lookup,
    Norm,
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
    regions,
)
from weft.core.span import Kind, Span


def span(
    schedule: Schedule,
    rank: int,
    lane: str,
    step: Step,
    start_us: float,
    end_us: float,
    waits: tuple[tuple[float, float], ...] = (),
) -> Span:
    """Return the span of a step on `rank`."""
    return Span(
        rank=rank,
        lane=lane,
        kind=WORK[type(step)].kind,
        name=label(rank, step),
        start_us=start_us,
        end_us=end_us,
        flops=flops(step),
        bytes=work_bytes(schedule, step),
        waits=waits,
    )


def region_bytes(schedule: Schedule, region: Region) -> int:
    """Return the bytes of a region. An element takes 4 bytes in a float32 buffer, one byte and its share of the scales in an
    FP8 buffer, and the problem's itemsize otherwise."""
    buffer = schedule.buffer[region.buffer]
    if scaling := schedule.problem.scalings.get(buffer.operand):
        assert buffer.operand
        (top, bottom), (left, right) = scaling.scales_of(buffer.operand, region.rows, region.cols)
        return region.size + 4 * (bottom - top) * (right - left)
    problem: Any = schedule.problem
    if isinstance(problem, ConcurrentProblem):
        problem = problem.collectives[buffer.collective]
    return region.size * (4 if buffer.float32 else problem.itemsize)


def is_plain(part: Part, rank: int) -> bool:
    """Return whether a part of a matmul has no waits, addends or count, and stores its result on its own rank."""
    return not (part.waits or part.adds) and part.count is None and part.out.rank == rank == part.a.rank


def label(rank: int, step: Step) -> str:
    """Return a short text for one step on `rank`, such as "gemm 8192x1792x4096" or "copy a[0:128] -> 3"."""
    return WORK[type(step)].label(rank, step)


def _flag_label(rank: int, step: Wait | Signal) -> str:
    where = "" if step.flag.rank == rank else f"@{step.flag.rank}"
    return f"{WORK[type(step)].kind} {step.flag.name}[{step.flag.index}]{where}"


def _push_label(rank: int, step: Push) -> str:
    """Return a text with the rows of a single part, or the number of rows of several, and each receiver once."""
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
    """Return the floating-point operations of a product, or 0 for a step that multiplies nothing."""
    return WORK[type(step)].flops(step)


def _fused_flops(step: FusedCollective) -> int:
    return 2 * step.factors[0].size * step.factors[1].shape[1] if step.multiplies else 0


def work_bytes(schedule: Schedule, step: Step) -> int:
    """Return the minimum of bytes that a step reads and writes. A Copy, a Push, a Collective and messages count the bytes that
    arrive, once. A FusedCollective does not count the bytes that it sends."""
    found = WORK[type(step)].bytes(schedule, step)
    return found if isinstance(found, int) else sum(region_bytes(schedule, region) for region in found)


def _gemm_regions(schedule: Schedule, step: Gemm) -> Iterator[Region]:
    yield step.b
    for part in step.parts:
        yield from (part.a, part.out, *part.adds, *[part.out] * step.accumulate)


def _lookup_bytes(schedule: Schedule, step: Lookup) -> int:
    return sum((schedule.problem.k + 1) * region_bytes(schedule, part.out) for part in step.parts)


def _collective_bytes(schedule: Schedule, step: Collective) -> int:
    passes = 2 if step.op == "all_reduce" else 1
    return passes * collective_shard_bytes(schedule, step) * (schedule.problem.world_size - 1)


def collective_shard_bytes(schedule: Schedule, step: Collective) -> int:
    """Return the bytes of the shard that each rank gives to every other rank (all_gather) or receives from it (the others).
    An all_reduce is a reduce_scatter and an all_gather, so its shard is a rank's part of all rows."""
    if step.op in ("all_to_all", "all_reduce"):
        return -(-region_bytes(schedule, step.dst) // schedule.problem.world_size)
    if step.op == "all_to_all_columns":
        return schedule.problem.shard_bytes
    return region_bytes(schedule, step.src if step.op == "all_gather" else step.dst)


def continued(lane: Lane, kernels: Mapping[Span1D, FusedCollective] | None = None) -> frozenset[int]:
    """Return the positions of the steps that run in the kernel of the step before them, and so pay no launch of their own.

    These are all steps of a FusedCollective but the first, and consecutive waits and signals on a lane that runs on SMs.
    kernels: the ranges of the lane's steps that belong to a FusedCollective (weft.core.fused_collective).
    """
    found = {at for low, high in kernels or {} for at in range(low + 1, high)}
    if lane.kind in ("compute", "blocks"):
        flags = [WORK[type(step)].kind in ("wait", "signal") for step in lane.steps]
        found |= {at for at in range(1, len(flags)) if flags[at - 1] and flags[at]}
    return frozenset(found)


class StepWork(NamedTuple):
    """How `span` describes the steps of one type.

    label: returns the text of a step on a rank. bytes: returns the bytes that a step moves in a schedule, or the regions that
    it moves. flops: returns its floating-point operations.
    """

    kind: Kind
    label: Callable[[int, Any], str] = lambda rank, step: str(step)
    bytes: Callable[[Schedule, Any], int | Iterable[Region]] = lambda schedule, step: 0
    flops: Callable[[Any], int] = lambda step: 0


WORK: dict[type, StepWork] = {
    Wait: StepWork("wait", _flag_label),
    Signal: StepWork("signal", _flag_label),
    Copy: StepWork("copy", _copy_label, lambda schedule, step: [step.src]),
    Push: StepWork("copy", _push_label, lambda schedule, step: [part.src for part in step.parts]),
    Gemm: StepWork(
        "gemm", bytes=_gemm_regions, flops=lambda step: sum(2 * part.a.size * step.b.shape[1] for part in step.parts)
    ),
    Reduce: StepWork("reduce", bytes=lambda schedule, step: regions(step)),
    Norm: StepWork("reduce", bytes=lambda schedule, step: regions(step)),
    Lookup: StepWork("lookup", bytes=_lookup_bytes),
    Collective: StepWork("collective", lambda rank, step: step.op, _collective_bytes),
    FusedCollective: StepWork(
        "collective",
        lambda rank, step: f"{'multiply and ' * step.multiplies}{step.op} as one kernel",
        lambda schedule, step: regions(step),
        _fused_flops,
    ),
    SendReceive: StepWork(
        "message",
        lambda rank, step: f"send {len(step.sends)}, receive {len(step.receives)}",
        lambda schedule, step: [receive.dst for receive in step.receives],
    ),
    UserCall: StepWork("call"),
    ShareCounts: StepWork("copy"),
    SegmentCopies: StepWork("copy"),
    GroupedGemm: StepWork("gemm"),
}
"""The description of every type of step."""
