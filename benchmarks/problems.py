"""Problems drawn from real models, in sets that share none: `fit` and `large`, `unseen` and `fresh`; `latest`, drawn when all
others had been looked at; and `estimated`, for a GPU on which no profile was measured. scores.py splits what was measured into
halves.

A set is a function of its name and the world size alone. Operators take turns, so that any beginning of a set covers them
evenly. A call of a model is drawn, then M: log-uniform between 256 and 65536 tokens, or samples (matmul_all_reduce, a decode
step: 1 to 256), of which a quarter are rounded to powers of two, half to multiples of 64, and a quarter are left as drawn.
What takes a rank more than MOST_FLOPS, or reads more than MOST_INDICES rows of tables, is drawn again.

Sizes of models that are no presets of weft: their config.json on Hugging Face.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from weft.core.problem import LOOKUP_OPS, OPS, LookupProblem, Op, Problem
from weft.planner.models import EmbeddingCall, Model, OperatorCall, decode_calls, load_model, operator_calls
from weft.schedules import parse, programs, spec

SetName = Literal["fit", "unseen", "fresh", "large", "latest", "estimated"]
SEEDS: dict[SetName, int] = {
    "fit": 20261121,
    "unseen": 2512,
    "fresh": 16679,
    "large": 20261122,
    "latest": 20261126,
    "estimated": 20261127,
}
HELD: tuple[SetName, ...] = ("unseen", "fresh")
"""What nothing is fitted to."""
COUNT = 120
"""Problems of a set, for each world size: 20 of each operator."""
MOST_FLOPS = 4e12
"""Of one rank's matmul: some 6 ms on an H200."""
MOST_INDICES = 1e8
ALL_OPS: tuple[Op, ...] = (*OPS, *LOOKUP_OPS)
TRIED: dict[Op, tuple[str, ...]] = {
    "all_gather_matmul": (
        *("sequential", "sequential_stores", "shard_p2p"),
        *("uniform_fused_1d:2", "uniform_fused_1d", "hetero_fused_1d:1", "hetero_fused_1d", "hetero_unfused_1d:2"),
        *("hetero_unfused_1d", "uniform_fused_2d:2", "uniform_fused_2d", "flag_gated:1", "flag_gated:2"),
        *("track_and_trigger:1", "track_and_trigger:2", "direct_store:1", "direct_store:2", "flag_gated_2d:4"),
    ),
    "matmul_reduce_scatter": (
        *("sequential", "sequential_stores", "shard_p2p"),
        *("uniform_fused_1d:2", "uniform_fused_1d", "hetero_fused_1d:1", "hetero_fused_1d", "hetero_unfused_1d:2"),
        *("hetero_unfused_1d", "uniform_fused_2d:2", "uniform_fused_2d", "flag_gated:1", "flag_gated:2"),
        *("track_and_trigger:1", "track_and_trigger:2", "track_and_trigger:4", "direct_store:1", "direct_store:2", "one_shot"),
    ),
    "matmul_all_to_all": (
        *("sequential", "sequential_stores", "shard_p2p", "hetero_unfused_1d:2", "hetero_unfused_1d"),
        *("track_and_trigger:1", "track_and_trigger:2", "direct_store:1", "direct_store:2"),
    ),
    "all_to_all_matmul": (
        *("sequential", "sequential_stores", "shard_p2p", "hetero_unfused_1d:2", "hetero_unfused_1d"),
        *("flag_gated:1", "flag_gated:2", "direct_store:1", "direct_store:2"),
    ),
    "matmul_all_reduce": (*("sequential", "sequential_stores", "shard_p2p", "hetero_unfused_1d:2", "one_shot", "two_shot"),),
    "embedding_bag_all_to_all": (
        "sequential",
        "track_and_trigger:1",
        "track_and_trigger:2",
        "direct_store:1",
        "direct_store:2",
    ),
}
"""What is measured of each: every family, with few chunk counts; none means world_size, as `schedule=` has it."""
PRESETS = ("llama3-8b", "llama3-70b", "llama3-405b", "mixtral-8x7b", "gpt3-175b", "t-nlg", "dlrm-mlperf")


def _dense(name: str, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int) -> Model:
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "intermediate": intermediate}
    return Model(name=name, source="config.json", **sizes)


def _tables(tables: int, dim: int, pooling: int) -> Model:
    """pooling: of each table."""
    name = f"dlrm-{tables}x{dim}"
    return Model(name=name, source="sizes around DLRM's", tables=tables, embedding_dim=dim, pooling=(pooling,) * tables)


