"""Schedule: the steps of every rank, their order and their dependencies. Planner, checker, executors and simulator share it.

A schedule lists the lanes of every rank. A lane runs its steps in order, and lanes run concurrently. Every dependency between
lanes or ranks is a flag. Two methods of overlapping are two Schedules, and nothing else differs.

Time, within one call on one rank:

    caller writes inputs --> all lanes of the rank start --> ... --> all lanes end --> caller reads outputs

and the next call on that rank starts after that. Only flags and collectives order two ranks.

Flags. A flag is stored on `flag.rank`; only that rank's steps wait for it. One step of one lane of one rank signals it, once a
call: a Signal, or a part whose `count` is the flag. Each step that waits for a flag has its own copy of it. The signal raises
the copy, and the step lowers it after its wait. So no value grows, and a CUDA graph may replay a call.

`Wait(flag)` waits for the signal of its own call. `Wait(flag, on_previous_call=True)` waits for the signal of the previous
call, and for nothing in the first call; a writer uses it to learn that a buffer may be written again. A Wait lowers its flag
when it has passed. A gate is a Wait of one part of a kernel. A kernel waits for all its gates on the previous call where it
starts, and lowers them there; it lowers its gates on this call where it ends. No flag may be signalled again before every step
that waits for it has lowered it. A flag that a kernel counts tile by tile has one waiting step. `weft.schedule.check` proves
both.

Buffers. "input" and "output" belong to the caller and to their own rank; "symmetric" may be read and written by peers; "local"
is scratch memory of its rank. Peers may only access symmetric buffers. There is one exception: during a call, the output of a
CollectiveProblem that is `reachable`.

Nodes. Memory and flags of a rank on another node cannot be accessed; there is only SendReceive, on a lane of kind network. A
received message implies that the sender's step had begun; a sender learns nothing about its receiver.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from weft.core import codec
from weft.core.concurrent import ConcurrentProblem
from weft.core.problem import CollectiveProblem, ColumnProblem, LookupProblem, Operand, Problem, RaggedProblem, Span1D

T = TypeVar("T")
LaneKind = Literal["compute", "copy", "blocks", "network"]
"""compute: kernels on all SMs; a rank has one such lane at most. copy: a copy engine. blocks: communication blocks on SMs of
their own (SM stores). network: NCCL's sends and receives; for a ConcurrentProblem NCCL's collectives."""
BufferKind = Literal["input", "output", "symmetric", "local"]
"""input, output: tensors of the caller. symmetric: peers may read and write it. local: scratch memory of its rank."""


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a named buffer on a rank: rows [low, high) by cols [low, high)."""

    buffer: str
    rank: int
    rows: Span1D
    cols: Span1D

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    @property
    def size(self) -> int:
        """The number of elements of the region."""
        return (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])

    def __str__(self) -> str:
        return f"{self.buffer}@{self.rank}[{self.rows[0]}:{self.rows[1]}, {self.cols[0]}:{self.cols[1]}]"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag on `rank`, identified by name and index."""

    name: str
    rank: int
    index: int = 0

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]@{self.rank}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until `flag` has been signalled in this call.

    on_previous_call: wait for the signal of the previous call instead. The first call does not wait then.
    """

    TAGGED: ClassVar[bool] = True
    flag: Flag
    on_previous_call: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return f"wait {self.flag}{' of the previous call' if self.on_previous_call else ''}"


