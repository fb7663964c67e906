"""Builders for calls with splits: dispatch and combine of mixture-of-experts, whose row counts only devices know.

Buffers of rank r: each holds segments (src, dst, expert) one after the other, without gaps (`RaggedProblem`)
    counts    symmetric  2 x world_size places    the row counts of every rank
    a         input      capacity x K             by sent_order
    landing   symmetric  max_rows x K             what has arrived, by received_order (dispatch)
    product   symmetric  capacity x N             what others take from here, by sent_order (combine)
    out       output     max_rows x N             by received_order
    received  output     max_rows x K             the rows that were multiplied, by received_order (dispatch, if asked for)

Flags of rank r (who advances ~> who waits)
    counted[s]@r   s's compute lane ~> r's compute lane: the counts of s are here, and s has ended the call before
    laid@r         r's compute lane ~> r's movers: all counts are here
    arrived[i]@r   who pushes ~> r's grouped GEMM: a segment is in `landing` (i: its place in received_order)
    made[i]@r      who multiplies ~> whoever of r pulls: a segment is in a peer's `product`

    dispatch, fused                                    combine, fused
    rank r, movers             rank p, compute         rank r, compute           rank p, movers
    wait laid                  share counts            share counts              wait laid
    push a -> landing@p  ~~~>  wait counted of all     wait counted of all
                               grouped GEMM, each      grouped GEMM ~~~~~~~~~~>  pull product@r -> out
                               segment once it is here

Sequential schedules have one lane, and each step waits for all of the one before.

Bad interleaving: r, a call ahead, pushes into the landing buffer of p while p still multiplies the old rows. It cannot, because
r pushes after it has the counts of p for this call, which p shares once all its lanes have ended the call before.
"""

from __future__ import annotations

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
    Signal,
    Step,
    Wait,
)

FAMILIES: dict[str, str] = {
    "sequential": "counts, then all rows, then the grouped GEMM; a combine in reverse",
    "fused": "each segment is multiplied once it is here, or pulled once it is made",
}
"""By name, what a family does, in one line."""


def build(problem: RaggedProblem, name: str = "fused") -> Schedule:
    """The schedule of a family. Raises ValueError for an unknown name."""
    if name not in FAMILIES:
        raise ValueError(f"schedule is {name!r}; {problem.op} has {', '.join(FAMILIES)}")
    lanes = _dispatch if problem.dispatches else _combine
    ranks = tuple(lanes(problem, rank, fused=name == "fused") for rank in range(problem.world_size))
    return Schedule(problem=problem, name=name, buffers=_buffers(problem), ranks=ranks)


def _buffers(problem: RaggedProblem) -> tuple[Buffer, ...]:
    each = (1,) * problem.world_size

    def sized(rows: int, cols: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(rows * one for one in each), tuple(cols * one for one in each)

    segments = problem.experts * problem.world_size
    buffers = [
        Buffer("counts", "symmetric", *sized(2 * problem.world_size, segments)),
        Buffer("a", "input", *sized(problem.capacity, problem.k)),
        Buffer("out", "output", *sized(problem.m, problem.n)),
    ]
    if not problem.dispatches:
        return (*buffers, Buffer("product", "symmetric", *sized(problem.capacity, problem.n)))
    buffers.append(Buffer("landing", "symmetric", *sized(problem.m, problem.k)))
    if problem.return_received:
        buffers.append(Buffer("received", "output", *sized(problem.m, problem.k)))
    return tuple(buffers)


def _counts(problem: RaggedProblem, rank: int) -> list[Step]:
    """Share this rank's counts, and wait for those of all ranks."""
    ranks = range(problem.world_size)
    return [ShareCounts(tuple(Flag("counted", peer, rank) for peer in ranks)), *(Wait(Flag("counted", rank, s)) for s in ranks)]


def _at(buffer: str, rank: int, name: tuple[int, int, int]) -> Segment:
    return Segment(buffer, rank, *name)


def _flag(problem: RaggedProblem, kind: str, name: tuple[int, int, int]) -> Flag:
    """Of a segment, on the rank that it goes to."""
    return Flag(kind, name[1], problem.received_order(name[1]).index(name))


def _dispatch(problem: RaggedProblem, rank: int, *, fused: bool) -> tuple[Lane, ...]:
    push = SegmentCopies(
        tuple(
            SegmentCopy(_at("a", rank, name), _at("landing", name[1], name), count=_flag(problem, "arrived", name))
            for name in problem.sent_order(rank)
        )
    )
    incoming = problem.received_order(rank)
    gates = [Wait(_flag(problem, "arrived", name)) for name in incoming]
    gemm = GroupedGemm(
        tuple(
            SegmentProduct(_at("landing", rank, name), _at("out", rank, name), (gate,) if fused else ())
            for name, gate in zip(incoming, gates, strict=True)
        )
    )
    rows = SegmentCopies(tuple(SegmentCopy(_at("landing", rank, n), _at("received", rank, n)) for n in incoming))
    last: list[Step] = [gemm, rows] if problem.return_received else [gemm]
    if not fused:
        return (Lane("compute", "compute", (*_counts(problem, rank), push, *gates, *last)),)
    laid = Flag("laid", rank)
    return (
        Lane("compute", "compute", (*_counts(problem, rank), Signal(laid), *last)),
        Lane("movers", "blocks", (Wait(laid), push)),
    )


def _combine(problem: RaggedProblem, rank: int, *, fused: bool) -> tuple[Lane, ...]:
    def product(name: tuple[int, int, int]) -> SegmentProduct:
        if name[1] == rank:
            return SegmentProduct(_at("a", rank, name), _at("out", rank, name))
        return SegmentProduct(_at("a", rank, name), _at("product", rank, name), count=_flag(problem, "made", name))

    gemm = GroupedGemm(tuple(map(product, problem.sent_order(rank))))
    incoming = [name for name in problem.received_order(rank) if name[0] != rank]
    gates = [Wait(_flag(problem, "made", name)) for name in incoming]
    pull = SegmentCopies(
        tuple(
            SegmentCopy(_at("product", name[0], name), _at("out", rank, name), (gate,) if fused else ())
            for name, gate in zip(incoming, gates, strict=True)
        )
    )
    if not fused:
        return (Lane("compute", "compute", (*_counts(problem, rank), gemm, *gates, pull)),)
    laid = Flag("laid", rank)
    return (
        Lane("compute", "compute", (*_counts(problem, rank), Signal(laid), gemm)),
        Lane("movers", "blocks", (Wait(laid), pull)),
    )
