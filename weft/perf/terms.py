"""The costs of a single kernel or collective on a Machine, in microseconds. Pure functions; the simulator adds contention.

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
from weft.core.hardware import AlphaBeta, Table, Tile
from weft.core.machine import Machine
from weft.core.problem import RATE_ITEMSIZE, CollectiveProblem, ColumnProblem, LookupProblem, Op, Problem, RaggedProblem
from weft.core.schedule import LaneKind, Schedule
from weft.perf.shapes import TileShape, streamed_tile, whole_tiles

COLLECTIVES: dict[Op, str] = {
    "all_gather_matmul": "all_gather",
    "matmul_reduce_scatter": "reduce_scatter",
    "matmul_all_to_all": "all_to_all",
    "all_to_all_matmul": "all_to_all",
    "ragged_matmul_all_to_all": "all_to_all",
    "ragged_all_to_all_matmul": "all_to_all",
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
"""The numbers of parts into which cuBLAS may cut K. Each part writes float32 sums, which are read again."""


GEMM_WITH_COPY, COPY_WITH_GEMM = "gemm during copy", "copy during gemm"
"""Names in the machine's contention."""
LEAST_SPEED = 0.01
"""The lowest speed of a kernel, reached if copies use the whole memory rate."""


@dataclass(frozen=True, slots=True)
class GemmCost:
    """GemmCost is the cost of one kernel.

    tiles: the tiles of each group of rows.
    sms: the number of SMs.
    math_us, memory_us: the time of a tile on its SM, and for its part of the memory traffic. The longer one counts.
    halves: the number of last tiles that are cut in two. Each half has its own SM and takes half_tile of a tile's time.
    speed: the speed of its tiles relative to cuBLAS."""

    tiles: tuple[int, ...]
    sms: int
    math_us: float
    memory_us: float
    halves: int = 0
    half_tile: float = 1.0
    speed: float = 1.0

    @property
    def tile_us(self) -> float:
        return max(self.math_us, self.memory_us)

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of a tile's time that its SM and its traffic take. The longer one is 1."""
        return self.math_us / self.tile_us, self.memory_us / self.tile_us

    def slower(self, factor: float) -> GemmCost:
        """Return the cost with tiles that take `factor` times as long."""
        return replace(self, math_us=self.math_us * factor, memory_us=self.memory_us * factor)

    @property
    def busy_us(self) -> float:
        """The time of all waves if no tile waits."""
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
    """Return the cost of the fastest tiling of one kernel over groups of `rows` that share no tile.

    The groups sweep over B's columns one after the other. If the last-level cache does not hold B, each group with a wave of
    its own reads B again. The scales of FP8 operands are not counted: they add at most 3% to the bytes of a.

    dtype: the operands' dtype, as the machine's rates are named.
    sms: the number of SMs; the default is all.
    accumulate: the kernel reads out and adds to it.
    out_itemsize: the bytes of an element of the result; the default is the operands', at least 2.
    flags: the kernel waits, counts or stores to peers.
    tiles: the tiles to choose from; the default is the GPU's.
    shape: of weft's own kernel, whose row tiles sweep over B in groups of `shape.group`.
    late_sweeps: further sweeps by row tiles that start too late to find B in the cache.
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
        costs.append(GemmCost(counts, sms, math_us, hbm_us(machine, moved) / waves, halves, gpu.half_tile, speed))
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
    """Return the cost of weft's own kernel over groups of `rows`, whose tiles wait, count or are stored at peers.

    Groups arrive one after the other, at intervals of at least the fixed cost of a copy. B streams through the last-level cache
    meanwhile, so a group that starts late reads the part of B again that the cache no longer holds.

    shape: the shape of its tiles; None on a GPU for which only cuBLAS's tiles are known.
    stored: the hardware (TMA) stores the tiles.
    late_bytes: the bytes of a in each group that waits for its arrival."""
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
    """Return the cost of the matmul in the kernel that also exchanges and sums the product (weft.kernels.all_reduce).

    Its tiles go down the rows first. If the last-level cache does not hold a, each column of tiles reads a again; columns that
    run at the same time share one read."""
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
    memory_us = cost.memory_us + hbm_us(machine, (sweeps - 1) * a_bytes) / waves
    return replace(cost, memory_us=memory_us, speed=kernels.streamed)


def stalled_us(machine: Machine, size: float, tiles: int, sms: int) -> float:
    """Return the delay of a tile that stores its part of `size` bytes at a peer, while the tiles of `sms` SMs do the same.

    tiles: the number of tiles that have the `size` bytes together."""
    gbps = machine.stores.rate(sms) * (machine.stores.tiles or 1.0)
    return machine.stores.stall * size / max(1, tiles) * sms / (gbps * 1e3)


def adding_us(machine: Machine, size: float, tiles: int, sms: int) -> float:
    """Return the time of a tile to read its part of `size` bytes that `tiles` tiles add, while the SMs are full of them."""
    return hbm_us(machine, size / max(1, tiles) * min(tiles, sms))


def staged_us(machine: Machine, *, rows: int, row_bytes: float, outs: int, out_bytes: float) -> float:
    """Return the time of the copies around a cuBLAS matmul.

    If the rows of a are more than one run, one kernel copies them into one matrix. If the product has several runs, one kernel
    for each copies it to its place. The matmul itself adds float32 sums (weft.runtime.products)."""
    launches, moved = (1, 2 * row_bytes) if rows > 1 else (0, 0.0)
    if outs > 1:
        launches, moved = launches + outs, moved + 2 * out_bytes
    return launches * machine.launch_us + hbm_us(machine, moved) if machine.stages else 0.0


def padded_us(machine: Machine, op: str, problem: Problem, whole: float) -> float:
    """Return the time of the copies around an NCCL collective of `whole` bytes with uneven shards.

    After an all-gather, one kernel for each rank copies its shard: one pass. Before a reduce-scatter, the padded product is
    cleared and copied, and its sum is copied afterwards."""
    first, last = (problem.shards[at][1] - problem.shards[at][0] for at in (0, -1))
    if not machine.stages or op not in ("all_gather", "reduce_scatter") or first == last:
        return 0.0
    passes = 2 if op == "all_gather" else 3
    return (len(problem.shards) + 2) * machine.launch_us + hbm_us(machine, passes * whole)


def slowed(machine: Machine, shares: tuple[float, float], gbps: float) -> float:
    """Return the slowdown of a tile by copies that move `gbps` through the GPU's memory, out and in.

    shares: the parts of its time alone that multiplications and traffic take."""
    multiplying, traffic = shares
    slower_gemm = max(1.0, machine.contention.get(GEMM_WITH_COPY, 1.0))
    slower = 1.0 + (slower_gemm - 1.0) * min(1.0, gbps / (2 * machine.copies.several_gbps))
    return max(multiplying * slower, traffic / max(LEAST_SPEED, 1.0 - gbps / machine.gpu.hbm_gbps))


def _sweeps(rows: Sequence[int], tile: Tile, shape: TileShape | None, late_sweeps: float) -> float:
    """Return the number of times that B is read: once by each group of rows or row tiles, and by each late sweep."""
    if shape is None:
        return max(1, sum(map(bool, rows)))
    return max(-(-sum(-(-r // tile.rows) for r in rows) // shape.group), 1 + late_sweeps)


def _tile_us(machine: Machine, tile: Tile, k: int, dtype: str, speed: float, extra_itemsize: int) -> float:
    """Return the time of one tile on one SM. extra_itemsize: bytes moved per element of the result beyond one write."""
    gpu = machine.gpu
    area = tile.rows * tile.cols
    math_us = 2 * area * k / (machine.tflops(dtype) * 1e6 / gpu.sms * tile.efficiency * speed)
    return math_us + gpu.tile_us + hbm_us(machine, area * extra_itemsize) * gpu.sms


def hbm_us(machine: Machine, traffic: float) -> float:
    """Return the time to read or write `traffic` bytes of the GPU's memory."""
    return traffic / (machine.gpu.hbm_gbps * 1e3)


