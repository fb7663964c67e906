"""What steps that are one kernel (`Lane.fused`) may have in common with others.

Such a kernel has flags and scratch memory of its own, on all ranks, in the place of those that its steps name: a rank that goes
step by step beside it would wait for good. A tile of it has that tile's elements of what came before, and no others. And where
its tiles wait, they may fill the rank's SMs, from its first step to its last.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.checker.program import Do, Op, Place, Program, ScheduleError


def check_fused(program: Program) -> None:
    """Raises ScheduleError."""
    if not any(lane.fused for lanes in program.schedule.ranks for lane in lanes):
        return
    inside, outside = list[tuple[Place, Op]](), list[tuple[Place, Op]]()
    for rank, lanes in enumerate(program.schedule.ranks):
        for index, lane in enumerate(lanes):
            fused = {position for low, high in lane.fused for position in range(low, high)}
            for position, op in enumerate(program.ops[rank][index]):
                (inside if position in fused else outside).append(((rank, index, position), op))
    _check_shared(program, inside, outside)
    _check_room(program, inside)


def _check_shared(program: Program, inside: list[tuple[Place, Op]], outside: list[tuple[Place, Op]]) -> None:
    """Flags of the steps, and scratch that they write, are for such steps alone; and no product reads that."""
    size, buffers = program.schedule.problem.world_size, program.schedule.buffers
    flags = {flag: place for place, op in inside for flag in _flags(op)}
    writes = {action.write[0] // size: place for place, op in inside for action in op.actions if action.write}
    scratch = {number: place for number, place in writes.items() if buffers[number].kind in ("symmetric", "local")}
    for place, op in outside:
        flag = next((flag for flag in _flags(op) if flag in flags), None)
        if flag is not None:
            raise _shared(program, flags[flag], f"flag {program.flags[flag]}", place)
        number = next((number for number in _touched(op, size) if number in scratch), None)
        if number is not None:
            raise _shared(program, scratch[number], f"scratch that it writes, {buffers[number].name},", place)
    for place, op in inside:
        made = [a for action in op.actions if action.do is Do.GEMM for a in action.reads if a[0] // size in scratch]
        if made:
            what = f"it multiplies {program.region(*made[0])}, which tiles of fused steps write"
            raise ScheduleError(f"{program.where(*place)}: {what}; let fused end before it")


def _shared(program: Program, within: Place, what: str, place: Place) -> ScheduleError:
    """The kernel that has what another step has, too."""
    rank, index, position = within
    lane = program.schedule.ranks[rank][index]
    low, high = next((low, high) for low, high in lane.fused if low <= position < high)
    kernel = f"rank {rank}, lane {lane.name} has steps {low} to {high} as one kernel"
    return ScheduleError(
        f"{kernel}, and there is none that shares {what} with others, as with {program.where(*place)}; fuse all, or none"
    )


def _flags(op: Op) -> Iterator[int]:
    """All that an op waits for or advances."""
    if op.flag >= 0:
        yield op.flag
    for action in op.actions:
        if action.counts >= 0:
            yield action.counts
        for flag, _ in action.waits:
            yield flag


def _touched(op: Op, size: int) -> Iterator[int]:
    """Numbers of the buffers that an op reads or writes."""
    for action in op.actions:
        for memory, _ in (*action.reads, *action.adds, *action.slices):
            yield memory // size
        if action.write:
            yield action.write[0] // size


def _check_room(program: Program, inside: list[tuple[Place, Op]]) -> None:
    """No other lane of a rank whose fused steps wait needs SMs; lanes of kind blocks have their own."""
    waiting = {place[:2]: place for place, op in inside if op.do is Do.WAIT or any(action.waits for action in op.actions)}
    for (rank, index), place in waiting.items():
        for other, ops in enumerate(program.ops[rank]):
            needs = next((at for at, op in enumerate(ops) if op.needs_sms), None)
            if other != index and needs is not None:
                kernel = f"{program.where(*place)} is one of fused steps, whose tiles may fill all while they wait"
                raise ScheduleError(
                    f"{program.where(rank, other, needs)}: it needs SMs, but {kernel}; use a lane of kind blocks"
                )
