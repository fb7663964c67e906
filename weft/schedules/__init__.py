"""All families of schedules by name, with their description, their builders and what the ranking knows of them.

`weft.schedule.register` (weft.checker.families) adds families to the table.

Sources: FiCCO (arXiv 2512.10236) for the chunked four; T3 (arXiv 2401.16677) for track-and-trigger; fused
computation-collectives (arXiv 2305.06942) for direct-store; PyTorch's asynchronous tensor parallelism for shard-level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain

from weft.core.concurrent import ConcurrentProblem
from weft.core.errors import require, warn_once
from weft.core.problem import COLLECTIVE_OPS, LOOKUP_OPS, CollectiveProblem, Op, Problem, RaggedProblem
from weft.core.schedule import Gemm, Push, Schedule, steps_of
from weft.core.work import is_plain
from weft.schedules import all_gather_matmul as ag
from weft.schedules import all_to_all_columns_matmul as columns_matmul
from weft.schedules import all_to_all_matmul as dispatch
from weft.schedules import collectives, concurrent, ragged
from weft.schedules import embedding_bag_all_to_all as bags
from weft.schedules import matmul_all_reduce as ar
from weft.schedules import matmul_all_to_all as combine
from weft.schedules import matmul_reduce_scatter as rs
from weft.schedules.builder import Build, Request
from weft.schedules.same_program import is_same_program
from weft.schedules.traits import FamilyTraits

UNFUSED: dict[Op, Build] = {
    "all_gather_matmul": ag.unfused,
    "matmul_reduce_scatter": rs.unfused,
    "matmul_all_to_all": combine.unfused,
    "all_to_all_matmul": dispatch.unfused,
    "matmul_all_reduce": rs.unfused,
    "matmul_all_to_all_columns": combine.unfused,
}
"""The builders of shard_p2p, and of hetero_unfused_1d, which cuts shards into chunks."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of schedules, which is a method of overlapping.

    summary: one line for lists.
    source: where the idea is from.
    builders: the builder for each operator that the family supports.
    traits: what its time depends on. Without them the ranking simulates its schedules.
    chunked: the number of chunks can be chosen.
    across: the family supports ranks on several nodes. Others load from and store to all ranks.
    fans_out: copies to several peers may run at once. Otherwise a rank sends to one peer after the other, or from kernels.
    overlaps: it communicates during the computation. Otherwise it exchanges before or after it.
    shards_residual: it leaves the rows of a matmul_all_reduce's residual and sum at their owners, if the problem does.
    float8: it takes FP8 operands. Families that cut columns of a or b do not, because elements of a row may share a scale.
    quantises: its kernels may quantise the rows of a that they send.
    candidate: planners consider it. Otherwise it has to be requested by name.
    registered: it was added by `weft.schedule.register`.
    unfit: returns why the family cannot run a problem, or "" if it can.
    """

    name: str
    summary: str
    source: str
    builders: dict[Op, Build]
    traits: FamilyTraits | None = None
    chunked: bool = True
    across: bool = False
    fans_out: bool = True
    overlaps: bool = True
    shards_residual: bool = False
    float8: bool = True
    quantises: bool = False
    candidate: bool = True
    registered: bool = False
    unfit: Callable[[Problem], str] = lambda problem: ""

    def __str__(self) -> str:
        return f"{self.name}: {self.summary} [{self.source}]"


def _fits_nodes(problem: Problem) -> str:
    if problem.weight_gradients == "shard" and problem.nodes:
        return "its messages and NCCL's gather of x could wait for each other; use sequential"
    uneven = problem.op == "matmul_all_reduce" and len(set(problem.nodes)) > 1
    return f"its all-reduce needs nodes of one size, not of {problem.nodes}; use sequential" if uneven else ""


class BuilderError(ValueError):
    """A registered builder raised an error, or returned anything but the requested schedule."""


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family(
            name="sequential",
            overlaps=False,
            shards_residual=True,
            quantises=True,
            traits=FamilyTraits("whole", "nccl", "nccl"),
            summary="cuBLAS GEMM and NCCL collective, one after the other",
            source="cuBLAS and NCCL",
            chunked=False,
            across=True,
            builders={
                "all_gather_matmul": ag.sequential,
                "matmul_reduce_scatter": rs.sequential,
                "matmul_all_to_all": combine.sequential,
                "all_to_all_matmul": dispatch.sequential,
                "matmul_all_reduce": ar.sequential,
                "embedding_bag_all_to_all": bags.sequential,
                "matmul_all_to_all_columns": combine.sequential,
                "all_to_all_columns_matmul": columns_matmul.sequential,
                **dict.fromkeys(COLLECTIVE_OPS, collectives.build_sequential),
            },
        ),
        Family(
            name="sequential_stores",
            overlaps=False,
            quantises=True,
            traits=FamilyTraits("whole", "store_kernel", "store_kernel"),
            summary="cuBLAS GEMM, and before or after it an exchange by a kernel's stores or loads",
            source="fused computation-collectives",
            chunked=False,
            builders={
                "all_gather_matmul": ag.sequential_stores,
                "matmul_reduce_scatter": rs.sequential_stores,
                "matmul_all_to_all": combine.sequential_stores,
                "all_to_all_matmul": dispatch.sequential_stores,
                "matmul_all_reduce": ar.sequential_stores,
            },
        ),
        Family(
            name="shard_p2p",
            traits=FamilyTraits("per_piece", "push_copies", "push_copies", one_lane=True),
            summary="one shard a step, from peer to peer, a GEMM for each",
            source="PyTorch async TP",
            chunked=False,
            fans_out=False,
            builders=UNFUSED,
        ),
        Family(
            name="uniform_fused_1d",
            traits=FamilyTraits("per_step", "push_copies", "push_copies", cuts_own_shard=True),
            summary="row chunks of all ranks, the own one too, as one GEMM a step",
            source="FiCCO",
            builders={
                "all_gather_matmul": partial(ag.fused, uniform=True),
                "matmul_reduce_scatter": partial(rs.fused, uniform=True),
                "all_to_all_columns_matmul": columns_matmul.fused,
            },
        ),
        Family(
            name="hetero_fused_1d",
            traits=FamilyTraits("per_step", "push_copies", "push_copies"),
            summary="the own shard as one GEMM; row chunks of all peers as one GEMM a step",
            source="FiCCO",
            builders={
                "all_gather_matmul": partial(ag.fused, uniform=False),
                "matmul_reduce_scatter": partial(rs.fused, uniform=False),
            },
        ),
        Family(
            name="hetero_unfused_1d",
            traits=FamilyTraits("per_piece", "push_copies", "push_copies"),
            summary="the own shard as one GEMM; one GEMM for each row chunk",
            source="FiCCO",
            builders=UNFUSED,
        ),
        Family(
            name="uniform_fused_2d",
            float8=False,
            traits=FamilyTraits("per_slice", "push_copies", "push_copies", cuts_own_shard=True),
            summary="column chunks of all ranks, one GEMM a step: slices of K summed up, or slices of N",
            source="FiCCO",
            builders={"all_gather_matmul": ag.fused_2d, "matmul_reduce_scatter": rs.fused_2d},
        ),
        Family(
            name="flag_gated",
            traits=FamilyTraits("tiles", "push_copies", "load_kernel"),
            summary="one kernel whose tiles wait for the flag of their chunk, in order of arrival",
            source="Iris, quack",
            builders={
                "all_gather_matmul": partial(ag.gated, blocks=False),
                "matmul_reduce_scatter": rs.pulled,
                "all_to_all_matmul": partial(dispatch.gated, blocks=False),
                "all_to_all_columns_matmul": partial(columns_matmul.gated, blocks=False),
            },
        ),
        Family(
            name="track_and_trigger",
            traits=FamilyTraits("tiles", "ring_copies", "push_copies"),
            summary="one GEMM; what is finished, or has arrived, triggers the copy that sends it on",
            source="T3",
            builders={
                "all_gather_matmul": ag.ring,
                "matmul_reduce_scatter": rs.counted,
                "matmul_all_to_all": combine.counted,
                "embedding_bag_all_to_all": bags.counted,
                "matmul_all_to_all_columns": combine.counted,
            },
        ),
        Family(
            name="direct_store",
            quantises=True,
            traits=FamilyTraits("tiles", "store_blocks", "tile_stores"),
            summary="stores from kernels straight to the peer's buffer, remote rows first",
            source="fused computation-collectives",
            fans_out=False,
            builders={
                "all_gather_matmul": partial(ag.gated, blocks=True),
                "matmul_reduce_scatter": rs.stored,
                "matmul_all_to_all": partial(combine.counted, stored=True),
                "all_to_all_matmul": partial(dispatch.gated, blocks=True),
                "embedding_bag_all_to_all": bags.stored,
                "matmul_all_to_all_columns": partial(combine.counted, stored=True),
                "all_to_all_columns_matmul": partial(columns_matmul.gated, blocks=True),
            },
        ),
        Family(
            name="flag_gated_2d",
            float8=False,
            traits=FamilyTraits("tiles", "store_blocks", cuts_own_shard=True),
            summary="one kernel whose tiles wait, slice by slice of K, for the columns of all ranks",
            source="weft",
            builders={"all_gather_matmul": ag.gated_2d},
        ),
        Family(
            name="one_shot",
            traits=FamilyTraits("exchanging", hops=1),
            summary="one kernel: partial tiles are stored at every rank that sums them, in one hop",
            source="fused computation-collectives",
            chunked=False,
            unfit=partial(collectives.why_not_one_kernel, hops=1),
            builders={
                "matmul_all_reduce": ar.one_shot,
                "matmul_reduce_scatter": rs.one_shot,
                "all_reduce": partial(collectives.build_one_kernel, hops=1),
            },
        ),
        Family(
            name="two_shot",
            traits=FamilyTraits("exchanging", hops=2),
            summary="one kernel: a tile's owner sums partial tiles, and stores the sum at every peer",
            source="fused computation-collectives",
            chunked=False,
            unfit=partial(collectives.why_not_one_kernel, hops=2),
            builders={"matmul_all_reduce": ar.two_shot, "all_reduce": partial(collectives.build_one_kernel, hops=2)},
        ),
        Family(
            name="token_split",
            summary="row chunks: the sums of one, made by their owners, are sent to all while the next one is multiplied",
            source="TokenWeave",
            traits=FamilyTraits("per_piece", "push_copies", "push_copies", cuts_own_shard=True, sends_sums=True),
            shards_residual=True,
            builders={"matmul_all_reduce": ar.token_split},
        ),
        Family(
            name="node_slices",
            unfit=_fits_nodes,
            traits=FamilyTraits("tiles", "push_copies", "tile_stores"),
            summary="stores and copies within a node; between nodes, slices that are sent when their last tile is done",
            source="fused computation-collectives",
            across=True,
            builders={
                "all_gather_matmul": ag.sliced,
                "matmul_reduce_scatter": rs.sliced,
                "matmul_all_to_all": combine.sliced,
                "all_to_all_matmul": dispatch.sliced,
                "matmul_all_reduce": ar.sliced,
                "embedding_bag_all_to_all": bags.sliced,
            },
        ),
        Family(
            name="copy_engine",
            traits=FamilyTraits("none", "push_copies", "push_copies"),
            summary="copy engines push pieces to the peers; a set number of SMs sum them as they arrive",
            source="FiCCO, T3",
            unfit=collectives.why_not_pieces,
            builders=collectives.PUSH_BUILDERS,
        ),
        Family(
            name="copy_engine_pull",
            traits=FamilyTraits("none", "pull_copies", "pull_copies"),
            summary="copy engines of the peers pull pieces to where they belong",
            source="FiCCO, T3",
            unfit=collectives.why_not_pieces,
            builders=collectives.PULL_BUILDERS,
        ),
    )
}
VERDICTS = OVERLAPPED, FASTER, NOT_OVERLAPPED = "overlapped", "faster but not overlapped", "not overlapped"
"""The verdicts of reports on the chosen schedule. None is the name of a schedule."""
MOST_CHUNKS = 512
"""The most chunks per shard. With 256, a schedule of 8 ranks has up to 100,000 steps, and its proof takes 2 s."""

MOST_PIECES = 4096
"""The most pieces of a candidate, which are chunks x world_size squared. Building and simulating 20,000 takes about 1 s."""
MOST_RANKS = 128
"""With more ranks only `sequential` is a candidate: at 256 one schedule that overlaps takes over 3 s to build and simulate, and
the time grows with the square of the ranks."""


def names(op: Op) -> tuple[str, ...]:
    """Return the families that support `op`."""
    return tuple(name for name, family in FAMILIES.items() if op in family.builders)


def overlaps(name: str) -> bool:
    """Return whether a schedule of that name, or spec, runs communication during its computation."""
    family = FAMILIES.get(name.partition(":")[0])
    return family is None or family.overlaps


def judge(name: str, us: float | None = None, sequential_us: float | None = None) -> str:
    """Return whether a schedule overlaps, is only faster than the sequential program, or neither. Times may be unknown.

    >>> judge("flag_gated:2"), judge("sequential_stores", 90.0, 99.0), judge("sequential")
    ('overlapped', 'faster but not overlapped', 'not overlapped')
    """
    if overlaps(name):
        return OVERLAPPED
    return FASTER if us is not None and sequential_us is not None and us < sequential_us else NOT_OVERLAPPED


def simplicity(name: str, chunks: int) -> tuple[int, int]:
    """Return a key that sorts schedules, the simplest first: in the order of FAMILIES, with other names last, then by chunks.

    >>> simplicity("sequential", 1) < simplicity("flag_gated", 1) < simplicity("flag_gated", 2)
    True
    """
    names = list(FAMILIES)
    return names.index(name) if name in names else len(names), chunks


def check_op(name: str, op: Op) -> None:
    """Raise ValueError, which lists the families of `op`, if it has no such family."""
    if name in FAMILIES and op not in FAMILIES[name].builders:
        ops = ", ".join(FAMILIES[name].builders)
        raise ValueError(f"schedule is {name!r}, which is for {ops} alone; {op} has {', '.join(names(op))}")


def check_chunks(chunks: int, world_size: int) -> None:
    """Raise ValueError for a count below one, or above both MOST_CHUNKS and world_size."""
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"chunks is {chunks!r}; it must be a whole number of at least 1")
    if chunks > (most := max(MOST_CHUNKS, world_size)):
        raise ValueError(f"chunks is {chunks}; use at most {most}: what proves a schedule takes minutes for more")


def unfit(name: str, problem: Problem) -> str:
    """Return why a family cannot run on the nodes of the problem's ranks, or "" if it can."""
    if problem.nodes and not FAMILIES[name].across:
        fit = " or ".join(one for one in names(problem.op) if FAMILIES[one].across)
        return f"schedule is {name!r}, which loads from and stores to all ranks; on nodes of {problem.nodes} ranks, use {fit}"
    if problem.scaling is not None and not FAMILIES[name].float8:
        fit = ", ".join(one for one in names(problem.op) if FAMILIES[one].float8)
        return f"schedule is {name!r}, which takes no FP8 operands, whose elements share scales; use {fit}"
    if problem.scaling is not None and problem.scaling.quantises and not FAMILIES[name].quantises:
        quantising = ", ".join(one.name for one in FAMILIES.values() if one.quantises)
        return f"schedule is {name!r}, which sends rows unquantised; schedules that quantise a are {quantising}"
    if problem.residual_sharded and not FAMILIES[name].shards_residual:
        fit = " or ".join(one for one in names(problem.op) if FAMILIES[one].shards_residual)
        return f"schedule is {name!r}, after which every rank has the whole sum; with a sharded residual use {fit}"
    if problem.weight_gradients and FAMILIES[name].registered:
        return f"schedule is {name!r}, which was registered for calls without gradients of weights"
    if isinstance(problem, CollectiveProblem) and problem.rows_matter and FAMILIES[name].registered:
        return f"schedule is {name!r}, which was registered for all_reduces of elements; with rows use one_shot or two_shot"
    reason = FAMILIES[name].unfit(problem)
    return f"schedule is {name!r}: {reason}" if reason else ""