def gemm_us(machine: Machine, m: int, n: int, k: int, dtype: str, out_itemsize: int | None = None) -> float:
    """Return the time of one cuBLAS GEMM of m x n x k with its launch; 0 if it has no elements.

    dtype, out_itemsize: as in `gemm_cost`.

    Raises ValueError if the machine has no rate for `dtype`.
    """
    if not m or not n:
        return 0.0
    cost = gemm_cost(machine, rows=(m,), n=n, k=k, dtype=dtype, out_itemsize=out_itemsize)
    return machine.launch_us + machine.gpu.paced_us(cost.busy_us)


def local_copy_us(machine: Machine, size: int) -> float:
    """Return the time to copy `size` bytes within one GPU's memory."""
    return hbm_us(machine, 2 * size)


def across_us(machine: Machine, op: str, shard_bytes: float, nodes: tuple[int, ...]) -> float:
    """Return the time of an NCCL collective over several nodes, each with this machine's GPUs and one adapter for each GPU.

    Assumption: all adapters share the traffic between nodes, and each byte enters a node once (in an all-to-all, once for each
    rank). The exchange inside a node runs at the same time. The slower of the two counts, plus the network's fixed costs.
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
    """Return the time of an NCCL collective of `shard_bytes` per rank; 0 on one rank.

    - A measured table for this number of ranks is used as it is. Between measured numbers the ratio is interpolated.
    - With fewer ranks than the profile's, the time per byte shrinks in proportion to the number of peers if a rank's ports are
      shared (switch, ring, pcie). On a mesh it stays, because each peer has its own link.
    - With more ranks than a table's, each further rank adds a hop. No collective is faster than its bytes on a rank's links
      (`wire_us`).
    - A machine without numbers for all_to_all uses those of all_gather, with the same bytes per port. Without numbers for
      all_reduce it adds a reduce_scatter and an all_gather.
    - An all_to_all of columns also copies the received columns into one matrix.

    nodes: the number of ranks on each of several nodes; see `across_us`. Raises ValueError if the machine has fewer GPUs.
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
    """Return the least time of a collective on one host: a rank receives every other rank's shard at the rate of its links.

    A mesh has a link for each peer, a ring two for all. In an all-to-all, a ring's links also carry other ranks' shards.

    >>> from weft.machine import load
    >>> wire_us(load("h200x8"), "all_gather", 390_000, 8), wire_us(load("mi300x8"), "all_gather", 48_000, 8)
    (7.0, 1.0)
    """
    return machine.links.wire_us(op, shard_bytes, world_size)


