"""This module draws scenarios to test FiCCO's heuristic: GEMMs of weft's models that are not among the paper's sixteen.

Three in four are forward passes: M tokens before a matmul that is sharded by columns. One in four is a weight gradient, whose K
is the number of tokens, as in the paper's g1, g3, g5 and g7. The numbers of tokens are log-uniform in the paper's range, and
multiples of 2048.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import islice

from weft.planner.models import Model, load_model, operator_calls, preset_names
from weft_studies.ficco.gemms import FICCO_GEMMS, GemmCase

SEED = 2512
COUNT = 96
GRADIENTS = 0.25
FORWARD_TOKENS, GRADIENT_TOKENS = (8192, 1607680), (65536, 524288)
_MULTIPLE = 2048


def unseen(count: int = COUNT) -> tuple[GemmCase, ...]:
    """Return `count` different scenarios, named u1, u2 and so on. They are the same in every call."""
    return drawn([model for model in map(load_model, preset_names()) if model.hidden], count, SEED)


def drawn(models: Sequence[Model], count: int, seed: int) -> tuple[GemmCase, ...]:
    """Return `count` different scenarios of these models, named u1, u2 and so on."""
    known = {(case.m, case.n, case.k) for case in FICCO_GEMMS}
    return tuple(islice(_new(known, models, random.Random(seed)), count))


def _new(known: set[tuple[int, int, int]], models: Sequence[Model], draw: random.Random) -> Iterator[GemmCase]:
    serial = 0
    while True:
        model = draw.choice(models)
        if draw.random() < GRADIENTS:
            m, n, k = (
                draw.choice((model.hidden, model.intermediate or model.hidden)),
                model.hidden,
                _tokens(draw, GRADIENT_TOKENS),
            )
            use = f"{model.name} gradient"
        else:
            call = draw.choice([call for call in operator_calls(model) if call.op == "all_gather_matmul"])
            m, n, k = _tokens(draw, FORWARD_TOKENS), call.n, call.k
            use = f"{model.name} {call.name}"
        if (m, n, k) not in known:
            known.add((m, n, k))
            serial += 1
            yield GemmCase(name=f"u{serial}", m=m, n=n, k=k, use=use)


def _tokens(draw: random.Random, bounds: tuple[int, int]) -> int:
    drawn = math.exp(draw.uniform(*map(math.log, bounds)))
    return max(1, round(drawn / _MULTIPLE)) * _MULTIPLE
