"""Room: the SMs that lanes of communication keep from the kernels of their rank while they run."""

from __future__ import annotations

from weft.core.machine import Machine
from weft.core.schedule import LaneKind, Schedule


def taken_sms(machine: Machine, kind: LaneKind) -> int:
    """What a lane of this kind keeps."""
    return {"blocks": machine.stores.sms, "network": machine.network.sms if machine.network else 0}.get(kind, 0)


def free_sms(schedule: Schedule, machine: Machine, rank: int) -> int:
    """What all lanes of a rank leave. Raises ValueError if that is nothing."""
    kinds = [lane.kind for lane in schedule.ranks[rank]]
    left = machine.gpu.sms - sum(taken_sms(machine, kind) for kind in kinds)
    if left <= 0:
        what = ", ".join(f"{kind}: {taken_sms(machine, kind)}" for kind in kinds if taken_sms(machine, kind))
        raise ValueError(
            f"lanes of rank {rank} of schedule {schedule.name} take all SMs of {machine.name} ({what} of gpu.sms, "
            f"{machine.gpu.sms}); lower stores.sms or network.sms"
        )
    return left