def build(problem: Problem, name: str, chunks: int | None = None, *, fan_out: bool = False) -> Schedule:
    """Build the schedule of family `name` for `problem`, with `chunks` pieces per shard (default: world_size, as in FiCCO).

    For a ConcurrentProblem, the name is one that `weft.concurrent` takes, and chunks is not used. A RaggedProblem has its own
    families (`weft.schedules.ragged`), without chunks.

    fan_out: use a copy lane for each peer instead of one for all. This is faster on a mesh, and slower behind a switch.

    Raises ValueError for an unknown name, a name that the operator does not have or that cannot run on the nodes of the
    problem's ranks, a chunk count below one or above both MOST_CHUNKS and world_size, or if a registered builder raises an
    error or returns anything but a Schedule of that name for the problem.
    """
    require("problem", problem, Problem, "use a weft.Problem, LookupProblem, CollectiveProblem or ConcurrentProblem")
    if isinstance(problem, ConcurrentProblem):
        return concurrent.build(problem, name, fan_out=fan_out)
    if isinstance(problem, RaggedProblem):
        if chunks is not None or fan_out:
            raise ValueError(f"chunks is {chunks}, fan_out {fan_out}; {problem.op} has neither, leave them out")
        return ragged.build(problem, name)
    if name not in FAMILIES:
        family_name, colon, count = name.partition(":")
        if colon and family_name in FAMILIES:
            use = f"build takes the chunks as an argument: build(problem, {family_name!r}, {count or 2})"
            raise ValueError(f"schedule is {name!r}; {use}")
        raise ValueError(f"schedule is {name!r}; weft has {', '.join(FAMILIES)}")
    check_op(name, problem.op)
    family = FAMILIES[name]
    if reason := unfit(name, problem):
        raise ValueError(reason)
    chunks = problem.world_size if chunks is None else chunks
    check_chunks(chunks, problem.world_size)
    asked = Request(problem, name, chunks if family.chunked else 1, fan_out and family.fans_out, shared_port=not fan_out)
    return (_build_registered if family.registered else family.builders[problem.op])(asked)


