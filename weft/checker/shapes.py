"""Rules on shapes and buffers that need no walk over the flags. They are part of the check's first stage.

Each rule returns the text of a fault, or an empty text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, pairwise
from typing import Any, get_args

from weft.checker.program import ScheduleError
from weft.core.problem import SCALE_BLOCK, CollectiveProblem, ColumnProblem, LookupProblem, Problem, RaggedProblem
from weft.core.schedule import (
    Bags,
    Buffer,
    BufferKind,
    Collective,
    Gemm,
    LaneKind,
    Norm,
    Part,
    Region,
    Schedule,
    SendReceive,
    Sum,
    steps_of,
)

Shape = tuple[tuple[int, ...], tuple[int, ...]]


def check_buffers(schedule: Schedule) -> None:
    """Check that ranks, lanes and buffers are those of the problem. Raises ScheduleError."""
    size = schedule.problem.world_size
    if len(schedule.ranks) != size:
        raise ScheduleError(f"the schedule has {len(schedule.ranks)} ranks; its problem has {size}")
    for rank, lanes in enumerate(schedule.ranks):
        names = [lane.name for lane in lanes]
        if len(names) > len(set(names)):
            raise ScheduleError(f"rank {rank} has two lanes of one name, of {', '.join(names)}")
        for lane in lanes:
            _check_kind(f"rank {rank}, lane {lane.name}", lane.kind, LaneKind)
        compute = [lane.name for lane in lanes if lane.kind == "compute"]
        if len(compute) > 1:
            several = f"lanes {', '.join(compute)} of kind compute, which is the caller's one stream"
            raise ScheduleError(f"rank {rank} has {several}; put their steps on one, or give the others kind blocks")
    if len(schedule.buffer) < len(schedule.buffers):
        raise ScheduleError(f"two buffers share a name, of {', '.join(b.name for b in schedule.buffers)}")
    expected = caller_buffers(schedule.problem)
    segmented = _segmented_buffers(schedule.problem) if isinstance(schedule.problem, RaggedProblem) else {}
    for buffer in schedule.buffers:
        _check_kind(f"buffer {buffer.name}", buffer.kind, BufferKind)
        _check_buffer(buffer, size, expected | segmented)
        if segmented and (buffer.name not in expected | segmented or buffer.float32):
            these = ", ".join(expected | segmented)
            raise ScheduleError(f"buffer {buffer.name} is none of {these}, which hold segments in the problem's dtype")
        fault = _operand_fault(buffer, schedule.problem) or _columns_fault(buffer)
        if fault:
            raise ScheduleError(f"buffer {buffer.name} {fault}")
        if buffer.float32 and buffer.kind != "local" and schedule.problem.dtype != "float32":
            what = f"buffer {buffer.name} is {buffer.kind} and holds float32, where the problem has {schedule.problem.dtype}"
            raise ScheduleError(f"{what}; only local buffers hold partial sums wider than that: round them by a reduce first")
    for name, (kind, _) in expected.items():
        if name not in schedule.buffer:
            raise ScheduleError(f"buffer {name} is missing; the problem has it as {kind}")


def _check_kind(where: str, kind: object, kinds: Any) -> None:
    """Raise ScheduleError unless `kind` is among the values of the Literal `kinds`."""
    *others, last = get_args(kinds)
    if kind not in (*others, last):
        raise ScheduleError(f"{where}: kind is {kind!r}; use {', '.join(others)} or {last}")


def _operand_fault(buffer: Buffer, problem: Problem) -> str:
    """Return a fault of a buffer's operand, or "".

    With scaling, the caller's a, b and gathered or received rows are FP8, and with a recipe of the norm, the norm is. No other
    buffer of the caller is.
    """
    scaling = problem.scaling
    operands = {"a": "" if scaling and scaling.quantises else "a", "b": "b", "gathered": "a", "received": "a", "normed": "norm"}
    if buffer.operand and buffer.operand not in problem.scalings:
        return f"has operand {buffer.operand!r}, but the problem has no scaling of it; leave it out"
    wanted: str = buffer.operand
    if buffer.kind in ("input", "output"):
        wanted = found if (found := operands.get(buffer.name, "")) in problem.scalings else ""
    if buffer.operand and buffer.float32:
        return "is float32 and holds FP8 elements; use one of the two"
    return f"has operand {buffer.operand!r}; the problem's scaling needs {wanted!r}" if buffer.operand != wanted else ""


def _columns_fault(buffer: Buffer) -> str:
    """Return a fault, or "". Only the gradients of weights are stored by columns, as callers have the weights."""
    wanted = (buffer.name, buffer.kind) == ("gradients", "output")
    return "" if buffer.by_columns == wanted else f"has by_columns={buffer.by_columns}; it must be {wanted}"


Extent = int | Callable[[int], int]
"""An extent that is the same on each rank, or a function of the rank."""


def _shape(problem: Problem, rows: Extent, cols: Extent) -> Shape:
    each = range(problem.world_size)
    high, wide = [tuple([extent if isinstance(extent, int) else extent(rank) for rank in each]) for extent in (rows, cols)]
    return high, wide


def caller_buffers(problem: Problem) -> dict[str, tuple[str, Shape]]:
    """Return the kind, and the extents by rank, of the caller's buffers."""
    inputs: dict[str, tuple[Extent, Extent]]
    outputs: dict[str, tuple[Extent, Extent]] = {"out": (problem.out_rows, problem.columns)}
    if isinstance(problem, LookupProblem):
        inputs, outputs = {"bags": (problem.m, problem.columns)}, {"out": (problem.out_rows, problem.n)}
    elif isinstance(problem, RaggedProblem):
        inputs, outputs = {"a": (problem.capacity, problem.k)}, {"out": (problem.m, problem.n)}
        if problem.return_received:
            outputs["received"] = problem.m, problem.k
    elif isinstance(problem, CollectiveProblem):
        inputs = {"a": (problem.a_rows, problem.columns)}
        _add_to_sum(problem, inputs, outputs)
    else:
        b_columns = problem.n if isinstance(problem, ColumnProblem) else problem.columns
        inputs = {"a": (problem.a_rows, problem.a_columns), "b": (problem.inner, b_columns)}
        _add_to_sum(problem, inputs, outputs)
        if problem.return_gathered:
            outputs["gathered"] = problem.out_rows, problem.inner
        if problem.weight_gradients:
            inputs["x"] = problem.out_rows if problem.weight_gradients == "shard" else problem.m, problem.n
            outputs["gradients"] = problem.n, problem.inner
    found = {name: ("input", _shape(problem, *extents)) for name, extents in inputs.items()}
    return found | {name: ("output", _shape(problem, *extents)) for name, extents in outputs.items()}


