"""The kernel of copies, interpreted on the CPU: alone, against torch's own copy, and from rank to rank."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pools import interpreted_ranks

from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import HostAllocation, heap_of
from weft.core.schedule import Flag, Region
from weft.runtime.bindings import Bindings
from weft.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")


alone, ranks = interpreted_ranks(1), interpreted_ranks([2], slow=[3])


@dataclass(frozen=True)
class Shape:
    """A copy: its extent, and the additional stride and offset of the rows on either side, in elements."""

    rows: int
    cols: int
    src_gap: int = 0
    dst_gap: int = 0
    src_at: int = 0
    dst_at: int = 0
    flagged: bool = True


def _bits(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _random(rows: int, cols: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit patterns, numbers or not, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(seed)
    size = (rows * cols * dtype.itemsize,)
    return torch.randint(-128, 128, size, generator=generator, dtype=torch.int8).view(dtype).view(rows, cols)


class _Local:
    """Copies within one process: sources, destinations in a sea of other bytes, and a word for each flag."""

    def __init__(self, shapes: list[Shape], dtype: torch.dtype) -> None:
        self.shapes, self.dtype = shapes, dtype
        self.words = torch.zeros(max(1, len(shapes)), dtype=torch.int64)
        self.bindings = Bindings()
        self.copies: list[tuple[Region, Region, Flag | None]] = []
        for number, shape in enumerate(shapes):
            src = self._bound("src", number, shape, shape.src_gap, shape.src_at)
            dst = self._bound("dst", number, shape, shape.dst_gap, shape.dst_at)
            self.copies.append((src, dst, Flag("arrived", 0, number) if shape.flagged else None))

    def _bound(self, name: str, number: int, shape: Shape, gap: int, at: int) -> Region:
        sea = torch.empty(shape.rows, at + shape.cols + gap, dtype=self.dtype)
        if not gap and at:  # rows without gaps that begin off the allocation's own alignment
            sea = torch.empty(at + shape.rows * shape.cols, dtype=self.dtype)[at:].view(shape.rows, shape.cols)
            at = 0
        self.bindings.bind(f"{name}{number}", 0, sea)
        return Region(f"{name}{number}", 0, (0, shape.rows), (at, at + shape.cols))

    def plan(self):  # type: ignore[no-untyped-def]
        from weft.kernels.push import push_tables

        return push_tables(
            self.copies,
            device=CPU,
            itemsize=self.dtype.itemsize,
            address=lambda region: self.bindings.view(region).data_ptr(),
            stride=lambda region: self.bindings.view(region).stride(0) * self.dtype.itemsize,
            count_address=lambda flag: self.words.data_ptr() + 8 * flag.index,
        )

    def fill(self, seed: int) -> list[torch.Tensor]:
        """New bytes everywhere; what every destination's whole sea must hold after the copies."""
        for number, ((sea, _),) in enumerate(self.bindings.tensors.values()):
            sea.copy_(_random(*sea.shape, self.dtype, 1000 * seed + number))
        expected = Bindings({key: [(sea.clone(), cols)] for key, ((sea, cols),) in self.bindings.tensors.items()})
        for src, dst, _ in self.copies:
            expected.view(dst).copy_(self.bindings.view(src))
        return [expected.tensors[dst.buffer, 0][0][0] for _, dst, _ in self.copies]

    def holds(self, expected: list[torch.Tensor]) -> bool:
        seas = [self.bindings.tensors[dst.buffer, 0][0][0] for _, dst, _ in self.copies]
        bits = _bits(self.dtype)
        return all(torch.equal(sea.view(bits), want.view(bits)) for sea, want in zip(seas, expected, strict=True))


def _copies(shapes: list[Shape], dtype: torch.dtype, sms: int) -> int:
    """Three calls on new data, the first without counting: each byte where torch's copy puts it. The unit, in bytes."""
    from weft.kernels.push import push, tiles_of_copy

    local = _Local(shapes, dtype)
    plan = local.plan()
    tiles = [tiles_of_copy(src, itemsize=dtype.itemsize, device=CPU) for src, _, _ in local.copies]
    assert plan.count == sum(tiles)
    for call in range(3):
        expected = local.fill(call)
        push(plan, sms=sms, silent=call == 0)
        assert local.holds(expected), (shapes, dtype, sms, call)
        counts = [call * count * shape.flagged for count, shape in zip(tiles, shapes, strict=True)]
        assert local.words.tolist() == (counts or [0]), (shapes, dtype, sms, call)
    return int(plan.unit)


