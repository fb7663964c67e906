"""The heuristic: each of FiCCO's schedules in closed form, from static sizes and the machine's profile; the least is chosen.

FiCCO reads op-to-byte ratio, memory traffic and M against K, and holds them against thresholds calibrated for a machine. Here
what these stand for is worked out. With n ranks and n chunks a shard, C the chunks' time on the way, c of one of n steps,
G the time of all GEMMs alone, g of the last; s how much slower kernels get beside copies, t copies beside kernels:

    sequential      the collective alone, and the GEMM alone
    overlapped      the longer of      head + G + (1 - 1/s) t (C - head)      kernels bind
                                       C + (1 - 1/t) s (G - g) + g            copies bind

head is c where the first GEMM waits for the first chunk (uniform), 0 where the own shard comes first (hetero). What cutting
costs a GEMM, its ragged waves and its C that is read again, is in G: `weft.perf.terms.gemm_cost`. Nothing is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.machine import Machine
from weft.core.problem import Problem
from weft.perf.contention import COPY_BESIDE_GEMM, GEMM_BESIDE_COPY
from weft.perf.terms import gemm_cost, hbm_us, whole_collective_us, whole_gemm_us

BESPOKE = ("uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d")
"""The four schedules that FiCCO keeps."""


@dataclass(frozen=True)
class _Case:
    """A problem with even shards on a machine, chunks as FiCCO has them: one a rank and shard."""

    problem: Problem
    machine: Machine

    @property
    def peers(self) -> int:
        return self.problem.world_size - 1

    @property
    def chunk_rows(self) -> int:
        return -(-self.problem.shards[0][1] // self.problem.world_size)

    @property
    def slower(self) -> tuple[float, float]:
        """Kernels beside copies, whose rate the kernels lower; and copies beside kernels."""
        known = self.machine.contention
        kernels, copies = (max(1.0, known.get(pair, 1.0)) for pair in (GEMM_BESIDE_COPY, COPY_BESIDE_GEMM))
        return 1 + (kernels - 1) / copies, copies

    @property
    def step_us(self) -> float:
        """The chunks of one step on the way to all peers, on a lane each or on one for all."""
        copies, size = self.machine.copies, self.problem.world_size
        fixed = (copies.copy_us + self.machine.flag_us) * (1 if self.machine.fans_out else self.peers)
        gbps = copies.several_gbps if self.machine.fans_out else copies.gbps
        return fixed + self.peers * self.problem.shard_bytes / size / (gbps * 1e3)

    def gemm_us(self, rows: int, *, waits: int, k: int | None = None, accumulate: bool | None = None) -> float:
        """One launch on so many rows, after so many waits. accumulate: on float32 sums, which are there already or not."""
        out = None if accumulate is None else 4
        cost = gemm_cost(
            self.machine,
            rows=(rows,),
            n=self.problem.columns(0),
            k=k or self.problem.k,
            dtype=self.problem.dtype,
            accumulate=bool(accumulate),
            out_itemsize=out,
        )
        return self.machine.launch_us + cost.busy_us + waits * self.machine.flag_us

    def overlapped_us(self, *, head: float, kernels: float, tail: float) -> float:
        """See the module's text."""
        slower, copies_slower = self.slower
        whole = self.problem.world_size * self.step_us
        kernels_bind = head + kernels + (1 - 1 / slower) * copies_slower * max(0.0, whole - head)
        copies_bind = whole + (1 - 1 / copies_slower) * slower * (kernels - tail) + tail
        return self.machine.flag_us + self.machine.links.latency_us + max(kernels_bind, copies_bind)


def scores(problem: Problem, machine: Machine) -> dict[str, float]:
    """Microseconds of sequential and of each of BESPOKE, for an all_gather_matmul on two ranks or more."""
    case, steps = _Case(problem, machine), problem.world_size
    own = case.gemm_us(problem.shards[0][1], waits=0)
    uniform = case.gemm_us(case.chunk_rows * steps, waits=steps)
    fused = case.gemm_us(case.chunk_rows * case.peers, waits=case.peers)
    single = case.gemm_us(case.chunk_rows, waits=1)
    return {
        "sequential": whole_collective_us(machine, problem) + whole_gemm_us(machine, problem),
        "uniform_fused_1d": case.overlapped_us(head=case.step_us, kernels=steps * uniform, tail=uniform),
        "hetero_fused_1d": case.overlapped_us(head=0.0, kernels=own + steps * fused, tail=fused),
        "hetero_unfused_1d": case.overlapped_us(head=0.0, kernels=own + steps * case.peers * single, tail=case.peers * single),
        "uniform_fused_2d": _by_columns_us(case),
    }


def _by_columns_us(case: _Case) -> float:
    """All rows by a slice of K a step, and a pass that rounds the sums."""
    problem, steps = case.problem, case.problem.world_size
    k = -(-problem.k // steps)
    first, later = (case.gemm_us(problem.m, waits=case.peers, k=k, accumulate=again) for again in (False, True))
    rounded = hbm_us(case.machine, problem.m * problem.columns(0) * (4 + problem.itemsize))
    overlapped = case.overlapped_us(head=case.step_us, kernels=first + (steps - 1) * later, tail=later)
    return overlapped + case.machine.launch_us + rounded


def pick(problem: Problem, machine: Machine) -> str:
    """Sequential or one of BESPOKE, whichever should be fastest."""
    found = scores(problem, machine)
    return min(found, key=lambda name: found[name])
