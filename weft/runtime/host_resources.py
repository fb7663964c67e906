"""HostResources holds what the programs of a process group share on a CPU rank: memory, messages and the threads of lanes.

HostWire sends messages between CPU ranks through gloo, on connections of its own.

Messages connect nodes, and they move data that no schedule describes: gradients of lookups, and rows whose numbers only the
hosts know. They do not use the caller's process group. If an error ends a call between two exchanges, ranks may have begun
different exchanges, and on a shared process group the next call would receive data of the failed one. These connections are
closed with the group, and the next group makes new ones.

A message has one sender and one receiver, so an error can name the late rank. A collective could not.

HostRows exchanges the counts of calls with splits on CPUs through shared memory, and computes the places of rows.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import HostAllocation, HostHeap, heap_of
from weft.compat.c10d import connections, nameless_group
from weft.core.experts import refused_index
from weft.core.problem import RaggedProblem, Scaling
from weft.core.schedule import Segment, SegmentCopy, SegmentProduct
from weft.runtime.arithmetic import multiply_gated
from weft.runtime.bindings import Bindings, FactorScales, scales_name
from weft.runtime.choose import nearest_profile
from weft.runtime.launches import Matmul
from weft.runtime.mailboxes import SharedMailboxes
from weft.runtime.network import bounded, name_lost_rank

INTERPRETED_BLOCKS = 4
"""The number of blocks of a kernel under Triton's interpreter."""
_LOOKS_PER_S = 3_000
"""An interpreted kernel reads a flag at most this many times per second."""


class LaneThread:
    """A LaneThread is a thread that runs the steps of one lane in each call."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"weft-{name}", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        torch.set_grad_enabled(False)  # a mode of the thread; the caller's is set by GroupState.run
        while (task := self._tasks.get()) is not None:
            raised = None
            try:
                task()
            except BaseException as error:
                raised = error
            task = None  # it refers to the tensors of the call, which must not live until the next one
            self._results.put(raised)
            raised = None

    def start(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def join(self) -> BaseException | None:
        """Wait for the started task. Return the exception that it raised, or None."""
        return self._results.get()

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()


class HostResources:
    """HostResources holds what the programs of one process group share on this rank.

    data: the shared memory of their buffers.
    """

    device = torch.device("cpu")

    def __init__(self, rank_group: RankGroup) -> None:
        self.rank_group, self.machine = rank_group, nearest_profile(self.device, rank_group.world_size)
        heap = heap_of(rank_group, self.device)
        assert isinstance(heap, HostHeap)
        self.heap, self.mailboxes = heap, SharedMailboxes(heap, self.device, self.blocks)
        self.data: HostAllocation | None = None
        self._wire: HostWire | None = None
        self._scratch: dict[Hashable, torch.Tensor] = {}
        self._threads: dict[str, LaneThread] = {}

    def runs_kernels(self, dtype: torch.dtype, scaling: Scaling | None = None) -> bool:
        """Return whether fused steps run as the kernels that GPUs run, which needs Triton's interpreter.

        The interpreter has no bfloat16 matmul. Products of FP8 operands may be float32.
        """
        fits = dtype == torch.float16 or (scaling is not None and dtype == torch.float32)
        return os.environ.get("TRITON_INTERPRET") == "1" and fits

    @property
    def quantises(self) -> bool:
        """True if a kernel quantises rows while it sends them."""
        return os.environ.get("TRITON_INTERPRET") == "1"

    def fuses(self, dtype: torch.dtype, scaling: Scaling | None = None) -> bool:
        return self.runs_kernels(dtype, scaling)

    @property
    def blocks(self) -> int:
        return INTERPRETED_BLOCKS

    @property
    def tries(self) -> int:
        return int(self.rank_group.timeout_s * _LOOKS_PER_S)

    def runs_lookups(self, dtype: torch.dtype) -> bool:
        """Return whether lookups run as kernels. They multiply no matrices, so the interpreter runs them in float32, too."""
        return os.environ.get("TRITON_INTERPRET") == "1" and dtype != torch.bfloat16

    def loading(self) -> AbstractContextManager[None]:
        """Return a context in which kernels may be loaded. On CPUs they may always be loaded, because no work is enqueued."""
        return nullcontext()

    def reserve(self, nbytes: int) -> None:
        """Make the shared memory for data of every rank at least `nbytes`. Collective: all ranks ask for the same size."""
        if self.data is None or self.data.nbytes < nbytes:
            outgrown, self.data = self.data, self.heap.allocate(nbytes)
            if outgrown is not None:
                self.heap.free(outgrown)

    def scratch(self, key: Hashable, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the local matrix with this key. It has the same memory in each call, until a larger one is needed."""
        nbytes = rows * cols * dtype.itemsize
        if key not in self._scratch or self._scratch[key].numel() < nbytes:
            self._scratch[key] = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[key][:nbytes].view(dtype).view(rows, cols)

    @property
    def wire(self) -> HostWire:
        """The channel for the group's messages. Its first use is a collective operation."""
        if self._wire is None:
            self._wire = HostWire(self.rank_group)
        return self._wire

    def thread(self, lane: str) -> LaneThread:
        if lane not in self._threads:
            self._threads[lane] = LaneThread(f"{lane}-{self.rank_group.rank}")
        return self._threads[lane]

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close()
        if self.data is not None:
            self.heap.free(self.data)
        if self._wire:
            self._wire.close()
        self._threads, self.data, self._scratch, self._wire = {}, None, {}, None