MODELS: tuple[Model, ...] = (
    *(load_model(name) for name in PRESETS),
    _dense("qwen2.5-7b", 3584, 28, 4, 128, 18944),
    _dense("qwen2.5-72b", 8192, 64, 8, 128, 29568),
    _dense("qwen3-32b", 5120, 64, 8, 128, 25600),
    _dense("gemma-2-9b", 3584, 16, 8, 256, 14336),
    _dense("gemma-2-27b", 4608, 32, 16, 128, 36864),
    _dense("gemma-3-27b", 5376, 32, 16, 128, 21504),
    Model(
        name="deepseek-v3",
        source="config.json, arXiv 2412.19437",
        hidden=7168,
        intermediate=18432,
        experts=256,
        experts_per_token=8,
        expert_intermediate=2048,
        notes=("attention is left out: its projections have low ranks of their own",),
    ),
    Model(
        name="qwen3-235b-a22b",
        source="config.json",
        hidden=4096,
        heads=64,
        kv_heads=4,
        head_dim=128,
        experts=128,
        experts_per_token=8,
        expert_intermediate=1536,
    ),
    Model(
        name="mixtral-8x22b",
        source="config.json",
        hidden=6144,
        heads=48,
        kv_heads=8,
        head_dim=128,
        experts=8,
        experts_per_token=2,
        expert_intermediate=16384,
    ),
    _tables(64, 64, 20),
    _tables(96, 128, 10),
    _tables(48, 256, 5),
)


def drawn(name: SetName, world_size: int, count: int = COUNT) -> tuple[tuple[str, Problem], ...]:
    """(case, problem), `count` of them, none twice; those of `fit` are none of COUNT that they are held to.

    Those of `large` are all-gathers as FiCCO's study draws them, but of models that it draws none from.
    """
    if name == "large":
        from weft_studies.ficco import gemms  # here, since to collect needs no simulator

        models = [model for model in MODELS if model.heads and model.name not in PRESETS]
        cases = gemms.drawn(models, count, SEEDS["large"] * 100 + world_size)
        return tuple((f"{case.use} M={case.m}", case.problem(world_size)) for case in cases)
    others: dict[str, tuple[SetName, ...]] = {"fit": HELD, "latest": ("fit", *HELD), "estimated": ("fit", *HELD, "latest")}
    avoided = {problem for other in others.get(name, ()) for _, problem in drawn(other, world_size)}
    found: dict[Problem, str] = {}
    for case, problem in _stream(name, world_size):
        if len(found) == count:
            break
        if problem not in avoided:
            found.setdefault(problem, case)
    return tuple((case, problem) for problem, case in found.items())


def _stream(name: SetName, world_size: int) -> Iterator[tuple[str, Problem]]:
    """Without end, the operators in turn."""
    random_ = random.Random(SEEDS[name] * 100 + world_size)
    known = {op: _find_calls(op) for op in ALL_OPS}
    for op in itertools.cycle(ALL_OPS):
        while True:
            model, call = random_.choice(known[op])
            tokens = _tokens(random_, (1, 256) if op == "matmul_all_reduce" else (256, 65536))
            problem = call.problem(tokens, world_size, "float32" if op in LOOKUP_OPS else "bfloat16")
            if _bearable(problem):
                yield f"{model} {call.name} tokens={tokens}", problem
                break


def _find_calls(op: Op) -> list[tuple[str, OperatorCall]]:
    """Return every call of the operator in any model."""
    found: list[tuple[str, OperatorCall]] = []
    for model in MODELS:
        layer = decode_calls(model) if op == "matmul_all_reduce" else operator_calls(model)
        found += [(model.name, _as_measured(call)) for call in layer if isinstance(call, OperatorCall) and call.op == op]
    return found


def _as_measured(call: OperatorCall) -> OperatorCall:
    # The published results are of bags of equally many rows, the model's average.
    return replace(call, pooling=()) if isinstance(call, EmbeddingCall) else call


def _tokens(random_: random.Random, bounds: tuple[int, int]) -> int:
    low, high = bounds
    drawn_log2 = random_.uniform(math.log2(low), math.log2(high))
    tokens = round(2**drawn_log2)
    kind = random_.randrange(4)
    if kind == 0:
        return int(2 ** round(drawn_log2))
    return tokens if kind == 1 or tokens < 64 else tokens // 64 * 64


def _bearable(problem: Problem) -> bool:
    if isinstance(problem, LookupProblem):
        return problem.m * problem.k * max(map(len, problem.dims)) <= MOST_INDICES
    return problem.flops <= MOST_FLOPS


def tried(problem: Problem) -> tuple[str, ...]:
    """The specs of TRIED for this problem, each with its count, and each program once, by its simplest name.

    >>> tried(Problem(op="matmul_all_reduce", m=8, n=8, k=8, world_size=2))[-2:]
    ('one_shot', 'two_shot')
    """
    named = (parse(text) for text in TRIED[problem.op])
    return programs(problem, [spec(name, chunks or problem.world_size) for name, chunks in named])
