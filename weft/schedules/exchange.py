"""What the builders of both all-to-all operators share. Every rank has an a and a b of its own; shard d of a's rows is d's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from weft.core.problem import ColumnProblem, Span1D
from weft.core.schedule import Part, Region
from weft.schedules.builder import Builder, Piece, Request


class AllToAllBuilder(Builder):
    """The caller's buffers, and where pieces arrive. pieces: by destination, chunks of every rank's rows for it."""

    def __init__(self, asked: Request) -> None:
        super().__init__(asked)
        problem = self.problem
        self.arriving = [problem.out_rows(r) for r in self.each]
        self.sends_columns = isinstance(problem, ColumnProblem) and problem.sends_columns
        self.buffer("a", "input", problem.m, problem.a_columns(0), operand="a")
        self.buffer("b", "input", problem.k, problem.n, operand="b")
        self.buffer("out", "output", self.arriving, problem.columns(0))

    def arrival(self, buffer: str, src_rank: int, piece: Piece) -> Region:
        """Return the position of a rank's piece among all pieces of its destination."""
        first = self.problem.arrivals(src_rank, piece.shard)[0] - self.problem.shards[piece.shard][0]
        return self.region(buffer, piece.shard, (first + piece.rows[0], first + piece.rows[1]))

    def multiply(self, rank: int, parts: Sequence[tuple[int, Part]]) -> None:
        """(destination, part) as one kernel; as one for each that follow each other, where destinations have columns of b of
        their own."""
        for cols, run in groupby(parts, key=lambda one: self.problem.blocks[one[0]] if self.sends_columns else None):
            self.gemm(rank, (part for _, part in run), (None, cols))

    def source(self, rank: int, dst_rank: int, rows: Span1D) -> Region:
        """The rows of a that make these rows of what is sent to a rank."""
        above = dst_rank * self.problem.m if self.sends_columns else 0
        return self.region("a", rank, (rows[0] - above, rows[1] - above))

    def own_shard(self, rank: int) -> list[Part]:
        """What stays, straight to the result; nothing if there is nothing."""
        rows = self.problem.shards[rank]
        out = self.region("out", rank, self.problem.arrivals(rank, rank))
        return [Part(self.source(rank, rank, rows), out)] if rows[1] > rows[0] else []

    def with_far(self, rank: int, index: int) -> tuple[list[Piece], list[tuple[int, Piece]]]:
        """Slice `index` of what goes to other nodes; and (sender, piece) of what comes from there."""
        return self.chunk(index, self.far(rank)), [(peer, p) for peer in self.far(rank) for p in self.chunk(index, [rank])]
