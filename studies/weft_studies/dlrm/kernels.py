"""This module computes the times of a DLRM's kernels on one node's GPU, in whole nanoseconds, by the model in weft.perf.terms.

Tables are spread evenly over the nodes. If there are more nodes than tables, each table is split by columns:

    tables of a node = tables * cuts / nodes      width of a row there = dim / cuts      cuts = nodes / tables, at least 1

Cuts and widths are rounded up. If they do not divide evenly, all nodes take as long as one that has a column more.

| kernel | memory traffic, for the L lookups of a table by all nodes' samples | at |
| --- | --- | --- |
| lookup | L (row + index), and the writes of pooled rows | the rate of gathering |
| sort | L * sort_bytes. It finds the bags of each row, without gradients | the memory's rate |
| update | L (gradient row + index) + D (2 rows + 2 states), for D different rows | the rate of gathering |
| repack | reads and writes all data that an all-to-all has received or will send | the memory's rate |

Rows are read in whole sectors. Indices are uniform, so D = rows (1 - exp(-L / rows)). The update is that of row-wise Adagrad,
which has one number of state per row. MLPs are GEMMs of weft.perf.terms. A weight gradient may use split-K along the samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.perf.terms import gemm_cost, gemm_us, hbm_us
from weft_studies.dlrm.system import DlrmSystem

SPLITS = (1, 2, 4, 8)
"""The numbers of parts into which a weight gradient's samples may be split. The fastest is used, as in cuBLAS."""


@dataclass(frozen=True, kw_only=True)
class NodeLookups:
    """NodeLookups describes the lookups of a node for all nodes.

    tables: the number of tables of the node, which may be a fraction. width: the elements of a row on this node."""

    nodes: int
    batch: int
    tables: float
    width: int
    pooling: int

    @property
    def lookups(self) -> float:
        """The number of rows that the node reads for the samples of all nodes."""
        return self.batch * self.tables * self.pooling

    def message(self, itemsize: int) -> int:
        """Return the bytes that a node sends to each other node."""
        return math.ceil(self.batch / self.nodes * self.tables * self.width * itemsize)


def require_columns(system: DlrmSystem, nodes: int) -> None:
    """Raise ValueError if there are more nodes than columns of all tables, because each node needs at least one."""
    model = system.model
    columns = model.tables * model.dim
    if nodes > columns:
        raise ValueError(
            f"nodes is {nodes}; model.tables, {model.tables}, of model.dim, {model.dim}, have {columns} columns: use no more"
        )


def bags(system: DlrmSystem, nodes: int) -> NodeLookups:
    """Return the lookups of a node in an iteration on `nodes` nodes."""
    model = system.model
    cuts = max(1, -(-nodes // model.tables))
    tables = model.tables * cuts / nodes
    return NodeLookups(
        nodes=nodes, batch=nodes * system.batch, tables=tables, width=-(-model.dim // cuts), pooling=model.pooling
    )


def lookup_us(system: DlrmSystem, bags: NodeLookups, occupancy: float = 1.0) -> float:
    """Return the time of the lookups without the launch. A gather's rate is proportional to the kernel's occupancy."""
    row = _sectors(system, bags.width * system.itemsize)
    read = bags.lookups * (row + system.model.index_bytes) / system.gpu.gather_share
    return hbm_us(system.machine, read + bags.message(system.itemsize) * bags.nodes) / occupancy


def sort_ns(system: DlrmSystem, bags: NodeLookups) -> int:
    """Return the time to sort a node's indices by row."""
    return _kernel_ns(system, hbm_us(system.machine, bags.lookups * system.model.sort_bytes))


def update_ns(system: DlrmSystem, bags: NodeLookups) -> int:
    """Return the time to sum up each row's gradients and apply them."""
    row, state = _sectors(system, bags.width * system.itemsize), _sectors(system, system.itemsize)
    rows, lookups = system.model.rows, bags.batch * bags.pooling
    different = -rows * math.expm1(-lookups / rows)
    traffic = lookups * (row + system.model.index_bytes) + different * 2 * (row + state)
    return _kernel_ns(system, hbm_us(system.machine, bags.tables * traffic / system.gpu.gather_share))


def repack_ns(system: DlrmSystem, bags: NodeLookups) -> int:
    """Return the time to reorder rows between the order by node, which an all-to-all uses, and the order by sample."""
    return _kernel_ns(system, hbm_us(system.machine, 2 * bags.message(system.itemsize) * bags.nodes))


def layer_ns(system: DlrmSystem) -> int:
    """Return the time of one layer's forward GEMM. The gradient of its input takes as long."""
    width = system.model.width
    return _ns(gemm_us(system.machine, system.batch, width, width, system.dtype))


def weight_gradient_ns(system: DlrmSystem) -> int:
    """Return the time of one layer's weight gradient."""
    machine, width = system.machine, system.model.width

    def split_us(splits: int) -> float:
        cost = gemm_cost(machine, rows=(width,) * splits, n=width, k=-(-system.batch // splits), dtype=system.dtype)
        summed = hbm_us(machine, (splits + 1) * layer_bytes(system)) if splits > 1 else 0.0
        return cost.busy_us + summed

    return _kernel_ns(system, min(map(split_us, SPLITS)))


def interaction_ns(system: DlrmSystem, passes: int) -> int:
    """Return the time of the interaction, forward (passes=1) or backward (passes=2).

    The limit is the rate of the GPU's fastest tile, or that of reading the input."""
    machine, model = system.machine, system.model
    best = max(tile.efficiency for tile in system.gpu.tiles)
    math_us = system.batch * model.interaction_mflop / (machine.tflops(system.dtype) * best)
    traffic = system.batch * model.tables * model.dim * system.itemsize
    return _kernel_ns(system, passes * max(math_us, hbm_us(machine, traffic)))


def step_ns(system: DlrmSystem, layers: int) -> int:
    """Return the time of the optimizer's step of `layers` layers. It reads weights and gradients, and writes weights."""
    return _kernel_ns(system, hbm_us(system.machine, 3 * layers * layer_bytes(system)))


def layer_bytes(system: DlrmSystem) -> int:
    """Return the bytes of one layer's weights. Their gradient has the same size."""
    return system.model.width**2 * system.itemsize


def _sectors(system: DlrmSystem, size: int) -> int:
    return -(-size // system.gpu.burst_bytes) * system.gpu.burst_bytes


def _kernel_ns(system: DlrmSystem, us: float) -> int:
    return _ns(system.launch_us + us)


def _ns(us: float) -> int:
    return round(us * 1e3)