@dataclass(frozen=True, slots=True)
class Signal:
    """Signal `flag`, after all earlier steps of this lane are done and visible."""

    TAGGED: ClassVar[bool] = True
    flag: Flag

    def __str__(self) -> str:
        return f"signal {self.flag}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy src to dst, which has the same shape. One of them may be on a peer. The copy is a push if dst is, and a pull if src
    is."""

    TAGGED: ClassVar[bool] = True
    src: Region
    dst: Region

    def __str__(self) -> str:
        return f"copy {self.src} -> {self.dst}"


@dataclass(frozen=True, slots=True)
class Store:
    """One copy of a Push from src to dst, which has the same shape.

    count: the flag that is signalled once all of it has arrived at dst's rank.
    """

    src: Region
    dst: Region
    count: Flag

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst}, count {self.count}"


@dataclass(frozen=True, slots=True)
class Push:
    """One kernel of stores from SMs, on a lane of kind compute or blocks. All of its parts read one buffer of this rank.

    Parts are unordered: the flag of a part implies that its own copy has arrived, and everything before the Push in its lane,
    but nothing about other parts. The kernel counts tiles, so no two parts share a flag.

    If the problem's scaling quantises a, the destinations may be FP8 while the source is not. Whole rows are then quantised,
    once for all destinations, and their scales are stored with them.
    """

    TAGGED: ClassVar[bool] = True
    parts: tuple[Store, ...]

    @property
    def source(self) -> tuple[str, int]:
        """The buffer that all parts read, and its rank."""
        return self.parts[0].src.buffer, self.parts[0].src.rank

    def __str__(self) -> str:
        if len(self.parts) == 1:
            return f"push {self.parts[0].src} -> {self.parts[0].dst}"
        rows = sum(part.src.shape[0] for part in self.parts)
        return f"push {rows} rows of {self.parts[0].src.buffer if self.parts else 'nothing'} in {len(self.parts)} parts"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a GEMM that are computed together: out = a @ b, for the Gemm's b.

    out: may be on a peer. The kernel then stores it there.
    gates: the waits of its tiles.
    count: the flag that is signalled once all its tiles are done. It is called `count` because each tile adds to it.
    adds: regions that are added: out = (a @ b + sum(adds)) / the Gemm's divide_by. The sum is in float32, in this order, and is
        rounded once. Tiles of a part that adds wait for its gates late: after they have read a and b, and before they read the
        addends, so that the multiplication hides the wait. These gates do not protect a and b, which must be ready when the
        Gemm starts.
    inner: pairs (column, wait), with ascending columns of a between its first and its last. Tiles wait after they have
        multiplied the columns below `column`, and before they read those from `column` on. All of b must be ready once the
        gates are open. `inner` is not allowed with adds, or with the Gemm's accumulate.
    """

    a: Region
    out: Region
    gates: tuple[Wait, ...] = ()
    count: Flag | None = None
    adds: tuple[Region, ...] = ()
    inner: tuple[tuple[int, Wait], ...] = ()

    @property
    def waits(self) -> tuple[Wait, ...]:
        """All waits of its tiles: first the gates, then the inner gates."""
        return self.gates + tuple(wait for _, wait in self.inner)

    def __str__(self) -> str:
        inner = "".join(f", {wait} at column {column}" for column, wait in self.inner)
        return f"{' + '.join(map(str, (self.a, *self.adds)))} -> {self.out}{_conditions(self.gates, self.count, inner)}"


@dataclass(frozen=True, slots=True)
class Gemm:
    """One GEMM kernel: its parts share b and are produced in this order, but run concurrently.

    A waiting part may delay those after it, never those before it.

    accumulate: add to out instead of overwriting it. Then no part has adds.
    divide_by: world_size for an average. It applies only to parts with adds, because the results of other parts are partial.
    transposed: out = a^T @ b. Then it has one part, which waits for, counts and adds nothing, and stores on its rank.
    """

    TAGGED: ClassVar[bool] = True
    b: Region
    parts: tuple[Part, ...]
    accumulate: bool = False
    divide_by: int = 1
    transposed: bool = False

    def __str__(self) -> str:
        rows = sum(p.out.shape[0] for p in self.parts)
        inner, cols = self.b.shape
        more = f" in {len(self.parts)} parts" if len(self.parts) > 1 else ""
        return f"gemm {rows}x{cols}x{inner}{'+' * self.accumulate}{' of a^T' * self.transposed}{more}"