@pytest.mark.parametrize(
    ("shapes", "dtype", "unit"),
    [
        ([Shape(64, 64)], torch.bfloat16, 16),
        ([Shape(253, 77)], torch.float16, 2),
        ([Shape(8, 77)], torch.float16, 16),
        ([Shape(8, 77, src_gap=3)], torch.float16, 2),
        ([Shape(40, 48, src_gap=16)], torch.bfloat16, 16),
        ([Shape(40, 48, dst_gap=4)], torch.bfloat16, 8),
        ([Shape(40, 48, src_gap=8, dst_gap=24, src_at=8)], torch.bfloat16, 16),
        ([Shape(1, 4096, src_gap=1)], torch.bfloat16, 16),
        ([Shape(16, 64, src_at=2)], torch.bfloat16, 4),
        ([Shape(5, 7, src_gap=1)], torch.int8, 1),
        ([Shape(64, 64), Shape(3, 8), Shape(64, 32, flagged=False), Shape(64, 64)], torch.float32, 16),
        ([Shape(64, 64), Shape(9, 40, dst_gap=24), Shape(33, 5)], torch.float16, 2),
        ([Shape(8, 77), Shape(8, 64, src_gap=8), Shape(64, 64)], torch.float16, 16),
        ([Shape(0, 64), Shape(64, 64), Shape(16, 0)], torch.bfloat16, 16),
        ([Shape(0, 64)], torch.bfloat16, 16),
        ([], torch.bfloat16, 16),
    ],
)
def test_copies_as_torch_does(alone: Ranks, shapes: list[Shape], dtype: torch.dtype, unit: int) -> None:
    for sms in (1, 3):
        assert alone.run(_copies, shapes, dtype, sms) == [unit]


_small = st.integers(0, 5)
_shapes = st.builds(Shape, st.integers(0, 40), st.integers(0, 90), _small, _small, _small, _small, st.booleans())


@settings(max_examples=10, deadline=None)
@given(
    st.lists(_shapes, max_size=4), st.sampled_from([torch.int8, torch.float16, torch.float32, torch.int64]), st.integers(1, 7)
)
def test_copies_of_any_shape(alone: Ranks, shapes: list[Shape], dtype: torch.dtype, sms: int) -> None:
    alone.run(_copies, shapes, dtype, sms)


def _flags_as_copies_see_them() -> list[list[int]]:
    """Three copies of the flags' own words, which are in the last of two tiles; what each copied, and the words at the end."""
    from weft.kernels.push import push, push_tables

    words, seen = torch.zeros(1, 256, dtype=torch.int64), torch.zeros(3, 256, dtype=torch.int64)
    bindings = Bindings()
    bindings.bind("words", 0, words)
    bindings.bind("seen", 0, seen)
    src = Region("words", 0, (0, 1), (0, 256))
    plan = push_tables(
        [(src, Region("seen", 0, (n, n + 1), (0, 256)), Flag("arrived", 0, n)) for n in range(3)],
        device=CPU,
        itemsize=8,
        address=lambda region: bindings.view(region).data_ptr(),
        stride=lambda region: 8 * 256,
        count_address=lambda flag: words[:, 253 + flag.index].data_ptr(),
    )
    push(plan, sms=1)
    return torch.cat([seen, words])[:, 253:].tolist()


def test_a_copy_is_counted_after_its_stores_and_before_the_next(alone: Ranks) -> None:
    """The order is exact with one block: no copy sees its own count, each sees all counts before it."""
    assert alone.run(_flags_as_copies_see_them) == [[[0, 0, 0], [2, 0, 0], [2, 2, 0], [2, 2, 2]]]


def _refused() -> list[str]:
    from weft.kernels.push import push_tables

    region, flag = Region("a", 0, (0, 4), (0, 8)), Flag("arrived", 0)
    messages = []
    for copies in ([(region, region, flag)] * 2, [(region, Region("a", 0, (0, 4), (0, 9)), flag)]):
        try:
            push_tables(copies, device=CPU, itemsize=2, address=lambda _: 64, stride=lambda _: 16, count_address=lambda _: 8)
        except AssertionError as error:
            messages.append(str(error))
    return messages


def test_what_no_run_can_say_is_refused(alone: Ranks) -> None:
    ((shared, shapes),) = alone.run(_refused)
    assert "share a flag" in shared
    assert "shapes differ" in shapes


