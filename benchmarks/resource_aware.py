"""How much faster do a GEMM and a concurrent collective end, when residency is capped and communication has priority?

Protocol: that of resource-aware overlap (arXiv 2606.09200), four GPUs. Two streams; GEMM_i, an event, collective_i, which runs
during GEMM_i+1. Workloads: a GEMM of 8192 x 8192 x 8192 (cb) or 8192 x 57344 x 8192 (mb: M, N, K), with an all-reduce (ar) or
an all-to-all (a2a) of 896 MB. GEMMs are Triton kernels with tiles of 64 x 64 x 32 and 64 x 64 x 64, float16. For each, every
residency that shared memory can cap it at, communication priority off and on; the tile's own residency without priority is
the plain overlap. A GEMM has a block for each tile, or as many blocks as --grids says, each of which takes tiles in turn. Ours,
with priority: NCCL held to the numbers of blocks that --ctas says, and copy engines in its place, whose sums take SUMS blocks.
The first third of the iterations is warm-up, after which all GPUs are idle once. A time is that of all others, from the begin
of their first GEMM to the end of their last collective, by iterations. All points take turns round by round; medians, slowest
rank.

    compute  | GEMM_0 |e GEMM_1 |e GEMM_2 |e ...
    comm              |~> collective_0 |  ~> collective_1 | ...

Baselines: sequential, the same on one stream; GEMM alone, also at each residency; collective alone. Figures: TimeRatio,
overlapped over sequential; normalised, over plain overlap with the same grid; overlap_rate, the share of time in which both
run, by events; hidden, the share saved of what the ideal saves, in which all but the first GEMM and the last collective run
concurrently. The paper caps residency by the tile, so the summary has the best point of both tiles over the plain overlap
of the smaller, too; and bound: what the ideal takes less than plain overlap, with the fastest GEMM alone of all residencies.

Traps: the first GEMM and the last collective overlap nothing, an eighth of a run of 8 iterations: few iterations hide
a part of what overlap saves. GEMMs wait for no collective, so where these starve, GEMMs run ahead: a clock that starts after
the warm-up's last collective has ended would not see them, and call what is left an overlap (on 4 x H200 the best point then
took 12.6% less than plain overlap). An event before a collective fires when it may start, not when its blocks find room: where
it starves, overlap_rate counts waiting as running, and hidden does not. All-reduces average, so that values stay finite. A
capped kernel is the same code: its result has to be equal, bit by bit, to the uncapped one's.

    torchrun --nproc-per-node 4 -m benchmarks.resource_aware --json benchmarks/results/h200x2/resource_aware.jsonl
    python docs/plot.py resource_aware benchmarks/results/h200x2/resource_aware.jsonl out/resource_aware.html
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from benchmarks import measure
from benchmarks.measure import WrongResult, alarm, append, parser, row, say, start, stop, together
from benchmarks.rows import Row
from weft import collectives as moved
from weft.overlap.controls import comm_stream, give_back, nccl_group, occupancy, shape

ALARM_S = 40
ROUNDS = 2
ITERATIONS = {"cb": 24, "mb": 8}
"""After a warm-up of half as many."""
SIZES = {"cb": (8192, 8192, 8192), "mb": (8192, 57344, 8192)}
"""M, N, K."""
WORKLOADS = ("cb-ar", "mb-ar", "cb-a2a", "mb-a2a")
BYTES = 896 << 20
TILES = ((64, 64, 32), (64, 64, 64))
WARPS, STAGES = 4, 3
NCCL = "nccl"
SUMS = 32
"""Blocks that sum what copy engines bring: as fast as NCCL alone on 2 x H200."""
BY_COPY_ENGINE = {"ar": ("copy_engine", "copy_engine_pull"), "a2a": ("copy_engine",)}


@triton.jit
def _tile(
    program,
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile of out_MN = a_MK b_KN, all contiguous, sizes multiples of the tile; GROUP row tiles share their columns of b."""
    columns = N // BLOCK_N
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


@triton.jit
def _gemm_kernel(
    a_ptr, b_ptr, out_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):
    """A block a tile."""
    _tile(tl.program_id(0), a_ptr, b_ptr, out_ptr, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP)