@dataclass(frozen=True, slots=True)
class Sum:
    """A part of a Reduce: out = sum(srcs) in float32, in this order, rounded once.

    A source may be a single row, which is added to every row of `out`; the first one is as tall as `out`.
    """

    srcs: tuple[Region, ...]
    out: Region
    gates: tuple[Wait, ...] = ()
    count: Flag | None = None

    @property
    def waits(self) -> tuple[Wait, ...]:
        """All waits of the part, which are its gates."""
        return self.gates

    def __str__(self) -> str:
        return f"{' + '.join(map(str, self.srcs))} -> {self.out}{_conditions(self.gates, self.count)}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """One reduction kernel. divide_by: world_size for an average. Sources may be on a peer: the kernel loads them."""

    TAGGED: ClassVar[bool] = True
    parts: tuple[Sum, ...]
    divide_by: int = 1

    def __str__(self) -> str:
        rows, cols = self.parts[0].out.shape if self.parts else (0, 0)
        more = f" in {len(self.parts)} parts" if len(self.parts) > 1 else ""
        total = sum(p.out.shape[0] for p in self.parts) if len({p.out.cols for p in self.parts}) == 1 else rows
        return f"reduce {len(self.parts[0].srcs) if self.parts else 0} x {total}x{cols}{more}"


@dataclass(frozen=True, slots=True)
class Bags:
    """Bags of the tables of the rank that runs the step, which are looked up together: out = their pooled rows.

    bags: its rows are samples of the whole batch. Its columns are those of the rank's tables, concatenated; whole tables only.
    out: may be on a peer. The kernel then stores it there.
    count: the flag that is signalled once all bags are done.
    """

    bags: Region
    out: Region
    count: Flag | None = None

    def __str__(self) -> str:
        return f"{self.bags} -> {self.out}{_conditions((), self.count)}"


@dataclass(frozen=True, slots=True)
class Lookup:
    """One kernel that gathers rows of tables and pools them bag by bag. Its parts start in this order and run concurrently."""

    TAGGED: ClassVar[bool] = True
    parts: tuple[Bags, ...]

    def __str__(self) -> str:
        rows = sum(part.bags.shape[0] for part in self.parts)
        more = f" in {len(self.parts)} parts" if len(self.parts) > 1 else ""
        return f"lookup {rows}x{self.parts[0].bags.shape[1] if self.parts else 0}{more}"


@dataclass(frozen=True, slots=True)
class Collective:
    """An NCCL collective over all ranks. It ends on a rank after every rank has started it.

    all_gather: dst[shard of s] = src of rank s. reduce_scatter: dst = the sum over ranks of this rank's shard of src.
    all_to_all: dst[arrivals from s] = this rank's shard of the src of rank s.
    all_reduce: dst = the sum over ranks of src; dst may be src.
    all_to_all_columns: dst[:, columns of s] = this rank's shard (rows) of src of rank s; dst has those of all ranks,
        concatenated.
    divide_by: what a reduce_scatter or an all_reduce divides its sum by: 1, or world_size for an average.
    """

    TAGGED: ClassVar[bool] = True
    op: Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "all_to_all_columns"]
    src: Region
    dst: Region
    divide_by: int = 1

    def __str__(self) -> str:
        return f"{self.op} {self.src} -> {self.dst}"


@dataclass(frozen=True, slots=True)
class Norm:
    """One kernel that normalises whole rows: out = src / sqrt(mean(src^2 of the row) + eps) * weight, in float32, rounded once.

    If the buffer of out has operand "norm", the float32 result is quantised: out's elements and scales are written.

    src, out: rows of N columns each. weight: one row. eps: that of the problem.
    """

    TAGGED: ClassVar[bool] = True
    src: Region
    weight: Region
    out: Region
    eps: float

    def __str__(self) -> str:
        return f"norm {self.src} * {self.weight} -> {self.out}"


MAILBOX_COPIES = 3
"""Copies of a mailbox, which are enough for any schedule (weft.checker.fused_collective.written_too_early)."""


@dataclass(frozen=True, slots=True)
class FusedCollective:
    """One persistent kernel that sums the tiles of all ranks, on a lane of kind compute. Every rank runs the same.

    factors: (a, b), whose product the kernel computes; or (partial,), which is ready: M x N on every rank.
    op: all_reduce gives every rank the whole sum. reduce_scatter gives a rank the rows of its shard.
    hops: with 1, every tile is sent to all ranks that need its sum, and each of them sums it. With 2 (all_reduce only), each
    rank owns an equal part of the columns of N; it sums the tiles of its columns and sends the sums to all.
    addends: tensors that are added to the sum once, each as large as out, or one row that is added to all rows.
    divide_by: as in a Reduce.
    norm: the norm of `out`, which the kernel computes, too; all_reduce in one hop only.

    Tiles are sent through a mailbox, symmetric memory that only such kernels use, one after the other. A 32-bit word of the
    mailbox is empty or holds data, so the data is its own flag. mailbox: its name; no other kernel of the schedule has it.
    copies: the number of copies, which calls use in turn.

    `weft.core.fused_collective.spelled_out` returns equivalent steps without such a kernel. The checker proves those steps, the
    simulator predicts them, and a device without the kernel runs them. weft.checker.fused_collective proves that a mailbox is
    never written before it is empty.
    """

    TAGGED: ClassVar[bool] = True
    op: Literal["all_reduce", "reduce_scatter"]
    factors: tuple[Region, ...]
    out: Region
    hops: int = 1
    addends: tuple[Region, ...] = ()
    divide_by: int = 1
    mailbox: str = "mailbox"
    copies: int = MAILBOX_COPIES
    norm: Norm | None = None

    @property
    def multiplies(self) -> bool:
        return len(self.factors) == 2

    def __str__(self) -> str:
        made = " @ ".join(map(str, self.factors))
        added = "".join(f" + {region}" for region in self.addends)
        hops = "one hop" if self.hops == 1 else f"{self.hops} hops"
        norm = "" if self.norm is None else f", {self.norm}"
        return f"{self.op} {made}{added} -> {self.out}{norm} in one kernel, {hops}"


@dataclass(frozen=True, slots=True)
class Send:
    """A message of whole rows from a buffer of this rank to another rank."""

    src: Region
    to: int

    def __str__(self) -> str:
        return f"{self.src} -> {self.to}"


@dataclass(frozen=True, slots=True)
class Receive:
    """A message from another rank, received into whole rows of a buffer of this rank."""

    dst: Region
    source: int

    def __str__(self) -> str:
        return f"{self.dst} <- {self.source}"


@dataclass(frozen=True, slots=True)
class SendReceive:
    """Concurrent messages. The n-th message that a rank sends to another in a call is the n-th that the other receives.

    The step ends once all of its messages have been transferred, which requires that the other end of each has begun.
    """

    TAGGED: ClassVar[bool] = True
    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()

    def __str__(self) -> str:
        directions = [("send", self.sends), ("receive", self.receives)]
        texts = (f"{verb} {', '.join(map(str, messages))}" for verb, messages in directions if messages)
        return ", ".join(texts) or "send nothing"

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, each once."""
        return tuple(dict.fromkeys([*(s.to for s in self.sends), *(r.source for r in self.receives)]))


