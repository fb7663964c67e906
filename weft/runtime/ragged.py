"""Calls whose rows go all to all in numbers that only devices know: MoE dispatch and combine.

    RaggedCall      one call: a, b by expert, splits on the device, and the most rows that may arrive
    RaggedProgram   its kernels (weft.kernels.exchange), on GPUs, and interpreted on CPUs for float16
    on_host         the same by torch, for CPUs without the interpreter, whose hosts may read the splits

No host waits for another in a call on GPUs, or for its device: what goes wrong there (rows that did not fit, a peer that
does not come) is noted on the device, which writes it to the host's memory, too. The next call that finds it there raises
it, and `weft.synchronize`, which waits for the device. On CPUs all hosts know all counts before a row moves, and all raise
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.comm.rank_group import RankGroup
from weft.compat.streams import Driver
from weft.core.errors import WaitTimeout
from weft.core.version import __version__
from weft.kernels.exchange import MOST_SEGMENTS, RaggedExchange, Shape, symmetric_shapes
from weft.kernels.segments import CUT, IN_A, LATE, NEGATIVE
from weft.runtime.host_wire import HostWire
from weft.runtime.replay import Branches
from weft.triton.peers import Peers

_ENDED_S = 600.0
"""Bound of the wait for all calls so far. Each of them has a bound of its own."""


@dataclass(frozen=True, kw_only=True)
class RaggedCall:
    """a: [rows, K]. b: [experts, K, N]. splits: by (expert, dst_rank) for a combine, (dst_rank, expert) for a dispatch. gated:
    a dispatch gives silu(left half) * right half of its product, N / 2 columns."""

    dispatch: bool
    a: torch.Tensor
    b: torch.Tensor
    splits: torch.Tensor
    max_rows: int
    return_received: bool = False
    gated: bool = False

    @property
    def columns(self) -> int:
        """Of the result."""
        return int(self.b.shape[2]) // (2 if self.gated else 1)

    @property
    def key(self) -> tuple[object, ...]:
        """What calls alike have in common: the same on every rank, so that all bind a program in the same call."""
        return (self.dispatch, self.gated, self.max_rows, self.b.shape, self.a.dtype, self.a.device)

    def describe(self) -> str:
        """What every rank must have in common, a line each."""
        experts, k, n = self.b.shape
        lines = (
            f"op: {'all_to_all_matmul' if self.dispatch else 'matmul_all_to_all'} with splits{', gated' * self.gated}",
            f"max_rows: {self.max_rows}",
            f"experts: {experts}",
            f"K: {k}",
            f"N: {n}",
            f"dtype: {self.a.dtype}",
            f"device: {self.a.device.type}",
            f"weft: {__version__}",
        )
        return "\n".join(lines)

    def received(self, world_size: int) -> torch.Tensor:
        """Room for the counts of what arrives, in the order in which rows land."""
        experts = self.b.shape[0]
        extents = (experts, world_size) if self.dispatch else (world_size, experts)
        return torch.zeros(extents, dtype=torch.int32, device=self.a.device)


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """out: [max_rows, N]. counts: as `RaggedCall.received`. rows: [max_rows, K], if asked for. Rows past counts are zero."""

    out: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor | None = None


class RaggedProgram:
    """The kernels of one kind of call. Collective: every rank constructs it for the same. a_rows: the most that an a of a rank
    has in its first call. captured: whether a graph may run it again."""

    captured = False

    def __init__(self, peers: Peers, call: RaggedCall, *, a_rows: int) -> None:
        self.peers = peers
        self.shape = _shape(call, peers.rank, peers.world_size, a_rows)
        self._symmetric = {
            name: peers.tensor(extents, dtype, name=name) for name, (extents, dtype) in symmetric_shapes(self.shape).items()
        }
        self.exchange = RaggedExchange(self.shape, self._symmetric, sms=peers.resident_blocks, tries=peers.tries)
        self._last: torch.cuda.Stream | None = None
        self._branches: Branches | None = None

    @property
    def nbytes(self) -> int:
        """Of its symmetric memory; the same on every rank."""
        return sum(tensor.local.nbytes for tensor in self._symmetric.values())

    def close(self) -> None:
        """Free its memory. Collective; waits for every rank's device. Raises what its last calls have noted."""
        self.peers.drop(self._symmetric.values())
        self.let_go()
        self.raise_noted()

    def let_go(self) -> None:
        """Of what it has of the driver's. Not collective."""
        if self._branches is not None:
            self._branches.close()
            self._branches = None

    def run(self, call: RaggedCall) -> Arrived:
        """One call, on torch's current stream, after the last one: calls of one program share its memory. Whatever it raises,
        peers may wait for this rank."""
        device = call.a.device
        if device.type != "cuda":
            return self._enqueue(call)
        current = torch.cuda.current_stream(device)
        if torch.cuda.is_current_stream_capturing():
            self._branches = self._branches or Branches(Driver())
            return self._branches.enqueue(current.cuda_stream, lambda: self._enqueue(call))
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current
        return self._enqueue(call)

    def _enqueue(self, call: RaggedCall) -> Arrived:
        a, b = _aligned(call.a), _unit_stride(call.b)
        counts = call.received(self.peers.world_size)
        out = a.new_empty(call.max_rows, self.shape.n)
        rows = a.new_empty(call.max_rows, self.shape.k) if call.return_received else None
        self.exchange.start(call.splits.contiguous(), counts, a_rows=call.a.shape[0])
        if not call.dispatch:
            self.exchange.combine(a, b, out)
            return Arrived(out=out, counts=counts)
        self.exchange.dispatch(a, b, out, keep_own=call.return_received)
        if rows is not None:
            self.exchange.collect(rows)
        return Arrived(out=out, counts=counts, rows=rows)

    def check_room(self, call: RaggedCall) -> None:
        """Products of a combine wait in memory that all ranks share, as large as their first call asked for: ValueError if a
        has more rows than that."""
        rows, room = call.a.shape[0], self.shape.a_rows
        if rows > room and not call.dispatch:
            raise ValueError(
                f"a has {rows} rows; the first call with max_rows={self.shape.max_rows} left room for {room}: give a as many "
                "rows in that call, on any rank, as it will have at most"
            )

    def raise_noted(self) -> None:
        """Raise what earlier calls have noted: splits that are wrong (ValueError), a peer that did not come (WaitTimeout)."""
        self._raise(self.exchange.host_notes.tolist())

    def raise_all_noted(self, rank_group: RankGroup) -> None:
        """The same, once the device has ended the calls so far."""
        device = self.shape.device
        if device.type != "cuda":
            return self._raise(self.exchange.notes.tolist())
        stream = self._last or torch.cuda.current_stream(device)
        ended = stream.record_event()
        rank_group.until(ended.query, lambda: f"rank {self.peers.rank}: calls with splits are under way", _ENDED_S)
        with torch.cuda.stream(stream):
            return self._raise(self.exchange.notes.tolist())

    def _raise(self, notes: list[int]) -> None:
        if notes[CUT]:
            self.exchange.host_notes.zero_()
            self.exchange.notes.zero_()
            raise ValueError(_cut(*notes[CUT : CUT + 3]))
        if notes[LATE]:
            raise WaitTimeout(f"rank {self.peers.rank}: rows or counts of a peer: expected {notes[1]}, seen {notes[2]}")


