"""Builds schedules that run collectives concurrently with the user's computation. A schedule's name has all of its options.

The names that `method=` takes are sequential, and nccl or copy_engine with any of +late, +priority, +pull, +ctas=N, +left=N,
+resident=N. For fully_shard there are also +ahead=N and +unsharded. `Method` has these options as fields.

Lanes of a rank, in the order in which they are enqueued:

    sequential       compute: collectives, call
    nccl             network: collectives         compute: call
    nccl+late        compute: call                network: collectives
    copy_engine      copy, blocks: the collectives' own schedules, whose copies and sums run there     compute: call

The collectives of copy_engine are those of `weft.schedules.collectives`, one after the other on the same lanes. The steps of
their compute lane are here on a lane `blocks.local`, because the user's computation has the compute lane.

Sources: occupancy and priority, arXiv 2606.09200; launch order, reserved units and DMA collectives, ConCCL, arXiv 2412.14335.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from weft.core.concurrent import ConcurrentProblem, OpaqueCollective, named, number_of, plain
from weft.core.problem import CollectiveProblem
from weft.core.schedule import (
    Buffer,
    Collective,
    Flag,
    Lane,
    Region,
    Schedule,
    Step,
    UserCall,
    collective_numbers,
    regions,
    signalled_flags,
    waits,
)
from weft.schedules import collectives
from weft.schedules.builder import Request

Transport = Literal["none", "nccl", "copy_engine"]
COMPUTATION = "computation"
LOCAL = "blocks.local"
"""The lane for the steps that copy engines' schedules have on their compute lane."""
BUDGETS = ((0, 24), (16, 0), (8, 8))
"""The candidates (blocks, SMs left) of an NCCL collective with priority. 16 blocks reach 0.89 of the rate at which all SMs
store to peers on 8 x H200. Without SMs left, 8 blocks were never the best of 23 pairs on 4 x H200, and neither were 16 blocks
with 16 SMs left."""
SUM_BLOCKS = ((32, 0), (64, 0), (12, 4), (32, 16))
"""The candidates (blocks that sum what copy engines bring, SMs left). Alone, on 2 x H200 with 512 MiB, 8 blocks take 2.2 times
NCCL's time, 16 take 1.34, and 32 take 0.92. During a GEMM that fills the SMs, 32 were faster than 16 in three of three pairs on
4 x H200. GEMMs of powers of two have as many waves on 128 SMs as on 132, and 12 blocks fit on the 4 others."""
PULLED_SUM_BLOCKS = ((32, 0), (12, 4))
"""The candidates if the receivers pull the sums."""
MOVE_BLOCKS, PULLED_MOVE_BLOCKS = ((0, 0), (0, 4)), ((0, 0),)
"""The candidates if nothing is summed. Arrived data is copied on this GPU."""
FLAGS = ("late", "priority", "pull", "unsharded")
NUMBERS = ("ctas", "left", "resident", "ahead")
SHARDED = ("ahead", "unsharded")
"""The options for fully_shard, which gathers parameters and frees them again."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """The method by which computation and collectives share the device. It is the parsed name of a schedule (`parse`).

    transport: what moves the bytes. With "none" the collectives run first, then the computation.
    late: the collectives are enqueued after the computation.
    priority: the collectives' stream has the highest priority.
    pull: copy engines of the receivers move the data, directly to the result.
    ctas: the blocks of the collectives' kernels, or of the sums with copy engines; 0 for the default.
    left: the SMs that cuBLAS GEMMs leave free.
    resident: the blocks per SM of named kernels, 0 for no cap.
    ahead: for sharded parameters, the groups whose gathers are enqueued ahead of the computation, 0 for fully_shard's own
    order.
    unsharded: sharded parameters are gathered once a step, for both passes.

    >>> print(Method(priority=True, ctas=16))
    nccl+priority+ctas=16
    """

    transport: Transport = "nccl"
    late: bool = False
    priority: bool = False
    pull: bool = False
    ctas: int = 0
    left: int = 0
    resident: int = 0
    ahead: int = 0
    unsharded: bool = False

    def __post_init__(self) -> None:
        for name in NUMBERS:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0, for no limit, or above")
        if self.pull and self.transport != "copy_engine":
            raise ValueError(f"{self.transport} has pull; only copy_engine pulls")
        if self.transport == "none" and self._modifiers():
            raise ValueError(f"sequential has no {self._modifiers()[0]}: nothing runs concurrently; use nccl or copy_engine")

    def _modifiers(self) -> list[str]:
        flags = [name for name in FLAGS if getattr(self, name)]
        return flags + [f"{name}={value}" for name in NUMBERS if (value := getattr(self, name))]

    @property
    def overlaps(self) -> bool:
        """Return whether the collectives run concurrently with the computation."""
        return self.transport != "none"

    def __str__(self) -> str:
        return "+".join(["sequential" if self.transport == "none" else self.transport, *self._modifiers()])


SEQUENTIAL = Method(transport="none")
PLAIN = Method()
"""Two streams and no other options, as PyTorch runs collectives by itself."""


def parse(spec: str) -> Method:
    """Return the Method that prints as `spec`. Raises ValueError with the grammar.

    >>> parse("copy_engine+priority+left=8") == Method(transport="copy_engine", priority=True, left=8)
    True
    """
    name, *words = spec.split("+")
    transports: dict[str, Transport] = {"sequential": "none", "nccl": "nccl", "copy_engine": "copy_engine"}
    options: dict[str, int | bool] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key in options or not (key in NUMBERS and value.isdecimal() if equals else key in FLAGS):
            name = ""
        options[key] = int(value) if value.isdecimal() else True
    if name not in transports:
        raise ValueError(
            f"method is {spec!r}; use auto, sequential, or nccl or copy_engine with any of "
            "+late, +priority, +pull, +ctas=N, +left=N, +resident=N; under fully_shard also +ahead=N, +unsharded"
        )
    return Method(transport=transports[name], **options)  # type: ignore[arg-type]


def family(spec: str) -> str:
    """Return the common name of schedules that differ only in numbers. Whether SMs are left is part of it; blocks are not.

    >>> family("nccl+priority+ctas=8+left=8") == family("nccl+priority+left=24") == "nccl+priority+left"
    True
    """
    words = (word.partition("=")[0] for word in spec.split("+"))
    return "+".join(word for word in words if word not in ("ctas", *SHARDED))


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """The options of a Method that a device, its software and these collectives support.

    pull: copy engines can pull.
    residents: the residencies to try of the named kernels.
    """

    priority: bool = False
    ctas: bool = False
    left: bool = False
    copy_engine: bool = False
    pull: bool = False
    residents: tuple[int, ...] = ()

    def allow(self, method: Method) -> bool:
        """Return whether all options of a method are supported."""
        blocks = self.ctas or not method.ctas or method.transport == "copy_engine"
        moved = (self.copy_engine or method.transport != "copy_engine") and (self.pull or not method.pull)
        options = (self.priority or not method.priority) and (self.left or not method.left)
        return blocks and moved and options and (not method.resident or method.resident in self.residents)


def everything(problem: ConcurrentProblem) -> Abilities:
    """Return the abilities of a GPU whose ranks share a node."""
    moved = not problem.nodes and len(problem.known) == len(problem.collectives)
    pulled = all(one.op in ("all_gather", "all_reduce") for _, one in problem.known)
    return Abilities(priority=True, ctas=True, left=True, copy_engine=moved, pull=moved and pulled)


def candidates(problem: ConcurrentProblem, abilities: Abilities | None = None) -> tuple[str, ...]:
    """Return all possible names, sequential and two plain streams first. abilities: default: `everything`."""
    possible = everything(problem)
    able = possible if abilities is None else abilities
    able = replace(able, copy_engine=able.copy_engine and possible.copy_engine, pull=able.pull and possible.pull)
    found = [SEQUENTIAL, PLAIN, Method(late=True)]
    if able.priority:
        found += [Method(priority=True, resident=resident) for resident in (0, *able.residents)]
    found += [Method(priority=able.priority, ctas=ctas, left=left) for ctas, left in BUDGETS]
    if able.priority:
        found.append(Method(late=True, priority=True, ctas=BUDGETS[1][0]))
    pushed, pulled = (SUM_BLOCKS, PULLED_SUM_BLOCKS) if problem.reduces else (MOVE_BLOCKS, PULLED_MOVE_BLOCKS)
    for pull, blocks in ((False, pushed), (True, pulled)):
        for ctas, left in blocks:
            found.append(Method(transport="copy_engine", priority=able.priority, pull=pull, ctas=ctas, left=left))
    return tuple(str(method) for method in dict.fromkeys(found) if able.allow(method))


def build(problem: ConcurrentProblem, spec: str, *, fan_out: bool = False) -> Schedule:
    """Return the schedule of that name.

    fan_out: as for `weft.schedule.build`.
    Raises ValueError for another name, and for copy engines if they cannot run one of the collectives.
    """
    method = parse(spec)
    computation = UserCall(COMPUTATION, None, method.left, method.resident, method.ahead, method.unsharded)
    if method.transport == "copy_engine":
        return _moved(problem, spec, method, computation, fan_out=fan_out)
    buffers = [
        Buffer(named(buffer.name, i), buffer.kind, buffer.rows, buffer.cols)
        for i, one in problem.known
        for buffer in collectives.build_sequential(Request(one, "sequential")).buffers
    ]
    ranks = []
    for rank in range(problem.world_size):
        steps = tuple(_nccl_step(problem, i, rank) for i in range(len(problem.collectives)))
        if method.overlaps:
            lanes = [
                Lane("network", "network", steps, priority=method.priority, ctas=method.ctas),
                Lane("compute", "compute", (computation,)),
            ]
            ranks.append(tuple(reversed(lanes) if method.late else lanes))
        else:
            ranks.append((Lane("compute", "compute", (*steps, computation)),))
    return Schedule(problem=problem, name=str(method), buffers=tuple(buffers), ranks=tuple(ranks))


def _nccl_step(problem: ConcurrentProblem, number: int, rank: int) -> Step:
    one = problem.collectives[number]
    if isinstance(one, OpaqueCollective):
        return UserCall(one.name, number)
    src, dst = (
        Region(named(name, number), rank, (0, rows), (0, 1))
        for name, rows in (("a", one.a_rows(rank)), ("out", one.out_rows(rank)))
    )
    return Collective(one.op, src, dst, one.divide_by)  # type: ignore[arg-type]


def _moved(problem: ConcurrentProblem, spec: str, method: Method, computation: UserCall, *, fan_out: bool) -> Schedule:
    """Combine the copy-engine schedules of all collectives. On each lane, the steps of a collective come after those of the one
    before."""
    buffers: list[Buffer] = []
    steps: list[dict[str, list[Step]]] = [{} for _ in range(problem.world_size)]
    kinds: dict[str, Any] = {}
    for number, one in enumerate(problem.collectives):
        schedule = _by_copy_engine(one, spec, method, fan_out=fan_out)
        buffers += (replace(buffer, name=named(buffer.name, number)) for buffer in schedule.buffers)
        for rank, lanes in enumerate(schedule.ranks):
            for lane in lanes:
                name = LOCAL if lane.kind == "compute" else lane.name
                kinds[name] = "blocks" if lane.kind == "compute" else lane.kind
                steps[rank].setdefault(name, []).extend(_steps(lane, number))
    ranks = []
    for own in steps:
        moving = [
            Lane(name, kinds[name], tuple(some), method.priority, method.ctas if kinds[name] == "blocks" else 0)
            for name, some in own.items()
        ]
        compute = Lane("compute", "compute", (computation,))
        ranks.append((compute, *moving) if method.late else (*moving, compute))
    return Schedule(problem=problem, name=str(method), buffers=tuple(buffers), ranks=tuple(ranks))


def _steps(lane: Lane, number: int) -> tuple[Step, ...]:
    """Return a lane's steps, with the names of buffers and flags in the schedule of all collectives."""
    return tuple(renamed(step, lambda name: named(name, number)) for step in lane.steps) if number else lane.steps


