"""CudaWire exchanges messages between GPUs of different nodes, with NCCL's sends and receives on a communicator of weft's own.

A separate communicator has these properties:

- Its kernels take at most `sms_for(rank_group)` SMs. Kernels of the same schedule leave these free, so that a slice is sent
  while the rest is computed.
- Its kernels are launched without clusters. The free SMs are spread over the GPU, so a cluster of several blocks would find
  room only after the other kernel has ended.
- weft can abort it, and so end a message that never comes, without aborting the caller's process group.

It is created with a store of its own and outside of torch's list of groups. torch names a group that only some ranks create by
its ranks and by the number of groups of a rank, so ranks could disagree on its name, or on that of the caller's next group.

This module bounds waits of libraries for other ranks, and describes what a call waits for.

gloo's collectives and messages on CPUs have no bound, or a different one. `bounded` runs such a wait on a separate thread while
the caller watches its peers. A lost rank ends the caller's wait at once, and at weft's bound it raises WaitTimeout. The thread
itself ends when its connection closes, or at gloo's bound. `await_collective` needs no thread, because a wait for a collective
can be given up and begun again. A wait in NCCL ends only when its communicator is aborted, which also needs a separate thread
(`Abort`).

On a GPU, the progress of each lane and the flags of its current steps show what a call waits for (`describe_waits`,
`describe_unfinished`).

An NcclCollective runs one step of a schedule as a collective of NCCL on plain buffers.

NCCL has kernels of lower latency for buffers that all ranks have registered with its communicator ("symmetric windows"). weft
does not use them, because they do not check whether their communicator has been aborted (2.28.9). If a peer does not come, they
never end. When they are faster than plain ones, so is `sequential_stores`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weft.comm.rank_group import RankGroup
from weft.compat.c10d import FlatCollectives, exchange_messages, has_ended, nccl_connections
from weft.core.errors import LOGGER, PeerLost, WeftError
from weft.core.problem import Problem
from weft.core.schedule import Collective, Lane, SendReceive, Wait, places_of, waits
from weft.runtime.bindings import Where
from weft.runtime.launches import Site

_SMS_OF_LINKS, _SMS_OF_ADAPTERS = 32, 16
"""The SMs for messages. Between nodes of one host, 32 blocks of NCCL move 64 MiB both ways at 260 GB/s (2 x H200), and 16 at
155. We assume, without a measurement, that 16 blocks keep an adapter of 50 GB/s busy."""

Messages = Sequence[tuple[torch.Tensor, int]]
"""Contiguous tensors, each with the rank that sends or receives it."""


def sms_for(rank_group: RankGroup) -> int:
    """Return the number of SMs for messages between the nodes of a group."""
    return _SMS_OF_LINKS if rank_group.one_host else _SMS_OF_ADAPTERS


class CudaWire:
    """A CudaWire exchanges messages between the ranks of a group. To construct it is a collective operation."""

    def __init__(self, rank_group: RankGroup, device: torch.device) -> None:
        rank_group.agree_on_call("messages between nodes: nccl")
        self._backend: Any = nccl_connections(
            rank_group.open_store("wire"),
            rank_group.rank,
            dist.get_process_group_ranks(rank_group.group),
            name=f"weft-{rank_group.topic}",
            max_ctas=sms_for(rank_group),
            device=device,
        )
        self._abort: Abort | None = None

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Enqueue sends and receives on torch's current stream, as one NCCL group."""
        exchange_messages(self._backend, sends, receives)

    def abort(self) -> None:
        """End all waits for messages. It is called at the end of a group, because no messages can be exchanged after it."""
        self._abort = self._abort or Abort(self._backend.abort, "wire")

    def close(self) -> None:
        if self._abort is None or self._abort.ended():
            with suppress(RuntimeError):  # it was aborted
                self._backend.shutdown()
        self._backend = None


T = TypeVar("T")
_REPORT_S = 2.0
"""After a connection breaks, the time to wait for the report that says which rank is lost."""
_LOOK_S = 5e-3
"""How long a wait for a collective lasts before the peers are looked at."""
_GRACE_S = 0.5
"""The time after the bound at which this rank gives up, so that the rank that it waits for can report first."""


def bounded(rank_group: RankGroup, explain: Callable[[], str], work: Callable[[], T]) -> T:
    """Run `work`, which may block, and return its result.

    Raises PeerLost with the rank that was lost, or WaitTimeout with `explain()`.
    """
    with name_lost_rank(rank_group, explain):
        return rank_group.run_bounded(work, lambda: explain() + describe_suspended(rank_group), grace_s=_GRACE_S)


