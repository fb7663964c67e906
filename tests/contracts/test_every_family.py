"""What holds of every schedule family of every operator: proved, read back from JSON, drawn, simulated, run on CPU ranks, and
compared with torch. A new family is tested once its registry has it; a new operator needs a problem in PROBLEMS."""

from __future__ import annotations

import os
from collections import Counter
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from concurrent_work import Exchange, Products
from conftest import RankFixture
from families import CASES, PROBLEMS, WORLD, made, specs
from operators import OPERATORS, check_forward
from rank_pools import on_ranks

import weft
from weft.core import codec, machine
from weft.core.fused_collective import spelled_out
from weft.core.problem import COLLECTIVE_OPS, CollectiveProblem, ColumnProblem, LookupProblem, Op, Problem
from weft.core.schedule import Bags, Collective, Copy, Gemm, Part, Push, Reduce, Region, Schedule, SendReceive, Step, waits
from weft.core.work import region_bytes
from weft.perf import run
from weft.perf.terms import gathered_bytes
from weft.schedules import FAMILIES

every_family = pytest.mark.parametrize(
    ("op", "spec", "nodes"), CASES, ids=[f"{op}-{spec}{'-nodes' * bool(nodes)}" for op, spec, nodes in CASES]
)


def test_every_operator_and_every_family_is_listed() -> None:
    assert set(PROBLEMS) == set(get_args(Op))
    assert {(op, name) for name, family in FAMILIES.items() for op in family.builders} == {
        (op, spec.partition(":")[0]) for op, spec, nodes in CASES if op in {o for f in FAMILIES.values() for o in f.builders}
    }


@every_family
def test_it_is_proved_and_comes_back_from_json(op: Op, spec: str, nodes: tuple[int, ...]) -> None:
    schedule = made(op, spec, nodes)
    weft.schedule.check(schedule)
    assert codec.loads(Schedule, codec.dumps(schedule)) == schedule
    if op == "concurrent":
        assert schedule.name == spec


@every_family
def test_no_step_is_idle(op: Op, spec: str, nodes: tuple[int, ...]) -> None:
    """Nothing empty is copied, and every flag that is signalled is waited for and the other way round."""
    schedule = made(op, spec, nodes)
    steps = [step for *_, step in schedule]
    assert not [step for step in steps if isinstance(step, Copy) and not step.src.size]
    assert not [step for step in steps if isinstance(step, (Gemm, Reduce)) and not step.parts]
    assert {wait.flag for step in steps for wait in waits(step)} == set(schedule.signals_per_call)
    assert len({str(flag) for flag in schedule.flags}) == len(schedule.flags)


@every_family
@pytest.mark.parametrize("width", [80, 300])
def test_its_timeline_fits_and_shows_every_step(op: Op, spec: str, nodes: tuple[int, ...], width: int) -> None:
    schedule = made(op, spec, nodes)
    lines = weft.schedule.timeline(schedule, width=max(width, 24 * max(map(len, schedule.ranks)))).splitlines()
    assert max(map(len, lines)) <= max(width, 24 * max(map(len, schedule.ranks)))
    assert not any(line.startswith("never") for line in lines)
    assert len(lines) >= max(len(lane.steps) for lane in schedule.ranks[0])


def _moves(step: Step) -> list[tuple[Region, Region]]:
    """What a step reads and writes where one of the two may lie on a peer."""
    if isinstance(step, Copy):
        return [(step.src, step.dst)]
    if isinstance(step, Push):
        return [(part.src, part.dst) for part in step.parts]
    if isinstance(step, Reduce):
        return [(src, part.out) for part in step.parts for src in part.srcs]
    return []


