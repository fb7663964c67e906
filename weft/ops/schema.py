"""What torch knows of an operator: its schema, and its floating-point operations, as torch.utils.flop_counter counts them.

The schema comes from the annotations of the function that computes the operator. An operator's number of operations is that of
the products which this rank computes, with 2 for a multiplication and an addition, whatever the schedule. Operators that are
not listed do not multiply matrices. A backward calls operators that are listed, and torch's own. With splits, the rows that
there are count. While a graph is traced or captured, nobody knows them, and the rows for which there is room count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch

from weft.compat.dispatch import Formula, number_of

SymInt = Annotated[int, "SymInt"]
"""An int that torch.compile may trace as a symbol. For any other int, torch.compile compiles each value separately."""
SCALES = (
    "Tensor? scale_a=None, Tensor[]? scale_bs=None, str recipe='', ScalarType? output_dtype=None, bool use_fast_accum=False"
)
"""The last arguments of an operator that takes FP8 operands. They have defaults, so that other calls do not pass them."""
_NAMES = {torch.Tensor: "Tensor", torch.dtype: "ScalarType", SymInt: "SymInt"}


def schema_of(name: str, run: Callable[..., Any], returns: Any = None) -> tuple[str, int, int, list[tuple[Any, slice]]]:
    """Return (schema of weft::name, number of tensors, number of options, NamedTuples). The numbers are without scales.

    Each NamedTuple comes with the positions of its fields, the last NamedTuple first. The arguments of the operator are the
    parameters of `run`, tensors first, and a NamedTuple stands for its fields. A tensor that the operator changes is annotated
    as in schemas: Annotated[Tensor, "a!"]. If `run` has a parameter `scales`, the operator takes SCALES last.

    returns: what the operator returns. By default it is what `run` returns.
    """
    hints = get_type_hints(run, include_extras=True)
    given, takes_scales = hints.pop("return"), hints.pop("scales", None) is not None
    result = _type(given if returns is None else returns)
    fields = [_fields(hint) or {parameter: hint} for parameter, hint in hints.items()]
    ends = accumulate(map(len, fields))
    places = [(hint, slice(end - len(_fields(hint)), end)) for hint, end in zip(hints.values(), ends, strict=True)]
    arguments = [f"{_type(hint)} {parameter}" for group in fields for parameter, hint in group.items()]
    names = [parameter for group in fields for parameter in group]
    assert len(names) == len(set(names)), f"weft::{name} has two arguments of one name, which Inductor refuses: {names}"
    tensors = sum(argument.startswith("Tensor") for argument in arguments)
    assert all(each.startswith("Tensor") for each in arguments[:tensors]), f"weft::{name} takes a tensor last: {arguments}"
    schema = f"{name}({', '.join([*arguments, SCALES] if takes_scales else arguments)}) -> {result}"
    return schema, tensors, len(arguments) - tensors, [(kind, place) for kind, place in reversed(places) if _fields(kind)]


def _fields(kind: Any) -> dict[str, Any]:
    """Return the types of a NamedTuple's fields, or an empty dictionary for another type."""
    return get_type_hints(kind, include_extras=True) if hasattr(kind, "_fields") else {}


def _type(hint: Any) -> str:
    if hint in _NAMES or not get_args(hint):
        return _NAMES.get(hint) or str(hint.__name__)
    kind, (first, *others) = get_origin(hint), get_args(hint)
    if kind is tuple:
        return f"({', '.join(map(_type, (first, *others)))})"
    if kind is Annotated:
        return _type(first).replace("Tensor", f"Tensor({others[0]})")
    return _type(first) + ("?" if others else "[]")


Tensor = torch.Tensor


def _of_own_rows(out: Any, a: Tensor, b: Tensor, *_: Any) -> Any:
    """This rank's rows are multiplied, and their product is exchanged."""
    return 2 * a.shape[0] * b.shape[0] * b.shape[1]


def _of_added_up(out: Any, factors: Sequence[Tensor], bs: Sequence[Tensor], *_: Any) -> Any:
    return sum(_of_own_rows(out, a, b) for a, b in zip(factors, bs, strict=True))


def _of_both_gradients(out: Any, factors: Sequence[Tensor], bs: Sequence[Tensor], *_: Any) -> Any:
    return 2 * _of_added_up(out, factors, bs)


def _of_arriving_rows(out: Sequence[Tensor], a: Tensor, b: Tensor, *_: Any) -> Any:
    """Rows are exchanged, and then multiplied."""
    return 2 * out[0].shape[0] * b.shape[0] * b.shape[1]


def _of_several(out: Sequence[Tensor], a: Tensor, bs: Sequence[Tensor], *_: Any) -> Any:
    return sum(2 * one.shape[0] * b.shape[0] * b.shape[1] for one, b in zip(out, bs, strict=False))


def _of_weights(out: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], *_: Any) -> Any:
    return sum(2 * one.numel() * weight.shape[1] for one, weight in zip(out, weights, strict=True))


def _of_sent(out: Any, a: Tensor, b: Tensor, splits: Tensor, *_: Any) -> Any:
    return 2 * number_of(splits, a.shape[0]) * b.shape[1] * b.shape[2]


def _of_received(out: Sequence[Tensor], a: Tensor, b: Tensor, *_: Any) -> Any:
    return 2 * number_of(out[1], out[0].shape[0]) * b.shape[1] * b.shape[2]


FORMULAS: Mapping[str, Formula] = {
    "all_gather_matmul": _of_several,
    "all_gather_matmul_backward": _of_both_gradients,
    "matmul_reduce_scatter": _of_added_up,
    "matmul_all_reduce": _of_added_up,
    "matmul_all_reduce_norm": _of_added_up,
    "matmul_all_to_all": _of_own_rows,
    "all_to_all_matmul": _of_arriving_rows,
    "matmul_all_to_all_columns": _of_own_rows,
    "all_to_all_columns_matmul": _of_arriving_rows,
    "linears_of_whole": _of_weights,
    "quantised_linears": _of_weights,
    "ragged_matmul_all_to_all": _of_sent,
    "ragged_all_to_all_matmul": _of_received,
    "ragged_all_to_all_gated": _of_received,
}
"""By operator, the operations of its forward."""
