"""This module makes the torch.library schema of an operator from the annotations of the function that computes it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch

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