def _build_registered(asked: Request) -> Schedule:
    """Call a registered builder. Raises BuilderError if it raises anything, so that all ranks raise a ValueError, after which
    their group stays usable, or if it does not return what was requested."""
    try:
        built = FAMILIES[asked.name].builders[asked.problem.op](asked)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        raise BuilderError(f"the builder of schedule {asked.name!r} raised {raised} for {asked.problem}") from error
    if isinstance(built, Schedule) and (built.problem, built.name, built.chunks) == (asked.problem, asked.name, asked.chunks):
        return built
    made = str(built) if isinstance(built, Schedule) else f"a {type(built).__name__}"
    raise BuilderError(
        f"the builder of schedule {asked.name!r} returned {made}; it must return a weft.schedule.Schedule for {asked.problem}, "
        f"with name={asked.name!r} and chunks={asked.chunks}, as the request has them"
    )


def parse(spec: str) -> tuple[str, int | None]:
    """Split "name" or "name:chunks". Raises ValueError for anything else.

    >>> parse("flag_gated:4")
    ('flag_gated', 4)
    """
    name, colon, chunks = spec.partition(":")
    if name not in FAMILIES:
        raise ValueError(
            f"schedule is {spec!r}; use auto, or one of {', '.join(FAMILIES)}, with :CHUNKS for a chunk count; "
            "weft.schedule.register adds others"
        )
    if not colon:
        return name, None
    if not chunks.isdecimal() or int(chunks) < 1 or not FAMILIES[name].chunked:
        raise ValueError(f"schedule is {spec!r}; a chunk count is a whole number of at least 1, for families that have chunks")
    return name, int(chunks)