def arriving(schedule: Schedule) -> Counter[int]:
    """Bytes that come to each rank from the others, as the steps say, in one call."""
    found: Counter[int] = Counter()
    problem = schedule.problem
    for rank, _, _, step in schedule:
        for src, dst in _moves(step):
            found[dst.rank] += region_bytes(schedule, src) if src.rank != dst.rank else 0
            found[rank] += region_bytes(schedule, src) if src.rank == dst.rank != rank else 0
        for part in getattr(step, "parts", ()):
            if isinstance(part, (Part, Bags)):  # may be stored from the kernel
                found[part.out.rank] += region_bytes(schedule, part.out) if part.out.rank != rank else 0
        if isinstance(step, SendReceive):
            found[rank] += sum(region_bytes(schedule, receive.dst) for receive in step.receives)
        if isinstance(step, Collective):
            low, high = problem.shards[rank] if problem.shards else (0, 0)
            own_elements = {"all_gather": step.src.size, "reduce_scatter": 0, "all_reduce": 0}
            found[rank] += region_bytes(schedule, step.dst)
            found[rank] -= own_elements.get(step.op, (high - low) * step.src.shape[1]) * problem.itemsize
    return found


def _bytes_are_known(op: Op) -> bool:
    """Not where several collectives share a schedule, or rows are counted on devices."""
    return op != "concurrent" and not op.startswith("ragged")


def needed(problem: Problem, rank: int) -> int:
    """Bytes that no schedule can do without: what this rank's result depends on, and another rank has, at the least."""
    size, item = problem.world_size, problem.itemsize
    low, high = problem.shards[rank] if problem.shards else (0, 0)
    others = sum(b - a for at, (a, b) in enumerate(problem.shards) if at != rank)
    if problem.op == "all_gather_matmul":
        return others * problem.k * item
    if problem.op == "matmul_reduce_scatter":
        return (high - low) * problem.n * item
    if problem.op == "matmul_all_reduce":
        return problem.m * problem.n * item * (size - 1) // size
    if problem.op == "matmul_all_to_all":
        return (high - low) * (size - 1) * problem.n * item
    if problem.op == "all_to_all_matmul":
        return (high - low) * (size - 1) * problem.k * item
    if isinstance(problem, LookupProblem):
        return (high - low) * (problem.n - problem.columns(rank)) * item
    if isinstance(problem, CollectiveProblem):
        return problem.m // size * item * (1 if problem.op == "reduce_scatter" else size - 1)
    return 1


@pytest.mark.parametrize(("op", "spec", "nodes"), [case for case in CASES if _bytes_are_known(case[0])])
def test_every_rank_gets_what_its_result_depends_on(op: Op, spec: str, nodes: tuple[int, ...]) -> None:
    schedule = made(op, spec, nodes)
    found = arriving(spelled_out(schedule).schedule)
    for rank in range(schedule.problem.world_size):
        assert found[rank] >= needed(schedule.problem, rank), (rank, found)
    least = sum(needed(schedule.problem, rank) for rank in range(schedule.problem.world_size))
    once = (
        op in ("all_gather_matmul", "all_to_all_matmul", "all_gather", "all_to_all", "embedding_bag_all_to_all") and not nodes
    )
    assert sum(found.values()) == least if once else sum(found.values()) >= least


@every_family
def test_its_flops_are_those_of_the_problem(op: Op, spec: str, nodes: tuple[int, ...]) -> None:
    """Each multiplication is done by one rank, and once."""
    schedule = spelled_out(made(op, spec, nodes)).schedule
    problem = schedule.problem
    gemms = [step for *_, step in schedule if isinstance(step, Gemm)]
    multiplied = sum(part.a.size * step.b.shape[1] for step in gemms for part in step.parts)
    own = problem.world_size if op.startswith(("matmul_all_to_all", "all_to_all_")) else 1
    if op.startswith("ragged") or op in (*COLLECTIVE_OPS, "concurrent", "embedding_bag_all_to_all"):
        assert not multiplied
    elif isinstance(problem, ColumnProblem):
        assert multiplied == problem.product_rows(0) * problem.columns(0) * problem.k * problem.world_size
    else:
        assert multiplied == own * problem.m * problem.n * problem.k