def _by_copy_engine(one: CollectiveProblem | OpaqueCollective, spec: str, method: Method, *, fan_out: bool) -> Schedule:
    if isinstance(one, OpaqueCollective):
        raise ValueError(f"method is {spec!r}; copy engines do not run {one.name}: use nccl")
    if one.nodes:
        raise ValueError(f"method is {spec!r}; copy engines do not reach other nodes: use nccl")
    own = replace(one, sms=method.ctas) if method.ctas else one
    known = collectives.PULL_BUILDERS if method.pull else collectives.PUSH_BUILDERS
    if one.op not in known:
        raise ValueError(f"method is {spec!r}; {one.op} is not pulled: leave out pull")
    return known[one.op](Request(own, "copy_engine", one.world_size, fan_out))


def renamed(value: Any, rename: Callable[[str], str]) -> Any:
    """Return a step, or a part of one, with other names for its buffers and flags."""
    if isinstance(value, Region):
        return replace(value, buffer=rename(value.buffer))
    if isinstance(value, Flag):
        return replace(value, name=rename(value.name))
    if isinstance(value, tuple):
        return tuple(renamed(item, rename) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: renamed(getattr(value, field.name), rename) for field in fields(value)})
    return value


def alone(schedule: Schedule, number: int) -> Schedule:
    """Return the schedule of one collective, which the checker proves, and which runs if the collective is not NCCL's.

    NCCL's collectives are on lanes of kind blocks, because they are kernels that need SMs.
    """
    assert isinstance(schedule.problem, ConcurrentProblem)
    one = schedule.problem.collectives[number]
    assert isinstance(one, CollectiveProblem)
    buffers = (buffer for buffer in schedule.buffers if number_of(buffer.name) == number)
    lanes = [[(lane, _own(lane, number)) for lane in lanes] for lanes in schedule.ranks]
    sms = max((lane.ctas for rank in lanes for lane, steps in rank if lane.kind == "blocks" and steps), default=0)
    return Schedule(
        problem=replace(one, sms=sms or one.sms),
        name=schedule.name,
        buffers=tuple(replace(buffer, name=plain(buffer.name)) for buffer in buffers),
        ranks=tuple(tuple(Lane(*_place(lane), steps) for lane, steps in rank if steps) for rank in lanes),
    )


def _own(lane: Lane, number: int) -> tuple[Step, ...]:
    """Return the steps of a collective, with the names of its own schedule. Opaque collectives have none."""
    steps = (step for step in lane.steps if not collective_numbers(step) and number in numbers(step))
    return tuple(renamed(step, plain) if number else step for step in steps)


def _place(lane: Lane) -> tuple[str, Any]:
    """Return the name and the kind of a lane in the collective's own schedule."""
    if lane.name == LOCAL:
        return "compute", "compute"
    return lane.name, "blocks" if lane.kind == "network" else lane.kind


def numbers(step: Step) -> Iterator[int]:
    """Yield the numbers of the collectives that a step belongs to."""
    yield from collective_numbers(step)
    yield from (number_of(region.buffer) for region in regions(step))
    yield from (number_of(wait.flag.name) for wait in waits(step))
    yield from (number_of(flag.name) for flag in signalled_flags(step))