Messages = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank that sends or receives it."""
AllToAll = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]], Callable[[], None]]
"""Begins an exchange (taken, given, elements from each rank, elements to each rank) of flat tensors. Returns a function that
waits."""
_LATER_S = 5.0
"""gloo's bound is this much later than weft's, because gloo's error does not name a rank."""


class HostWire:
    """A HostWire sends messages between the ranks of a group. To construct it is a collective operation."""

    def __init__(self, rank_group: RankGroup) -> None:
        self.rank_group = rank_group
        self._backend: Any = _connect(rank_group, rank_group.open_store("wire"))

    def begin(self, sends: Messages, receives: Messages, what: object) -> Callable[[], None]:
        """Begin to send and receive messages. Return a function that waits for them, and raises PeerLost or WaitTimeout.

        Empty messages are skipped on both sides. what: the name of the exchange in errors.
        """
        waiting = [""]
        under_way = list[tuple[str, Any]]()
        with name_lost_rank(self.rank_group, lambda: f"{what}: connections are broken"):
            for one, rank in receives:
                if one.numel():
                    under_way.append((f"a message of rank {rank}", self._backend.recv([one], rank, 0)))
            for one, rank in sends:
                if one.numel():
                    under_way.append((f"rank {rank} to receive", self._backend.send([one], rank, 0)))

        def wait() -> None:
            for waiting[0], one in under_way:
                one.wait()

        def finish() -> None:
            if under_way:
                bounded(self.rank_group, lambda: f"{what}: expected {waiting[0]}; it has not come to that", wait)

        return finish

    def exchange(self, sends: Messages, receives: Messages, what: object) -> None:
        """Send and receive messages, and wait for them. Raises PeerLost or WaitTimeout."""
        self.begin(sends, receives, what)()

    def share(self, mine: torch.Tensor, theirs: Sequence[torch.Tensor], what: object) -> None:
        """Gather the tensors of all ranks. mine: this rank's tensor. theirs: the tensors that are filled, by rank."""
        others = [rank for rank in range(self.rank_group.world_size) if rank != self.rank_group.rank]
        mine = mine.contiguous()
        theirs[self.rank_group.rank].copy_(mine)
        self.exchange([(mine, rank) for rank in others], [(theirs[rank], rank) for rank in others], what)

    def all_to_all(self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor], what: object) -> Callable[[], None]:
        """Send given[rank] to each rank, and receive taken[rank] from it. Return a function that waits, like `begin`.

        All tensors are contiguous.
        """
        rank = self.rank_group.rank
        others = [other for other in range(self.rank_group.world_size) if other != rank]
        taken[rank].copy_(given[rank])
        return self.begin([(given[other], other) for other in others], [(taken[other], other) for other in others], what)

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """A process group for gloo's collectives, on connections of its own. Its first use is a collective operation.

        It has no name in torch, and is closed with this object.
        """
        store = self.rank_group.open_store("collectives")
        return nameless_group(store, self.rank_group.rank, self.rank_group.world_size, _connect(self.rank_group, store))

    def close(self) -> None:
        """Close all connections.

        gloo waits until its collectives have ended, which after a failure is at their bound. A thread waits for that.
        """
        held = [self._backend, self.__dict__.pop("group", None)]
        self._backend = None
        if self.rank_group.broken is not None and held[1] is not None:
            threading.Thread(target=held.clear, name=f"weft-closes-{self.rank_group.rank}", daemon=True).start()
        else:
            held.clear()


