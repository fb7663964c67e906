"""What a schedule's own pieces take, in us, from sizes alone: its matmuls one after the other, and its copies.

Contract: pure arithmetic on static sizes and a machine's profile, quick enough to be done for every schedule at each choice.
A matmul is as `weft.sim.cost.gemm_cost` has it, with fewer shapes of tiles (`Gpu.shapes`): whole waves of tiles of the fastest
shape, or its traffic, if that takes longer; and a launch. With n ranks and c chunks a shard, a schedule multiplies

    shard_p2p, hetero_unfused_1d    the own shard, and c (n - 1) pieces of 1/c of a shard; of shard_p2p c is 1
    hetero_fused_1d                 the own shard, and c times n - 1 such pieces together
    uniform_fused_1d                c times n such pieces together
    uniform_fused_2d                c times all rows: by a slice of K, which is added to float32 sums, where rows are gathered;
                                    else by a slice of the columns

and copies c (n - 1) pieces. Any other schedule has one matmul, and sends at the links' rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from weft.machine import Machine
from weft.problem import Problem

CUTS = (2, 4)
"""Into how many parts vendors' matmuls may cut K, each with float32 sums that are written and read."""
LEAST_CUT = 8192
"""No part of K is shorter: 136 x 6144 x 16384 took 60 us on an H200, as if cut in two, 256 x 4608 x 9216 took 50, whole."""
_FLOAT32 = 4


CUT = frozenset(("shard_p2p", "hetero_unfused_1d", "hetero_fused_1d", "uniform_fused_1d", "uniform_fused_2d"))
"""Families whose copies bring or take pieces of their matmuls."""


class Pieces:
    """A problem's matmul of rows x inner by inner x cols on the rank with most work, and how schedules cut it. links_us: what
    the links take for what a rank sends. us: what one matmul of so many rows takes."""

    __slots__ = ("_sent", "_shard", "cols", "inner", "links_us", "machine", "problem", "rows", "us", "whole_us")

    def __init__(self, problem: Problem, machine: Machine, *, rows: int, cols: int, inner: int, links_us: float) -> None:
        self.problem, self.machine, self.links_us = problem, machine, links_us
        self.rows, self.cols, self.inner = rows, cols, inner
        self._shard = -(-rows // problem.world_size)
        self._sent: dict[int, float] = {}
        self.us = _vendor_us(problem, machine, cols, inner, sums=False)
        self.whole_us = self.us(rows)

    def halves(self, name: str, chunks: int) -> tuple[float, float]:
        """The longer and the shorter one of all matmuls and all copies of a schedule of CUT."""
        matmul_us, sent_us = self._matmul_us(name, chunks), self._sent.get(chunks)
        if sent_us is None:
            sent_us = self._sent[chunks] = self._sent_us(chunks)
        return (matmul_us, sent_us) if matmul_us > sent_us else (sent_us, matmul_us)

    def _matmul_us(self, name: str, chunks: int) -> float:
        if name == "uniform_fused_2d":
            return self._columns_us(chunks)
        us, size, shard = self.us, self.problem.world_size, self._shard
        chunk = -(-shard // chunks)
        if name == "uniform_fused_1d":
            return chunks * us(size * chunk)
        if name == "hetero_fused_1d":
            return us(shard) + chunks * us((size - 1) * chunk)
        return us(shard) + chunks * (size - 1) * us(chunk)

    def _columns_us(self, chunks: int) -> float:
        sums = self.problem.op == "all_gather_matmul"
        cols, inner = (self.cols, -(-self.inner // chunks)) if sums else (-(-self.cols // chunks), self.inner)
        return chunks * _vendor_us(self.problem, self.machine, cols, inner, sums=sums)(self.rows)

    def _sent_us(self, chunks: int) -> float:
        copies = self.machine.copies
        if self.machine.fans_out:
            return self.links_us + chunks * copies.copy_us
        turned = copies.gbps / copies.turned_gbps(chunks)
        return self.links_us * turned + chunks * (self.problem.world_size - 1) * copies.copy_us


def _vendor_us(problem: Problem, machine: Machine, cols: int, inner: int, *, sums: bool) -> Callable[[int], float]:
    """Of a vendor's matmul by b of inner x cols: what some rows of a take, with a launch. sums: it adds to float32 sums.

    Ways are whole, and with K in two parts or four; sums are not cut again. Of each shape of tiles the rows, and less than
    zero, so that quotients round up, how many lie beside each other and us of a wave; and what a row's traffic takes, which
    alone rules some ways out.
    """
    gpu, itemsize, launch_us = machine.gpu, problem.itemsize, machine.launch_us
    byte_us, fixed_us, less_sms, less_cols = 1 / (gpu.hbm_gbps * 1e3), gpu.tile_us, -gpu.sms, -cols
    less_us = 2 * less_sms * inner / (gpu.tflops[problem.dtype] * 1e6)
    b_us = inner * cols * itemsize * byte_us
    row_us = (inner * itemsize + cols * (2 * _FLOAT32 if sums else itemsize)) * byte_us
    if sums:
        extra_us = (2 * _FLOAT32 - itemsize) * byte_us * less_sms
        tiles = [
            (high, less_cols // wide, slow * less_us - fixed_us + high * wide * extra_us) for high, wide, slow in gpu.shapes
        ]
    else:
        tiles = [(high, less_cols // wide, slow * less_us - fixed_us) for high, wide, slow in gpu.shapes]
    ways = [(tiles, row_us)]
    for cuts in () if sums else CUTS:
        if inner < cuts * LEAST_CUT:
            break
        part_us = less_us / cuts
        tiles = [(high, less_cols // wide * cuts, slow * part_us - fixed_us) for high, wide, slow in gpu.shapes]
        ways.append((tiles, row_us + cuts * 2 * _FLOAT32 * cols * byte_us))
    known: dict[int, float] = {}

    def us(rows: int) -> float:
        if rows in known:
            return known[rows]
        less_rows, least_us = -rows, math.inf
        for tiles, row_us in ways:
            busy_us, waves_us = rows * row_us + b_us, least_us
            if busy_us >= least_us:
                break
            for high, across, wave_us in tiles:
                took_us = less_rows // high * across // less_sms * wave_us
                if took_us < waves_us:
                    waves_us = took_us
            least_us = waves_us if waves_us > busy_us else busy_us
        known[rows] = least_us = launch_us + least_us
        return least_us

    return us
