"""The checker and a brute-force interpreter agree on damaged schedules of several nodes, in both directions.

As tests/checker/test_check_damage.py, whose damages are tried, too. With WEFT_DAMAGES=9000 all agree.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import count

import pytest
from brute import verdict
from damage import DAMAGES
from damage_messages import MESSAGES, random_schedule
from refusals import refusal

EVERY = MESSAGES | DAMAGES
SHARE = int(os.environ.get("WEFT_DAMAGES", "250")) // (3 * len(MESSAGES) + len(DAMAGES))
TRIES = 400
"""Seeds that are tried for a kind of damage that rarely applies here."""


@pytest.mark.parametrize("name", EVERY)
def test_agrees_with_brute_force(name: str) -> None:
    seen: Counter[bool] = Counter()
    each = SHARE * (3 if name in MESSAGES else 1)
    for seed in count():
        rng = random.Random(f"{name} {seed}")
        whole = random_schedule(rng)
        damaged = EVERY[name](whole, rng)
        if damaged is not None and damaged != whole:
            said, wrong = refusal(damaged), verdict(damaged)
            assert bool(said) == bool(wrong), f"seed {seed}, {whole}: check says {said!r}, brute force {wrong!r}"
            seen[bool(said)] += 1
        if seen.total() >= each or seed >= TRIES:
            break
    assert name not in MESSAGES or seen[True], "this damage never did harm: it tests nothing"


def test_agrees_with_brute_force_on_whole_schedules() -> None:
    for seed in range(SHARE):
        whole = random_schedule(random.Random(seed))
        assert (refusal(whole), verdict(whole)) == ("", ""), f"seed {seed}, {whole}"
