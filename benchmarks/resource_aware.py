"""How much faster do a GEMM and a collective end beside each other, when residency is capped and communication has priority?

Protocol: that of resource-aware overlap (arXiv 2606.09200), four GPUs. Two streams; GEMM_i, an event, collective_i, which runs
beside GEMM_i+1. Workloads: a GEMM of 8192 x 8192 x 8192 (cb) or 8192 x 57344 x 8192 (mb: M, N, K), with an all-reduce (ar) or
an all-to-all (a2a) of 896 MB. GEMMs are Triton kernels with tiles of 64 x 64 x 32 and 64 x 64 x 64, float16. For each, every
residency that shared memory can cap it at, communication priority off and on; the tile's own residency without priority is
the plain overlap. The first third of the iterations is warm-up, after which all GPUs are idle once. A time is that of all
others, from the begin of their first GEMM to the end of their last collective, by iterations. All points take turns round by
round; medians, slowest rank.

    compute  | GEMM_0 |e GEMM_1 |e GEMM_2 |e ...
    comm              |~> collective_0 |  ~> collective_1 | ...

Baselines: sequential, the same on one stream; GEMM alone; collective alone. Figures: TimeRatio, overlapped over sequential;
normalised, over plain overlap; overlap_rate, the share of time in which both run, by events; hidden, the share saved of what
the ideal saves, in which all but the first GEMM and the last collective run beside each other.

Traps: GEMMs wait for no collective, so where these starve, GEMMs run ahead: a clock that starts after the warm-up's last
collective has ended would not see them, and call what is left an overlap (on 4 x H200 the best point then took 12.6% less than
plain overlap). An event before a collective fires when it may start, not when its blocks find room: where it starves,
overlap_rate counts waiting as running, and hidden does not. All-reduces average, so that values stay finite. A capped kernel is
the same code: its result has to be equal, bit by bit, to the uncapped one's.

    torchrun --nproc-per-node 4 benchmarks/resource_aware.py --json benchmarks/results/resource_aware.jsonl
    python benchmarks/resource_aware_plot.py benchmarks/results/resource_aware.jsonl out/resource_aware.html
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import measure
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from measure import WrongResult, alarm, append, parser, row, say, start, stop, together

from weft.controls import comm_stream, give_back, nccl_group, occupancy, shape

ALARM_S = 40
ROUNDS, WARM_UP, ITERATIONS = 2, 4, 8
"""Iterations: after the warm-up."""
SIZES = {"cb": (8192, 8192, 8192), "mb": (8192, 57344, 8192)}
"""M, N, K."""
WORKLOADS = ("cb-ar", "mb-ar", "cb-a2a", "mb-a2a")
BYTES = 896 << 20
TILES = ((64, 64, 32), (64, 64, 64))
WARPS, STAGES = 4, 3


@triton.jit
def _gemm_kernel(
    a_ptr, b_ptr, out_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):
    """A tile of out_MN = a_MK b_KN, all contiguous, sizes multiples of the tile; GROUP row tiles share their columns of b."""
    program, columns = tl.program_id(0), N // BLOCK_N
    first = program // (GROUP * columns) * GROUP
    height = min(M // BLOCK_M - first, GROUP)
    rows = (first + program % (GROUP * columns) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = program % (GROUP * columns) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_at = a_ptr + rows[:, None] * K + inner[None, :]
    b_at = b_ptr + inner[:, None] * N + cols[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        total = tl.dot(tl.load(a_at), tl.load(b_at), total)
        a_at += BLOCK_K
        b_at += BLOCK_K * N
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], total.to(tl.float16))


@dataclass(frozen=True, kw_only=True)
class Point:
    """blocks_per_sm: the residency. capped: whether shared memory had to be added for it. priority: of communication."""

    blocks_per_sm: int
    capped: bool
    priority: bool

    def __str__(self) -> str:
        return f"r={self.blocks_per_sm}{'' if self.capped else ' (its own)'} priority={'on' if self.priority else 'off'}"


class Workload:
    """One workload with one tile on this rank: its tensors, and its GEMM at every residency."""

    def __init__(self, name: str, tile: tuple[int, int, int], groups: Mapping[bool, dist.ProcessGroup]) -> None:
        size, _, self.op = name.partition("-")
        self.groups, self.tile = groups, tile
        m, n, k = self.size = SIZES[size]
        self.a = torch.randn(m, k, device="cuda", dtype=torch.float16)
        self.b = torch.randn(k, n, device="cuda", dtype=torch.float16) * k**-0.5
        self.out = torch.empty(m, n, device="cuda", dtype=torch.float16)
        self.sent = torch.randn(BYTES // 2, device="cuda", dtype=torch.float16)
        self.received = torch.empty_like(self.sent) if self.op == "a2a" else self.sent
        self.own = occupancy(self.run(_gemm_kernel)).blocks
        self.gemms = {r: shape(_gemm_kernel, blocks_per_sm=r) for r in range(1, self.own)} | {self.own: _gemm_kernel}

    def run(self, kernel: Any) -> Any:
        """The GEMM by a kernel, capped or not; what its launch returns."""
        (m, n, k), (block_m, block_n, block_k) = self.size, self.tile
        sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": 8}
        blocks = m // block_m * (n // block_n)
        return kernel[(blocks,)](self.a, self.b, self.out, m, n, k, **sizes, num_warps=WARPS, num_stages=STAGES)

    def gemm(self, r: int) -> None:
        self.run(self.gemms[r])

    def collective(self, priority: bool) -> None:
        if self.op == "ar":
            dist.all_reduce(self.sent, op=dist.ReduceOp.AVG, group=self.groups[priority])
        else:
            dist.all_to_all_single(self.received, self.sent, group=self.groups[priority])

    def points(self) -> list[Point]:
        return [
            Point(blocks_per_sm=r, capped=r != self.own, priority=priority) for r in self.gemms for priority in (False, True)
        ]

    def check(self) -> None:
        """Raises WrongResult unless all residencies agree with each other, and with cuBLAS within rounding."""
        self.gemm(self.own)
        expected, own = torch.mm(self.a, self.b), self.out.clone()
        worst = float((own - expected).abs().max()) / float(expected.abs().max())
        if not worst <= 0.01:
            raise WrongResult(f"tile {self.tile} is off by {worst:.3g} of the largest element")
        for r in self.gemms:
            self.out.zero_()
            self.gemm(r)
            if not torch.equal(self.out, own):
                raise WrongResult(f"tile {self.tile} at {r} blocks an SM has another result than without a cap")


@dataclass(frozen=True, kw_only=True)
class Times:
    """us: of one iteration, slowest rank. rate: share of it in which both run, of the rank with the least."""

    us: float
    rate: float


Event = torch.cuda.Event
Marks = list[tuple[Event, Event]]


def marked(marks: Marks, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
    """Enqueue work on a stream, between two events."""
    begin, end = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        begin.record()
        work()
        end.record()
    marks.append((begin, end))


Iteration = Callable[[Marks, Marks], None]
"""Enqueues one iteration, and marks its GEMM and its collective."""


def overlapped(work: Workload, point: Point, streams: Mapping[bool, torch.cuda.Stream], compute: torch.cuda.Stream) -> Times:
    """GEMM_i, an event, collective_i beside GEMM_i+1."""
    comm = streams[point.priority]

    def iteration(gemms: Marks, collectives: Marks) -> None:
        marked(gemms, compute, lambda: work.gemm(point.blocks_per_sm))
        comm.wait_event(gemms[-1][1])
        marked(collectives, comm, lambda: work.collective(point.priority))

    return timed(iteration)


def sequential(work: Workload, compute: torch.cuda.Stream) -> Times:
    """The same on one stream."""

    def iteration(gemms: Marks, collectives: Marks) -> None:
        marked(gemms, compute, lambda: work.gemm(work.own))
        marked(collectives, compute, lambda: work.collective(False))

    return timed(iteration)


def alone(run: Callable[[], None], compute: torch.cuda.Stream) -> Times:
    return timed(lambda gemms, collectives: marked(gemms, compute, run))


def timed(iteration: Iteration) -> Times:
    """An iteration's time, and the share of it in which both ran. Collective."""
    for count in (WARM_UP, ITERATIONS):
        torch.cuda.synchronize()
        dist.barrier()
        gemms, collectives = Marks(), Marks()
        for _ in range(count):
            iteration(gemms, collectives)
    torch.cuda.synchronize()
    zero, last = gemms[0][0], (collectives or gemms)[-1][1]
    total_ms = zero.elapsed_time(last)
    both_ms = sum(shared(a, b) for a in spans(zero, gemms) for b in spans(zero, collectives))
    found = torch.tensor([total_ms / ITERATIONS * 1e3, -both_ms / total_ms], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return Times(us=float(found[0]), rate=-float(found[1]))


def spans(zero: Event, marks: Marks) -> Iterator[tuple[float, float]]:
    """Each mark's begin and end after `zero`, in ms."""
    for begin, end in marks:
        yield zero.elapsed_time(begin), zero.elapsed_time(end)


def shared(a: tuple[float, float], b: tuple[float, float]) -> float:
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))