@triton.jit
def _staying_kernel(
    a_ptr, b_ptr, out_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):
    """Blocks that take tiles in turn, until none is left."""
    for program in range(tl.program_id(0), M // BLOCK_M * (N // BLOCK_N), tl.num_programs(0)):
        _tile(program, a_ptr, b_ptr, out_ptr, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP)


@dataclass(frozen=True, kw_only=True)
class Point:
    """grid: the GEMM's blocks, 0 for one a tile. blocks_per_sm: the residency. capped: whether shared memory had to be added
    for it. priority: of communication. transport: NCCL, or a schedule of weft.collectives. ctas: blocks of the collective, 0
    for NCCL's own choice."""

    grid: int
    blocks_per_sm: int
    capped: bool
    priority: bool
    transport: str = NCCL
    ctas: int = 0

    @property
    def plain(self) -> bool:
        return not (self.capped or self.priority)

    def __str__(self) -> str:
        parts = [f"r={self.blocks_per_sm}{'' if self.capped else ' (its own)'}", f"priority={'on' if self.priority else 'off'}"]
        parts += [self.transport] if self.transport != NCCL else []
        return " ".join(([f"grid={self.grid}"] if self.grid else []) + parts + ([f"ctas={self.ctas}"] if self.ctas else []))


Groups = Mapping[tuple[bool, int], dist.ProcessGroup]
"""By priority and number of blocks."""


class Workload:
    """One workload with one tile on this rank: its tensors, and its GEMM in every grid and residency."""

    def __init__(self, name: str, tile: tuple[int, int, int], groups: Groups, grids: Sequence[int]) -> None:
        size, _, self.op = name.partition("-")
        self.groups, self.tile = groups, tile
        self.iterations = ITERATIONS[size]
        m, n, k = self.size = SIZES[size]
        self.a = torch.randn(m, k, device="cuda", dtype=torch.float16)
        self.b = torch.randn(k, n, device="cuda", dtype=torch.float16) * k**-0.5
        self.out = torch.empty(m, n, device="cuda", dtype=torch.float16)
        self.sent = torch.randn(BYTES // 2, device="cuda", dtype=torch.float16)
        self.received = torch.empty_like(self.sent) if self.op == "a2a" else self.sent
        self.own, self.gemms = dict[int, int](), dict[tuple[int, int], Any]()
        for grid in (0, *grids):
            kernel = _staying_kernel if grid else _gemm_kernel
            own = self.own[grid] = occupancy(self.run(kernel, grid)).blocks
            self.gemms |= {(grid, r): shape(kernel, blocks_per_sm=r) for r in range(1, own)} | {(grid, own): kernel}

    def run(self, kernel: Any, grid: int) -> Any:
        """The GEMM by a kernel, capped or not; what its launch returns."""
        (m, n, k), (block_m, block_n, block_k) = self.size, self.tile
        sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": 8}
        blocks = grid or m // block_m * (n // block_n)
        return kernel[(blocks,)](self.a, self.b, self.out, m, n, k, **sizes, num_warps=WARPS, num_stages=STAGES)

    def gemm(self, grid: int, r: int) -> None:
        self.run(self.gemms[grid, r], grid)

    def collective(self, point: Point) -> None:
        if point.transport != NCCL:
            self.by_copy_engine(point.transport)
        elif self.op == "ar":
            dist.all_reduce(self.sent, op=dist.ReduceOp.AVG, group=self.groups[point.priority, point.ctas])
        else:
            dist.all_to_all_single(self.received, self.sent, group=self.groups[point.priority, point.ctas])

    def by_copy_engine(self, schedule: str) -> None:
        if self.op == "ar":
            moved.all_reduce(self.sent, "avg", schedule=schedule, sms=SUMS)
        else:
            moved.all_to_all_single(self.received, self.sent, schedule=schedule)

    @property
    def plain(self) -> Point:
        return Point(grid=0, blocks_per_sm=self.own[0], capped=False, priority=False)

    def points(self) -> list[Point]:
        """The paper's points in every grid; with a block a tile also ours."""
        made = []
        for grid, r in self.gemms:
            point = Point(grid=grid, blocks_per_sm=r, capped=r != self.own[grid], priority=False)
            made += [
                replace(point, priority=priority, ctas=ctas) for priority, ctas in sorted(self.groups) if not (grid and ctas)
            ]
            if not grid:
                made += [replace(point, priority=True, transport=name, ctas=SUMS) for name in BY_COPY_ENGINE[self.op]]
        return made

    def check(self) -> None:
        """Raises WrongResult unless all residencies agree with each other, and with cuBLAS within rounding."""
        self.gemm(0, self.own[0])
        expected, own = torch.mm(self.a, self.b), self.out.clone()
        worst = float((own - expected).abs().max()) / float(expected.abs().max())
        if not worst <= 0.01:
            raise WrongResult(f"tile {self.tile} is off by {worst:.3g} of the largest element")
        for grid, r in self.gemms:
            self.out.zero_()
            self.gemm(grid, r)
            if not torch.equal(self.out, own):
                raise WrongResult(f"tile {self.tile}, grid {grid}, {r} blocks an SM: another result than without a cap")
        self._check_collectives()

    def _check_collectives(self) -> None:
        """Copy engines bring what NCCL brings, within rounding of sums. What is sent is the same before each, and after."""
        sent = self.sent.clone()
        self.collective(self.plain)
        expected = self.received.clone()
        for schedule in BY_COPY_ENGINE[self.op]:
            self.sent.copy_(sent)
            self.by_copy_engine(schedule)
            if not torch.allclose(self.received, expected, rtol=2e-3, atol=2e-3):
                raise WrongResult(f"{self.op} by {schedule} differs from NCCL's")
        self.sent.copy_(sent)


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


def pair(work: Workload, point: Point, compute: torch.cuda.Stream, comm: torch.cuda.Stream) -> Times:
    """GEMM_i, an event, collective_i, which runs concurrently with GEMM_i+1 if it has another stream."""

    def iteration(gemms: Marks, collectives: Marks) -> None:
        marked(gemms, compute, lambda: work.gemm(point.grid, point.blocks_per_sm))
        if comm is not compute:
            comm.wait_event(gemms[-1][1])
        marked(collectives, comm, lambda: work.collective(point))

    return timed(iteration, work.iterations)


def alone(run: Callable[[], None], compute: torch.cuda.Stream, iterations: int) -> Times:
    return timed(lambda gemms, collectives: marked(gemms, compute, run), iterations)


def timed(iteration: Iteration, iterations: int) -> Times:
    """An iteration's time, and the share of it in which both ran. Collective."""
    for count in (iterations // 2, iterations):
        torch.cuda.synchronize()
        dist.barrier()
        gemms, collectives = Marks(), Marks()
        for _ in range(count):
            iteration(gemms, collectives)
    torch.cuda.synchronize()
    zero, last = gemms[0][0], (collectives or gemms)[-1][1]
    total_ms = zero.elapsed_time(last)
    spans = ([(zero.elapsed_time(begin), zero.elapsed_time(end)) for begin, end in marks] for marks in (gemms, collectives))
    both_ms = sum(shared(a, b) for a, b in product(*spans))
    found = torch.tensor([total_ms / iterations * 1e3, -both_ms / total_ms], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return Times(us=float(found[0]), rate=-float(found[1]))


def shared(a: tuple[float, float], b: tuple[float, float]) -> float:
    """How long two spans overlap."""
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0]))


def measured(work: Workload, rounds: int) -> dict[Any, Times]:
    """Medians of every method: sequential, collective, the GEMM alone by its residency, and each point."""
    streams = {priority: comm_stream(priority="high" if priority else "normal") for priority in (False, True)}
    compute = comm_stream(priority="normal")
    methods: dict[Any, Callable[[], Times]] = {
        "sequential": lambda: pair(work, work.plain, compute, compute),
        "collective": lambda: alone(lambda: work.collective(work.plain), compute, work.iterations),
    }
    for r in range(1, work.own[0] + 1):
        methods[r] = lambda r=r: alone(lambda: work.gemm(0, r), compute, work.iterations)
    methods |= {point: lambda point=point: pair(work, point, compute, streams[point.priority]) for point in work.points()}
    found: dict[Any, list[Times]] = {key: [] for key in methods}
    for _ in range(rounds):
        for key, run in methods.items():
            alarm()
            found[key].append(run())
    for stream in (compute, *streams.values()):
        give_back(stream)
    middle = statistics.median
    return {key: Times(us=middle(t.us for t in some), rate=middle(t.rate for t in some)) for key, some in found.items()}


def rows_of(name: str, work: Workload, found: Mapping[Any, Times], arguments: argparse.Namespace) -> list[Row]:
    """A row for each point: `weft/overlapped` is the point's time."""
    points = [point for point in found if isinstance(point, Point)]
    plain = {point.grid: found[point].us for point in points if point.plain}
    gemm, collective, serial = (found[key].us for key in (work.own[0], "collective", "sequential"))
    fastest = min(found[r].us for r in found if isinstance(r, int))
    ideal = ideal_us(gemm, collective, work.iterations)
    made = []
    for point in points:
        us = {"sequential/default": serial, "computation/triton": gemm, "communication/default": collective}
        us["weft/overlapped"] = found[point].us
        if not point.grid:
            us["computation/capped"] = found[point.blocks_per_sm].us
        extra = {
            "tile": list(work.tile),
            "iterations": work.iterations,
            **asdict(point),
            "ideal_us": ideal,
            "normalised": found[point].us / plain[point.grid],
            "bound": ideal_us(fastest, collective, work.iterations) / plain[point.grid],
            "overlap_rate": found[point].rate,
            "hidden": (serial - found[point].us) / (serial - ideal),
        }
        about = partial(row, bench="resource_aware", op=name, case=str(point), dtype="float16", mode="eager")
        made.append(about(us=us, extra=extra, arguments=arguments))
    return made


def ideal_us(gemm_us: float, collective_us: float, iterations: int) -> float:
    """An iteration's time if all but the first GEMM and the last collective run concurrently at full rate."""
    return (gemm_us + collective_us + (iterations - 1) * max(gemm_us, collective_us)) / iterations


def point_us(row: Row) -> float:
    return row.us["weft/overlapped"]


def sentence(row: Row) -> str:
    tile, shares = "x".join(map(str, row.extra["tile"])), row.extra
    return (
        f"{row.op:6} {tile:8} {row.case:27} {point_us(row):8.0f} us  "
        f"TimeRatio {point_us(row) / row.us['sequential/default']:.3f}  normalised {shares['normalised']:.3f}  "
        f"overlap {shares['overlap_rate']:.2f}  hidden {shares['hidden']:.2f}"
    )


def summary(made: Sequence[Row]) -> str:
    """Of each workload, tile and grid: the best point, compared with plain overlap; and over both tiles."""
    lines, groups = [], dict[tuple[object, ...], list[Row]]()
    for one in made:
        for tile in (str(one.extra["tile"]), "tile as the knob"):
            groups.setdefault((one.op, tile, one.extra["grid"] or "a block a tile"), []).append(one)
    for name, of in groups.items():
        best, first = min(of, key=point_us), of[0]
        plain_us = point_us(first) / first.extra["normalised"]
        less = 1 - point_us(best) / plain_us
        lines.append(f"{' '.join(map(str, name))}: plain {plain_us:.0f} us, {less:.1%} less by {best.case}")
        lines.append(f"  {sentence(best)}  bound {1 - best.extra['bound']:.1%} less")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS, modes="eager")
    options.add_argument("--workloads", default=",".join(WORKLOADS), help="with commas (%(default)s)")
    options.add_argument("--grids", default="", help="numbers of blocks that stay and take tiles in turn, with commas")
    options.add_argument("--ctas", default="", help="numbers of NCCL's blocks to try with priority, with commas")
    arguments = options.parse_args()
    if arguments.modes != "eager":
        options.error(f"--modes {arguments.modes!r}: streams that run into each other are measured as they run; use eager")
    if unknown := set(arguments.workloads.split(",")) - set(WORKLOADS):
        options.error(f"--workloads has {sorted(unknown)}; use {', '.join(WORKLOADS)}")
    measure.ALARM_S = ALARM_S
    start()
    grids, counts = ([int(number) for number in text.split(",") if number] for text in (arguments.grids, arguments.ctas))
    groups = {(priority, 0): nccl_group(high_priority=priority) for priority in (False, True)}
    groups |= {(True, ctas): nccl_group(high_priority=True, min_ctas=ctas, max_ctas=ctas) for ctas in counts}
    made = []
    for name in arguments.workloads.split(","):
        for tile in TILES:
            work = together(f"{name} {tile}", partial(Workload, name, tile, groups, grids))
            together(f"{name} {tile}", work.check)
            new = rows_of(name, work, measured(work, arguments.rounds), arguments)
            del work
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
