"""What the checker accepts is right: an oracle that shares no code with it judges schedules of which something was changed.

They are of every operator and family, with every kind of step. WEFT_ORACLE says how many: 50,000 take some three minutes on one
core. Where a test fails, its number is the seed of the schedule.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import get_args

import pytest
from damage_any import any_schedule, changed
from families import CASES, made
from oracle import fault
from refusals import refusal

from weft.core.problem import COLLECTIVE_OPS, Op
from weft.core.schedule import Schedule, Step

COUNT = int(os.environ.get("WEFT_ORACLE", "1000"))
SHARES = 10


@pytest.mark.parametrize("share", range(SHARES))
def test_what_is_accepted_is_right(share: int) -> None:
    judged: Counter[tuple[bool, bool]] = Counter()
    for seed in range(share, COUNT, SHARES):
        rng = random.Random(seed)
        damaged = changed(any_schedule(rng), rng)
        refused, wrong = bool(refusal(damaged)), _fault(damaged)
        assert refused or not wrong, f"seed {seed}, {damaged}: accepted, but {wrong}"
        judged[refused, bool(wrong)] += 1
    # An oracle that finds no fault in what is refused would show nothing.
    assert judged[False, False] > COUNT / SHARES / 20
    assert judged[True, True] > 3 * judged[True, False]


def _fault(schedule: Schedule) -> str:
    """What the oracle says, for which a schedule may make so little sense that Python raises."""
    try:
        return fault(schedule)
    except (KeyError, ValueError, IndexError, AssertionError, TypeError, AttributeError, RuntimeError) as error:
        return repr(error)


@pytest.mark.parametrize(("op", "spec", "nodes"), [case for case in CASES if case[0] not in ("concurrent", *COLLECTIVE_OPS)])
def test_every_family_is_right(op: Op, spec: str, nodes: tuple[int, ...]) -> None:
    """But those of collectives, which have thousands of elements here."""
    assert fault(made(op, spec, nodes)) == ""


def test_drawn_schedules_are_right_and_have_every_operator_and_step() -> None:
    ops, steps = set[str](), set[type]()
    for seed in range(300):
        schedule = any_schedule(random.Random(f"whole {seed}"))
        assert (refusal(schedule), fault(schedule)) == ("", ""), f"seed {seed}, {schedule}"
        ops.add(schedule.problem.op)
        steps |= {type(step) for *_, step in schedule}
    assert ops == set(get_args(Op))
    assert steps == set(get_args(Step))