def _cut(kind: int, rows: int, capacity: int) -> str:
    if kind == NEGATIVE:
        return f"splits of an earlier call has {rows}; it must be numbers of rows, 0 or more"
    if kind == IN_A:
        return f"splits of an earlier call add up to {rows}, but a had {capacity} rows; {rows - capacity} were not sent"
    return f"max_rows is {capacity}, but {rows} rows arrived in an earlier call; {rows - capacity} of them were dropped"


def _shape(call: RaggedCall, rank: int, world_size: int, a_rows: int) -> Shape:
    experts, k, _ = call.b.shape
    return Shape(
        rank=rank,
        world_size=world_size,
        experts=experts,
        max_rows=call.max_rows,
        a_rows=max(a_rows, call.max_rows),
        n=call.columns,
        k=k,
        dtype=call.a.dtype,
        dispatch=call.dispatch,
        gated=call.gated,
        device=call.a.device,
    )


def check_kernels(call: RaggedCall, world_size: int) -> None:
    """What the kernels need beside what every call does; the same on every rank. Raises ValueError."""
    experts, k, n = call.b.shape
    unit = 16 if call.gated else 8
    if call.a.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"a is {call.a.dtype}; with splits on GPUs, use bfloat16 or float16")
    if not k:
        raise ValueError("K is 0; with splits on GPUs it must be a multiple of 8, and at least 8")
    for name, extent, of in (("K", k, 8), ("N", n, unit)):
        if extent % of:
            raise ValueError(f"{name} is {extent}; with splits on GPUs it must be a multiple of {of}")
    if experts * world_size > MOST_SEGMENTS:
        raise ValueError(f"b has {experts} experts on each of {world_size} ranks; with splits, at most {MOST_SEGMENTS} in all")


def _aligned(a: torch.Tensor) -> torch.Tensor:
    """Contiguous, at a multiple of 16 bytes, and at least one row, which no segment has."""
    if not a.shape[0]:
        return a.new_zeros(1, a.shape[1])
    a = (a[0][None] if a.shape[0] == 1 else a).contiguous()
    return a if a.data_ptr() % 16 == 0 else a.clone()