def _from_table(machine: Machine, op: str, table: Table, shard_bytes: float, world_size: int) -> float:
    """Return a table's time, scaled to `world_size` ranks and corrected by the tables measured for other numbers of ranks."""
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
    """Return the time per byte among `world_size` ranks, relative to `measured` ranks."""
    return 1.0 if machine.links.topology == "mesh" else (world_size - 1) / max(1, measured - 1)


def _interpolate(table: Table, shard_bytes: float) -> float:
    """Interpolate log-log between points. Below the table the smallest point's time counts, above it the largest one's rate."""
    sizes, times = zip(*table.points, strict=True)
    if shard_bytes >= sizes[-1]:
        return float(times[-1] * shard_bytes / sizes[-1])
    return float(math.exp(np.interp(math.log(shard_bytes), np.log(sizes), np.log(times))))


def gathered_bytes(problem: Problem, elements: int, machine: Machine) -> float:
    """Return the memory traffic of a lookup of pooled `elements` of K rows each, in equivalent bytes of a copy."""
    return elements * problem.k * problem.itemsize * _burst_share(problem, machine.gpu.burst_bytes) / machine.gpu.gather_share


def _burst_share(problem: Problem, burst_bytes: int) -> float:
    """Return the bytes that memory delivers per byte of a table's row, on average. Memory delivers whole bursts."""
    dims = [dim for rank in problem.dims for dim in rank] if isinstance(problem, LookupProblem) else []
    rows = [dim * problem.itemsize for dim in dims]
    return sum(row + burst_bytes - math.gcd(row, burst_bytes) for row in rows) / (sum(rows) or 1) if rows else 1.0