def spec(name: str, chunks: int) -> str:
    """Return the text for a schedule, the inverse of `parse`. A chunked family always has its count, because a name without one
    means world_size chunks.

    >>> spec("flag_gated", 1), spec("sequential", 1)
    ('flag_gated:1', 'sequential')
    """
    chunked = FAMILIES[name].chunked if name in FAMILIES else chunks > 1
    return f"{name}:{chunks}" if chunked else name


def synonym(problem: Problem, spec: str, among: Iterable[str]) -> str | None:
    """Return `spec` if it is `among` the given specs, else the first of them that is the same program, or None.

    Raises ValueError as `parse` and `build` do.
    """
    listed = tuple(among)
    return (
        spec
        if spec in listed
        else next((one for one in listed if is_same_program(_of(problem, one), _of(problem, spec))), None)
    )


def programs(problem: Problem, specs: Iterable[str]) -> tuple[str, ...]:
    """Return the specs in their order, without those that are the same program as a simpler one among them."""
    listed = tuple(dict.fromkeys(specs))
    found: list[str] = []
    for spec in sorted(listed, key=_simplicity):
        if synonym(problem, spec, found) is None:
            found.append(spec)
    return tuple(spec for spec in listed if spec in found)


def _simplicity(spec: str) -> tuple[int, int]:
    name, chunks = parse(spec)
    return simplicity(name, chunks or 1)


