"""Every schedule that the builders make, for any problem, is proved right; small ones are also run by brute force."""

from __future__ import annotations

from typing import Any

import pytest
from brute import verdict
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import codec
from weft.checker import check
from weft.problem import ADDENDS, OPS, Problem
from weft.schedule import Collective, Copy, Gemm, Reduce, Schedule, waits
from weft.schedules import FAMILIES, build, candidates, names, parse


@st.composite
def problems(draw: Any, *, most: int = 40, most_ranks: int = 6) -> Problem:
    """Of any extents, those that divide by nothing and those smaller than world_size among them."""
    op = draw(st.sampled_from(OPS))
    return Problem(
        op=op,
        m=draw(st.integers(0, most)),
        n=draw(st.integers(0, most)),
        k=draw(st.integers(1, most)),
        world_size=draw(st.integers(1, most_ranks)),
        dtype=draw(st.sampled_from(("bfloat16", "float32"))),
        return_gathered=op == "all_gather_matmul" and draw(st.booleans()),
        reduce_op=draw(st.sampled_from(("sum", "avg"))) if op == "matmul_reduce_scatter" else "sum",
        addends=tuple(name for name in ADDENDS if op == "matmul_all_reduce" and draw(st.booleans())),
    )


@st.composite
def cases(draw: Any, *, most: int = 40, most_ranks: int = 6) -> tuple[Problem, str]:
    """A problem and a family of its operator."""
    problem = draw(problems(most=most, most_ranks=most_ranks))
    return problem, draw(st.sampled_from(names(problem.op)))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases(), st.integers(1, 9))
def test_every_schedule_is_proved_right(case: tuple[Problem, str], chunks: int) -> None:
    check(build(*case, chunks))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases(most=7, most_ranks=3), st.integers(1, 3))
def test_small_schedules_compute_the_result_in_every_order(case: tuple[Problem, str], chunks: int) -> None:
    assert verdict(build(*case, chunks)) == ""


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases(), st.integers(1, 5))
def test_json_and_back(case: tuple[Problem, str], chunks: int) -> None:
    schedule = build(*case, chunks)
    assert codec.loads(Schedule, codec.dumps(schedule)) == schedule


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases(), st.integers(1, 9))
def test_no_step_is_idle(case: tuple[Problem, str], chunks: int) -> None:
    """Nothing empty is copied, every flag that is advanced is waited for and the other way round, names are right."""
    problem, _ = case
    schedule = build(*case, chunks)
    assert (schedule.problem, schedule.name) == case
    assert not [step for *_, step in schedule if isinstance(step, Copy) and not problem.k * step.src.shape[0]]
    assert not [step for *_, step in schedule if isinstance(step, (Gemm, Reduce)) and not step.parts]
    awaited = {wait.flag for *_, step in schedule for wait in waits(step)}
    assert awaited == set(schedule.signals_per_call)
    assert len({str(flag) for flag in schedule.flags}) == len(schedule.flags)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases(), st.integers(1, 5))
def test_work_is_conserved(case: tuple[Problem, str], chunks: int) -> None:
    """All multiplications are done once, and every rank's pieces travel once to each peer."""
    problem, name = case
    schedule = build(*case, chunks)
    flops = sum(
        part.a.shape[0] * step.b.size for *_, step in schedule if isinstance(step, Gemm) for part in step.parts if step.b.size
    )
    assert flops == problem.m * problem.n * problem.k
    if name == "sequential":
        assert sum(isinstance(step, Collective) for *_, step in schedule) == problem.world_size
    elif problem.op == "all_gather_matmul":
        sent = sum(step.src.size for *_, step in schedule if isinstance(step, Copy) and step.src.rank != step.dst.rank)
        assert sent == problem.m * problem.k * (problem.world_size - 1)


@pytest.mark.parametrize("op", OPS)
def test_all_candidates_of_a_real_problem_are_right(op: Any) -> None:
    found = candidates(Problem(op=op, m=4096, n=1792, k=4096, world_size=4))
    assert {schedule.name for schedule in found} == set(names(op))
    for schedule in found:
        check(schedule)


def test_specs_and_their_errors() -> None:
    problem = Problem(op="all_gather_matmul", m=4, n=4, k=4, world_size=2)
    assert parse("flag_gated:4") == ("flag_gated", 4)
    assert build(problem, "flag_gated").chunks == 2
    assert build(problem, "sequential", 4).chunks == 1
    with pytest.raises(ValueError, match="schedule is 'ring'; weft has sequential"):
        build(problem, "ring")
    for chunks in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="chunks is"):
            build(problem, "flag_gated", chunks)  # type: ignore[arg-type]
    for spec in ("ring", "flag_gated:0", "flag_gated:x", "sequential:2", ""):
        with pytest.raises(ValueError, match="schedule is"):
            parse(spec)
    assert all(str(family).startswith(f"{name}: ") for name, family in FAMILIES.items())
