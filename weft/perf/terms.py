"""What one kernel or collective costs alone on a Machine, in microseconds. Pure functions; the simulator adds contention.

GEMM. The result is cut into tiles, which run in waves over the SMs:

    tile = 2 * rows * cols * k / (peak of an SM * efficiency) + prologue and epilogue (+ what accumulating adds)
    time = launch + waves * max(tile, HBM time of the whole / waves)

with the tile shape of the machine's list that is fastest for the kernel. Rows that do not fill a tile cost a whole one, and
so does a last wave that does not fill the GPU: these two are the decomposition loss of small GEMMs (FiCCO, arXiv 2512.10236).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.core.concurrent import ConcurrentProblem
from weft.core.machine import AlphaBeta, Machine, Table, Tile
from weft.core.problem import RATE_ITEMSIZE, CollectiveProblem, ColumnProblem, LookupProblem, Op, Problem
from weft.core.schedule import LaneKind, Schedule
from weft.perf.shapes import TileShape, streamed_tile, whole_tiles

COLLECTIVES: dict[Op, str] = {
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_to_all": "all_to_all",
    "all_to_all_matmul": "all_to_all",
    "matmul_all_reduce": "all_reduce",
    "embedding_bag_all_to_all": "all_to_all_columns",
    "matmul_all_to_all_columns": "all_to_all",
    "all_to_all_columns_matmul": "all_to_all_columns",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
}
"""The NCCL collective that an operator's sequential program has."""
CUTS = (1, 2, 4)
"""Into how many parts cuBLAS's GEMMs may cut K, each with float32 sums that are written and read."""


GEMM_WITH_COPY, COPY_WITH_GEMM = "gemm beside copy", "copy beside gemm"
"""Names in the machine's contention."""
LEAST_SPEED = 0.01
"""Of a kernel whose memory copies take whole: it goes on, slowly."""