def _add_to_sum(problem: Problem, inputs: dict[str, tuple[Extent, Extent]], outputs: dict[str, tuple[Extent, Extent]]) -> None:
    """Add the buffers of what is added to a sum, and of its norm."""
    for name in problem.addends:
        inputs[name] = problem.out_rows if name == "residual" else 1, problem.n
    if problem.norm_eps is not None:
        inputs["norm_weight"], outputs["normed"] = (1, problem.n), (problem.m, problem.n)


def _segmented_buffers(problem: RaggedProblem) -> dict[str, tuple[str, Shape]]:
    """Return the buffers that may exist in addition to the caller's."""
    return {
        "landing": ("symmetric", _shape(problem, problem.m, problem.k)),
        "product": ("symmetric", _shape(problem, problem.capacity, problem.n)),
    }


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


def reachable_outputs(schedule: Schedule) -> set[str]:
    """Return the caller's buffers that peers may write."""
    problem = schedule.problem
    return {"out"} if isinstance(problem, CollectiveProblem) and problem.reachable else set()


def region_fault(region: Region, buffers: Mapping[str, Buffer], size: int) -> str:
    """Return a fault, or "". A region must be within a declared buffer of one of `size` ranks."""
    buffer = buffers.get(region.buffer)
    if buffer is None:
        return f"{region} is in no declared buffer; there are {', '.join(buffers)}"
    rank, (low, high), (left, right) = region.rank, region.rows, region.cols
    if not 0 <= rank < size:
        return f"{region} is on no rank; ranks are 0 to {size - 1}"
    if not (0 <= low <= high <= buffer.rows[rank] and 0 <= left <= right <= buffer.cols[rank]):
        return f"{region} is not within {buffer.whole(rank)}"
    return ""


def scales_fault(region: Region, buffer: Buffer, problem: Problem) -> str:
    """Return a fault, or "". A region of FP8 elements must begin and end at the edges of their scales' blocks."""
    ends = buffer.rows[region.rank], buffer.cols[region.rank]
    shared = {"tensorwise": None, "rowwise": None, "blockwise": SCALE_BLOCK}[problem.scalings[buffer.operand].recipe]
    along = [("rows", region.rows, ends[0]) if buffer.operand == "b" else ("columns", region.cols, ends[1])]
    if buffer.operand == "b" and shared is not None:
        along.append(("columns", region.cols, ends[1]))
    for name, (low, high), end in along:
        whole = (low, high) == (0, end)
        if not whole and (shared is None or low % shared or (high % shared and high != end)):
            unit = f"begin and end at multiples of {shared}" if shared else f"be all {end}"
            return f"{region} has {name} {low} to {high} of FP8 elements; its {name} must {unit}, because they share scales"
    return ""


