"""Builds schedules that run collectives concurrently with the user's computation. A schedule's name has all of its options.

The names that `method=` takes are sequential, and nccl or copy_engine with any of +late, +priority, +pull, +ctas=N, +left=N,
+resident=N. For fully_shard there are also +ahead=N and +unsharded. `Method` has these options as fields.

Lanes of a rank, in the order in which they are enqueued:

    sequential       compute: collectives, call
    nccl             network: collectives         compute: call
    nccl+late        compute: call                network: collectives
    copy_engine      copy: collectives            compute: call

Each collective is a part of the schedule, which has a schedule of its own: one of `weft.schedules.collectives`. weft.core.parts
joins the lanes of all parts.

Sources: occupancy and priority, arXiv 2606.09200; launch order, reserved units and DMA collectives, ConCCL, arXiv 2412.14335.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from weft.core.concurrent import ConcurrentProblem, OpaqueCollective
from weft.core.problem import CollectiveProblem
from weft.core.schedule import Lane, LaneKind, Schedule, UserCall
from weft.schedules import collectives
from weft.schedules.builder import Request

Transport = Literal["none", "nccl", "copy_engine"]
COMPUTATION = "computation"
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
    moves = method.transport == "copy_engine"
    parts = tuple(
        _by_copy_engine(one, spec, method, fan_out=fan_out)
        if moves
        else None
        if isinstance(one, OpaqueCollective)
        else collectives.build_sequential(Request(one, "sequential"))
        for one in problem.collectives
    )
    calls = [
        UserCall(one.name if isinstance(one, OpaqueCollective) else one.op, number)
        for number, one in enumerate(problem.collectives)
    ]
    computation = UserCall(COMPUTATION, None, method.left, method.resident, method.ahead, method.unsharded)
    lanes = [Lane("compute", "compute", (computation,))]
    if not method.overlaps:
        lanes = [Lane("compute", "compute", (*calls, computation))]
    else:
        name: LaneKind = "copy" if moves else "network"
        lanes.insert(method.late, Lane(name, name, tuple(calls), method.priority, method.ctas))
    ranks = (tuple(lanes),) * problem.world_size
    return Schedule(problem=problem, name=str(method), buffers=(), ranks=ranks, parts=parts)


def _by_copy_engine(one: CollectiveProblem | OpaqueCollective, spec: str, method: Method, *, fan_out: bool) -> Schedule:
    if isinstance(one, OpaqueCollective):
        raise ValueError(f"method is {spec!r}; copy engines do not run {one.name}: use nccl")
    if one.nodes:
        raise ValueError(f"method is {spec!r}; copy engines do not reach other nodes: use nccl")
    own = replace(one, sms=method.ctas) if method.ctas else one
    known = collectives.PULL_BUILDERS if method.pull else collectives.PUSH_BUILDERS
    if one.op not in known:
        raise ValueError(f"method is {spec!r}; {one.op} is not pulled: leave out pull")
    built = known[one.op](Request(own, "copy_engine", one.world_size, fan_out))
    return replace(built, name=str(method), chunks=1)
