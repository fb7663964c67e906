"""This module runs a FusedCollective as one kernel, on any device whose memory has addresses (weft.kernels.all_reduce)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from weft.core.errors import WaitTimeout
from weft.core.problem import SUMMED_WHOLE, CollectiveProblem, Problem, split
from weft.core.schedule import MAILBOX_COPIES, Flag, FusedCollective, Schedule
from weft.kernels.all_reduce import AllReducePlan, Hops, all_reduce, plan
from weft.runtime.bindings import Bindings, Where
from weft.runtime.launches import Site, StepKernel

_COLUMNS, _LEAST_COLUMNS = 1024, 16
"""The columns that elements in a row get, which are a power of two, and the fewest. Threads then load 16 bytes each."""


def _hops(schedule: Schedule, where: Where, step: FusedCollective) -> Hops:
    """Return how the kernel exchanges tiles. Raises ValueError for a step that the kernel cannot run."""
    problem, rank = schedule.problem, where.rank
    scatters = step.op == "reduce_scatter"
    divides = problem.world_size if problem.reduce_op == "avg" else 1
    wrong = ""
    if problem.op not in (("matmul_reduce_scatter",) if scatters else SUMMED_WHOLE):
        wrong = f"it is a {step.op} in a schedule for {problem.op}"
    elif step.divide_by != divides:
        wrong = f"divide_by is {step.divide_by}, where the problem divides by {divides}"
    elif step.copies != MAILBOX_COPIES:
        wrong = f"copies is {step.copies}, where it has {MAILBOX_COPIES}"
    elif step.out != schedule.buffer["out"].whole(rank) or step.addends != tuple(
        schedule.buffer[name].whole(rank) for name in problem.addends
    ):
        wrong = "its result, or what it adds, is not that of the problem"
    elif step.norm is not None and step.norm.out != schedule.buffer["normed"].whole(rank):
        wrong = "its norm is not that of the problem"
    if wrong:
        raise ValueError(f"schedule {schedule.name}: {where}: weft's kernel cannot run it: {wrong}")
    return "scatter" if scatters else "two" if step.hops == 2 else "one"


def _as_matrix(problem: Problem) -> Problem:
    """Return the problem as the kernel sees it. Elements in a row become rows of as many columns as divide their number."""
    if not isinstance(problem, CollectiveProblem) or problem.rows_matter:
        return problem
    cols = math.gcd(problem.m, _COLUMNS)
    cols = cols if cols >= _LEAST_COLUMNS else problem.m
    return replace(problem, m=problem.m // cols, n=cols)


class FusedCollectiveKernel(StepKernel):
    """A FusedCollectiveKernel runs one FusedCollective of one rank. Collective, because it may allocate memory on all ranks.

    It shares its mailbox with kernels of other programs (weft.runtime.mailboxes).

    Raises ValueError for a step that the kernel cannot run.
    It waits itself, and the data that it waits for comes from peers without an SM of this GPU.
    """

    manages_own_flags = True

    def __init__(self, site: Site, where: Where, step: FusedCollective) -> None:
        super().__init__(site, where)
        self.step, device = step, site.device
        hops, problem = _hops(site.schedule, where, step), _as_matrix(site.schedule.problem)
        self._shape = (problem.m, problem.n) if problem is not site.schedule.problem else None
        self.plan: AllReducePlan = plan(
            problem,
            where.rank,
            problem.shards if hops == "scatter" else split(problem.n, problem.world_size),
            hops=hops,
            multiply=step.multiplies,
            device=device,
            # The interpreter runs blocks one after the other, and those of a norm wait for each other.
            sms=1 if step.norm is not None and device.type != "cuda" else site.blocks,
            norm=step.norm is not None,
        )
        shared = site.shared_mailbox(self.plan.copy_bytes)
        begun = torch.zeros(1, dtype=torch.int64, device=device)
        self._memory, self._box = replace(shared.memory, begun=begun), shared.piece.local
        # `abort` needs pinned memory. It is pinned now because pinning may wait for the GPU, which `abort` must release.
        one = torch.ones(1, dtype=torch.int32)
        self._raised = one.pin_memory() if device.type == "cuda" else one

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        step, out = self.step, bindings.view(self.step.out)
        given = [bindings.view(region) for region in step.factors]
        if self._shape is not None:
            given, out = [one.view(self._shape) for one in given], out.view(self._shape)
        scales = [view for region in step.factors for view in bindings.scale_views(region)]
        added = {region.buffer: bindings.view(region) for region in step.addends}
        all_reduce(
            self.plan,
            self._memory,
            out,
            factors=(given[0], given[1]) if step.multiplies else None,
            partial=None if step.multiplies else given[0],
            bias=added.get("bias"),
            residual=added.get("residual"),
            live=not silent,
            tries=tries,
            scales=(scales[0], scales[1]) if scales else None,
            norm=None if step.norm is None else (bindings.view(step.norm.weight), bindings.view(step.norm.out)),
            launched_by=self.launched_by,
            stream=stream,
        )

    def raise_if_late(self, describe: Callable[[Flag], str]) -> None:
        region, call = self._memory.status.tolist()
        if region:
            self._memory.status.zero_()
            raise WaitTimeout(self._missing(call) or f"{self.where}: call {call}: {self._source(region - 1)} was late")

    def missing(self) -> str:
        return self._missing(self._last_ended() + 1)

    def call_under_way(self) -> int:
        begun = int(self._memory.begun.cpu())
        return begun if begun > self._last_ended() else 0

    def _last_ended(self) -> int:
        """Return the number of the mailbox's last call that all blocks have ended. A copy of one column would be a kernel."""
        return int(self._memory.epochs.cpu()[:, 0].min())

    def _missing(self, call: int) -> str:
        whole = self._whole(call)
        late = [region for region in self._expected() if not whole[region]]
        return f"{self.where}: call {call}: {self._source(late[0])} has not arrived" if late else ""

    def _expected(self) -> list[int]:
        """Return the regions of this rank that a call fills: for each tile, the partial tiles of all ranks and, with two hops,
        the sums of all ranks."""
        layout, size = self.plan, self.plan.problem.world_size
        filled = 2 * size if layout.hops == "two" else size
        return [tile * layout.regions + i for tile in range(layout.count) for i in range(filled)]

    def _whole(self, call: int) -> torch.Tensor:
        """Return whether each region has received all words of the rows that are sent."""
        layout = self.plan
        used = self._box[call % MAILBOX_COPIES * layout.copy_bytes :][: layout.tile_bytes].cpu()
        words = used.view(torch.int32).view(layout.count, layout.regions, layout.region_rows, -1)
        tiles = torch.arange(layout.count)[:, None]
        rows = tiles % layout.row_tiles * layout.region_rows + torch.arange(layout.region_rows)
        travels = rows < layout.received_rows
        return ((words != 0).all(-1) | ~travels[:, None]).all(-1).flatten()

    def _source(self, region: int) -> str:
        tile, index = divmod(region, self.plan.regions)
        if tile >= self.plan.count:
            return f"a sum of squares of the rows of row tile {region - self.plan.count * self.plan.regions}"
        size = self.plan.problem.world_size
        return f"the partial tile {tile} of rank {index}" if index < size else f"the sum of tile {tile} by rank {index - size}"

    def abort(self) -> None:
        self._memory.abort.copy_(self._raised, non_blocking=True)