def gemm_fault(step: Gemm, part: Part) -> str:
    (rows, inner), (inner_b, cols) = part.a.shape, step.b.shape
    if step.transposed:
        if len(step.parts) > 1 or part.waits or part.count or part.adds or step.accumulate or part.out.rank != step.b.rank:
            return "a product of a^T has one part, which waits, counts and adds nothing, and stores on its rank"
        rows, inner = inner, rows
    if inner != inner_b:
        along = "rows" if step.transposed else "columns"
        return f"{part.a} has {inner} {along} but {step.b} has {inner_b} rows; a product needs them equal"
    if part.out.shape != (rows, cols):
        return f"{part.out} has shape {part.out.shape}; the product of {part.a} and {step.b} has {(rows, cols)}"
    for add in part.adds:
        if add.shape != part.out.shape:
            return f"{add} has shape {add.shape}, but it is added into {part.out} of shape {part.out.shape}"
    if part.adds and step.accumulate:
        return f"it adds to {part.out} its old content, and {part.adds[0]}; use one of accumulate and adds"
    return inner_fault(step, part) if part.inner else ""


def inner_fault(step: Gemm, part: Part) -> str:
    columns = [column for column, _ in part.inner]
    if part.adds or step.accumulate:
        other = "adds" if part.adds else "accumulate"
        return f"the part into {part.out} has inner gates and {other}; use one of the two"
    edges = [0, *columns, part.a.shape[1]]
    if any(low >= high for low, high in pairwise(edges)):
        return f"inner gates of {part.a} are at columns {columns}; they must ascend, above 0 and below {part.a.shape[1]}"
    return ""


def sum_fault(part: Sum) -> str:
    if not part.srcs:
        return f"the sum into {part.out} has no source; it needs at least one"
    for i, src in enumerate(part.srcs):
        if src.shape != part.out.shape and not (i and src.shape == (1, part.out.shape[1])):
            return f"{src} has shape {src.shape}, but it is summed into {part.out} of shape {part.out.shape}"
    return ""


def norm_fault(step: Norm, problem: Problem) -> str:
    """Return a fault, or "". A norm takes whole rows of the problem's result."""
    if problem.norm_eps is None or step.eps != problem.norm_eps:
        return f"its eps is {step.eps:g}; that of {problem} is {problem.norm_eps}"
    for region, shape in (
        (step.src, step.out.shape),
        (step.weight, (1, problem.n)),
        (step.out, (step.out.shape[0], problem.n)),
    ):
        if region.shape != shape:
            return f"{region} has shape {region.shape}; a norm of whole rows of {problem.n} columns needs {shape}"
    return ""


def bags_fault(part: Bags, problem: Problem, rank: int) -> str:
    """Return a fault, or "". Bags must cover whole tables, and fit the rectangle that they are stored to."""
    if not isinstance(problem, LookupProblem) or part.bags.buffer != "bags":
        return f"{part.bags} holds no bags; a lookup reads buffer bags of a lookup's problem"
    if part.bags.shape != part.out.shape:
        return f"{part.bags} has shape {part.bags.shape}, but it is looked up into {part.out} of shape {part.out.shape}"
    borders = {0, *(end for _, end in problem.table_columns(rank))}
    if not borders.issuperset(part.bags.cols):
        return f"{part.bags} cuts a table; the tables of rank {rank} end at columns {sorted(borders)}"
    return ""


def collective_fault(step: Collective, problem: Problem, rank: int) -> str:
    """Return a fault of a collective's shapes, or "".

    Rows are cut by the problem's shards. Columns are the same on both sides, or one side has a rank's and the other all.
    """
    low, high = problem.shards[rank]
    full, part, cols = problem.shards[-1][1], high - low, step.src.shape[1]
    blocks = problem.blocks
    if step.op == "all_to_all" and isinstance(problem, ColumnProblem) and not problem.sends_columns:
        return f"all_to_all stacks rows; {problem.op} concatenates columns: use all_to_all_columns"
    if step.op == "all_to_all_columns" and sum(right - left for left, right in blocks) != blocks[-1][1]:
        return f"all_to_all_columns lays columns side by side; in {problem.op} every rank has all of them: use all_to_all"
    shapes = {
        "all_gather": ((part, cols), (full, cols)),
        "reduce_scatter": ((full, cols), (part, cols)),
        "all_reduce": ((full, cols), (full, cols)),
        "all_to_all": ((full, cols), (problem.world_size * part, cols)),
        "all_to_all_columns": ((full, blocks[rank][1] - blocks[rank][0]), (part, blocks[-1][1])),
    }
    for region, shape in zip((step.src, step.dst), shapes[step.op], strict=True):
        if region.shape != shape:
            return f"{region} has shape {region.shape}; {step.op} on rank {rank} needs {shape}"
    if step.divide_by != 1 and step.op not in ("reduce_scatter", "all_reduce"):
        return f"divide_by is {step.divide_by}; {step.op} divides nothing"
    if step.divide_by not in (1, problem.world_size):
        return f"divide_by is {step.divide_by}; an NCCL collective sums (1), or averages ({problem.world_size})"
    return ""