@dataclass(frozen=True, slots=True)
class GemmCost:
    """One kernel: tiles of each group of rows, on how many SMs, and what a tile takes: math_us on its SM, or memory_us for its
    part of the traffic, if that is longer. halves: how many of the last tiles are cut in two, each half on an SM of its own,
    and takes half_tile of a tile's time."""

    tiles: tuple[int, ...]
    sms: int
    math_us: float
    memory_us: float
    halves: int = 0
    half_tile: float = 1.0

    @property
    def tile_us(self) -> float:
        return max(self.math_us, self.memory_us)

    @property
    def shares(self) -> tuple[float, float]:
        """Of a tile's time, what its SM takes and what its traffic takes: the longer one is 1."""
        return self.math_us / self.tile_us, self.memory_us / self.tile_us

    def slower(self, factor: float) -> GemmCost:
        """With tiles that take `factor` times as long."""
        return replace(self, math_us=self.math_us * factor, memory_us=self.memory_us * factor)

    @property
    def busy_us(self) -> float:
        """Time of all waves, if no tile waits."""
        waves = -(-(sum(self.tiles) - self.halves) // self.sms)
        return waves * self.tile_us + (self.tile_us * self.half_tile if self.halves else 0.0)


def gemm_cost(
    machine: Machine,
    *,
    rows: Sequence[int],
    n: int,
    k: int,
    dtype: str,
    sms: int | None = None,
    accumulate: bool = False,
    out_itemsize: int | None = None,
    flags: bool = False,
    tiles: Sequence[Tile] = (),
    shape: TileShape | None = None,
    late_sweeps: float = 0.0,
) -> GemmCost:
    """The fastest tiling of one kernel over groups of `rows` that share no tile. tiles: what it may use, if not the GPU's.

    One group after the other sweeps over B's columns: where the last-level cache does not hold B, it is read by each group that
    has a wave of its own. dtype: of the operands, as the machine's rates are named. out_itemsize: of the result's elements
    (default: of the operands', 2 at least). sms: how many it may use (default: all). accumulate: out is read and added to.
    flags: it waits, counts or stores to peers. shape: of weft's own kernel, whose row tiles sweep over B in groups of
    `shape.group`. apart: further sweeps of row tiles that started too late to find in the cache what those before them have
    read. Scales of FP8 operands are not counted: of the blockwise recipe they add 3% to the bytes of a, else less.
    """
    sms = machine.gpu.sms if sms is None else sms
    itemsize = RATE_ITEMSIZE[dtype]
    rounded_itemsize = max(itemsize, 2)
    out_itemsize = out_itemsize or rounded_itemsize
    total = sum(rows)
    traffic = itemsize * total * k + out_itemsize * total * n * (2 if accumulate else 1)
    extra = (2 * out_itemsize - rounded_itemsize) if accumulate else 0
    gpu, speed = machine.gpu, machine.gpu.flag_efficiency if flags else 1.0
    splits = [cuts for cuts in CUTS if cuts == 1 or (k >= cuts * gpu.cut_k and not (flags or tiles))]
    tiles = tiles or ((gpu.kernel_tiles or gpu.tiles) if flags else gpu.library_tiles)
    costs = []
    for tile, cuts in itertools.product(tiles, splits):
        counts = tuple(-(-r // tile.rows) * -(-n // tile.cols) * cuts for r in rows)
        halves = sum(counts) - whole_tiles(sum(counts), sms, shape) if shape else 0
        waves = max(1, -(-(sum(counts) - halves) // sms) + (gpu.half_tile if halves else 0))
        sweeps = _sweeps(rows, tile, shape, late_sweeps) if itemsize * k * n > gpu.l2_bytes else 1
        moved = traffic + itemsize * k * n * min(sweeps, waves) + (8 * cuts * total * n if cuts > 1 else 0)
        math_us = _tile_us(machine, tile, -(-k // cuts), dtype, speed, extra)
        costs.append(GemmCost(counts, sms, math_us, hbm_us(machine, moved) / waves, halves, gpu.half_tile))
    return min(costs, key=lambda cost: cost.busy_us)


def kernel_cost(
    machine: Machine,
    *,
    rows: Sequence[int],
    n: int,
    k: int,
    dtype: str,
    shape: TileShape | None,
    out_itemsize: int | None = None,
    sms: int | None = None,
    stored: bool = False,
    late_bytes: Iterable[float] = (),
) -> GemmCost:
    """weft's own kernel over groups of `rows`, whose tiles wait, count or go to peers. shape: its tiles', None on a GPU of
    which only cuBLAS's are known. stored: by hardware. late_bytes: of a, of each group that waits for what brings it.

    What brings a group takes its turn, a copy's fixed cost at least. Where it starts later than those before by more than what
    the last-level cache keeps of B, which streams through it meanwhile, it reads B by itself."""
    gpu, copies = machine.gpu, machine.copies
    cached_us = machine.kernels.l2_share * gpu.l2_bytes / (gpu.hbm_gbps * 1e3)
    late_sweeps = sum(min(1.0, (copies.copy_us + size / (copies.gbps * 1e3)) / cached_us) for size in late_bytes)
    efficiency = gpu.kernel_efficiency(shape.m, shape.n, stored=stored) if shape else 0.0
    tiles = (Tile(rows=shape.m, cols=shape.n, efficiency=efficiency),) if shape else ()
    return gemm_cost(
        machine,
        rows=rows,
        n=n,
        k=k,
        dtype=dtype,
        sms=sms,
        out_itemsize=out_itemsize,
        flags=True,
        tiles=tiles,
        shape=shape,
        late_sweeps=late_sweeps,
    )


def streamed_cost(machine: Machine, problem: Problem, hops: int) -> GemmCost:
    """The product in the kernel that goes on to exchange and sum it (weft.kernels.all_reduce), in so many hops. Its tiles go
    down the rows first: where the last-level cache does not hold a, that is read again for each of the columns of tiles, but
    for those that run at once."""
    gpu, kernels, size = machine.gpu, machine.kernels, problem.world_size
    pieces, width = (1, problem.n) if hops == 1 else (1 << (size - 1).bit_length(), -(-problem.n // size))
    rows, cols = streamed_tile(problem, width, pieces, problem.product_rows(0), gpu.sms)
    full_us = 2 * rows * cols / (machine.tflops(problem.rate_name) * 1e6 / gpu.sms * kernels.streamed)
    tile = Tile(rows=rows, cols=cols, efficiency=kernels.streamed * min(1.0, full_us / kernels.row_us))
    inner = max(problem.inner(rank) for rank in range(size)) if problem.b_sizes else problem.inner(0)
    height, dtype = problem.product_rows(0), problem.rate_name
    cost = gemm_cost(machine, rows=(height,), n=problem.n, k=inner, dtype=dtype, out_itemsize=problem.itemsize, tiles=(tile,))
    row_tiles, a_bytes = -(-height // rows), height * inner * problem.operand_itemsize
    sweeps = math.ceil(sum(cost.tiles) / row_tiles / max(1, cost.sms // row_tiles)) if a_bytes > gpu.l2_bytes else 1
    waves = max(1, -(-sum(cost.tiles) // cost.sms))
    return replace(cost, memory_us=cost.memory_us + hbm_us(machine, (sweeps - 1) * a_bytes) / waves)


def stalled_us(machine: Machine, size: float, tiles: int, sms: int) -> float:
    """By how much a tile takes longer where it stores its part of `size` bytes in so many tiles at a peer, and the tiles of
    `sms` SMs do."""
    gbps = machine.stores.rate(sms) * (machine.stores.tiles or 1.0)
    return machine.stores.stall * size / max(1, tiles) * sms / (gbps * 1e3)


def adding_us(machine: Machine, size: float, tiles: int, sms: int) -> float:
    """What a tile takes to read its part of `size` bytes that are added in so many tiles, while as many of them as fit on the
    SMs do."""
    return hbm_us(machine, size / max(1, tiles) * min(tiles, sms))


def staged_us(machine: Machine, *, rows: int, row_bytes: float, outs: int, out_bytes: float) -> float:
    """What is done around a cuBLAS matmul: its rows of a brought together by one kernel, where they are more than one run;
    runs of the product brought to their places, by one kernel each. What is summed in float32 the matmul adds by itself
    (weft.runtime.products)."""
    launches, moved = (1, 2 * row_bytes) if rows > 1 else (0, 0.0)
    if outs > 1:
        launches, moved = launches + outs, moved + 2 * out_bytes
    return launches * machine.launch_us + hbm_us(machine, moved) if machine.stages else 0.0


def padded_us(machine: Machine, op: str, problem: Problem, whole: float) -> float:
    """What is done around an NCCL collective of `whole` bytes where shards are uneven: an all-gather's are taken apart in
    one pass, a kernel a rank; a product to be scattered is cleared, copied, and its sum copied once more."""
    first, last = (problem.shards[at][1] - problem.shards[at][0] for at in (0, -1))
    if not machine.stages or op not in ("all_gather", "reduce_scatter") or first == last:
        return 0.0
    passes = 2 if op == "all_gather" else 3
    return (len(problem.shards) + 2) * machine.launch_us + hbm_us(machine, passes * whole)


def slowed(machine: Machine, shares: tuple[float, float], gbps: float) -> float:
    """How many times as long a tile takes beside copies that move so much through the GPU's memory, out and in. shares: of its
    time alone that multiplying takes, and that its traffic takes."""
    multiplying, traffic = shares
    slower_gemm = max(1.0, machine.contention.get(GEMM_WITH_COPY, 1.0))
    slower = 1.0 + (slower_gemm - 1.0) * min(1.0, gbps / (2 * machine.copies.several_gbps))
    return max(multiplying * slower, traffic / max(LEAST_SPEED, 1.0 - gbps / machine.gpu.hbm_gbps))


def _sweeps(rows: Sequence[int], tile: Tile, shape: TileShape | None, late_sweeps: float) -> float:
    """How often B is read: by each group of rows, or of row tiles, and by those that come apart."""
    if shape is None:
        return max(1, sum(map(bool, rows)))
    return max(-(-sum(-(-r // tile.rows) for r in rows) // shape.group), 1 + late_sweeps)


def _tile_us(machine: Machine, tile: Tile, k: int, dtype: str, speed: float, extra_itemsize: int) -> float:
    """One tile on one SM. extra_itemsize: bytes an element of the result moves beyond being written once."""
    gpu = machine.gpu
    area = tile.rows * tile.cols
    math_us = 2 * area * k / (machine.tflops(dtype) * 1e6 / gpu.sms * tile.efficiency * speed)
    return math_us + gpu.tile_us + hbm_us(machine, area * extra_itemsize) * gpu.sms


def hbm_us(machine: Machine, traffic: float) -> float:
    """Read or write `traffic` bytes of the GPU's memory."""
    return traffic / (machine.gpu.hbm_gbps * 1e3)


def gemm_us(machine: Machine, m: int, n: int, k: int, dtype: str, out_itemsize: int | None = None) -> float:
    """One cuBLAS GEMM of m x n x k, launch included; 0 if it has no elements. dtype, out_itemsize: as `gemm_cost` has them.

    Raises ValueError if the machine has no rate for `dtype`.
    """
    if not m or not n:
        return 0.0
    cost = gemm_cost(machine, rows=(m,), n=n, k=k, dtype=dtype, out_itemsize=out_itemsize)
    return machine.launch_us + machine.gpu.paced_us(cost.busy_us)


def local_copy_us(machine: Machine, size: int) -> float:
    """Move `size` bytes within one GPU's memory: read and written."""
    return hbm_us(machine, 2 * size)


def across_us(machine: Machine, op: str, shard_bytes: float, nodes: tuple[int, ...]) -> float:
    """An NCCL collective over several nodes, each with this machine's GPUs and an adapter for each of them.

    Assumed: what crosses nodes is spread over all adapters, each byte once a node (all to all: once a rank), and goes on while
    ranks of a node exchange theirs, and pass on what came by the adapters of others: the slower of the two counts, and the
    network's fixed costs. So a node's ranks gather, or scatter, all shards, of which each has brought its part.
    """
    assert machine.network is not None, "the machine of several nodes has a network"
    if op == "all_reduce":
        return sum(across_us(machine, half, shard_bytes, nodes) for half in ("reduce_scatter", "all_gather"))
    most, passed_on = max(nodes), op != "all_to_all"
    crossing = (sum(nodes) - min(nodes)) * shard_bytes / (min(nodes) if passed_on else 1)
    network_us = machine.network.step_us + machine.network.latency_us + crossing / (machine.network.gbps * 1e3)
    within_bytes = shard_bytes * sum(nodes) / most if passed_on else shard_bytes
    return max(network_us, collective_us(machine, op, within_bytes, most))


def collective_us(machine: Machine, op: str, shard_bytes: float, world_size: int, nodes: tuple[int, ...] = ()) -> float:
    """An NCCL collective of `shard_bytes` a rank; 0 on one rank.

    On fewer ranks than the profile's, the part that grows with bytes shrinks: with the number of peers where a rank's
    ports are shared (switch, ring, pcie), not at all on a mesh, where peers have links of their own. Steps shrink alike.
    all_to_all, of rows or of columns: where the machine has no figures for it, those of all_gather, in which as many bytes
    cross each port.
    What a Table has of that number of ranks goes before, and counts in part for those in between. An all_to_all of columns then
    lays what came side by side.
    An all_reduce of a machine that has no figures for it is a reduce_scatter and an all_gather.
    On more ranks than a Table's each further one is a hop more, and none is faster than its bytes cross a rank's links
    (`wire_us`); up to the Table's, what was measured counts.
    nodes: ranks on each, where there are several: see `across_us`. Raises ValueError if the machine has fewer GPUs.
    """
    if op == "all_to_all_columns":
        laid_us = local_copy_us(machine, round(world_size * shard_bytes)) if world_size > 1 else 0.0
        return laid_us + collective_us(machine, "all_to_all", shard_bytes, world_size, nodes)
    if nodes:
        return across_us(machine, op, shard_bytes, nodes) if shard_bytes else 0.0
    machine.require(world_size)
    if world_size == 1 or not shard_bytes:
        return 0.0
    if op == "all_reduce" and op not in machine.collectives:
        return sum(collective_us(machine, half, shard_bytes, world_size) for half in ("reduce_scatter", "all_gather"))
    known = "all_gather" if op == "all_to_all" and op not in machine.collectives else op
    model = machine.collectives[known]  # type: ignore[index]
    if isinstance(model, AlphaBeta):
        fixed = model.fixed_us + (world_size - 1) * model.step_us
        return fixed + (machine.world_size - 1) * shard_bytes / (model.gbps * 1e3) * _share(
            machine, world_size, machine.world_size
        )
    return _from_table(machine, op, model, shard_bytes, world_size)


def wire_us(machine: Machine, op: str, shard_bytes: float, world_size: int) -> float:
    """The least that a collective of one host takes: every other rank's shard comes in by a rank's links, at their rate. A mesh
    has a link for each, a ring two for all; all to all the shards of others pass through a ring's, too.

    >>> from weft.machine import load
    >>> wire_us(load("h200x8"), "all_gather", 390_000, 8), wire_us(load("mi300x8"), "all_gather", 48_000, 8)
    (7.0, 1.0)
    """
    return machine.links.wire_us(op, shard_bytes, world_size)


def _from_table(machine: Machine, op: str, table: Table, shard_bytes: float, world_size: int) -> float:
    """Scaled to so many ranks, and corrected by what was measured on them, or on the numbers around: by the ratio at the sizes
    around. On more than were measured latency grows by a hop for each, and the links bound it."""
    fixed = min(us for _, us in table.points)
    scaled = fixed + (_interpolate(table, shard_bytes) - fixed) * _share(machine, world_size, table.world_size)
    if world_size > table.world_size:
        hops_us = (world_size - table.world_size) * machine.links.latency_us
        return max(scaled + hops_us, wire_us(machine, op, shard_bytes, world_size))
    if not table.also or world_size == table.world_size:
        return scaled
    ratios, bare = {table.world_size: 0.0}, replace(table, also=())
    for other in table.also:
        bare_us = [_from_table(machine, op, bare, size, other.world_size) for size, _ in other.points]
        logs = [math.log(us / bare) for (_, us), bare in zip(other.points, bare_us, strict=True)]
        ratios[other.world_size] = np.interp(math.log(shard_bytes), [math.log(size) for size, _ in other.points], logs)
    return scaled * math.exp(np.interp(world_size, sorted(ratios), [ratios[ranks] for ranks in sorted(ratios)]))


def _share(machine: Machine, world_size: int, measured: int) -> float:
    """Time for the bytes among `world_size` ranks, relative to `measured` ranks."""
    return 1.0 if machine.links.topology == "mesh" else (world_size - 1) / max(1, measured - 1)


def _interpolate(table: Table, shard_bytes: float) -> float:
    """Log-log between the points; the smallest point's time below the table, the largest one's rate above."""
    sizes, times = zip(*table.points, strict=True)
    if shard_bytes >= sizes[-1]:
        return float(times[-1] * shard_bytes / sizes[-1])
    return float(math.exp(np.interp(math.log(shard_bytes), np.log(sizes), np.log(times))))


def gathered_bytes(problem: Problem, elements: int, machine: Machine) -> float:
    """What gathering so many pooled elements, of K rows each, takes of the memory: in bytes of a copy."""
    return elements * problem.k * problem.itemsize * _burst_share(problem, machine.gpu.burst_bytes) / machine.gpu.gather_share


def _burst_share(problem: Problem, burst_bytes: int) -> float:
    """Bytes that memory delivers for a row of a table, over the row's, on average: a row that does not start at a multiple of a
    burst takes its neighbours' bytes along."""
    dims = [dim for rank in problem.dims for dim in rank] if isinstance(problem, LookupProblem) else []
    rows = [dim * problem.itemsize for dim in dims]
    return sum(row + burst_bytes - math.gcd(row, burst_bytes) for row in rows) / (sum(rows) or 1) if rows else 1.0


def whole_gemm_us(machine: Machine, problem: Problem) -> float:
    """The slowest rank's computation alone: its matmul as one cuBLAS GEMM, its lookup, or what the problem says of a user's; of
    a collective alone nothing."""
    if isinstance(problem, CollectiveProblem):
        return 0.0
    if isinstance(problem, ConcurrentProblem):
        return problem.compute_us or 0.0
    if isinstance(problem, LookupProblem):
        elements = problem.m * max(problem.b_sizes)
        busy = hbm_us(machine, gathered_bytes(problem, elements, machine) + elements * problem.itemsize)
        return machine.launch_us + busy if elements else 0.0
    ranks = range(problem.world_size)
    sizes = {(problem.product_rows(rank), problem.columns(rank), problem.inner(rank)) for rank in ranks}
    if isinstance(problem, ColumnProblem) and problem.sends_columns:
        sizes = {(problem.m, problem.n, problem.k)}  # before columns for each rank are laid together
    return max(gemm_us(machine, m, n, k, problem.rate_name, problem.itemsize) for m, n, k in sizes)


def alone_us(problem: ConcurrentProblem, machine: Machine) -> tuple[float, ...]:
    """What each of NCCL's collectives takes alone: as the machine has it, all together as was measured if that was done.
    Raises ValueError for one that is not described, where nothing was measured."""
    found = [collective_us(machine, one.op, one.shard_bytes, one.world_size, one.nodes) for _, one in problem.known]
    measured, count = problem.communication_us, len(problem.collectives)
    if measured is None:
        if len(found) < count:
            raise ValueError(f"communication_us is None; {problem} has communication that only a measurement can tell")
        return tuple(found)
    if len(found) < count or not sum(found):
        return (measured / count,) * count
    return tuple(us * measured / sum(found) for us in found)


def whole_collective_us(machine: Machine, problem: Problem) -> float:
    """The problem's collectives alone, by NCCL; where columns have come, they are not laid side by side yet."""
    if isinstance(problem, ConcurrentProblem):
        return sum(alone_us(problem, machine))
    whole = -(-problem.m * problem.n * problem.itemsize // problem.world_size)
    shard_bytes = whole if problem.op == "matmul_all_reduce" else problem.shard_bytes
    op = COLLECTIVES[problem.op].removesuffix("_columns")
    return collective_us(machine, op, shard_bytes, problem.world_size, problem.nodes)


def taken_sms(machine: Machine, kind: LaneKind) -> int:
    """What a lane of this kind keeps."""
    return {"blocks": machine.stores.sms, "network": machine.network.sms if machine.network else 0}.get(kind, 0)


def free_sms(schedule: Schedule, machine: Machine, rank: int) -> int:
    """What all lanes of a rank leave. Raises ValueError if that is nothing."""
    kinds = [lane.kind for lane in schedule.ranks[rank]]
    left = machine.gpu.sms - sum(taken_sms(machine, kind) for kind in kinds)
    if left <= 0:
        what = ", ".join(f"{kind}: {taken_sms(machine, kind)}" for kind in kinds if taken_sms(machine, kind))
        raise ValueError(
            f"lanes of rank {rank} of schedule {schedule.name} take all SMs of {machine.name} ({what} of gpu.sms, "
            f"{machine.gpu.sms}); lower stores.sms or network.sms"
        )
    return left


def warm(machine: Machine, problem: Problem) -> Machine:
    """`machine` as calls that repeat on the same memory find it, such as a benchmark's: where one rank's operands and result
    fit into the last-level cache, memory is as fast as the cache. In a model other weights come between."""
    gpu = machine.gpu
    if gpu.l2_gbps is None or isinstance(problem, (CollectiveProblem, LookupProblem)):
        return machine
    touched = max(_touched_bytes(problem, rank) for rank in range(problem.world_size))
    return replace(machine, gpu=replace(gpu, hbm_gbps=gpu.l2_gbps)) if touched <= gpu.l2_bytes else machine


def _touched_bytes(problem: Problem, rank: int) -> int:
    rows, cols, inner = problem.product_rows(rank), problem.columns(rank), problem.inner(rank)
    return problem.operand_itemsize * (rows * inner + inner * cols) + problem.itemsize * rows * cols
