"""The checker and a brute-force interpreter agree on damaged schedules, in both directions: 0 missed, 0 valid ones refused.

No kind of damage is excepted, and what is damaged is of every family, with any fan-out, row multiple and uneven operands.
Schedules of synchronisation alone are judged, too: there a verdict is about deadlock and lost signals, and nothing else.
WEFT_DAMAGES says how many schedules are tried.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import count

import pytest
from brute import verdict
from damage import DAMAGES
from random_schedules import random_schedule, random_sync
from refusals import refusal

EACH = int(os.environ.get("WEFT_DAMAGES", "500")) // len(DAMAGES)
SYNCS = int(os.environ.get("WEFT_DAMAGES", "400"))


@pytest.mark.parametrize("name", DAMAGES)
def test_agrees_with_brute_force_on_damage(name: str) -> None:
    seen: Counter[bool] = Counter()
    for seed in count():
        rng = random.Random(f"{name} {seed}")
        whole = random_schedule(rng)
        damaged = DAMAGES[name](whole, rng)
        if damaged is None or damaged == whole:
            continue
        said, wrong = refusal(damaged), verdict(damaged)
        assert bool(said) == bool(wrong), f"seed {seed}, {whole}: check says {said!r}, brute force {wrong!r}"
        seen[bool(said)] += 1
        if seen.total() >= EACH and seen[True]:  # damage that never does harm tests nothing
            break


def test_agrees_with_brute_force_on_whole_schedules() -> None:
    for seed in range(EACH):
        whole = random_schedule(random.Random(seed))
        assert (refusal(whole), verdict(whole)) == ("", ""), f"seed {seed}, {whole}"


def test_agrees_with_brute_force_on_synchronisation_alone() -> None:
    seen: Counter[str] = Counter()
    kinds = ("fill all SMs", "deadlock", "signalled again", "counted by a kernel")
    for seed in range(SYNCS):
        schedule = random_sync(random.Random(seed))
        said, wrong = refusal(schedule), verdict(schedule)
        assert bool(said) == bool(wrong), f"seed {seed}: check says {said!r}, brute force {wrong!r}"
        seen[next((kind for kind in kinds if kind in said), "right")] += 1
    assert min(seen[kind] for kind in (*kinds, "right")) > SYNCS // 200, seen