def check_collectives(schedule: Schedule) -> None:
    """Check that every rank runs the same collectives in the same order, on one lane. Raises ScheduleError."""
    first: list[tuple[str, int, int]] = []
    for rank, lanes in enumerate(schedule.ranks):
        users = [lane for lane in lanes if any(steps_of(Collective, [lane]))]
        if len(users) > 1:
            names = ", ".join(u.name for u in users)
            raise ScheduleError(f"rank {rank} has collectives on lanes {names}; one lane must run them all")
        mine: list[tuple[str, int, int]] = [(s.op, _common_columns(s), s.divide_by) for s in steps_of(Collective, users)]
        first = mine if rank == 0 else first
        if mine != first:
            theirs, ours = ([f"{op} of {cols} columns" for op, cols, _ in ops] for ops in (first, mine))
            raise ScheduleError(f"rank {rank} runs collectives {ours}, rank 0 runs {theirs}; all ranks need the same, in order")


def _common_columns(step: Collective) -> int:
    """Return the number of columns that ranks must agree on: those of the result if each rank sends its own columns."""
    return step.dst.shape[1] if step.op == "all_to_all_columns" else step.src.shape[1]


def message_fault(region: Region, buffer: Buffer, rank: int, peer: int, size: int) -> str:
    """Return a fault, or "". A message is whole rows of this rank, which are contiguous, and goes to or from another rank."""
    if not 0 <= peer < size or peer == rank:
        return f"rank {peer} is no other end for a message of rank {rank}; use another one of 0 to {size - 1}"
    if not region.size:
        return f"{region} has no elements; leave the message out"
    if region.cols != (0, buffer.cols[region.rank]):
        return f"{region} is not whole rows of {buffer.whole(region.rank)}; a message is"
    return ""


Message = tuple[tuple[int, int], bool]
"""The shape of a message, and whether it holds float32 partial sums."""


def check_messages(schedule: Schedule) -> None:
    """Check that each rank receives the messages that others send to it in a call, in the same order. Raises ScheduleError.

    A rank has one lane with messages. The schedule has no NCCL collective as well, because two communicators could deadlock.
    """
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for rank, lanes in enumerate(schedule.ranks):
        users = [lane.name for lane in lanes if any(steps_of(SendReceive, [lane]))]
        if len(users) > 1:
            raise ScheduleError(f"rank {rank} sends and receives on lanes {', '.join(users)}; one lane must do it all")
        for step in steps_of(SendReceive, lanes):
            for send in step.sends:
                sent.setdefault((rank, send.to), []).append(_message(schedule, send.src))
            for receive in step.receives:
                received.setdefault((receive.source, rank), []).append(_message(schedule, receive.dst))
    for src, dst in sorted({*sent, *received}):
        _check_pair(src, dst, sent.get((src, dst), []), received.get((src, dst), []))
    if sent and any(steps_of(Collective, chain(*schedule.ranks))):
        raise ScheduleError("the schedule has messages and an NCCL collective; two communicators at once could deadlock")


def _message(schedule: Schedule, region: Region) -> Message:
    return region.shape, schedule.buffer[region.buffer].float32 and schedule.problem.dtype != "float32"


def _check_pair(src: int, dst: int, sent: list[Message], received: list[Message]) -> None:
    if len(sent) != len(received):
        raise ScheduleError(
            f"rank {src} sends {len(sent)} messages to rank {dst} in a call, which receives {len(received)} from it"
        )
    for number, (one, two) in enumerate(zip(sent, received, strict=True)):
        if one != two:
            (mine, wide), (theirs, other) = one, two
            what = f"as {mine}{' of float32' * wide}, received as {theirs}{' of float32' * other}"
            raise ScheduleError(f"message {number} of a call from rank {src} to rank {dst} is sent {what}")