def await_collective(rank_group: RankGroup, explain: Callable[[], str], work: dist.Work) -> None:
    """Wait for a collective on CPUs. Raises as `bounded` does, and has no thread."""
    with name_lost_rank(rank_group, explain):
        rank_group.wait_until(
            lambda: has_ended(work, _LOOK_S), lambda: explain() + describe_suspended(rank_group), grace_s=_GRACE_S
        )


@contextmanager
def name_lost_rank(rank_group: RankGroup, explain: Callable[[], str]) -> Iterator[None]:
    """Turn a library's error about a broken connection into a PeerLost. It names the lost rank if that is reported soon."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WeftError):
            raise
        deadline = time.monotonic() + _REPORT_S
        while time.monotonic() < deadline:
            rank_group.check_peers()
            time.sleep(0.02)
        raise rank_group.fail(PeerLost(f"{explain()}{describe_suspended(rank_group)}: {error}")) from error


def describe_suspended(rank_group: RankGroup) -> str:
    """Return a text that names the ranks of this node that SIGSTOP or a debugger has stopped, or "" if there are none."""
    stopped = []
    for peer in rank_group.ranks_on_node:
        with suppress(OSError):
            if Path(f"/proc/{rank_group.pids[peer]}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t"):
                stopped.append(f"rank {peer} (process {rank_group.pids[peer]}) is suspended")
    return "".join(f"; {one}" for one in stopped)


class Abort:
    """An Abort aborts one communicator on a separate thread.

    The communicator's kernels end at once, but NCCL returns only when no CUDA graph holds collectives of the communicator.
    """

    _WAITS_S = 5.0

    def __init__(self, abort: Callable[[], object], name: str) -> None:
        self._abort, self._ended = abort, False
        self._thread = threading.Thread(target=self._run, name=f"weft-abort-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._abort()
            self._ended = True
        except Exception as error:  # torch and NCCL raise several types
            LOGGER.error("the process group cannot be aborted (%s): end this process", str(error).splitlines()[0])

    def ended(self) -> bool:
        """Wait a few seconds for NCCL. Return whether it has returned."""
        self._thread.join(self._WAITS_S)
        return self._ended


def describe_waits(site: Site, seen: Sequence[int], reached: Mapping[str, int]) -> list[str]:
    """Return a line for each lane that waits for a flag.

    seen: the words of this rank.
    reached: the position that each lane has reached.
    """
    lines = []
    for lane in site.schedule.ranks[site.rank]:
        for where, wait in may_wait_for(site.rank, lane, reached[lane.name]):
            value, need = seen[site.flags.slot[wait.flag, lane.name, where.position]], site.signal_value(wait.flag)
            if value < need:
                lines.append(f"{where}: {wait.flag}: expected {need}, seen {value}; {site.raiser(wait.flag)}")
                break
    return lines


def describe_unfinished(site: Site, reached: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each collective of the schedule, and for each lane whose last reached step is messages.

    No flag shows whether these have ended.
    """
    rank, schedule = site.rank, site.schedule
    others = ", ".join(f"rank {peer}" for peer in range(schedule.problem.world_size) if peer != rank)
    for lane, position, step in places_of(Collective, schedule.ranks[rank]):
        where = Where(rank, lane.name, position, step)
        yield f"{where}: no flag is missing; perhaps not all ranks have begun it ({others})"
    for lane in schedule.ranks[rank]:
        position = reached[lane.name]
        last = lane.steps[position] if position >= 0 else None
        if isinstance(last, SendReceive):
            where = Where(rank, lane.name, position, last)
            yield f"{where}: no flag is missing; perhaps not all of ranks {sorted(last.peers)} have begun their ends"


def may_wait_for(rank: int, lane: Lane, position: int) -> Iterator[tuple[Where, Wait]]:
    """Yield the waits of a lane that has reached `position`. The waits of consecutive Wait steps are one wait."""
    for at in range(position, len(lane.steps) if position >= 0 else position):
        step = lane.steps[at]
        yield from ((Where(rank, lane.name, at, step), wait) for wait in waits(step))
        if not isinstance(step, Wait):
            return


