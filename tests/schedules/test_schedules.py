"""Every schedule that the builders make, for any problem, is proved right; small ones are also run by brute force."""

from __future__ import annotations

from typing import Any

import pytest
from brute import verdict
from families import of_one_node
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.checker import check
from weft.core.problem import ADDENDS, OPS, Problem
from weft.core.schedule import Copy, Gemm, Reduce, Schedule, waits
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
        return_gathered=op in ("all_gather_matmul", "all_to_all_matmul") and draw(st.booleans()),
        reduce_op=draw(st.sampled_from(("sum", "avg"))) if op == "matmul_reduce_scatter" else "sum",
        addends=tuple(name for name in ADDENDS if op == "matmul_all_reduce" and draw(st.booleans())),
    )


@st.composite
def schedules(draw: Any, *, most: int = 40, most_ranks: int = 6, most_chunks: int = 9) -> Schedule:
    """One of a family that its operator has."""
    problem = draw(problems(most=most, most_ranks=most_ranks))
    return build(problem, draw(st.sampled_from(names(problem.op))), draw(st.integers(1, most_chunks)))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(schedules())
def test_every_schedule_is_proved_right(schedule: Schedule) -> None:
    check(schedule)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(schedules(most=7, most_ranks=3, most_chunks=3))
def test_small_schedules_compute_the_result_in_every_order(schedule: Schedule) -> None:
    assert verdict(schedule) == ""


@settings(max_examples=100, deadline=None, derandomize=True)
@given(schedules())
def test_no_step_is_idle(schedule: Schedule) -> None:
    """Nothing empty is copied, and flags are signalled if and only if a step waits for them."""
    assert not [step for *_, step in schedule if isinstance(step, Copy) and not step.src.shape[0]]
    assert not [step for *_, step in schedule if isinstance(step, (Gemm, Reduce)) and not step.parts]
    awaited = {wait.flag for *_, step in schedule for wait in waits(step)}
    assert awaited == set(schedule.signals_per_call)
    assert len({str(flag) for flag in schedule.flags}) == len(schedule.flags)


@pytest.mark.parametrize("op", OPS)
def test_all_candidates_of_a_real_problem_are_right(op: Any) -> None:
    found = candidates(Problem(op=op, m=4096, n=1792, k=4096, world_size=4))
    assert {schedule.name for schedule in found} == set(of_one_node(op))
    for schedule in found:
        check(schedule)


def test_specs_and_their_errors() -> None:
    problem = Problem(op="all_gather_matmul", m=4, n=4, k=4, world_size=2)
    assert parse("flag_gated:4") == ("flag_gated", 4)
    assert build(problem, "flag_gated").chunks == 2
    assert build(problem, "sequential", 4).chunks == 1
    with pytest.raises(
        ValueError, match=r"schedule is 'flag_gated', which is for .* alone; matmul_all_to_all has sequential, .*, direct_store"
    ):
        build(Problem(op="matmul_all_to_all", m=4, n=4, k=4, world_size=2), "flag_gated")
    with pytest.raises(ValueError, match="schedule is 'ring'; weft has sequential"):
        build(problem, "ring")
    for chunks in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="chunks is"):
            build(problem, "flag_gated", chunks)  # type: ignore[arg-type]
    for spec in ("ring", "flag_gated:0", "flag_gated:x", "sequential:2", ""):
        with pytest.raises(ValueError, match="schedule is"):
            parse(spec)
    scatter = Problem(op="matmul_reduce_scatter", m=4, n=4, k=4, world_size=2)
    words = "schedule is 'flag_gated_2d', which is for all_gather_matmul alone; matmul_reduce_scatter has sequential, "
    with pytest.raises(ValueError, match=words):
        build(scatter, "flag_gated_2d")
    assert "flag_gated_2d" not in {schedule.name for schedule in candidates(scatter)}
    assert all(str(family).startswith(f"{name}: ") for name, family in FAMILIES.items())