@dataclass(frozen=True, slots=True)
class UserCall:
    """A call of something that a schedule for a ConcurrentProblem joins. It accesses no buffer of that schedule.

    Without `collective` it is the user's computation, on the compute lane. Otherwise it is the collective of that number: its
    own schedule (`Schedule.parts`), or communication whose tensors are not described (OpaqueCollective).

    left: the number of SMs that the computation's cuBLAS GEMMs leave free.
    resident: the most blocks on an SM of the kernels that the user named; 0 for no limit.
    ahead: for fully_shard, the number of groups that are gathered before the one that computes; 0 for its default.
    unsharded: for fully_shard, whether parameters are gathered once a step for both passes.
    """

    TAGGED: ClassVar[bool] = True
    name: str
    collective: int | None = None
    left: int = 0
    resident: int = 0
    ahead: int = 0
    unsharded: bool = False

    def __str__(self) -> str:
        numbers = [f"{name}={value}" for name in ("left", "resident", "ahead") if (value := getattr(self, name))]
        return ", ".join([f"call {self.name}", *numbers, *["unsharded"] * self.unsharded])


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of a buffer on `rank` that rank src sends to an expert of rank dst. Their number and their first row are known
    only on the device: help(weft.core.problem.RaggedProblem) defines the layout of segments."""

    buffer: str
    rank: int
    src: int
    dst: int
    expert: int

    @property
    def name(self) -> tuple[int, int, int]:
        """The segment's identity (src, dst, expert), which is the same in any buffer."""
        return self.src, self.dst, self.expert

    def __str__(self) -> str:
        return f"{self.buffer}@{self.rank}[{self.src}->{self.dst}, expert {self.expert}]"


@dataclass(frozen=True, slots=True)
class ShareCounts:
    """Write this rank's row counts at the rank of each of these flags, and signal that flag. Then wait for the gates, which
    open when the counts of the other ranks have arrived.

    The counts are stored in the step's own memory. It has two slots for each rank, used by alternate calls: a peer may be one
    call behind, but not two.
    """

    TAGGED: ClassVar[bool] = True
    flags: tuple[Flag, ...]
    gates: tuple[Wait, ...] = ()

    def __str__(self) -> str:
        return f"share counts with {len(self.flags)} ranks, wait for those of {len(self.gates)}"