@lru_cache(maxsize=32)
def _of(problem: Problem, spec: str) -> Schedule:
    return build(problem, *parse(spec))


def candidates(problem: Problem, *, fan_out: bool = False, only: str | None = None) -> list[Schedule]:
    """Build every schedule that a planner should consider, each program once, under its simplest name.

    These are all families of the operator with 1, world_size / 2, world_size and 2 x world_size chunks per shard. Whole shards
    and halves are included because a copy's fixed cost can exceed a small chunk's time (7 us per copy on 8 x H200, where an
    eighth of a shard may take 3). With many ranks, candidates have at most MOST_PIECES pieces. With more than MOST_RANKS only
    the sequential program is a candidate, unless a family is requested.

    only: build this family only.
    """
    if isinstance(problem, ConcurrentProblem):
        return [concurrent.build(problem, name, fan_out=fan_out) for name in concurrent.candidates(problem)]
    return distinct(problem, specs(problem, only), fan_out=fan_out)


def specs(problem: Problem, only: str | None = None) -> list[str]:
    """Return the specs that `candidates` builds, the simplest first. Several may be the same program.

    On one node, node_slices has the steps of another family, and is left out unless it is requested. So is a registered family,
    unless it was registered with candidate=True. A spec for which a registered builder raises an error is left out, with a
    warning, unless its family is requested.
    """
    size, rows = problem.world_size, max(1, problem.shards[0][1])
    most = max(1, min(rows, MOST_PIECES // size**2))
    only = "sequential" if only is None and size > MOST_RANKS else only
    found = []
    for family in (FAMILIES[n] for n in names(problem.op) if only in (None, n) and not unfit(n, problem)):
        if only is None and not _is_considered(family, problem):
            continue
        counts = sorted({max(1, min(c, most)) for c in (1, 2, size // 2, size, 2 * size)}) if family.chunked else [1]
        counts = [count for count in counts if only is not None or _can_be_built(family, problem, count)]
        found += [spec(family.name, chunks) for chunks in counts]
    return found


def _is_considered(family: Family, problem: Problem) -> bool:
    of_nodes = family.name == "node_slices" and not problem.nodes
    can_be = family.candidate and not of_nodes and _can_be_built(family, problem, 1)
    return can_be and _runs_as_priced(family.name, problem)


def _can_be_built(family: Family, problem: Problem, chunks: int) -> bool:
    """Return whether a registered builder returns a schedule, and warn if it does not."""
    try:
        for fan_out in (False, True) if family.registered else ():
            build(problem, family.name, chunks, fan_out=fan_out)
    except BuilderError as error:
        warn_once(f"schedule {family.name} is not a candidate: {error}")
        return False
    return True


@lru_cache(maxsize=1024)
def _runs_as_priced(name: str, problem: Problem) -> bool:
    """Return whether the executor runs the steps of a family by the kernels whose costs the planner uses.

    In float32 it does not use weft's GEMM kernel, whose tiles wait, count or store, nor the kernel that pushes chunks. It then
    runs such steps part by part. With FP8 operands it uses both, whatever the dtype of the result.
    """
    if problem.dtype != "float32" or problem.scaling is not None or name == "sequential":
        return True
    if problem.op in (*LOOKUP_OPS, *COLLECTIVE_OPS):
        return True
    lanes = list(chain(*build(problem, name, 1).ranks))
    plain = (is_plain(part, step.b.rank) for step in steps_of(Gemm, lanes) for part in step.parts)
    return not any(steps_of(Push, lanes)) and all(plain)


def distinct(problem: Problem, named: Iterable[str], *, fan_out: bool = False, most: int | None = None) -> list[Schedule]:
    """Build the schedules of these specs in their order, each program once. most: the largest number of schedules."""
    found: list[Schedule] = []
    for text in named:
        if len(found) == most:
            break
        schedule = build(problem, *parse(text), fan_out=fan_out)
        if not any(is_same_program(schedule, other) for other in found):
            found.append(schedule)
    return found
