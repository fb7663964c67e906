"""Memory with numbers in it: the half of the brute-force interpreter that computes. See tests/helpers/brute.py.

Numbers are integers modulo a prime, so that sums and averages are exact and nothing is right by rounding; an element that
was never written is poison. Values are drawn anew for each call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.problem import EXCHANGES
from weft.core.schedule import Collective, Gemm, Norm, Reduce, Region, Schedule, Step, Wait

PRIME = 2_147_483_647


class Wrong(Exception):
    """What is wrong."""


@dataclass(eq=False)
class Access:
    """A copy, a part of a kernel or a rank's collective: what it reads and writes, element by element.

    A part with late or inner gates is several, one after the other, of which the last one writes. gates: what it waits for.
    """

    rank: int
    step: Step
    part: int
    reads: list[Region]
    write: Region | None
    gates: tuple[Wait, ...] = ()
    number: int = 0

    @property
    def writes(self) -> list[Region]:
        return [self.write] if self.write else []


class Values:
    """Memory with numbers in it, and the sequential program's results."""

    def __init__(self, schedule: Schedule, calls: int) -> None:
        self.schedule, self.problem = schedule, schedule.problem
        rng = np.random.default_rng(7)
        problem = self.problem
        # Of an all-to-all, every rank has an a and b of its own: a's lie below each other, b's side by side.
        self.exchange = problem.op in EXCHANGES
        own = problem.world_size if self.exchange else 1
        self.a = rng.integers(1, PRIME, (calls, own * problem.m, problem.k))
        self.b = rng.integers(1, PRIME, (calls, problem.k, own * problem.n))
        self.addends = {
            name: rng.integers(1, PRIME, (calls, problem.m if name == "residual" else 1, problem.n)) for name in problem.addends
        }
        self.norm_weight = rng.integers(1, PRIME, (calls, 1, problem.n)) if problem.norm_eps is not None else None
        self.products: dict[tuple[int, int], np.ndarray] = {}
        self.factors: dict[tuple[int, int], np.ndarray] = {}
        self.sent: dict[tuple[int, int], dict[int, np.ndarray]] = {}
        self.numbers, self.known = {}, {}
        for buffer in schedule.buffers:
            for rank in range(problem.world_size):
                self.numbers[buffer.name, rank] = np.zeros((buffer.rows[rank], buffer.cols[rank]), np.int64)
                self.known[buffer.name, rank] = np.zeros((buffer.rows[rank], buffer.cols[rank]), bool)

    def begin(self, rank: int, call: int) -> None:
        """The caller writes the inputs."""
        p = self.problem
        rows, mine = slice(*p.shards[rank]), slice(*p.b_shards[rank])
        gather = p.op == "all_gather_matmul"
        a, b = (self.a[call][rows], self.b[call][:, mine]) if gather else (self.a[call][:, mine], self.b[call][mine])
        if self.exchange:
            a, b = self._whole(rank, call)
        addends = [(name, self._added(rank, call, name)) for name in self.addends]
        addends += [] if self.norm_weight is None else [("norm_weight", self.norm_weight[call])]
        for name, value in (("a", a), ("b", b), *addends):
            self.numbers[name, rank][:] = value
            self.known[name, rank][:] = True

    def _added(self, rank: int, call: int, name: str) -> np.ndarray:
        """What a rank has of an addend."""
        found = self.addends[name][call]
        return found[slice(*self.problem.shards[rank])] if name == "residual" and self.problem.residual_sharded else found

    def _whole(self, rank: int, call: int) -> tuple[np.ndarray, np.ndarray]:
        """An all-to-all's a and b of a rank."""
        p = self.problem
        rows, columns = slice(rank * p.m, (rank + 1) * p.m), slice(rank * p.n, (rank + 1) * p.n)
        return self.a[call][rows], self.b[call][:, columns]

    def _exchanged(self, rank: int, call: int) -> dict[str, np.ndarray]:
        """What a rank has at the end: from each rank, its shard of that rank's a, times that rank's b or its own."""
        out, gathered = [], []
        for src_rank in range(self.problem.world_size):
            a, b = self._whole(src_rank, call)
            if self.problem.op == "all_to_all_matmul":
                _, b = self._whole(rank, call)
            gathered.append(a[slice(*self.problem.shards[rank])])
            out.append(matmul(gathered[-1], b))
        found = {"out": np.concatenate(out)}
        return found | ({"gathered": np.concatenate(gathered)} if self.problem.return_gathered else {})

    def end(self, rank: int, call: int) -> None:
        """The caller reads the outputs."""
        p = self.problem
        rows = slice(*p.shards[rank])
        full = matmul(self.a[call], self.b[call])
        if self.exchange:
            wanted = self._exchanged(rank, call)
        elif p.op == "all_gather_matmul":
            wanted = {"out": full[:, slice(*p.b_shards[rank])]} | ({"gathered": self.a[call]} if p.return_gathered else {})
        elif p.op == "matmul_all_reduce":
            total = (full + sum(values[call] for values in self.addends.values())) % PRIME
            wanted = {"out": total[rows] if p.residual_sharded else total}
            if self.norm_weight is not None:
                wanted["normed"] = normalised(total, self.norm_weight[call])
        else:
            wanted = {"out": full[rows] * (pow(p.world_size, -1, PRIME) if p.reduce_op == "avg" else 1) % PRIME}
        for name, value in wanted.items():
            if not self.known[name, rank].all():
                raise Wrong(f"rank {rank}, call {call}: {name} is not written everywhere")
            if not np.array_equal(self.numbers[name, rank], value):
                raise Wrong(f"rank {rank}, call {call}: {name} is wrong")

    def read(self, region: Region) -> np.ndarray:
        place = slice(*region.rows), slice(*region.cols)
        if not self.known[region.buffer, region.rank][place].all():
            raise Wrong(f"{region} is read before it is written")
        return self.numbers[region.buffer, region.rank][place]

    def write(self, region: Region, value: np.ndarray) -> None:
        place = slice(*region.rows), slice(*region.cols)
        self.known[region.buffer, region.rank][place] = True
        self.numbers[region.buffer, region.rank][place] = value

    def work(self, access: Access) -> None:
        """A copy or a part."""
        found = [self.read(region) for region in access.reads]
        if isinstance(access.step, Gemm) and access.step.parts[access.part].adds:
            self._add(access, access.step, found)
        elif isinstance(access.step, Gemm) and access.step.parts[access.part].inner:
            self._slice(access, found)
        elif isinstance(access.step, Gemm):
            if found:
                old = found[2] if access.step.accumulate else 0
                self.write(access.write, (matmul(found[0], found[1]) + old) % PRIME)
        elif isinstance(access.step, Reduce):
            self.write(access.write, sum(found) % PRIME * pow(access.step.divide_by, -1, PRIME) % PRIME)
        elif isinstance(access.step, Norm):
            if found[0].shape[1] != self.problem.n or access.step.eps != self.problem.norm_eps:
                raise Wrong(f"{access.step} is no norm of whole rows")
            self.write(access.write, normalised(found[0], found[1]))
        else:
            self.write(access.write, found[0].copy())

    def _add(self, access: Access, step: Gemm, found: list[np.ndarray]) -> None:
        """Either half of a part that adds."""
        if found and access.write is None:
            self.products[id(step), access.part] = matmul(found[0], found[1])
        elif found:
            whole = (self.products.pop((id(step), access.part)) + sum(found)) % PRIME
            self.write(access.write, whole * pow(step.divide_by, -1, PRIME) % PRIME)

    def _slice(self, access: Access, found: list[np.ndarray]) -> None:
        """One slice of a part with inner gates. The first one reads all of b; what is left of it is for the others."""
        key = id(access.step), access.part
        if len(found) > 1:
            self.factors[key], self.products[key] = found[1].copy(), np.zeros((), np.int64)
        if found:
            width = found[0].shape[1]
            b, self.factors[key] = self.factors[key][:width], self.factors[key][width:]
            self.products[key] = (self.products[key] + matmul(found[0], b)) % PRIME
        if found and access.write:
            self.write(access.write, self.products.pop(key))

    def meet(self, access: Access, meeting: tuple[int, int]) -> None:
        self.sent.setdefault(meeting, {})[access.rank] = self.read(access.reads[0]).copy()

    def part(self, access: Access, meeting: tuple[int, int]) -> None:
        """What a rank has of a collective once it ends."""
        sent, step = [self.sent[meeting][r] for r in range(self.problem.world_size)], access.step
        assert isinstance(step, Collective)
        if step.op == "all_gather":
            self.write(step.dst, np.concatenate(sent))
        elif step.op == "all_to_all":
            self.write(step.dst, np.concatenate([rows[slice(*self.problem.shards[access.rank])] for rows in sent]))
        else:
            total = sum(sent) % PRIME * pow(step.divide_by, -1, PRIME) % PRIME
            rows = slice(None) if step.op == "all_reduce" else slice(*self.problem.shards[access.rank])
            self.write(step.dst, total[rows])


def normalised(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """In place of a norm, which integers do not have: each element times its weight and a number that its whole row gives."""
    places = np.arange(1, rows.shape[1] + 1)
    return rows * weight % PRIME * ((1 + (rows * rows % PRIME * places).sum(1, keepdims=True)) % PRIME) % PRIME


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b modulo the prime, without overflow."""
    total = np.zeros((a.shape[0], b.shape[1]), np.int64)
    for k in range(a.shape[1]):
        total = (total + a[:, k : k + 1] * b[k : k + 1] % PRIME) % PRIME
    return total