@dataclass(frozen=True, slots=True)
class SegmentCopy:
    """A part of a SegmentCopies or a GroupedGemm that copies a segment from src to dst. It waits for its gates, and signals
    `count` at its end. It is a push if dst is on a peer, and a pull if src is."""

    TAGGED: ClassVar[bool] = True
    src: Segment
    dst: Segment
    gates: tuple[Wait, ...] = ()
    count: Flag | None = None

    @property
    def ends(self) -> tuple[Segment, Segment]:
        """The segment that it reads, and the segment that it writes."""
        return self.src, self.dst

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst}{_conditions(self.gates, self.count)}"


@dataclass(frozen=True, slots=True)
class SegmentCopies:
    """One kernel that copies segments. Nothing orders its parts."""

    TAGGED: ClassVar[bool] = True
    parts: tuple[SegmentCopy, ...]

    def __str__(self) -> str:
        return f"copy {len(self.parts)} segments"


@dataclass(frozen=True, slots=True)
class SegmentProduct:
    """One part of a GroupedGemm: out = a @ (b of the segment's expert on this rank), once its gates are open."""

    TAGGED: ClassVar[bool] = True
    a: Segment
    out: Segment
    gates: tuple[Wait, ...] = ()
    count: Flag | None = None

    @property
    def ends(self) -> tuple[Segment, Segment]:
        """The segment that it reads, and the segment that it writes."""
        return self.a, self.out

    def __str__(self) -> str:
        return f"{self.a} -> {self.out}{_conditions(self.gates, self.count)}"


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """One kernel that multiplies segments by the b of their experts, and copies segments on some of its blocks.

    Each part has its own gates. A waiting part may hold the SMs that later parts need. Otherwise, parts are unordered.
    """

    TAGGED: ClassVar[bool] = True
    parts: tuple[SegmentProduct | SegmentCopy, ...]

    def __str__(self) -> str:
        copies = sum(isinstance(part, SegmentCopy) for part in self.parts)
        return f"grouped gemm of {len(self.parts) - copies} segments" + (f", {copies} copies" if copies else "")


RaggedStep = ShareCounts | SegmentCopies | GroupedGemm
"""Steps that only a RaggedProblem has. They read row counts on the device."""
Step = (
    Wait
    | Signal
    | Copy
    | Push
    | Gemm
    | Reduce
    | Norm
    | Lookup
    | Collective
    | FusedCollective
    | SendReceive
    | UserCall
    | RaggedStep
)


