"""The sixteen GEMMs that FiCCO is evaluated on, by their global sizes, and others to test its heuristic.

Source: arXiv 2512.10236, and the sizes in AMD's public benchmark code. The use of each is inferred from its sizes. Each GEMM
follows an all-gather of a (M x K, rows sharded over 8 GPUs). The paper does not say that N is sharded, so that M, N and K are
those of the whole GEMM, but it is plausible. Elements have 2 bytes.

`drawn` draws GEMMs of weft's models that are not among the paper's sixteen. Three in four are forward passes: M tokens before a
matmul that is sharded by columns. One in four is a weight gradient, whose K is the number of tokens, as in the paper's g1, g3,
g5 and g7. The numbers of tokens are log-uniform in the paper's range, and multiples of 2048.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from weft.core.problem import DType, Problem
from weft.planner.models import Model, load_model, operator_calls

WORLD_SIZE = 8
"""The number of GPUs of the paper's host."""


@dataclass(frozen=True, kw_only=True)
class GemmCase:
    """A GEMM of the paper: m x n, contracted over k, over all ranks. use: the model's projection that has these sizes."""

    name: str
    m: int
    n: int
    k: int
    use: str

    def problem(self, world_size: int = WORLD_SIZE, dtype: DType = "bfloat16") -> Problem:
        """Return the problem of the GEMM with the all-gather of its rows. Raises ValueError as Problem does."""
        return Problem(op="all_gather_matmul", m=self.m, n=self.n, k=self.k, world_size=world_size, dtype=dtype)

    def __str__(self) -> str:
        return f"{self.name}: M={self.m} N={self.n} K={self.k} ({self.use})"


def _case(name: str, m: int, n: int, k: int, use: str) -> GemmCase:
    return GemmCase(name=name, m=m, n=n, k=k, use=use)


FICCO_GEMMS: tuple[GemmCase, ...] = (
    _case("g1", 16384, 16384, 131072, "Llama-3 405B"),
    _case("g2", 131072, 16384, 16384, "Llama-3 405B"),
    _case("g3", 53248, 16384, 131072, "Llama-3 405B FFN"),
    _case("g4", 16384, 53248, 16384, "Llama-3 405B FFN"),
    _case("g5", 8192, 8192, 262144, "Llama-2 70B"),
    _case("g6", 262144, 8192, 8192, "Llama-2 70B"),
    _case("g7", 28672, 8192, 262144, "Llama-2 70B FFN"),
    _case("g8", 262144, 28672, 8192, "Llama-2 70B FFN"),
    _case("g9", 196608, 18432, 16384, "Llama-3 405B QKV"),
    _case("g10", 196608, 106496, 16384, "Llama-3 405B gate+up"),
    _case("g11", 1048576, 10240, 8192, "Llama-3 70B QKV"),
    _case("g12", 1048576, 57344, 8192, "Llama-3 70B gate+up"),
    _case("g13", 1607680, 57344, 8192, "Llama-3 70B gate+up"),
    _case("g14", 147456, 28672, 4096, "Mixtral gate+up"),
    _case("g15", 327680, 28672, 4096, "Mixtral gate+up"),
    _case("g16", 229376, 28672, 4096, "Mixtral gate+up"),
)
"""The GEMMs in the order of the paper."""


def ficco_gemm(name: str) -> GemmCase:
    """Return one of FICCO_GEMMS by name. Raises ValueError for an unknown name.

    >>> print(ficco_gemm("g4"))
    g4: M=16384 N=53248 K=16384 (Llama-3 405B FFN)
    """
    for case in FICCO_GEMMS:
        if case.name == name:
            return case
    raise ValueError(f"scenario is {name!r}; FiCCO has {', '.join(case.name for case in FICCO_GEMMS)}")


MODELS = ("gpt3-175b", "llama3-405b", "llama3-70b", "llama3-8b", "mixtral-8x7b", "t-nlg")
"""The models of the unseen scenarios. Another list, or another order, draws other scenarios."""
SEED = 2512
COUNT = 96
GRADIENTS = 0.25
FORWARD_TOKENS, GRADIENT_TOKENS = (8192, 1607680), (65536, 524288)
_MULTIPLE = 2048


def unseen(count: int = COUNT) -> tuple[GemmCase, ...]:
    """Return `count` different scenarios, named u1, u2 and so on. They are the same in every call."""
    return drawn([load_model(name) for name in MODELS], count, SEED)


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