CHUNKS = 3
_WORDS_BYTES = 4096


class _Exchange:
    """Each rank's matrix in chunks of rows to all peers. A rank's memory: words, then a place for each sender's matrix."""

    def __init__(self, rows: int, cols: int, gap: int) -> None:
        self.rank_group = RankGroup(dist.group.WORLD)  # type: ignore[arg-type]
        self.rank, self.size = self.rank_group.rank, self.rank_group.world_size
        self.rows, self.cols, self.lead = rows, cols, cols + gap
        place = rows * self.lead * 2
        piece = heap_of(self.rank_group, CPU).allocate(_WORDS_BYTES + self.size * place)
        assert isinstance(piece, HostAllocation)
        self.words, self.addresses = piece.words(self.rank, self.size * CHUNKS), piece.addresses
        self.src = torch.zeros(rows, cols, dtype=torch.float16)
        self.bindings = Bindings()
        self.bindings.bind("a", self.rank, self.src)
        for rank in range(self.size):
            for sender in range(self.size):
                landing = piece.view(rank, _WORDS_BYTES + sender * place, rows, self.lead, torch.float16)
                self.bindings.bind(f"from{sender}", rank, landing)
        bounds = [n * rows // CHUNKS for n in range(CHUNKS + 1)]
        self.chunks = list(pairwise(bounds))

    def landing(self, sender: int, rank: int, index: int) -> Region:
        return Region(f"from{sender}", rank, self.chunks[index], (0, self.cols))

    def plan(self):  # type: ignore[no-untyped-def]
        from weft.kernels.push import push_tables

        copies = []
        for index, rows in enumerate(self.chunks):
            for peer in ((self.rank + hop) % self.size for hop in range(1, self.size)):
                flag = Flag("arrived", peer, self.rank * CHUNKS + index)
                copies.append((Region("a", self.rank, rows, (0, self.cols)), self.landing(self.rank, peer, index), flag))
        return push_tables(
            copies,
            device=CPU,
            itemsize=2,
            address=lambda region: self.bindings.view(region).data_ptr(),
            stride=lambda region: 2 * self.bindings.view(region).stride(0),
            count_address=lambda flag: self.addresses[flag.rank] + 8 * flag.index,
        )

    def check_arrivals(self, call: int) -> None:
        """Wait for the count of each chunk, then read it."""
        from weft.kernels.push import tiles_of_copy

        for index, rows in enumerate(self.chunks):
            for sender in (peer for peer in range(self.size) if peer != self.rank):
                region, slot = self.landing(sender, self.rank, index), sender * CHUNKS + index
                need = (call + 1) * tiles_of_copy(region, itemsize=2, device=CPU)
                self.rank_group.wait_until(lambda s=slot, n=need: self.words.load(s) >= n, lambda r=region: f"no {r}")  # type: ignore[misc]
                want = _random(self.rows, self.cols, torch.float16, 100 * call + sender)[slice(*rows)]
                assert torch.equal(self.bindings.view(region).view(torch.int16), want.view(torch.int16)), (call, region)
                assert self.words.load(slot) == need, (call, region)


def _exchange(rows: int, cols: int, gap: int) -> None:
    """Calls on new data. Ranks enter a call together, so that a peer's place is free; once each side is late."""
    from weft.kernels.push import push

    exchange = _Exchange(rows, cols, gap)
    try:
        plan = exchange.plan()
        exchange.rank_group.agree_on_call("rehearsal")
        push(plan, sms=2, silent=True)
        for call in range(5):
            exchange.src.copy_(_random(rows, cols, torch.float16, 100 * call + exchange.rank))
            exchange.rank_group.agree_on_call(f"call {call}")
            time.sleep(0.2 * (call == 1 and exchange.rank == 0))
            push(plan, sms=2)
            time.sleep(0.2 * (call == 3 and exchange.rank == 1))
            exchange.check_arrivals(call)
        exchange.rank_group.agree_on_call("end")
    finally:
        exchange.rank_group.close()


@pytest.mark.parametrize(("rows", "cols", "gap"), [(96, 64, 0), (70, 80, 16), pytest.param(253, 77, 0, marks=pytest.mark.slow)])
def test_copies_to_peers_are_there_when_counted(ranks: Ranks, rows: int, cols: int, gap: int) -> None:
    ranks.run(_exchange, rows, cols, gap)
