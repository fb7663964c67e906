"""What a schedule's own pieces take, in us, from sizes alone: its matmuls one after the other, and its copies.

Contract: pure arithmetic on static sizes and a machine's profile, quick enough to be done for every schedule at each choice.
A matmul is as `weft.perf.terms.gemm_cost` has it, with fewer shapes of tiles (`Gpu.shapes`): waves of tiles of the fastest
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

from weft.core.machine import Machine
from weft.core.problem import Problem

CUTS = (2, 4)
"""Into how many parts vendors' matmuls may cut K, each with float32 sums that are written and read."""
_FLOAT32 = 4


CUT = frozenset(("shard_p2p", "hetero_unfused_1d", "hetero_fused_1d", "uniform_fused_1d", "uniform_fused_2d"))
"""Families whose copies bring or take pieces of their matmuls."""


class Pieces:
    """A problem's matmul of rows x inner by inner x cols on the rank with most work, and how schedules cut it. links_us: what
    the links take for what a rank sends. us: what one matmul of so many rows takes; whole_us, shard_us: of all, and of a
    shard's."""

    def __init__(self, problem: Problem, machine: Machine, *, rows: int, cols: int, inner: int, links_us: float) -> None:
        self.problem, self.machine, self.links_us = problem, machine, links_us
        self.rows, self.cols, self.inner = rows, cols, inner
        self.size = problem.world_size
        self._shard = -(-rows // self.size)
        self._sent: dict[int, float] = {}
        self.us = _vendor_us(problem, machine, cols, inner)
        self.whole_us, self.shard_us = self.us(rows), self.us(self._shard)

    def halves(self, name: str, chunks: int) -> tuple[float, float]:
        """The longer and the shorter one of all matmuls and all copies of a schedule of CUT."""
        size, us, chunk = self.size, self.us, -(-self._shard // chunks)
        if name == "uniform_fused_1d":
            matmul_us = chunks * us(size * chunk)
        elif name == "hetero_fused_1d":
            matmul_us = self.shard_us + chunks * us((size - 1) * chunk)
        elif name == "uniform_fused_2d":
            matmul_us = self._columns_us(chunks)
        else:
            matmul_us = self.shard_us + chunks * (size - 1) * (us(chunk) if chunks > 1 else self.shard_us)
        sent_us = self._sent.get(chunks)
        if sent_us is None:
            sent_us = self._sent[chunks] = self._sent_us(chunks)
        return (matmul_us, sent_us) if matmul_us > sent_us else (sent_us, matmul_us)

    def _columns_us(self, chunks: int) -> float:
        problem, machine = self.problem, self.machine
        if problem.op == "all_gather_matmul":
            return chunks * _sums_us(problem, machine, self.rows, self.cols, -(-self.inner // chunks))
        return chunks * _vendor_us(problem, machine, -(-self.cols // chunks), self.inner)(self.rows)

    def _sent_us(self, chunks: int) -> float:
        copies = self.machine.copies
        if self.machine.fans_out:
            return self.links_us + chunks * copies.copy_us
        turned = copies.gbps / copies.turned_gbps(chunks)
        return self.links_us * turned + chunks * (self.size - 1) * copies.copy_us


def _sums_us(problem: Problem, machine: Machine, rows: int, cols: int, inner: int) -> float:
    """A vendor's matmul that adds to float32 sums, with a launch. K is not cut again."""
    gpu, itemsize = machine.gpu, problem.itemsize
    byte_us, fixed_us, less_sms = 1 / (gpu.hbm_gbps * 1e3), gpu.tile_us, -float(gpu.sms)
    less_us = 2.0 * less_sms * inner / (gpu.tflops[problem.dtype] * 1e6)
    extra_us = less_sms * (2 * _FLOAT32 - itemsize) * byte_us
    busy_us = ((rows + cols) * inner * itemsize + rows * cols * 2 * _FLOAT32) * byte_us
    less_rows, less_cols, waves_us = -float(rows), -float(cols), math.inf
    for high, group in gpu.shapes:
        down = less_rows // high
        for wide, slow in group:
            took_us = less_cols // wide * down // less_sms * (slow * less_us - fixed_us + high * wide * extra_us)
            if took_us < waves_us:
                waves_us = took_us
    return machine.launch_us + (waves_us if waves_us > busy_us else busy_us)


def _vendor_us(problem: Problem, machine: Machine, cols: int, inner: int) -> Callable[[int], float]:
    """Of a vendor's matmul by b of inner x cols: what some rows of a take, with a launch; whole, or K in two parts or four.

    By the tiles' rows: how many lie beside each other, and us of a wave, by each way; all of them less than zero, so that
    quotients round up, and all float, which Python divides and multiplies faster.
    """
    gpu, itemsize = machine.gpu, problem.itemsize
    byte_us, less_cols = 1 / (gpu.hbm_gbps * 1e3), -float(cols)
    less_us = -2.0 * gpu.sms * inner / (gpu.tflops[problem.dtype] * 1e6)
    b_us = inner * cols * itemsize * byte_us
    row_us = (inner + cols) * itemsize * byte_us
    if inner >= CUTS[0] * gpu.cut_k:
        part_us = 2 * _FLOAT32 * cols * byte_us
        return _cut_us(machine, less_cols, less_us, b_us, row_us, part_us, four=inner >= CUTS[1] * gpu.cut_k)
    launch_us, fixed_us, less_sms = machine.launch_us, gpu.tile_us, -float(gpu.sms)
    tiles = [(high, [(less_cols // wide, slow * less_us - fixed_us) for wide, slow in group]) for high, group in gpu.shapes]
    known: dict[int, float] = {}
    less_step = -gpu.rows_step

    def us(rows: int) -> float:
        steps = rows // less_step
        least_us = known.get(steps)
        if least_us is None:
            less_rows, least_us = -float(rows), math.inf
            for high, group in tiles:
                down = less_rows // high
                for across, wave_us in group:
                    took_us = down * across // less_sms * wave_us
                    if took_us < least_us:
                        least_us = took_us
            known[steps] = least_us
        busy_us = rows * row_us + b_us
        return launch_us + (least_us if least_us > busy_us else busy_us)

    return us


def _cut_us(
    machine: Machine, less_cols: float, less_us: float, b_us: float, row_us: float, part_us: float, *, four: bool
) -> Callable[[int], float]:
    """The same where K is long enough to be cut: the least of all ways, in one pass over the tiles. less_us: us of a tile's
    element in a wave, less than zero. b_us, row_us: of b, and of a row, through the memory; part_us: of a row of a part's sums.
    four: K is long enough for that."""
    fixed_us, less_sms, launch_us = machine.gpu.tile_us, -float(machine.gpu.sms), machine.launch_us
    less_half, less_quarter = less_sms / CUTS[0], less_sms / CUTS[1]
    two_row_us, four_row_us = row_us + CUTS[0] * part_us, row_us + CUTS[1] * part_us if four else math.inf
    two_us, four_us = less_us / CUTS[0], less_us / CUTS[1]
    tiles = [
        (
            high,
            [
                (less_cols // wide, slow * less_us - fixed_us, slow * two_us - fixed_us, slow * four_us - fixed_us)
                for wide, slow in group
            ],
        )
        for high, group in machine.gpu.shapes
    ]
    known: dict[int, tuple[float, float, float]] = {}
    less_step = -machine.gpu.rows_step

    def us(rows: int) -> float:
        steps = rows // less_step
        if steps in known:
            whole, in_two, in_four = known[steps]
        else:
            less_rows, whole, in_two, in_four = -float(rows), math.inf, math.inf, math.inf
            for high, group in tiles:
                down = less_rows // high
                for across, whole_us, two_us, four_us in group:
                    blocks = down * across
                    took = blocks // less_sms * whole_us
                    if took < whole:
                        whole = took
                    took = blocks // less_half * two_us
                    if took < in_two:
                        in_two = took
                    took = blocks // less_quarter * four_us
                    if took < in_four:
                        in_four = took
            known[steps] = whole, in_two, in_four
        busy, two_busy, four_busy = rows * row_us + b_us, rows * two_row_us + b_us, rows * four_row_us + b_us
        least = whole if whole > busy else busy
        in_two = in_two if in_two > two_busy else two_busy
        in_four = in_four if in_four > four_busy else four_busy
        if in_two < least:
            least = in_two
        return launch_us + (in_four if in_four < least else least)

    return us