@dataclass(frozen=True, slots=True)
class Lane:
    """Steps that run one after the other. kind: the kind of resource that runs them.

    compute: kernels on all SMs; a rank has one such lane at most.
    copy: a copy engine. It runs Copy, Wait and Signal.
    blocks: kernels of a few blocks, on SMs of their own.
    network: sends to other nodes and receives from them.

    In a schedule with a UserCall, the lanes of a rank are enqueued in the order in which they are listed. priority: use streams
    of the highest priority. ctas: the blocks of this lane's kernels, 0 for their default. Only a schedule for a
    ConcurrentProblem may set priority and ctas.

    Raises ValueError for ctas below zero.
    """

    name: str
    kind: LaneKind
    steps: tuple[Step, ...]
    priority: bool = False
    ctas: int = 0

    def __post_init__(self) -> None:
        if self.ctas < 0:
            raise ValueError(f"ctas is {self.ctas} on lane {self.name}; it must be 0, for the kernels' own choice, or above")


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named buffer. rows, cols: its size on each rank. float32: it holds float32 partial sums, whatever the problem's dtype;
    only a local buffer may.

    kind: "input" and "output" are tensors of the caller. "symmetric" may be read and written by peers. "local" is scratch
        memory of its rank.

    operand: "a", "b" or "norm" if the buffer holds FP8 elements of that operand and their scales, as the problem's `scalings`
        define them. The scales are a separate matrix. A region of such a buffer includes the scales of its elements: a step
        that accesses a region accesses both, and a flag covers both.

    collective: in `weft.core.parts.joined`, the number of the collective that it belongs to.

    by_columns: its elements are stored column by column: the caller's tensor is the transpose of the buffer. Only products
        write such a buffer, and nothing reads it. It is the output `gradients` alone, because weights are stored so.
    """

    name: str
    kind: BufferKind
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    float32: bool = False
    operand: Literal["", Operand] = ""
    by_columns: bool = False
    collective: int = 0

    def whole(self, rank: int) -> Region:
        return Region(self.name, rank, (0, self.rows[rank]), (0, self.cols[rank]))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The steps of every rank for one problem. help(weft.core.schedule) explains them.

    name: the family, as `weft schedules` lists it. chunks: the pieces into which a shard is cut. ranks: the lanes of each rank.
    parts: for a ConcurrentProblem, the schedule of each collective, None for one that is not described. The lanes then consist
    of UserCalls. NCCL runs a part of one Collective, on the lane that calls it; all other parts have lanes of their own.
    A Schedule is not checked when it is constructed; `weft.schedule.check` proves it right.

    Raises ValueError for chunks below 1, and for parts, priority or ctas in a schedule that does not use them.
    """

    problem: Problem | LookupProblem | CollectiveProblem | ColumnProblem | ConcurrentProblem | RaggedProblem
    name: str
    buffers: tuple[Buffer, ...]
    ranks: tuple[tuple[Lane, ...], ...]
    chunks: int = 1
    parts: tuple[Schedule | None, ...] = ()

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ValueError(f"chunks is {self.chunks} in schedule {self.name}; it must be 1 or above")
        if isinstance(self.problem, ConcurrentProblem):
            return
        if self.parts:
            raise ValueError(
                f"schedule {self.name} has parts; only a schedule for a ConcurrentProblem has some: leave them out"
            )
        for rank, lane in ((rank, lane) for rank, lanes in enumerate(self.ranks) for lane in lanes):
            name = "priority" if lane.priority else "ctas"
            if getattr(lane, name):
                raise ValueError(
                    f"{name} is {getattr(lane, name)} on rank {rank}, lane {lane.name}; only a schedule for a "
                    "ConcurrentProblem has lanes with priority or ctas: leave it out"
                )

    @cached_property
    def buffer(self) -> dict[str, Buffer]:
        """The buffers by name."""
        return {b.name: b for b in self.buffers}

    @cached_property
    def signals_per_call(self) -> Counter[Flag]:
        """The number of times that each flag is signalled in one call, which is once in a correct schedule."""
        return Counter(flag for _, _, _, step in self for flag in signalled_flags(step))

    @cached_property
    def digest(self) -> str:
        """A hash of 16 hexadecimal digits, equal for equal schedules in every process."""
        return hashlib.sha256(codec.dumps(self).encode()).hexdigest()[:16]

    @cached_property
    def flags(self) -> tuple[Flag, ...]:
        """Every flag that is signalled or waited for, in the order of (rank, name, index)."""
        used = set(self.signals_per_call) | {w.flag for _, _, _, step in self for w in waits(step)}
        return tuple(sorted(used, key=lambda f: (f.rank, f.name, f.index)))

    def __iter__(self) -> Iterator[tuple[int, Lane, int, Step]]:
        """Yield (rank, lane, position in the lane, step) for every step."""
        for rank, lanes in enumerate(self.ranks):
            for lane in lanes:
                for position, step in enumerate(lane.steps):
                    yield rank, lane, position, step

    def __str__(self) -> str:
        steps = sum(1 for _ in self)
        return f"{self.name} (chunks={self.chunks}) for {self.problem}: {steps} steps on {len(self.ranks)} ranks"


def _nothing(step: Any) -> tuple[()]:
    return ()


def _of_parts(each: Callable[[Any], tuple[T, ...]]) -> Callable[[Any], tuple[T, ...]]:
    """Return a function that concatenates the results of `each` for the parts of a step."""
    return lambda step: tuple(found for part in step.parts for found in each(part))


def _flags_of_parts(step: Any) -> tuple[Flag, ...]:
    return tuple(part.count for part in step.parts if part.count is not None)


class StepContents(NamedTuple):
    """StepContents holds, for one type of step, the functions that return what such a step refers to.

    regions, segments: what it reads or writes.
    waits: its waits, including those of its parts.
    signals: the flags that it signals.
    """

    regions: Callable[[Any], tuple[Region, ...]] = _nothing
    segments: Callable[[Any], tuple[Segment, ...]] = _nothing
    waits: Callable[[Any], tuple[Wait, ...]] = _nothing
    signals: Callable[[Any], tuple[Flag, ...]] = _nothing


