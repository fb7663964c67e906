"""A schedule written by hand: checked, drawn, damaged, simulated, and run on two ranks.

    python examples/02_schedule_by_hand.py

all_gather_matmul on two ranks. Each rank pushes the upper half of its shard first, then the lower half; one GEMM multiplies
the own shard at once, then each half of the peer's behind its gate.

    rank r, compute                      rank r, copy
    gemm  own shard                      wait prev free                the peer has read what the call before brought it
          upper half, gate arrived[0]    copy upper half ~> peer,      signal arrived[0]@peer
          lower half, gate arrived[1]    copy lower half ~> peer,      signal arrived[1]@peer
    signal free@peer

The builder of `flag_gated:2` makes the same schedule for any number of ranks and any shapes. Here it is spelled out, for
equal shards: nothing but this value is needed, since checker, simulator and executor take any Schedule.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

import weft
from weft.runtime.ranks import Ranks
from weft.schedule import Buffer, Copy, Flag, Gemm, Lane, Part, Region, Schedule, Signal, Span1D, Step, Wait

RANKS = 2


def by_hand(problem: weft.Problem) -> Schedule:
    """The schedule for two equal shards."""
    (low, high), _ = problem.shards
    rows, cols, k = high - low, problem.columns(0), problem.k
    buffers = (
        Buffer("a", "input", (rows,) * RANKS, (k,) * RANKS),
        Buffer("b", "input", (k,) * RANKS, (cols,) * RANKS),
        Buffer("a_full", "symmetric", (problem.m,) * RANKS, (k,) * RANKS),
        Buffer("out", "output", (problem.m,) * RANKS, (cols,) * RANKS),
    )
    halves = ((0, rows // 2), (rows // 2, rows))
    ranks = tuple(lanes(rank, halves, buffers) for rank in range(RANKS))
    return Schedule(problem=problem, name="by_hand", chunks=2, buffers=buffers, ranks=ranks)


def lanes(rank: int, halves: tuple[Span1D, Span1D], buffers: tuple[Buffer, ...]) -> tuple[Lane, Lane]:
    """The compute and copy lanes of a rank. halves: rows of a shard."""
    a, b, a_full, out = buffers
    peer, shard = 1 - rank, a.rows[0]
    push: list[Step] = [Wait(Flag("free", rank), on_previous_call=True)]
    parts = [Part(a.whole(rank), Region("out", rank, moved((0, shard), rank * shard), (0, out.cols[rank])))]
    for index, rows in enumerate(halves):
        there = Region("a_full", peer, moved(rows, rank * shard), (0, a_full.cols[peer]))
        push += [Copy(Region("a", rank, rows, (0, a.cols[rank])), there), Signal(Flag("arrived", peer, index))]
        landed = moved(rows, peer * shard)
        gate = Wait(Flag("arrived", rank, index))
        here = Region("a_full", rank, landed, (0, a_full.cols[rank]))
        parts.append(Part(here, Region("out", rank, landed, (0, out.cols[rank])), gates=(gate,)))
    compute = (Gemm(b.whole(rank), tuple(parts)), Signal(Flag("free", peer)))
    return Lane("compute", "compute", compute), Lane("copy", "copy", tuple(push))


def moved(rows: Span1D, by: int) -> Span1D:
    return rows[0] + by, rows[1] + by


def without_free(schedule: Schedule) -> Schedule:
    """The same, but rank 0 does not ask whether its peer still reads what the call before brought it."""
    compute, copy = schedule.ranks[0]
    return replace(schedule, ranks=((compute, replace(copy, steps=copy.steps[1:])), schedule.ranks[1]))


def run_here(schedule: Schedule) -> float:
    """One rank's part: largest difference from the sequential program, relative to its largest element."""
    problem, rank = schedule.problem, dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(problem.m // RANKS, problem.k, generator=generator)
    b = torch.randn(problem.k, problem.columns(rank), generator=generator) * problem.k**-0.5
    gathered = torch.empty(problem.m, problem.k)
    dist.all_gather(list(gathered.chunk(RANKS)), a)
    expected = gathered @ b
    out = weft.all_gather_matmul(a, b, schedule=schedule)
    return float((out - expected).abs().max() / expected.abs().max())


def main() -> None:
    small = by_hand(weft.Problem(op="all_gather_matmul", m=256, n=256, k=128, world_size=RANKS, dtype="float32"))
    weft.schedule.check(small)
    print("Checked: two calls in a row, at any speed of lanes and ranks.\n")
    print(f"{weft.schedule.timeline(small, ranks=(0, 1), width=150)}\n")

    try:
        weft.schedule.check(without_free(small))
    except weft.schedule.ScheduleError as error:
        print(f"Without the wait for `free` on rank 0:\n{error}\n")

    h200 = weft.machine.load("h200x8")
    large = weft.Problem(op="all_gather_matmul", m=8192, n=3072, k=8192, world_size=RANKS)
    print(f"Predicted for two GPUs of {h200.description}, {large}:")
    for schedule in (weft.schedule.build(large, "sequential"), weft.schedule.build(large, "shard_p2p"), by_hand(large)):
        print(f"  {schedule.name:<12}{max(span.end_us for span in weft.schedule.simulate(schedule, h200)):>6.0f} us")

    with Ranks(RANKS) as ranks:
        errors = ranks.run(run_here, small)
    worst = f"{max(errors):.1e} of the largest element"
    print(f"\nRun on two CPU ranks: largest difference from the sequential program {worst}")
    if not all(error <= 1e-5 for error in errors):  # also where one is nan
        raise SystemExit("that is more than rounding explains")


if __name__ == "__main__":
    main()
