"""This file finds a model's operator calls among the matmuls of its layers.

A block is the matmuls of one module of a layer, such as an attention. If some of them read the hidden state and one writes it,
the block has two calls. The first gathers rows for the matmuls that read; ranks split their columns. The second scatters the
sums of the matmul that writes; ranks split its rows. Each up-projection of latent attention has a call of its own, which
gathers the latent vectors. All other matmuls are listed as not covered: each rank computes a router for its own rows, say.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from weft.core.problem import EXCHANGES, Op
from weft.planner.models.values import Model, OperatorCall, Place, Uncovered

COLUMNS = re.compile(
    r"(q|k|v|qkv|g|a|b|gate|up|gate_up)_proj|in_proj(_\w+)?|[wW]?qkv|W[qkv]|w[13]|Wi|c_attn|c_fc|fc1|fc_in|query_key_value"
    r"|dense_h_to_4h|input_linear|linear_[xy]|output_gate|proj_up(_gate)?|[qkv]|[iof]gate_preact"
)
"""Names of matmuls that read the hidden state: ranks split their N."""
ROWS = re.compile(
    r"o_proj|o_b_proj|out_proj|down_proj|proj_down|dense|dense_4h_to_h|c_proj|fc2|fc_out|[wW]o|w2|output_linear|linear_out"
)
"""Names of matmuls that write the hidden state: ranks split their K, and their results are summed."""
LATENT = re.compile(r"(q|k|v|kv)_b_proj")
"""Up-projections of latent attention: ranks split their N. Each rank computes the latent vectors of its own rows."""
OTHER_ROWS = re.compile(r"norm|cross|encoder_att")
"""Modules whose matmuls read other rows than the layer's: in a norm, those of a rank; in cross-attention, an encoder's."""
LABELS = (
    ("MLP", r"\b(mlp|feed_?forward|ffn?|fc2)\b"),
    ("state space", r"mamba|ssm"),
    ("linear attention", r"linear_?att|delta|lightning|kda|retention|lstm"),
    ("convolution", r"conv"),
    ("attention", r"att"),
    ("MLP", r"mlp|moe"),
)
"""The labels of blocks. The first whose pattern matches the module's path, class or weights' names is taken."""


@dataclass(frozen=True, kw_only=True)
class LayerWeight:
    """LayerWeight is a weight of a layer, from k to n columns.

    block: the path of its module within the layer. owner: that module's class. experts: the number of experts that have such a
    weight; 0 if every token is multiplied by it."""

    block: str
    name: str
    n: int
    k: int
    experts: int = 0
    owner: str = ""


@dataclass
class _Seen:
    """_Seen has the numbers of the layers that have a call, and the path of the first module that has it."""

    block: str = ""
    layers: set[int] = field(default_factory=set)


def count_calls(
    layers: Sequence[Sequence[LayerWeight]], hidden: int, visits: int
) -> tuple[tuple[OperatorCall, ...], tuple[Uncovered, ...]]:
    """Return the operator calls of all layers and the other matmuls, each with the number of layers that have it.

    visits: the number of experts that a token goes to."""
    calls: dict[OperatorCall, _Seen] = defaultdict(_Seen)
    others: dict[tuple[str, int, int, int], set[int]] = defaultdict(set)
    flops = [sum(one.n * one.k * _visits(one, visits) for one in layer) for layer in layers]
    for at, layer in enumerate(layers):
        for block in _blocks(layer):
            found, rest = _find_calls(block, _label(block, shared=any(one.experts for one in layer)), hidden, visits)
            for call in found:
                calls[call].block = calls[call].block or block[0].block
                calls[call].layers.add(at)
            for one in rest:
                others[f"{one.block}.{one.name}".strip("."), one.n, one.k, _visits(one, visits)].add(at)
    uncovered = (
        Uncovered(name=name, n=n, k=k, visits=times, layers=len(at), share=n * k * times * len(at) / sum(flops[i] for i in at))
        for (name, n, k, times), at in others.items()
    )
    return _name_by_layer(calls), tuple(uncovered)


def _visits(one: LayerWeight, visits: int) -> int:
    return visits if one.experts else 1


def _blocks(layer: Iterable[LayerWeight]) -> Iterable[list[LayerWeight]]:
    found: dict[tuple[str, bool], list[LayerWeight]] = defaultdict(list)
    for one in layer:
        found[one.block, bool(one.experts)].append(one)
    return found.values()


def _find_calls(block: list[LayerWeight], label: str, hidden: int, visits: int) -> tuple[list[OperatorCall], list[LayerWeight]]:
    """Return the operator calls of one block, and its other matmuls."""
    rows = [one for one in block if ROWS.fullmatch(one.name) and one.n == hidden]
    latent = [one for one in block if LATENT.fullmatch(one.name)]
    columns = [one for one in block if COLUMNS.fullmatch(one.name) and one.k == hidden]
    if len(rows) != 1 or not (columns or latent) or OTHER_ROWS.search(block[0].block):
        return [], block
    (row,), n = rows, sum(one.n for one in columns)
    label = "attention" if latent else label
    first, last = _names(label, n == 2 * row.k, [one.name for one in columns] if latent else [])
    into: tuple[Op, Op] = ("all_gather_matmul", "matmul_reduce_scatter")
    if row.experts:
        into = ("all_to_all_matmul", "matmul_all_to_all")
    times = _visits(row, visits)
    found = [OperatorCall(name=f"{label} {one.name}", op=into[0], n=one.n, k=one.k, visits=times) for one in latent]
    if columns:
        found.insert(0, OperatorCall(name=first, op=into[0], n=n, k=hidden, visits=times, weights=len(columns)))
    found.append(OperatorCall(name=last, op=into[1], n=hidden, k=row.k, visits=times))
    return found, [one for one in block if one not in (*columns, *latent, row)]


def _label(block: list[LayerWeight], *, shared: bool) -> str:
    """Return the label of a block. shared: its layer has experts, so it may be a shared expert."""
    if block[0].experts:
        return "expert"
    if shared and "shared" in block[0].block:
        return "shared expert"
    text = " ".join((block[0].block, block[0].owner, *(one.name for one in block)))
    return next((label for label, pattern in LABELS if re.search(pattern, text, re.IGNORECASE)), block[0].block or "layer")


def _names(label: str, gated: bool, columns: list[str]) -> tuple[str, str]:
    """Return the names of a block's first and last call. columns: the projections that the first call covers, if not QKV."""
    up = "gate/up" if gated else "up"
    if label == "expert":
        return f"expert dispatch + {up}", "expert down + combine"
    if label in ("MLP", "shared expert"):
        return f"{label} {up}", f"{label} down"
    if label == "attention":
        return f"attention {' + '.join(columns) or 'QKV'}", "attention out"
    return f"{label} in", f"{label} out"


