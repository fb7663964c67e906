"""Rules on shapes and buffers that need no walk over the flags: part of the check's first stage.

Each rule hands back what is wrong, in words, or an empty text.
"""

from __future__ import annotations

from weft.checker.program import ScheduleError
from weft.problem import LookupProblem, Problem
from weft.schedule import Bags, Buffer, Collective, Gemm, Part, Schedule, Sum

Shape = tuple[tuple[int, ...], tuple[int, ...]]


def check_buffers(schedule: Schedule) -> None:
    """Ranks, lanes and buffers are those of the problem. Raises ScheduleError."""
    size = schedule.problem.world_size
    if len(schedule.ranks) != size:
        raise ScheduleError(f"the schedule has {len(schedule.ranks)} ranks; its problem has {size}")
    for rank, lanes in enumerate(schedule.ranks):
        names = [lane.name for lane in lanes]
        if len(names) > len(set(names)):
            raise ScheduleError(f"rank {rank} has two lanes of one name, of {', '.join(names)}")
    if len(schedule.buffer) < len(schedule.buffers):
        raise ScheduleError(f"two buffers share a name, of {', '.join(b.name for b in schedule.buffers)}")
    expected = caller_buffers(schedule.problem)
    for buffer in schedule.buffers:
        _check_buffer(buffer, size, expected)
    for name, (kind, _) in expected.items():
        if name not in schedule.buffer:
            raise ScheduleError(f"buffer {name} is missing; the problem has it as {kind}")


def caller_buffers(problem: Problem) -> dict[str, tuple[str, Shape]]:
    """Kind and extents by rank of the buffers that belong to the caller."""
    each = range(problem.world_size)
    owned = tuple(high - low for low, high in problem.shards)
    m, k = tuple(problem.m for _ in each), tuple(problem.inner(r) for r in each)
    columns = tuple(problem.columns(r) for r in each)
    if isinstance(problem, LookupProblem):
        return {
            "bags": ("input", (m, columns)),
            "out": ("output", (owned, tuple(problem.n for _ in each))),
        }
    gather = problem.op == "all_gather_matmul"
    found: dict[str, tuple[str, Shape]] = {
        "a": ("input", (owned if gather else m, k)),
        "b": ("input", (k, columns)),
        "out": ("output", (m if gather else owned, columns)),
    }
    if gather and problem.return_gathered:
        found["gathered"] = ("output", (m, k))
    return found


def _check_buffer(buffer: Buffer, size: int, expected: dict[str, tuple[str, Shape]]) -> None:
    extents = (*buffer.rows, *buffer.cols)
    if len(buffer.rows) != size or len(buffer.cols) != size or min(extents) < 0:
        have = f"rows {buffer.rows} and cols {buffer.cols}"
        raise ScheduleError(f"buffer {buffer.name} has {have}; it needs {size} of each, none below 0")
    kind, shape = expected.get(buffer.name, ("", None))
    if (buffer.kind in ("input", "output") or kind) and (buffer.kind, (buffer.rows, buffer.cols)) != (kind, shape):
        wanted = f"{kind} {shape}" if shape else "not the caller's"
        have = f"{buffer.kind} {(buffer.rows, buffer.cols)}"
        raise ScheduleError(f"buffer {buffer.name} is {have}; for this problem it is {wanted}")


def gemm_fault(step: Gemm, part: Part) -> str:
    (rows, inner), (inner_b, cols) = part.a.shape, step.b.shape
    if inner != inner_b:
        return f"{part.a} has {inner} columns but {step.b} has {inner_b} rows; a product needs them equal"
    if part.out.shape != (rows, cols):
        return f"{part.out} has shape {part.out.shape}; the product of {part.a} and {step.b} has {(rows, cols)}"
    for add in part.adds:
        if add.shape != part.out.shape:
            return f"{add} has shape {add.shape}, but it is added into {part.out} of shape {part.out.shape}"
    if part.adds and step.accumulate:
        return f"it adds to {part.out} what lies there, and {part.adds[0]}; use one of accumulate and adds"
    return ""


def sum_fault(part: Sum) -> str:
    if not part.srcs:
        return f"the sum into {part.out} has no source; it needs at least one"
    for src in part.srcs:
        if src.shape != part.out.shape:
            return f"{src} has shape {src.shape}, but it is summed into {part.out} of shape {part.out.shape}"
    return ""


def bags_fault(part: Bags, problem: Problem, rank: int) -> str:
    """Bags of whole tables, into a rectangle of their shape."""
    if not isinstance(problem, LookupProblem) or part.bags.buffer != "bags":
        return f"{part.bags} holds no bags; a lookup reads buffer bags of a lookup's problem"
    if part.bags.shape != part.out.shape:
        return f"{part.bags} has shape {part.bags.shape}, but it is looked up into {part.out} of shape {part.out.shape}"
    borders = {0, *(end for _, end in problem.table_columns(rank))}
    if not borders.issuperset(part.bags.cols):
        return f"{part.bags} cuts a table; the tables of rank {rank} end at columns {sorted(borders)}"
    return ""


def collective_fault(step: Collective, problem: Problem, rank: int) -> str:
    """Rows are cut by the problem's shards; columns are the same on both sides."""
    low, high = problem.shards[rank]
    if step.op == "all_to_all_columns":
        return _exchange_fault(step, (problem.m, problem.columns(rank)), (high - low, problem.n))
    full, part = (problem.m, step.src.shape[1]), (high - low, step.src.shape[1])
    src, dst = (part, full) if step.op == "all_gather" else (full, part)
    for region, shape in ((step.src, src), (step.dst, dst)):
        if region.shape != shape:
            return f"{region} has shape {region.shape}; {step.op} on rank {rank} needs {shape}"
    if step.divide_by != 1 and step.op == "all_gather":
        return f"divide_by is {step.divide_by}; all_gather divides nothing"
    return ""


def _exchange_fault(step: Collective, src: tuple[int, int], dst: tuple[int, int]) -> str:
    for region, shape in ((step.src, src), (step.dst, dst)):
        if region.shape != shape:
            return f"{region} has shape {region.shape}; {step.op} needs {shape}"
    return f"divide_by is {step.divide_by}; {step.op} divides nothing" if step.divide_by != 1 else ""


def check_collectives(schedule: Schedule) -> None:
    """Every rank runs the same collectives in the same order, on one lane. Raises ScheduleError."""
    first: list[tuple[str, int, int]] = []
    for rank, lanes in enumerate(schedule.ranks):
        users = [lane for lane in lanes if any(isinstance(s, Collective) for s in lane.steps)]
        if len(users) > 1:
            names = ", ".join(u.name for u in users)
            raise ScheduleError(f"rank {rank} has collectives on lanes {names}; one lane must run them all")
        steps = [s for lane in users for s in lane.steps if isinstance(s, Collective)]
        mine: list[tuple[str, int, int]] = [(s.op, _common_columns(s), s.divide_by) for s in steps]
        first = mine if rank == 0 else first
        if mine != first:
            theirs, ours = ([f"{op} of {cols} columns" for op, cols, _ in ops] for ops in (first, mine))
            raise ScheduleError(f"rank {rank} runs collectives {ours}, rank 0 runs {theirs}; all ranks need the same, in order")


def _common_columns(step: Collective) -> int:
    """The columns in which ranks must agree: those of the result where each gives its own."""
    return step.dst.shape[1] if step.op == "all_to_all_columns" else step.src.shape[1]
