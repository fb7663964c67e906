"""The schedule space: every family by name, what it is, and how to build it for a problem.

Sources: FiCCO (arXiv 2512.10236) for the chunked four; T3 (arXiv 2401.16677) for track-and-trigger; fused
computation-collectives (arXiv 2305.06942) for direct-store; PyTorch's asynchronous tensor parallelism for shard-level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from weft.problem import Op, Problem
from weft.schedule import Schedule
from weft.schedules import all_gather_matmul as ag
from weft.schedules import matmul_reduce_scatter as rs

Build = Callable[[Problem, int], Schedule]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A way to overlap. chunked: its chunk count is free. words: one line for lists. source: where the idea is from."""

    name: str
    words: str
    source: str
    chunked: bool
    builders: dict[Op, Build]

    def __str__(self) -> str:
        return f"{self.name}: {self.words} [{self.source}]"


def _family(
    name: str,
    words: str,
    source: str,
    gather: Callable[..., Schedule],
    scatter: Callable[..., Schedule],
    *,
    chunked: bool = True,
) -> Family:
    def wrap(build: Callable[..., Schedule]) -> Build:
        return lambda problem, chunks: build(problem, name, chunks)

    return Family(
        name=name,
        words=words,
        source=source,
        chunked=chunked,
        builders={"all_gather_matmul": wrap(gather), "matmul_reduce_scatter": wrap(scatter)},
    )


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        _family(
            "sequential",
            "vendor GEMM and vendor collective, one after the other",
            "cuBLAS and NCCL",
            lambda p, name, c: ag.sequential(p),
            lambda p, name, c: rs.sequential(p),
            chunked=False,
        ),
        _family(
            "shard_p2p",
            "one shard a step, from peer to peer, a GEMM for each",
            "PyTorch async TP",
            lambda p, name, c: ag.unfused(p, name, 1),
            lambda p, name, c: rs.unfused(p, name, 1),
            chunked=False,
        ),
        _family(
            "uniform_fused_1d",
            "row chunks of all ranks, the own one too, as one GEMM a step",
            "FiCCO",
            partial(ag.fused, uniform=True),
            partial(rs.fused, uniform=True),
        ),
        _family(
            "hetero_fused_1d",
            "the own shard as one GEMM; row chunks of all peers as one GEMM a step",
            "FiCCO",
            partial(ag.fused, uniform=False),
            partial(rs.fused, uniform=False),
        ),
        _family("hetero_unfused_1d", "the own shard as one GEMM; one GEMM for each row chunk", "FiCCO", ag.unfused, rs.unfused),
        _family(
            "uniform_fused_2d",
            "column chunks of all ranks, one GEMM a step: slices of K summed up, or slices of N",
            "FiCCO",
            ag.fused_2d,
            rs.fused_2d,
        ),
        _family(
            "flag_gated",
            "one kernel whose tiles wait for the flag of their chunk, in order of arrival",
            "Iris, quack",
            partial(ag.gated, lane="copy"),
            partial(rs.stored, pull=True),
        ),
        _family(
            "track_and_trigger",
            "one GEMM; what is finished, or has arrived, triggers the copy that sends it on",
            "T3",
            ag.ring,
            rs.counted,
        ),
        _family(
            "direct_store",
            "stores from kernels straight to the peer's buffer, remote rows first",
            "fused computation-collectives",
            partial(ag.gated, lane="blocks"),
            partial(rs.stored, pull=False),
        ),
    )
}
NAMES: tuple[str, ...] = tuple(FAMILIES)


def build(problem: Problem, name: str, chunks: int | None = None) -> Schedule:
    """The schedule of family `name` for `problem`, with `chunks` pieces a shard (default: world_size, as FiCCO has it).

    Raises ValueError for an unknown name or a chunk count below one.
    """
    if name not in FAMILIES:
        raise ValueError(f"schedule is {name!r}; weft has {', '.join(NAMES)}")
    family = FAMILIES[name]
    chunks = problem.world_size if chunks is None else chunks
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"chunks is {chunks!r}; it must be a whole number of at least 1")
    return family.builders[problem.op](problem, chunks if family.chunked else 1)


def parse(spec: str) -> tuple[str, int | None]:
    """Split "name" or "name:chunks". Raises ValueError for anything else.

    >>> parse("flag_gated:4")
    ('flag_gated', 4)
    """
    name, colon, chunks = spec.partition(":")
    if name not in FAMILIES:
        raise ValueError(f"schedule is {spec!r}; use auto, or one of {', '.join(NAMES)}, with :CHUNKS for a chunk count")
    if not colon:
        return name, None
    if not chunks.isdigit() or int(chunks) < 1 or not FAMILIES[name].chunked:
        raise ValueError(f"schedule is {spec!r}; a chunk count is a whole number of at least 1, for families that have chunks")
    return name, int(chunks)


def candidates(problem: Problem) -> list[Schedule]:
    """Every schedule that a planner should consider: each family, with half, one and two times world_size chunks a shard."""
    found: dict[tuple[str, int], Schedule] = {}
    rows = max(1, problem.shards[0][1])
    for family in FAMILIES.values():
        counts = (problem.world_size // 2, problem.world_size, 2 * problem.world_size) if family.chunked else (1,)
        for chunks in counts:
            schedule = build(problem, family.name, max(1, min(chunks, rows)))
            found.setdefault((family.name, schedule.chunks), schedule)
    return list(found.values())