@every_family
def test_its_prediction_is_at_least_what_its_bytes_and_its_flops_take(op: Op, spec: str, nodes: tuple[int, ...]) -> None:
    schedule, h200 = made(op, spec, nodes), machine.load("h200x8")
    outcome = run(schedule, h200)
    problem = schedule.problem
    if op == "concurrent":
        assert outcome.total_us >= 100.0
        return
    flops = max(sum(span.flops for span in outcome.spans if span.rank == rank) for rank in range(problem.world_size))
    assert outcome.total_us >= flops / (h200.tflops(problem.dtype) * 1e6)
    received = 0 if op.startswith("ragged") or nodes else max(needed(problem, rank) for rank in range(problem.world_size))
    if isinstance(problem, LookupProblem):
        assert outcome.total_us >= gathered_bytes(problem, 0, h200) / (h200.gpu.hbm_gbps * 1e3)
    assert outcome.total_us >= received / (h200.links.gbps * 1e3)
    steps = sorted((rank, lane.name) for rank, lane, _, _ in spelled_out(schedule).schedule)
    assert sorted((span.rank, span.lane) for span in outcome.spans) == steps


def _same_everywhere(out: torch.Tensor) -> bool:
    """Whether every rank has the same bits."""
    bits = out.contiguous().view(torch.uint8)
    found = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(found, bits)
    return all(torch.equal(one, bits) for one in found)


def _forward(op: Op, spec: str, rows: tuple[int, ...], per_node: int, dtype: torch.dtype = torch.float32) -> None:
    operators = [one for one in OPERATORS if one.op == op and one.takes(spec)]
    assert operators
    if per_node:
        weft.close()
        os.environ["WEFT_RANKS_PER_NODE"] = str(per_node)
    try:
        for turn, count in enumerate(rows):
            for operator in operators:
                given = operator.drawn(count, dist.get_world_size(), dtype, turn)
                options = {"schedule": spec} if operator.scheduled else {}
                for _ in range(2):
                    out = check_forward(operator, given, (str(operator), spec, count), **options)
                    assert not operator.replicated or _same_everywhere(out), (spec, count)
    finally:
        if per_node:
            weft.close()
            del os.environ["WEFT_RANKS_PER_NODE"]


RUN = [case for case in CASES if case[0] != "concurrent" and not (case[0].startswith("ragged") and case[1] == "sequential")]


@pytest.mark.ranks
@pytest.mark.parametrize(("op", "spec", "nodes"), RUN, ids=[f"{op}-{spec}{'-nodes' * bool(nodes)}" for op, spec, nodes in RUN])
def test_it_runs_on_cpu_ranks_as_torch_does(ranks: RankFixture, op: Op, spec: str, nodes: tuple[int, ...]) -> None:
    """Two calls in a row with rows that do not divide, and with fewer rows than ranks."""
    ranks(4 if nodes else WORLD).run(_forward, op, spec, (11, 2), 2 if nodes else 0)


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (4, torch.float16)], ids=str)
@pytest.mark.parametrize("op", [op for op in PROBLEMS if op != "concurrent" and not op.startswith("ragged")])
def test_other_numbers_of_ranks_run_every_family(ranks: RankFixture, op: Op, world_size: int, dtype: torch.dtype) -> None:
    ranks(world_size).run(_every_spec, op, dtype)


def _every_spec(op: Op, dtype: torch.dtype) -> None:
    for spec in specs(op):
        _forward(op, spec, (7,), 0, dtype)


CPU_METHODS = [
    spec for spec in specs("concurrent") if not {"priority", "left"} & {word.partition("=")[0] for word in spec.split("+")}
]


@on_ranks(WORLD)
@pytest.mark.parametrize("spec", CPU_METHODS)
def test_collectives_beside_a_computation_run_on_cpu_ranks(spec: str) -> None:
    for turn, op in enumerate(COLLECTIVE_OPS):
        exchange, products = Exchange(op, torch.device("cpu"), part=37), Products(torch.device("cpu"), size=8)
        if "pull" in spec and not exchange.collective.pulls:
            continue
        exchange.fill(turn)
        products.check(weft.concurrent(products, exchange.collective, method=spec))
        exchange.check(turn)
