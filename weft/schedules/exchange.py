"""The base of the builders of the all-to-all operators. Every rank has its own a and b; shard d of a's rows goes to rank d."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from weft.core.problem import ColumnProblem, Span1D
from weft.core.schedule import Part, Region
from weft.schedules.builder import Builder, Piece, Request


class AllToAllBuilder(Builder):
    """An AllToAllBuilder adds the caller's buffers, and computes where pieces arrive.

    pieces: by destination, the chunks of every rank's rows for it.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        problem = self.problem
        self.arriving = [problem.out_rows(r) for r in self.ranks]
        self.sends_columns = isinstance(problem, ColumnProblem) and problem.sends_columns
        self.add_buffer("a", "input", problem.m, problem.a_columns(0), operand="a")
        self.add_buffer("b", "input", problem.k, problem.n, operand="b")
        self.add_buffer("out", "output", self.arriving, problem.columns(0))

    def arrival(self, buffer: str, src_rank: int, piece: Piece) -> Region:
        """Return the position of a rank's piece among all pieces of its destination."""
        first = self.problem.arrivals(src_rank, piece.shard)[0] - self.problem.shards[piece.shard][0]
        return self.region(buffer, piece.shard, (first + piece.rows[0], first + piece.rows[1]))

    def multiply(self, rank: int, parts: Sequence[tuple[int, Part]]) -> None:
        """Add one GEMM of these (destination, part) pairs.

        If each destination has its own columns of b, add one GEMM for each run of parts with the same destination.
        """
        for cols, run in groupby(parts, key=lambda one: self.problem.blocks[one[0]] if self.sends_columns else None):
            self.add_gemm(rank, (part for _, part in run), (None, cols))

    def source(self, rank: int, dst_rank: int, rows: Span1D) -> Region:
        """Return the rows of a whose products are these rows for `dst_rank`."""
        above = dst_rank * self.problem.m if self.sends_columns else 0
        return self.region("a", rank, (rows[0] - above, rows[1] - above))

    def own_shard(self, rank: int) -> list[Part]:
        """Return the rows that stay on the rank as one part, which writes the result, or no part if there are none."""
        rows = self.problem.shards[rank]
        out = self.region("out", rank, self.problem.arrivals(rank, rank))
        return [Part(self.source(rank, rank, rows), out)] if rows[1] > rows[0] else []

    def pieces_between_nodes(self, rank: int, index: int) -> tuple[list[Piece], list[tuple[int, Piece]]]:
        """Return slice `index` of the pieces for other nodes, and (sender, piece) for each piece that comes from them."""
        return self.select_chunk(index, self.ranks_on_other_nodes(rank)), [
            (peer, p) for peer in self.ranks_on_other_nodes(rank) for p in self.select_chunk(index, [rank])
        ]