def whole_gemm_us(machine: Machine, problem: Problem) -> float:
    """Return the time of the slowest rank's computation alone: its matmul as one cuBLAS GEMM, its lookup, or the user's
    compute_us. A collective has none. Experts are one GEMM of all rows that a rank sends. The weights' gradients, if the
    problem has them, are a GEMM for each of its products."""
    if isinstance(problem, CollectiveProblem):
        return 0.0
    if isinstance(problem, ConcurrentProblem):
        return problem.compute_us or 0.0
    if isinstance(problem, LookupProblem):
        elements = problem.m * max(problem.b_sizes)
        busy = hbm_us(machine, gathered_bytes(problem, elements, machine) + elements * problem.itemsize)
        return machine.launch_us + busy if elements else 0.0
    if isinstance(problem, RaggedProblem):
        rows, columns = min(problem.capacity, problem.m), problem.n * (2 if problem.gated else 1)
        return gemm_us(machine, rows, columns, problem.k, problem.rate_name, problem.itemsize)
    ranks = range(problem.world_size)
    sizes = {(problem.product_rows(rank), problem.columns(rank), problem.inner(rank)) for rank in ranks}
    if isinstance(problem, ColumnProblem) and problem.sends_columns:
        sizes = {(problem.m, problem.n, problem.k)}  # before columns for each rank are laid together
    whole_us = max(gemm_us(machine, m, n, k, problem.rate_name, problem.itemsize) for m, n, k in sizes)
    if not problem.weight_gradients:
        return whole_us
    products = problem.products
    return whole_us + products * max(gemm_us(machine, k // products, n, m, problem.rate_name) for m, n, k in sizes)


def alone_us(problem: ConcurrentProblem, machine: Machine) -> tuple[float, ...]:
    """Return the time of each NCCL collective alone, from the profile. If their total was measured, they are scaled to it.

    Raises ValueError if a collective has no description and the total was not measured."""
    found = [collective_us(machine, one.op, one.shard_bytes, one.world_size, one.nodes) for _, one in problem.known]
    measured, count = problem.communication_us, len(problem.collectives)
    if measured is None:
        if len(found) < count:
            raise ValueError(f"communication_us is None; {problem} has communication whose time only a measurement can give")
        return tuple(found)
    if len(found) < count or not sum(found):
        return (measured / count,) * count
    return tuple(us * measured / sum(found) for us in found)


def whole_collective_us(machine: Machine, problem: Problem) -> float:
    """Return the time of the problem's NCCL collectives alone, without copies of received columns. The gradients of weights
    need an all-gather if ranks have their shards of x."""
    if isinstance(problem, ConcurrentProblem):
        return sum(alone_us(problem, machine))
    whole = -(-problem.m * problem.n * problem.itemsize // problem.world_size)
    shard_bytes = whole if problem.op == "matmul_all_reduce" else problem.shard_bytes
    op = COLLECTIVES[problem.op].removesuffix("_columns")
    ops = (op, "all_gather") if problem.weight_gradients == "shard" else (op,)
    return sum(collective_us(machine, each, shard_bytes, problem.world_size, problem.nodes) for each in ops)


def taken_sms(machine: Machine, kind: LaneKind) -> int:
    """Return the number of SMs that a lane of this kind occupies."""
    return {"blocks": machine.stores.sms, "network": machine.network.sms if machine.network else 0}.get(kind, 0)


def free_sms(schedule: Schedule, machine: Machine, rank: int) -> int:
    """Return the number of SMs that the lanes of a rank leave free. Raises ValueError if they leave none."""
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
    """Return `machine` as a benchmark sees it that repeats a call on the same memory.

    If one rank's operands and result fit into the last-level cache, memory is as fast as that cache. In a model, other weights
    replace them between calls."""
    gpu = machine.gpu
    if gpu.l2_gbps is None or isinstance(problem, (CollectiveProblem, LookupProblem)):
        return machine
    touched = max(_touched_bytes(problem, rank) for rank in range(problem.world_size))
    return replace(machine, gpu=replace(gpu, hbm_gbps=gpu.l2_gbps)) if touched <= gpu.l2_bytes else machine


def _touched_bytes(problem: Problem, rank: int) -> int:
    rows, cols, inner = problem.product_rows(rank), problem.columns(rank), problem.inner(rank)
    return problem.operand_itemsize * (rows * inner + inner * cols) + problem.itemsize * rows * cols