def _unit_stride(b: torch.Tensor) -> torch.Tensor:
    """With one of the last two dimensions contiguous, and all else at multiples of 16 bytes."""
    if b.shape[0] == 1:
        b = b[0][None]  # how far one expert is from the next may be anything then, which contiguous() leaves
    apart, *strides = b.stride()
    fits = 1 in strides and all(s == 1 or (s > 0 and s % 8 == 0) for s in strides) and apart > 0 and apart % 8 == 0
    return b if fits and b.data_ptr() % 16 == 0 else b.clone(memory_format=torch.contiguous_format)


def on_host(wire: HostWire, call: RaggedCall) -> Arrived:
    """The same by torch and messages. Raises ValueError, before any row moves and the same on every rank, where rows do not
    fit."""
    with wire.rank_group.failing():  # the others wait for this rank's counts
        everyone = _shared(wire, call)
    _check_fits(everyone, call.dispatch, call.max_rows)
    with wire.rank_group.failing():
        result, landed, counts = _moved_on_host(wire, call, [sizes for sizes, _ in everyone])
    received = _filled(landed, call.max_rows) if call.return_received else None
    return Arrived(out=_filled(result, call.max_rows), counts=counts.to(torch.int32).contiguous(), rows=received)


def _shared(wire: HostWire, call: RaggedCall) -> list[tuple[torch.Tensor, int]]:
    """By rank, its splits, and how many rows its a has."""
    mine = torch.cat([call.splits.long().flatten(), torch.tensor([call.a.shape[0]])])
    everyone = [torch.empty_like(mine) for _ in range(wire.rank_group.world_size)]
    wire.share(mine, everyone, f"rank {wire.rank_group.rank}, counts of rows")
    return [(one[:-1].view(call.splits.shape), int(one[-1])) for one in everyone]


def _check_fits(everyone: Sequence[tuple[torch.Tensor, int]], dispatch: bool, max_rows: int) -> None:
    """Raise ValueError for the first rank whose splits are wrong, or at which more rows arrive than it has room for."""
    for rank, (sizes, rows) in enumerate(everyone):
        counts = sizes.flatten().tolist()  # their sum may be past what 64 bits hold
        if min(counts) < 0:
            raise ValueError(f"splits has {min(counts)} on rank {rank}; it must be numbers of rows, 0 or more")
        if sum(counts) > rows:
            raise ValueError(f"splits add up to {sum(counts)} on rank {rank}, but a has {rows} rows")
    for rank in range(len(everyone)):
        arrive = sum(int((sizes if dispatch else sizes.t())[rank].sum()) for sizes, _ in everyone)
        if arrive > max_rows:
            more = f"{arrive - max_rows} too many; none was moved"
            raise ValueError(f"max_rows is {max_rows}, but {arrive} rows arrived at rank {rank}: {more}")


def _moved_on_host(
    wire: HostWire, call: RaggedCall, everyone: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The products here, the rows that a dispatch has brought here, and the counts of what came. everyone: splits, by rank."""
    sizes = everyone[wire.rank_group.rank]
    sent = sizes if call.dispatch else sizes.t()  # by dst_rank, expert
    arriving = torch.stack(
        [(each if call.dispatch else each.t())[wire.rank_group.rank] for each in everyone]
    )  # by src_rank, expert
    pieces = call.a[: int(sizes.sum())]
    if not call.dispatch:
        product = _by_other(_grouped(pieces, call.b, sizes.sum(1).tolist()), sizes)
        return _exchanged(wire, product, sent, arriving), pieces[:0], arriving
    landed = _by_other(_exchanged(wire, pieces, sent, arriving), arriving)
    result = _grouped(landed, call.b, arriving.sum(0).tolist())
    if call.gated:
        gate, up = result.float().chunk(2, -1)
        result = (torch.nn.functional.silu(gate) * up).to(result.dtype)
    return result, landed, arriving.t()


def _exchanged(wire: HostWire, rows: torch.Tensor, sent: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
    """All-to-all of rows, by the sums of counts."""
    received = rows.new_empty(int(arriving.sum()), rows.shape[1])
    given = torch.split(rows.contiguous(), sent.sum(1).tolist())
    wire.all_to_all(given, torch.split(received, arriving.sum(1).tolist()), f"rank {wire.rank_group.rank}, rows")()
    return received


def _by_other(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows that lie by (first, second) of counts, by (second, first)."""
    pieces = torch.split(rows, counts.flatten().tolist())
    first, second = counts.shape
    return torch.cat([pieces[i * second + j] for j in range(second) for i in range(first)])


def _grouped(rows: torch.Tensor, b: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Into memory of its own, which autocast leaves in its dtype."""
    out = rows.new_empty(rows.shape[0], b.shape[2])
    for part, one, place in zip(torch.split(rows, counts), b, torch.split(out, counts), strict=True):
        torch.mm(part, one, out=place)
    return out


def _filled(rows: torch.Tensor, height: int) -> torch.Tensor:
    filled = rows.new_zeros(height, rows.shape[1])
    filled[: rows.shape[0]] = rows
    return filled