def _connect(rank_group: RankGroup, store: Any) -> Any:
    """Return gloo connections between the ranks of a group. Collective."""
    return bounded(
        rank_group,
        lambda: f"rank {rank_group.rank}: expected connections of all ranks; not all have come",
        lambda: connections(store, rank_group.rank, rank_group.world_size, rank_group.timeout_s + _LATER_S),
    )


Name = tuple[int, int, int]
"""The name of a segment: (src, dst, expert)."""


class HostRows:
    """HostRows moves and multiplies the rows of calls with splits whose counts hosts read. To construct it is a collective
    operation.

    Each rank writes its counts into the memory of all others. They have two tables, one for even calls and one for odd calls.

    refused: the error that all ranks report for the counts of the last call, or "" if they fit.
    """

    def __init__(self, problem: RaggedProblem, rank: int, heap: HostHeap) -> None:
        self._problem, self._rank, self._heap = problem, rank, heap
        self._width = problem.experts * problem.world_size + 1
        """The width of a table's row: the counts of a rank's segments, and the number of rows of its a."""
        self._memory: HostAllocation = heap.allocate(8 * 2 * problem.world_size * self._width)
        self._calls = 0
        self._rows: RowsOfCall | None = None
        self.refused = ""

    def _table(self, rank: int) -> torch.Tensor:
        """Return a rank's table of counts for this call. It has one row for each rank."""
        size = self._problem.world_size
        whole = self._memory.view(rank, 0, 2 * size, self._width, torch.int64)
        return whole[self._calls % 2 * size :][:size]

    def share(self, bindings: Bindings, ranks: Sequence[int]) -> None:
        """Write this rank's counts into the tables of these ranks."""
        (splits,), ((a, _),) = bindings.loose["splits"], bindings.tensors["a", self._rank]
        mine = torch.cat([splits.long().flatten(), torch.tensor([a.shape[0]])])
        for rank in ranks:
            self._table(rank)[self._rank].copy_(mine)

    def lay_out(self, bindings: Bindings) -> None:
        """Compute the places of all segments of the call, after every rank has written its counts."""
        found = self._table(self._rank).tolist()
        self._calls += 1
        self._rows = RowsOfCall(self._problem, self._rank, [row[:-1] for row in found], [row[-1] for row in found], bindings)
        self._rows.finish()
        self.refused = self._rows.wrong

    def run(self, part: SegmentCopy | SegmentProduct, bindings: Bindings, matmul: Matmul) -> None:
        """Copy a segment, or multiply it."""
        assert self._rows is not None, "the checker lets no step come before the counts"
        if isinstance(part, SegmentCopy):
            for there, here in zip(self._rows.moved(part.dst), self._rows.moved(part.src), strict=True):
                there.copy_(here)
            return
        (b,), expert = bindings.loose["b"], part.a.expert
        (out,), (rows, *of_rows), scales = self._rows.moved(part.out), self._rows.moved(part.a), None
        if self._problem.scaling is not None:
            scales = FactorScales(of_rows[0], bindings.loose[scales_name("b")][0][expert], self._problem.scaling)
        if self._problem.gated:
            multiply_gated(rows, b[expert], out, matmul, scales)
        else:
            matmul(rows, b[expert], out, accumulate=False, scales=scales)

    def close(self) -> None:
        self._heap.free(self._memory)