class NcclCollective:
    """An NcclCollective is one collective step of one program."""

    def __init__(self, group: dist.ProcessGroup, step: Collective, problem: Problem) -> None:
        self._group, self._step, self._problem = group, step, problem
        self._shards = shards = problem.shards
        self._longest = shards[0][1] - shards[0][0]
        self._even = all(high - low == self._longest for low, high in shards)
        self._flat = FlatCollectives(group, dist.ReduceOp.SUM if step.divide_by == 1 else dist.ReduceOp.AVG)

    @cached_property
    def whole(self) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
        """The function (dst, src) that enqueues the collective on contiguous matrices of equal parts, without any check. None
        for exchanges and unequal parts."""
        if self._step.op == "all_reduce":
            return lambda dst, src: self._plain(src, dst)
        return {"all_gather": self._flat.all_gather, "reduce_scatter": self._flat.reduce_scatter}.get(
            self._step.op if self._even else ""
        )

    def run(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Enqueue the collective on torch's current stream."""
        if self._step.op == "all_to_all":
            self._exchange(src, dst)
        elif self._step.op == "all_to_all_columns":
            self._exchange_columns(src, dst)
        else:
            self._plain(src, dst)

    def rehearse(self, device: torch.device) -> None:
        """Run the same collective with one element for each rank. Collective.

        At first use NCCL makes a communicator, and connections for each kind of collective. This takes a second or more if many
        processes do it.
        """
        one, many = torch.zeros(1, device=device), torch.zeros(len(self._shards), device=device)
        if self._step.op == "all_reduce":
            self._flat.all_reduce(one)
        elif self._step.op == "all_gather":
            self._flat.all_gather(many, one)
        elif self._step.op == "reduce_scatter":
            self._flat.reduce_scatter(one, many)
        else:
            dist.all_to_all_single(torch.empty_like(many), many, group=self._group)

    def _plain(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Run a collective of equal parts. Unequal shards are padded to the longest one for the exchange."""
        if self._step.op == "all_reduce":
            if src.data_ptr() != dst.data_ptr():
                dst.copy_(src)
            self._flat.all_reduce(dst)
        elif self._step.op == "all_gather":
            if self._even:
                self._flat.all_gather(dst, src.contiguous())
            else:
                self._gather_uneven(src, dst)
        elif self._even:
            self._flat.reduce_scatter(dst, src.contiguous())
        else:
            self._scatter_uneven(src, dst)

    def _exchange(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        if self._even:
            # Lists of sizes are omitted, because torch would check them and NCCL would split the exchange.
            dist.all_to_all_single(dst, src.contiguous(), group=self._group)
            return
        low, high = self._shards[self._group.rank()]
        sent, received = [last - first for first, last in self._shards], [high - low] * len(self._shards)
        dist.all_to_all_single(dst, src.contiguous(), received, sent, group=self._group)

    def _exchange_columns(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Run an all-to-all in which each rank sends a block of columns. Concatenate the received blocks."""
        columns = [right - left for left, right in self._problem.blocks]
        gives = [(high - low) * src.shape[1] for low, high in self._shards]
        takes = [dst.shape[0] * width for width in columns]
        landed = src.new_empty(sum(takes))
        if self._even and len(set(columns)) == 1:
            dist.all_to_all_single(landed, src.contiguous().view(-1), group=self._group)
        else:
            dist.all_to_all_single(landed, src.contiguous().view(-1), takes, gives, group=self._group)
        blocks = zip(torch.split(landed, takes), columns, strict=True)
        torch.cat([block.view(dst.shape[0], width) for block, width in blocks], 1, out=dst)

    def _gather_uneven(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        longest = self._longest
        padded = src.new_zeros(longest, src.shape[1])
        padded[: src.shape[0]].copy_(src)
        gathered = src.new_empty(len(self._shards) * longest, src.shape[1])
        self._flat.all_gather(gathered, padded)
        for rank, (low, high) in enumerate(self._shards):
            dst[low:high].copy_(gathered[rank * longest : rank * longest + high - low])

    def _scatter_uneven(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        longest = self._longest
        spread = src.new_zeros(len(self._shards) * longest, src.shape[1])
        for rank, (low, high) in enumerate(self._shards):
            spread[rank * longest : rank * longest + high - low].copy_(src[low:high])
        reduced = src.new_empty(longest, src.shape[1])
        self._flat.reduce_scatter(reduced, spread)
        dst.copy_(reduced[: dst.shape[0]])