def _name_by_layer(calls: dict[OperatorCall, _Seen]) -> tuple[OperatorCall, ...]:
    """Return the calls with their counts. Calls of one name and different shapes also get their first layer or their module."""
    named = []
    for call, seen in calls.items():
        others = [other for one, other in calls.items() if one.name == call.name and one != call]
        name = call.name
        if others:
            first = min(seen.layers)
            name += f" of {seen.block}" if first in (min(other.layers) for other in others) else f" of layer {first}"
        named.append(replace(call, name=name, layers=len(seen.layers)))
    return tuple(named)


def notes_on_layers(calls: Sequence[OperatorCall], uncovered: Sequence[Uncovered], layers: int) -> tuple[str, ...]:
    """Return notes about calls that only some of a model's layers have, and about matmuls that no call covers."""
    some: dict[int, list[str]] = {}
    for call in calls:
        if call.layers < layers:
            some.setdefault(call.layers, []).append(call.name)
    return (
        *(f"{count} of {layers} layers have {', '.join(names)}" for count, names in some.items()),
        *(f"not covered: {one}" for one in uncovered),
    )


def place_calls(model: Model, places: Sequence[Place]) -> Model:
    """Return a model that was read from its modules, with the operator calls of these places in place of its own."""
    calls = [call for place in places for call in _calls_at(model, place, places)]
    made = {(call.op, call.n, call.k) for call in calls}
    without = [call.name for call in model.read if (call.op, call.n, call.k) not in made]
    before = notes_on_layers(model.read, model.uncovered, model.layers)
    notes = [f"weft.parallelize runs no operator for {', '.join(without)}"] if without else []
    notes += [note for note in model.notes if note not in before]
    return replace(
        model,
        read=tuple(calls),
        places=tuple(places),
        notes=(*notes, *notes_on_layers(calls, model.uncovered, model.layers)),
    )


def _calls_at(model: Model, place: Place, places: Sequence[Place]) -> list[OperatorCall]:
    """Return the operator calls of a forward pass at one place."""
    if not place.operators or place.backward_only:
        return []
    if not place.n:  # experts have the sizes of the model's
        return [replace(call, layers=place.count) for call in model.read if call.op in EXCHANGES]
    op, rows = place.operators[0], [one for one in places if one.module == place.module and one.n == model.hidden]
    last = op == "matmul_reduce_scatter"
    label = next((label for label, pattern in LABELS if re.search(pattern, place.module, re.IGNORECASE)), place.module)
    name = _names(label, any(place.n == 2 * row.k for row in rows), [])[last]
    sizes = {(one.n, one.k) for one in places if one.operators[:1] == (op,) and one.module == place.module}
    name += f" N={place.n} K={place.k}" if len(sizes) > 1 else ""
    shared = 1 if last else max(1, len(place.parts))
    return [OperatorCall(name=name, op=cast(Op, op), n=place.n, k=place.k, layers=place.count, weights=shared)]
