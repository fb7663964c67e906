"""The operators as torch.library knows them: their schemas, and which calls need torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

from weft.ops.operator import can_skip_dispatcher, define

SCHEMAS = [
    "weft::all_gather_matmul(Tensor a, Tensor[] bs, str group, SymInt rows, SymInt unit, str schedule, bool "
    "return_gathered, bool keep, SCALES) -> Tensor[]",
    "weft::all_to_all_columns_matmul(Tensor a, Tensor b, str group, int world_size, str schedule, bool "
    "return_received) -> Tensor[]",
    "weft::all_to_all_matmul(Tensor a, Tensor b, str group, int rank, int world_size, SymInt unit, str schedule, bool"
    " return_received, SCALES) -> Tensor[]",
    "weft::collective(Tensor x, str op, str reduce_op, str group, int world_size, str schedule, int staging_bytes, "
    "int sms) -> Tensor",
    "weft::embedding_bag_all_to_all(Tensor[] tables, Tensor indices, Tensor offsets, Tensor? weights, Tensor? anchor,"
    " Tensor[] states, str group, int rank, int[] counts, int[] dims, SymInt batch, str how, ScalarType dtype, str "
    "schedule, int pooling, bool checked, bool sparse, str optimizer, float lr, float eps) -> Tensor",
    "weft::embedding_bag_gradients(Tensor grad, Tensor[] tables, Tensor indices, Tensor offsets, Tensor? weights, str"
    " group, int rank, int[] counts, int[] dims, SymInt batch, str how, bool sparse, bool of_tables, bool of_weights)"
    " -> Tensor[]",
    "weft::embedding_bag_update(Tensor grad, Tensor(a!)[] tables, Tensor(b!)[] states, Tensor indices, Tensor "
    "offsets, Tensor? weights, str group, int rank, int[] counts, int[] dims, SymInt batch, str how, str kind, float "
    "lr, float eps, bool of_weights) -> Tensor",
    "weft::experts_route(Tensor index, int experts, int last) -> (Tensor, Tensor, Tensor)",
    "weft::experts_spread(Tensor x, Tensor place) -> Tensor",
    "weft::experts_total(Tensor rows, Tensor place, Tensor? weights) -> Tensor",
    "weft::experts_total_backward(Tensor grad, Tensor rows, Tensor place, Tensor weights) -> (Tensor, Tensor)",
    "weft::linears_of_whole(Tensor x, Tensor[] weights, str group, str schedule) -> Tensor[]",
    "weft::matmul_all_reduce(Tensor[] factors, Tensor[] bs, Tensor? bias, Tensor? residual, str group, str schedule, "
    "SCALES) -> Tensor",
    "weft::matmul_all_to_all(Tensor a, Tensor b, str group, int rank, int world_size, SymInt unit, str "
    "schedule, SCALES) -> Tensor",
    "weft::matmul_all_to_all_columns(Tensor a, Tensor b, str group, int world_size, str schedule) -> Tensor",
    "weft::matmul_reduce_scatter(Tensor[] factors, Tensor[] bs, str group, int rank, int world_size, SymInt unit, str "
    "schedule, str op, SCALES) -> Tensor",
    "weft::quantised_linears(Tensor x, Tensor[] weights, Tensor[] scale_bs, str recipe) -> Tensor[]",
    "weft::ragged_all_to_all_gated(Tensor a, Tensor b, Tensor splits, str group, int world_size, SymInt max_rows, "
    "SymInt? a_rows, str limit, str schedule, bool return_received, SCALES) -> (Tensor, Tensor)",
    "weft::ragged_all_to_all_matmul(Tensor a, Tensor b, Tensor splits, str group, int world_size, SymInt max_rows, "
    "SymInt? a_rows, str limit, str schedule, bool return_received, SCALES) -> Tensor[]",
    "weft::ragged_matmul_all_to_all(Tensor a, Tensor b, Tensor splits, str group, int world_size, SymInt max_rows, "
    "SymInt? a_rows, str limit, str schedule, bool return_received, SCALES) -> (Tensor, Tensor)",
    "weft::rows_of_ranks(Tensor a, str group, str limit) -> (SymInt, SymInt)",
    "weft::swiglu(Tensor hidden, Tensor counts) -> Tensor",
    "weft::swiglu_backward(Tensor grad, Tensor hidden, Tensor counts) -> Tensor",
]
"""Saved graphs name operators and their arguments: these stay as they are, and so do those of NAME_forward."""
SCALES = (
    'Tensor? scale_a=None, Tensor[]? scale_bs=None, str recipe="", ScalarType? output_dtype=None, bool use_fast_accum=False'
)
"""The last arguments of operators that take FP8 operands. Graphs without FP8 operands do not have them."""
SCHEMAS = [schema.replace("SCALES", SCALES) for schema in SCHEMAS]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.partition("(")[0])
def test_saved_graphs_find_their_operators(schema: str) -> None:
    name = schema.partition("(")[0].removeprefix("weft::")
    assert str(getattr(torch.ops.weft, name).default._schema) == schema


def _has_autograd(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd")


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.partition("(")[0])
def test_what_computes_a_differentiable_operator_takes_the_same_arguments(schema: str) -> None:
    name, rest = schema.split("(", 1)
    if _has_autograd(name):
        forward = getattr(torch.ops.weft, f"{name.removeprefix('weft::')}_forward").default
        assert str(forward._schema) == f"{name}_forward({rest}"
        assert not _has_autograd(f"{name}_forward")


def test_compiled_graphs_have_operators_without_autograd() -> None:
    """Python around an operator for autograd takes longer than the rest of its dispatch."""
    graphs: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append([node.target.name() for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)])
        return make_boxed_func(graph.forward)

    hidden, counts = torch.randn(3, 4, requires_grad=True), torch.tensor([2])
    compiled = torch.compile(lambda x: torch.ops.weft.swiglu(x, counts), backend=aot_autograd(fw_compiler=note))
    torch._dynamo.reset()
    compiled(hidden).sum().backward()
    gradient, hidden.grad = hidden.grad, None
    torch.ops.weft.swiglu(hidden, counts).sum().backward()
    assert torch.equal(_not_none(gradient), _not_none(hidden.grad))
    names = [name for graph in graphs for name in graph if name.startswith("weft::")]
    assert names == ["weft::swiglu_forward", "weft::swiglu_backward"]
    assert not any(map(_has_autograd, names))


def _not_none(one: torch.Tensor | None) -> torch.Tensor:
    assert one is not None
    return one


def test_tensors_come_before_options() -> None:
    def run(group: str, a: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    with pytest.raises(AssertionError, match="wrong_order"):
        define("wrong_order", run, run)


class _Own(torch.Tensor):
    pass


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _x(**options: Any) -> torch.Tensor:
    return torch.ones(2, 2, **options)


@pytest.mark.parametrize(
    ("make", "outside"),
    [
        (lambda: [_x(), [_x(), _x()], None, []], True),
        (lambda: [torch.nn.Parameter(_x(), requires_grad=False)], True),
        (lambda: [_x(requires_grad=True)], False),
        (lambda: [_x(), [_x(), torch.nn.Parameter(_x())]], False),
        (lambda: [_x(dtype=torch.complex64).conj()], False),
        (lambda: [[torch._neg_view(_x())]], False),
        (lambda: [_x().as_subclass(_Own)], False),
    ],
)
def test_tensors_that_need_the_dispatcher(make: Callable[[], Any], outside: bool) -> None:
    assert can_skip_dispatcher(make()) is outside


def test_gradients_need_the_dispatcher_only_where_they_are_recorded() -> None:
    with torch.no_grad():
        assert can_skip_dispatcher([torch.nn.Parameter(_x())])


def test_modes_need_the_dispatcher() -> None:
    with _Mode():
        assert not can_skip_dispatcher([_x()])
    assert can_skip_dispatcher([_x()])