class RowsOfCall:
    """RowsOfCall finds the rows of each segment of one call.

    counts: the counts of each rank's segments, in the order in which the rank sends them.
    rows: the number of rows of each rank's a.
    wrong: the error that all ranks report for counts that do not fit, or "" if they fit.
    """

    def __init__(
        self, problem: RaggedProblem, rank: int, counts: Sequence[Sequence[int]], rows: Sequence[int], bindings: Bindings
    ) -> None:
        self._problem, self._rank, self._bindings = problem, rank, bindings
        asked = dict[Name, int]()
        for sender, row in enumerate(counts):
            asked |= dict(zip(problem.sent_order(sender), row, strict=True))
        counted = {name: max(count, 0) for name, count in asked.items()}
        self._places = problem.places(counted, rows)
        self.wrong = _wrong(problem, counts, rows, self._arriving(counted, rows))

    def _arriving(self, counted: dict[Name, int], rows: Sequence[int]) -> list[int]:
        """Return the number of rows sent to each rank, including rows for which it has no room."""
        unbounded = self._problem.places(counted, rows, room=sum(counted.values()))
        return [sum(unbounded[name][2] for name in self._problem.received_order(rank)) for rank in range(len(rows))]

    def moved(self, segment: Segment) -> list[torch.Tensor]:
        """Return the rows of a segment and, for FP8, their scales."""
        sent_at, landed_at, rows = self._places[segment.name]
        first = sent_at if segment.buffer in ("a", "product") else landed_at
        return [whole[first : first + rows] for whole in self._whole(segment.buffer, segment.rank)]

    def _whole(self, buffer: str, rank: int) -> list[torch.Tensor]:
        """Return a whole buffer and, for FP8, its scales."""
        ((matrix, _),) = self._bindings.tensors[buffer, rank]
        return [matrix, *self._bindings.scales.get((buffer, rank), ())]

    def finish(self) -> None:
        """Write the counts of the rows that arrive at this rank, and zeros into the unused rows of its results."""
        rows = [self._places[name][2] for name in self._problem.received_order(self._rank)]
        (counts,) = self._bindings.loose["counts"]
        counts.copy_(torch.tensor(rows, dtype=torch.int32).view_as(counts))
        for buffer in ("out", "received"):
            if (buffer, self._rank) in self._bindings.tensors:
                for whole in self._whole(buffer, self._rank):
                    whole[sum(rows) :].zero_()


def _wrong(problem: RaggedProblem, counts: Sequence[Sequence[int]], rows: Sequence[int], arriving: Sequence[int]) -> str:
    for rank, (mine, held) in enumerate(zip(counts, rows, strict=True)):
        if min(mine) < 0:
            return below_zero(min(mine), problem, f"on rank {rank}")
        if sum(mine) > held:
            return f"splits add up to {sum(mine)} on rank {rank}, but a has {held} rows; {sum(mine) - held} were not sent"
    for rank, arrive in enumerate(arriving):
        if arrive > problem.m:
            return no_room(problem, arrive, f"at rank {rank}")
    return ""


def below_zero(count: int, problem: RaggedProblem, where: str) -> str:
    """Return the error for a negative number of rows, which may stand for a wrong expert index."""
    index = refused_index(count)
    if index is None:
        return f"splits has {count} {where}; it must be numbers of rows, 0 or more"
    experts = problem.experts * problem.world_size
    return f"top_k_index has {index} {where}; of {experts} experts it must be 0 to {experts - 1}, or -1 for none"


def no_room(problem: RaggedProblem, arrived: int, where: str) -> str:
    """Return the error for rows for which a rank has no room."""
    room = f"{problem.limit} leaves room for {problem.m} rows" if problem.limit else f"max_rows is {problem.m}"
    return f"{room}, but {arrived} rows arrived {where}; {arrived - problem.m} of them were dropped"
