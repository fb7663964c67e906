"""Kernels of a DLRM on one node's GPU: how long each takes, in whole nanoseconds, by weft.perf.terms's model of the GPU.

Tables are spread evenly over the nodes, whole or, where there are more nodes than tables, cut by columns:

    tables of a node = tables * cuts / nodes      width of a row there = dim / cuts      cuts = nodes / tables, at least 1

Cuts and widths are rounded up: where they do not divide, all nodes do as one that has a column more.

| kernel | memory traffic, for the L lookups of a table by all nodes' samples | at |
| --- | --- | --- |
| lookup | L (row + index), and writes what is pooled | the rate of gathering |
| sort | L * sort_bytes: which bags a row is in; needs no gradient | the memory's rate |
| update | L (gradient row + index) + D (2 rows + 2 states), for D different rows | the rate of gathering |
| repack | reads and writes what an all-to-all brought, or is to take | the memory's rate |

Rows are read in whole sectors. Indices are uniform, so D = rows (1 - exp(-L / rows)). An update is row-wise Adagrad's, whose
state is a number a row. MLPs are GEMMs of weft.perf.terms; a weight's gradient may be split along samples, and summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.perf.terms import gemm_cost, gemm_us, hbm_us
from weft.studies.dlrm.system import DlrmSystem

SPLITS = (1, 2, 4, 8)
"""Of a weight gradient's samples; the fastest is taken, as cuBLAS does."""


@dataclass(frozen=True, kw_only=True)
class NodeLookups:
    """What a node looks up for all nodes. tables: of the node, maybe not whole in number; width: of a row there, elements."""

    nodes: int
    batch: int
    tables: float
    width: int
    pooling: int

    @property
    def lookups(self) -> float:
        """Rows that are read, for the samples of all nodes."""
        return self.batch * self.tables * self.pooling

    def message(self, itemsize: int) -> int:
        """Bytes that a node has for each other one."""
        return math.ceil(self.batch / self.nodes * self.tables * self.width * itemsize)


def require_columns(system: DlrmSystem, nodes: int) -> None:
    """Raises ValueError if there are more nodes than columns, which `bags` would then have more of than the tables."""
    model = system.model
    columns = model.tables * model.dim
    if nodes > columns:
        raise ValueError(
            f"nodes is {nodes}; model.tables, {model.tables}, of model.dim, {model.dim}, have {columns} columns: use no more"
        )


def bags(system: DlrmSystem, nodes: int) -> NodeLookups:
    """What a node looks up in an iteration of `nodes` nodes."""
    model = system.model
    cuts = max(1, -(-nodes // model.tables))
    tables = model.tables * cuts / nodes
    return NodeLookups(
        nodes=nodes, batch=nodes * system.batch, tables=tables, width=-(-model.dim // cuts), pooling=model.pooling
    )


def lookup_us(system: DlrmSystem, bags: NodeLookups, occupancy: float = 1.0) -> float:
    """Look all of them up, launch not included. occupancy: of the kernel; a gather's rate is that of the reads under way."""
    row = _sectors(system, bags.width * system.itemsize)
    read = bags.lookups * (row + system.model.index_bytes) / system.gpu.gather_share
    return hbm_us(system.machine, read + bags.message(system.itemsize) * bags.nodes) / occupancy


def sort_ns(system: DlrmSystem, bags: NodeLookups) -> int:
    """Sort a node's indices by row."""
    return _kernel_ns(system, hbm_us(system.machine, bags.lookups * system.model.sort_bytes))


def update_ns(system: DlrmSystem, bags: NodeLookups) -> int:
    """Sum up each row's gradients, and apply them."""
    row, state = _sectors(system, bags.width * system.itemsize), _sectors(system, system.itemsize)
    rows, lookups = system.model.rows, bags.batch * bags.pooling
    different = -rows * math.expm1(-lookups / rows)
    traffic = lookups * (row + system.model.index_bytes) + different * 2 * (row + state)
    return _kernel_ns(system, hbm_us(system.machine, bags.tables * traffic / system.gpu.gather_share))


def repack_ns(system: DlrmSystem, bags: NodeLookups) -> int:
    """Between the order by node, in which an all-to-all has it, and that by sample."""
    return _kernel_ns(system, hbm_us(system.machine, 2 * bags.message(system.itemsize) * bags.nodes))


def layer_ns(system: DlrmSystem) -> int:
    """One layer's products, forward; or its input's gradient."""
    width = system.model.width
    return _ns(gemm_us(system.machine, system.batch, width, width, system.dtype))


def weight_gradient_ns(system: DlrmSystem) -> int:
    """One layer's weight gradient."""
    machine, width = system.machine, system.model.width

    def split_us(splits: int) -> float:
        cost = gemm_cost(machine, rows=(width,) * splits, n=width, k=-(-system.batch // splits), dtype=system.dtype)
        summed = hbm_us(machine, (splits + 1) * layer_bytes(system)) if splits > 1 else 0.0
        return cost.busy_us + summed

    return _kernel_ns(system, min(map(split_us, SPLITS)))


def interaction_ns(system: DlrmSystem, passes: int) -> int:
    """The interaction forward (passes=1) or backward (2), at the rate of the GPU's fastest tile, or of reading its input."""
    machine, model = system.machine, system.model
    best = max(tile.efficiency for tile in system.gpu.tiles)
    math_us = system.batch * model.interaction_mflop / (machine.tflops(system.dtype) * best)
    traffic = system.batch * model.tables * model.dim * system.itemsize
    return _kernel_ns(system, passes * max(math_us, hbm_us(machine, traffic)))


def step_ns(system: DlrmSystem, layers: int) -> int:
    """The optimizer's step of so many layers: reads weights and gradients, writes weights."""
    return _kernel_ns(system, hbm_us(system.machine, 3 * layers * layer_bytes(system)))


def layer_bytes(system: DlrmSystem) -> int:
    """One layer's weights, or their gradient."""
    return system.model.width**2 * system.itemsize


def _sectors(system: DlrmSystem, size: int) -> int:
    return -(-size // system.gpu.burst_bytes) * system.gpu.burst_bytes


def _kernel_ns(system: DlrmSystem, us: float) -> int:
    return _ns(system.launch_us + us)


def _ns(us: float) -> int:
    return round(us * 1e3)