def measured(name: str, tile: tuple[int, int, int], groups: Mapping[bool, dist.ProcessGroup], rounds: int) -> dict[str, Any]:
    """Medians of every method: sequential, gemm, collective, and each point."""
    work = together(f"{name} {tile}", lambda: Workload(name, tile, groups))
    together(f"{name} {tile}", work.check)
    streams = {priority: comm_stream(priority="high" if priority else "normal") for priority in (False, True)}
    compute = comm_stream(priority="normal")
    methods: dict[Any, Callable[[], Times]] = {
        "sequential": lambda: sequential(work, compute),
        "gemm": lambda: alone(lambda: work.gemm(work.own), compute),
        "collective": lambda: alone(lambda: work.collective(False), compute),
    }
    methods |= {point: lambda point=point: overlapped(work, point, streams, compute) for point in work.points()}
    found: dict[Any, list[Times]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method, run in methods.items():
            alarm()
            found[method].append(run())
    for stream in (compute, *streams.values()):
        give_back(stream)
    return {
        method: Times(us=statistics.median(t.us for t in times), rate=statistics.median(t.rate for t in times))
        for method, times in found.items()
    }


def lines(
    name: str, tile: tuple[int, int, int], found: Mapping[Any, Times], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A JSON line for each point."""
    points = [point for point in found if isinstance(point, Point)]
    plain = next(found[point] for point in points if not point.capped and not point.priority)
    gemm, collective, serial = (found[key].us for key in ("gemm", "collective", "sequential"))
    ideal = (gemm + collective + (ITERATIONS - 1) * max(gemm, collective)) / ITERATIONS
    made = []
    for point in points:
        times = found[point]
        line = row(bench="resource_aware", op=name, case=str(point), dtype="float16", mode="eager", arguments=arguments)
        made.append(
            line
            | {
                "tile": list(tile),
                "blocks_per_sm": point.blocks_per_sm,
                "capped": point.capped,
                "priority": point.priority,
                "sequential_us": serial,
                "computation_us": gemm,
                "communication_us": collective,
                "ideal_us": ideal,
                "overlapped_us": times.us,
                "time_ratio": times.us / serial,
                "normalised": times.us / plain.us,
                "overlap_rate": times.rate,
                "hidden": (serial - times.us) / (serial - ideal),
            }
        )
    return made


def sentence(line: Mapping[str, Any]) -> str:
    tile = "x".join(map(str, line["tile"]))
    return (
        f"{line['op']:6} {tile:8} {line['case']:27} {line['overlapped_us']:8.0f} us  TimeRatio {line['time_ratio']:.3f}  "
        f"normalised {line['normalised']:.3f}  overlap {line['overlap_rate']:.2f}  hidden {line['hidden']:.2f}"
    )


def summary(made: Sequence[Mapping[str, Any]]) -> str:
    """Of each workload and tile: the baselines, plain overlap, and the best point."""
    told = []
    for name, tile in dict.fromkeys((line["op"], tuple(line["tile"])) for line in made):
        of = [line for line in made if (line["op"], tuple(line["tile"])) == (name, tile)]
        best, one = min(of, key=lambda line: line["overlapped_us"]), of[0]
        told.append(
            f"{name} {tile}: gemm {one['computation_us']:.0f} collective {one['communication_us']:.0f} sequential "
            f"{one['sequential_us']:.0f} us; best {best['case']}: TimeRatio {best['time_ratio']:.3f}, "
            f"{1 - best['normalised']:.1%} less than plain overlap"
        )
    return "\n".join(told)


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS, modes="eager")
    options.add_argument("--workloads", default=",".join(WORKLOADS), help="with commas (%(default)s)")
    arguments = options.parse_args()
    if arguments.modes != "eager":
        raise ValueError(f"--modes {arguments.modes!r}: streams that run into each other are measured as they run; use eager")
    unknown = set(arguments.workloads.split(",")) - set(WORKLOADS)
    if unknown:
        raise ValueError(f"--workloads has {sorted(unknown)}; use {', '.join(WORKLOADS)}")
    measure.ALARM_S = ALARM_S
    start()
    groups = {priority: nccl_group(high_priority=priority) for priority in (False, True)}
    made = []
    for name in arguments.workloads.split(","):
        for tile in TILES:
            new = lines(name, tile, measured(name, tile, groups, arguments.rounds), arguments)
            for line in new:
                say(sentence(line))
                append(arguments.json, line)
            made += new
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        print(summary(made))
    for group in groups.values():
        dist.destroy_process_group(group)
    stop()


if __name__ == "__main__":
    main()
