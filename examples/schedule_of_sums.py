"""A family of schedules for matmul_reduce_scatter, for readers of docs/write-a-schedule.md.

    python examples/schedule_of_sums.py

draws it. In examples/, this runs it on three CPU ranks and compares the results with torch:

    weft run llama3-8b --op matmul_reduce_scatter --schedule counted --ranks 3 --device cpu --import schedule_of_sums

The GEMM signals flags to the copy lane of its own rank: `made` is the `count` of a part, raised when all its tiles are done.
The copy lane then takes these rows from the local buffer `partial` to the owner's `recv`. The owner sums in the order of
ranks, whatever arrives first. `free` protects `recv`, which peers write; `partial` needs no such flag.
"""

from __future__ import annotations

import weft
from weft.schedule import Buffer, Copy, Flag, Gemm, Lane, Part, Reduce, Region, Request, Schedule, Signal, Step, Sum, Wait


def counted(request: Request) -> Schedule:
    """One GEMM; what is finished for a peer is copied there."""
    problem, size = request.problem, request.problem.world_size
    n, ranks = problem.n, range(size)
    rows = tuple(problem.out_rows(rank) for rank in ranks)
    inner = tuple(problem.inner(rank) for rank in ranks)
    buffers = (
        Buffer("a", "input", (problem.m,) * size, inner),
        Buffer("b", "input", inner, (n,) * size),
        Buffer("partial", "local", (problem.m,) * size, (n,) * size),
        Buffer("recv", "symmetric", tuple(size * each for each in rows), (n,) * size),
        Buffer("out", "output", rows, (n,) * size),
    )

    def partial(rank: int, owner: int) -> Region:
        """The product of `rank` for the rows of `owner`."""
        return Region("partial", rank, problem.shards[owner], (0, n))

    def recv(owner: int, sender: int) -> Region:
        return Region("recv", owner, (sender * rows[owner], (sender + 1) * rows[owner]), (0, n))

    def lanes(rank: int) -> tuple[Lane, Lane]:
        peers = [(rank + step) % size for step in range(1, size)]
        parts, copies = [], list[Step]()
        for owner in [*peers, rank]:
            made = Flag("made", rank, owner) if owner != rank else None
            parts.append(Part(Region("a", rank, problem.shards[owner], (0, inner[rank])), partial(rank, owner), count=made))
            if made:
                copies += [Wait(made), Wait(Flag("free", rank, owner), on_previous_call=True)]
                copies += [Copy(partial(rank, owner), recv(owner, rank)), Signal(Flag("arrived", owner, rank))]
        addends = tuple(partial(rank, rank) if sender == rank else recv(rank, sender) for sender in ranks)
        gates = tuple(Wait(Flag("arrived", rank, peer)) for peer in peers)
        compute: tuple[Step, ...] = (
            Gemm(Region("b", rank, (0, inner[rank]), (0, n)), tuple(parts)),
            Reduce(
                (Sum(addends, Region("out", rank, (0, rows[rank]), (0, n)), gates),), size if problem.reduce_op == "avg" else 1
            ),
            *(Signal(Flag("free", peer, rank)) for peer in peers),
        )
        return Lane("compute", "compute", compute), Lane("copy", "copy", tuple(copies))

    return Schedule(problem=problem, name=request.name, buffers=buffers, ranks=tuple(map(lanes, ranks)))


weft.schedule.register("counted", counted, ops="matmul_reduce_scatter", chunked=False)

if __name__ == "__main__":
    small = weft.Problem(op="matmul_reduce_scatter", m=12, n=12, k=12, world_size=3)
    print(weft.schedule.timeline(weft.schedule.build(small, "counted"), width=140))
