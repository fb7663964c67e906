"""Builders for calls with splits: dispatch and combine of mixture-of-experts, whose row counts are known only on devices.

Buffers of rank r: each holds segments (src, dst, expert) one after the other, without gaps (`RaggedProblem`)
    a         input      capacity x K   by sent_order
    landing   symmetric  max_rows x K   arrived rows, by received_order (dispatch)
    product   symmetric  capacity x N   rows that other ranks pull, by sent_order (combine)
    out       output     max_rows x N   by received_order
    received  output     max_rows x K   the rows that were multiplied, by received_order (dispatch, if asked for)
If a is FP8, a, landing and received hold rows and their scales, which are sent together.

Flags of rank r (who signals ~> who waits)
    counted[s]@r   s ~> r: the counts of s are here, and s has ended the call before
    arrived[i]@r   who pushes ~> r's grouped GEMM: a segment is in `landing` (i: its place in received_order)
    made[i]@r      who multiplies ~> the rank of r that pulls: a segment is in a peer's `product`

    dispatch, fused                                       combine, fused
    rank r                       rank p                   rank r                        rank p
    share counts  ~~~~~~~~~~~~>  share counts             share counts  ~~~~~~~~~~~~~>  share counts
    grouped GEMM:                grouped GEMM:            grouped GEMM:                 grouped GEMM:
      push a -> landing@p  ~~~>    wait, multiply           multiply -> product  ~~~~>    wait, pull product@r -> out

Parts are ordered by expert, so that copies and products proceed together. Within an expert, ranks begin with their neighbours,
so that ranks begin with different peers. There is one lane. In a sequential schedule each step waits for all of the previous
one. In a fused one the copies are parts of the GEMM's kernel. Pushes come before all products, and pulls after them, so that no
part waits for a later one of its kernel.

Bad interleaving: r is a call ahead, and pushes into the landing buffer of p while p still multiplies the old rows. The counts
prevent this: r pushes after it has the counts of p for this call, which p shares once it has ended the previous call.
"""

from __future__ import annotations

from typing import Literal

from weft.core.problem import RaggedProblem
from weft.core.schedule import (
    Buffer,
    Flag,
    GroupedGemm,
    Lane,
    Schedule,
    Segment,
    SegmentCopies,
    SegmentCopy,
    SegmentProduct,
    ShareCounts,
    Step,
    Wait,
)

FAMILIES: dict[str, str] = {
    "sequential": "counts, then all rows, then the grouped GEMM; a combine in reverse",
    "fused": "each segment is multiplied once it is here, or pulled once it is made",
}
"""The families by name, with one line that describes each."""


def build(problem: RaggedProblem, name: str = "fused") -> Schedule:
    """Build the schedule of a family. Raises ValueError for an unknown name."""
    if name not in FAMILIES:
        raise ValueError(f"schedule is {name!r}; {problem.op} has {', '.join(FAMILIES)}")
    lane = _dispatch if problem.dispatches else _combine
    ranks = tuple((lane(problem, rank, fused=name == "fused"),) for rank in range(problem.world_size))
    return Schedule(problem=problem, name=name, buffers=_buffers(problem), ranks=ranks)


def _buffers(problem: RaggedProblem) -> tuple[Buffer, ...]:
    operand: Literal["", "a"] = "a" if problem.scaling is not None else ""

    def sized(rows: int, cols: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (rows,) * problem.world_size, (cols,) * problem.world_size

    buffers = [
        Buffer("a", "input", *sized(problem.capacity, problem.k), operand=operand),
        Buffer("out", "output", *sized(problem.m, problem.n)),
    ]
    if not problem.dispatches:
        return (*buffers, Buffer("product", "symmetric", *sized(problem.capacity, problem.n)))
    buffers.append(Buffer("landing", "symmetric", *sized(problem.m, problem.k), operand=operand))
    if problem.return_received:
        buffers.append(Buffer("received", "output", *sized(problem.m, problem.k), operand=operand))
    return tuple(buffers)


def _counts(problem: RaggedProblem, rank: int) -> ShareCounts:
    ring = [(rank + distance) % problem.world_size for distance in range(problem.world_size)]
    return ShareCounts(
        flags=tuple(Flag("counted", peer, rank) for peer in ring),
        gates=tuple(Wait(Flag("counted", rank, peer)) for peer in ring),
    )


def _at(buffer: str, rank: int, name: tuple[int, int, int]) -> Segment:
    return Segment(buffer, rank, *name)


def _flag(problem: RaggedProblem, kind: str, name: tuple[int, int, int]) -> Flag:
    """Return the flag of a segment, on the rank that the segment goes to."""
    return Flag(kind, name[1], problem.received_order(name[1]).index(name))


def _by_expert(problem: RaggedProblem, rank: int, step: int) -> list[tuple[int, int]]:
    """Return (expert, other rank) in the order of copies and products, expert by expert.

    For each expert, the other ranks come in a ring, which `step` +1 or -1 walks from the neighbour on, and `rank` itself comes
    last.
    """
    ring = [(rank + step * distance) % problem.world_size for distance in range(1, problem.world_size + 1)]
    return [(expert, other) for expert in range(problem.experts) for other in ring]


def _dispatch(problem: RaggedProblem, rank: int, *, fused: bool) -> Lane:
    pushes = tuple(
        SegmentCopy(_at("a", rank, name), _at("landing", name[1], name), count=_flag(problem, "arrived", name))
        for name in ((rank, other, expert) for expert, other in _by_expert(problem, rank, 1))
    )
    # Own rows are available at once, and those of the predecessor arrive next.
    ring = [(rank - distance) % problem.world_size for distance in range(problem.world_size)]
    incoming = [(other, rank, expert) for expert in range(problem.experts) for other in ring]
    gates = [Wait(_flag(problem, "arrived", name)) for name in incoming]
    products = tuple(
        SegmentProduct(_at("landing", rank, name), _at("out", rank, name), (gate,) if fused else ())
        for name, gate in zip(incoming, gates, strict=True)
    )
    rows = SegmentCopies(tuple(SegmentCopy(_at("landing", rank, n), _at("received", rank, n)) for n in incoming))
    last: list[Step] = [rows] if problem.return_received else []
    if fused:
        return Lane("compute", "compute", (_counts(problem, rank), GroupedGemm((*pushes, *products)), *last))
    return Lane("compute", "compute", (_counts(problem, rank), SegmentCopies(pushes), *gates, GroupedGemm(products), *last))


def _combine(problem: RaggedProblem, rank: int, *, fused: bool) -> Lane:
    def product(name: tuple[int, int, int]) -> SegmentProduct:
        if name[1] == rank:
            return SegmentProduct(_at("a", rank, name), _at("out", rank, name))
        return SegmentProduct(_at("a", rank, name), _at("product", rank, name), count=_flag(problem, "made", name))

    products = tuple(product((rank, other, expert)) for expert, other in _by_expert(problem, rank, 1))
    incoming = [(other, rank, expert) for expert, other in _by_expert(problem, rank, -1) if other != rank]
    gates = [Wait(_flag(problem, "made", name)) for name in incoming]
    pulls = tuple(
        SegmentCopy(_at("product", name[0], name), _at("out", rank, name), (gate,) if fused else ())
        for name, gate in zip(incoming, gates, strict=True)
    )
    if fused:
        return Lane("compute", "compute", (_counts(problem, rank), GroupedGemm((*products, *pulls))))
    return Lane("compute", "compute", (_counts(problem, rank), GroupedGemm(products), *gates, SegmentCopies(pulls)))