_SEGMENTS = StepContents(segments=_of_parts(attrgetter("ends")), waits=_of_parts(attrgetter("gates")), signals=_flags_of_parts)
STEP_CONTENTS: dict[type, StepContents] = {
    Wait: StepContents(waits=lambda step: (step,)),
    Signal: StepContents(signals=lambda step: (step.flag,)),
    Copy: StepContents(attrgetter("src", "dst")),
    Push: StepContents(_of_parts(attrgetter("src", "dst")), signals=_flags_of_parts),
    Gemm: StepContents(
        lambda step: (step.b, *(region for part in step.parts for region in (part.a, part.out, *part.adds))),
        waits=_of_parts(attrgetter("waits")),
        signals=_flags_of_parts,
    ),
    Reduce: StepContents(
        _of_parts(lambda part: (*part.srcs, part.out)), waits=_of_parts(attrgetter("waits")), signals=_flags_of_parts
    ),
    Lookup: StepContents(_of_parts(attrgetter("bags", "out")), signals=_flags_of_parts),
    Collective: StepContents(attrgetter("src", "dst")),
    Norm: StepContents(attrgetter("src", "weight", "out")),
    FusedCollective: StepContents(
        lambda step: (*step.factors, *step.addends, step.out, *([] if step.norm is None else [step.norm.weight, step.norm.out]))
    ),
    SendReceive: StepContents(lambda step: (*(send.src for send in step.sends), *(receive.dst for receive in step.receives))),
    UserCall: StepContents(),
    ShareCounts: StepContents(waits=attrgetter("gates"), signals=attrgetter("flags")),
    SegmentCopies: _SEGMENTS,
    GroupedGemm: _SEGMENTS,
}
"""The contents of every type of step."""


def waits(step: Step) -> tuple[Wait, ...]:
    """Return every wait of a step, gates and inner gates included, part by part."""
    return STEP_CONTENTS[type(step)].waits(step)


def signalled_flags(step: Step) -> tuple[Flag, ...]:
    """Return every flag that a step signals, in order."""
    return STEP_CONTENTS[type(step)].signals(step)


def segments(step: Step) -> tuple[Segment, ...]:
    """Return every segment that a step reads or writes."""
    return STEP_CONTENTS[type(step)].segments(step)


def regions(step: Step) -> tuple[Region, ...]:
    """Return every region that a step reads or writes."""
    return STEP_CONTENTS[type(step)].regions(step)


def places_of(kind: type[T], lanes: Iterable[Lane]) -> Iterator[tuple[Lane, int, T]]:
    """Yield the steps of one type, lane by lane, each with its lane and its position."""
    return ((lane, at, step) for lane in lanes for at, step in enumerate(lane.steps) if isinstance(step, kind))


def quantises(step: Push, schedule: Schedule) -> bool:
    """Return whether a Push quantises its source to FP8."""
    return not schedule.buffer[step.source[0]].operand and any(schedule.buffer[one.dst.buffer].operand for one in step.parts)


def steps_of(kind: type[T], lanes: Iterable[Lane]) -> Iterator[T]:
    """Yield the steps of one type, lane by lane."""
    return (step for _, _, step in places_of(kind, lanes))


def runs(regions: Sequence[Region]) -> list[Region]:
    """Merge neighbouring regions whose rows are contiguous.

    >>> parts = [Region("a", 0, rows, (0, 8)) for rows in ((0, 2), (2, 4), (6, 8))]
    >>> [region.rows for region in runs(parts)]
    [(0, 4), (6, 8)]
    """
    found: list[Region] = []
    for region in regions:
        last = found[-1] if found else None
        follows = last and (last.buffer, last.rank, last.cols, last.rows[1]) == (*_columns(region), region.rows[0])
        if last and follows:
            found[-1] = Region(last.buffer, last.rank, (last.rows[0], region.rows[1]), last.cols)
        else:
            found.append(region)
    return found


def _columns(region: Region) -> tuple[str, int, Span1D]:
    return region.buffer, region.rank, region.cols


def _conditions(gates: tuple[Wait, ...], count: Flag | None, inner: str = "") -> str:
    return "".join(f", {gate}" for gate in gates) + inner + (f", count {count}" if count else "")
