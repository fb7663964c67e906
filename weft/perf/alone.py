"""What a step, or a part of it, takes alone on a Machine, in microseconds: nothing waits, and nothing is beside it."""

from __future__ import annotations

from weft.core.machine import Machine
from weft.core.schedule import Bags, Gemm, LaneKind, Schedule, Sum
from weft.core.work import region_bytes
from weft.perf.cost import gathered_bytes, gemm_cost, hbm_us, local_copy_us
from weft.perf.room import free_sms


def parts_us(schedule: Schedule, machine: Machine, rank: int, step: Gemm) -> tuple[float, ...]:
    """Of each part of a GEMM: its tiles' share of the kernel's time. The first one is launched."""
    plain = all(not part.waits and part.count is None and part.out.rank == rank for part in step.parts)
    rows = tuple(part.a.shape[0] for part in step.parts)
    k, n = step.b.shape
    cost = gemm_cost(
        machine,
        rows=(sum(rows),) if plain else rows,
        n=n,
        k=k,
        dtype=schedule.problem.dtype,
        sms=free_sms(schedule, machine, rank),
        accumulate=step.accumulate,
        out_itemsize=4 if schedule.buffer[step.parts[0].out.buffer].float32 else None,
        flags=not plain,
    )
    weights = rows if plain else cost.tiles
    whole = sum(weights) or 1
    return tuple(cost.busy_us * weight / whole + (machine.launch_us if not i else 0.0) for i, weight in enumerate(weights))


def copy_us(machine: Machine, kind: LaneKind, size: int) -> float:
    """A copy within a rank's memory."""
    return (machine.copies.copy_us if kind == "copy" else machine.launch_us) + local_copy_us(machine, size)


def sum_us(schedule: Schedule, machine: Machine, part: Sum, *, first: bool) -> float:
    """A part of a reduction, once all its sources are there."""
    size = region_bytes(schedule, part.out) + sum(region_bytes(schedule, src) for src in part.srcs)
    return (machine.launch_us if first else 0.0) + hbm_us(machine, size)


def lookup_us(schedule: Schedule, machine: Machine, part: Bags, *, first: bool) -> float:
    """A part of a lookup, before it is stored anywhere else."""
    size = gathered_bytes(schedule.problem, part.bags.size) + region_bytes(schedule, part.out)
    return (machine.launch_us if first else 0.0) + hbm_us(machine, size)
