"""What every public operator does on CPU ranks, compared with torch in float64: results, gradients, uneven rows, strides,
dtypes, torch.compile, torch.library, and a ValueError for each argument that is wrong. A new operator is tested by being
listed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from operators import BY_ID, OPERATORS, Arguments, Operator, check_forward, close, wide
from rank_pools import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft import collectives
from weft.core.problem import Op

pytestmark = pytest.mark.ranks
every_operator = pytest.mark.parametrize("name", BY_ID)
differentiable = pytest.mark.parametrize("name", [str(one) for one in OPERATORS if one.differentiable])
ROWS = (11, 2, 0)
"""Of 3 ranks: one has fewer than the others; one has none; none has any."""


def _public() -> dict[str, Callable[..., Any]]:
    """Functions of the package that exchange tensors between ranks."""
    others = {"choices", "close", "synchronize", "SGD", "RowwiseAdagrad", "Work", "empty"}
    found = {name: getattr(weft.ops, name) for name in weft.ops.__all__ if name not in others}
    return found | {name: getattr(collectives, name) for name in collectives.__all__ if name not in others}


def test_every_public_operator_is_listed() -> None:
    assert {one.name: one.public for one in OPERATORS} == _public()
    assert {one.op for one in OPERATORS} | {"concurrent"} == set(get_args(Op))
    assert MISTAKES.keys() == _public().keys()


@on_ranks(1, 3)
@every_operator
def test_results_of_uneven_rows(name: str) -> None:
    operator = BY_ID[name]
    for seed, rows in enumerate(ROWS):
        for call in range(2):
            given = operator.drawn(rows, dist.get_world_size(), torch.float32, 10 * seed + call)
            out = check_forward(operator, given, (name, rows))
            with torch.inference_mode():
                again = check_forward(operator, given, (name, rows))
            assert torch.equal(out, again), (name, rows)


@on_ranks(2)
@every_operator
def test_results_of_every_dtype(name: str) -> None:
    operator = BY_ID[name]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        check_forward(operator, operator.drawn(7, dist.get_world_size(), dtype, 1), (name, dtype))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": lambda x: torch.nn.functional.pad(x, (3, 2)).narrow(-1, 3, x.shape[-1]),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:1].expand(x.shape),
}


@on_ranks(3)
@every_operator
def test_results_of_any_strides(name: str) -> None:
    operator = BY_ID[name]
    given = operator.drawn(8, dist.get_world_size(), torch.float32, 2)
    for layout in operator.layouts:
        change = LAYOUTS[layout]
        for at in range(len(given[0])):
            changed = [[change(x) if i == at and x.numel() else x for i, x in enumerate(each)] for each in given]
            check_forward(operator, changed, (name, layout, at))


def _wanted_gradients(operator: Operator, given: list[Arguments], weights: list[torch.Tensor]) -> Arguments:
    """Of this rank's tensors, by autograd of the program that one rank would run."""
    leaves = wide(given)
    outs = [operator.expected(leaves, rank) for rank in range(1 if operator.replicated else len(leaves))]
    total = sum(((out * weight.double()).sum() for out, weight in zip(outs, weights, strict=False)), torch.zeros(()))
    mine = leaves[dist.get_rank()]
    return list(torch.autograd.grad(total, mine, allow_unused=True, materialize_grads=True)) if mine else []


def _weights(operator: Operator, given: list[Arguments]) -> list[torch.Tensor]:
    """What the loss multiplies each rank's result by; the same where results are."""
    generator = torch.Generator().manual_seed(5)
    shapes = [operator.expected(given, rank).shape for rank in range(len(given))]
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    return found[:1] * len(given) if operator.replicated else found


def _gradients(name: str, compiled: bool) -> None:
    operator, rank = BY_ID[name], dist.get_rank()
    torch.compiler.reset()  # what is compiled for another operator is none of this one's
    for rows in ROWS[:1] if compiled else ROWS[:2]:
        given = operator.drawn(rows, dist.get_world_size(), torch.float32, rows)
        weights = _weights(operator, given)
        mine = [x.clone().requires_grad_() for x in given[rank]]
        options = operator.options(given)

        def loss(*tensors: torch.Tensor) -> torch.Tensor:
            return (operator.call(*tensors, **options) * weights[rank]).sum()  # noqa: B023 (called in the same turn)

        run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
        run(*mine).backward()  # also on a rank without tables, whose peers' gradients come from it
        for at, (x, wanted) in enumerate(zip(mine, _wanted_gradients(operator, given, weights), strict=True)):
            assert x.grad is not None
            close(x.grad, wanted, (name, rows, f"gradient {at}"))


@differentiable
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients(ranks: RankFixture, name: str, world_size: int) -> None:
    ranks(world_size).run(_gradients, name, False)


@differentiable
def test_compiles_as_one_graph(ranks: RankFixture, name: str) -> None:
    ranks(2).run(_gradients, name, True)


class _Called(TorchDispatchMode):
    """What torch.library runs of weft's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "weft":
            self.calls.append((func, args, kwargs))
        return func(*args, **(kwargs or {}))


@on_ranks(2, 3)
@differentiable
def test_schemas_and_shapes_without_data_are_true(name: str) -> None:
    """Of the operator that autograd knows, and of the one that computes it, also with what else is returned if asked for."""
    operator = BY_ID[name]
    given = operator.drawn(7, dist.get_world_size(), torch.float32, 1)
    more = {argument: True for argument in inspect.signature(operator.public).parameters if argument.startswith("return_")}
    with torch.no_grad(), _Called() as seen:
        for options in (operator.options(given), operator.options(given) | more):
            operator.call(*given[dist.get_rank()], **options)
    assert len(seen.calls) >= 2
    for function, arguments, keywords in seen.calls:
        of_autograd = getattr(torch.ops.weft, function.name().removeprefix("weft::").removesuffix("_forward"))
        for each in (function, of_autograd):
            torch.library.opcheck(each, arguments, keywords, test_utils=("test_schema", "test_faketensor"))


A, B, X = torch.ones(4, 8), torch.ones(8, 2), torch.ones(4, 3)
LOOKUP = {"indices": torch.zeros(4, dtype=torch.int64), "offsets": torch.arange(5), "tables": [torch.ones(3, 4)]}
PRODUCT = {"a": A.int(), "b": B[1:], "group": "x", "schedule": "fast"}
EXCHANGE = {**PRODUCT, "splits": torch.ones(2), "max_rows": 3}
ALONE = {"group": "x", "schedule": "fast", "staging_bytes": 7, "sms": 0}
MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all_gather_matmul": ({"a": A, "b": B}, {**PRODUCT, "gather_dim": 1, "rows": 13}),
    "matmul_reduce_scatter": ({"a": A, "b": B}, {**PRODUCT, "scatter_dim": 1, "op": "max"}),
    "matmul_all_reduce": ({"a": A, "b": B}, {**PRODUCT, "bias": torch.ones(3), "residual": torch.ones(4, 3)}),
    "matmul_all_reduce_norm": (
        {"a": A, "b": B, "residual": torch.ones(4, 2), "weight": torch.ones(2)},
        {
            **PRODUCT,
            "bias": torch.ones(3),
            "residual": torch.ones(4, 3),
            "weight": torch.ones(3),
            "eps": 2.0,
            "residual_sharded": 1,
            "scale_recipe_normed": "TensorWise",
        },
    ),
    "all_reduce_norm": (
        {"x": X, "residual": torch.ones(4, 3), "weight": torch.ones(3)},
        {
            "x": X.int(),
            "residual": torch.ones(4, 2),
            "weight": torch.ones(2),
            "bias": torch.ones(2),
            "eps": 2.0,
            "group": "x",
            "schedule": "fast",
            "scale_recipe_normed": "TensorWise",
        },
    ),
    "matmul_all_to_all": ({"a": A, "b": B}, {**EXCHANGE, "split_dim": 1}),
    "all_to_all_matmul": ({"a": A, "b": B}, {**EXCHANGE, "gather_dim": 1}),
    "embedding_bag_all_to_all": (
        LOOKUP,
        {
            "indices": torch.zeros(4),
            "offsets": torch.arange(5.0),
            "tables": [torch.ones(3)],
            "group": "x",
            "lengths": torch.ones(4, dtype=torch.int64),
            "mode": "max",
            "per_sample_weights": torch.ones(3),
            "dims": ((5,), (5,)),
            "batch": -1,
            "dtype": torch.float16,
            "schedule": "fast",
            "pooling": 0,
            "optimizer": "x",
        },
    ),
    "all_gather": ({"x": X}, {"x": torch.tensor(1.0), **ALONE}),
    "reduce_scatter": ({"x": X}, {"x": torch.ones(3), "op": "max", **ALONE}),
    "all_to_all": ({"x": X}, {"x": torch.ones(3), **ALONE}),
    "all_reduced": ({"x": X}, {"x": X.int(), "op": "max", **ALONE}),
    "all_gather_into_tensor": (
        {"output": torch.ones(8), "input": torch.ones(4)},
        {"output": X, "input": torch.ones(4).double(), **ALONE},
    ),
    "reduce_scatter_tensor": (
        {"output": torch.ones(2), "input": torch.ones(4)},
        {"output": torch.ones(2).double(), "input": X, "op": "max", **ALONE},
    ),
    "all_reduce": ({"tensor": torch.ones(4)}, {"tensor": X.t(), "op": "max", **ALONE}),
    "all_to_all_single": (
        {"output": torch.ones(4), "input": torch.zeros(4)},
        {
            "output": X,
            "input": torch.ones(4).double(),
            "output_split_sizes": [1, 3],
            "input_split_sizes": [1, 3],
            **ALONE,
        },
    ),
}
"""By operator: arguments that are right, and for each argument a value that is wrong."""
FLAGS = {"return_gathered", "keep_gathered", "return_received", "async_op", "checked", "sparse", "stream"}
"""Arguments that are true or false: any value is one of the two; and a stream, which is read on GPUs alone."""


@pytest.mark.parametrize("name", MISTAKES)
def test_every_argument_has_a_mistake(name: str) -> None:
    """But for the scales of FP8 operands, whose mistakes have tests of their own."""
    parameters = inspect.signature(_public()[name]).parameters.keys() - {"scales"}
    assert MISTAKES[name][1].keys() | FLAGS >= parameters


def _mistakes(name: str) -> list[str]:
    """What is said of each mistake that is no ValueError which names the argument. A call that is right ends them."""
    right, wrong = MISTAKES[name]
    call, unnamed = _public()[name], []
    for argument, value in wrong.items():
        try:
            call(**{**right, argument: value})
            unnamed.append(f"{argument}={value!r} is taken")
        except ValueError as error:
            if not re.search(rf"\b{argument}\b", str(error)):
                unnamed.append(f"{argument}: {error}")
    call(**right)
    return unnamed


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_wrong_with_an_argument_is_a_value_error_that_names_it(ranks: RankFixture, name: str) -> None:
    assert ranks(2).run(_mistakes, name) == [[], []]
