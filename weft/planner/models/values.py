"""A model's sizes, its operator calls, and the matmuls that weft has no operator for.

`place_calls` finds the operator calls among the matmuls of the layers. A block is the matmuls of one module of a layer, such as
an attention. If some of them read the hidden state and one writes it, the block has two calls. The first gathers rows for the
matmuls that read; ranks split their columns. The second scatters the sums of the matmul that writes; ranks split its rows. Each
up-projection of latent attention has a call of its own, which gathers the latent vectors. All other matmuls are listed as not
covered: each rank computes a router for its own rows, say.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import cast

from weft.core.problem import EXCHANGES, GATHERS, ITEMSIZE, DType, LookupProblem, Op, Problem, RaggedProblem, Scaling, split


@dataclass(frozen=True, kw_only=True)
class OperatorCall:
    """OperatorCall is a call of weft's operator `op` in a model: its output is tokens x n, contracted over k.

    visits: the number of experts that each token goes to, for an all-to-all. layers: the number of layers that have this call;
    0 means all. weights: the number of weights that share a gathered input, such as 3 of Q, K and V, with n columns in all."""

    name: str
    op: Op
    n: int
    k: int
    visits: int = 1
    layers: int = 0
    weights: int = 1

    def problem(self, tokens: int, world_size: int, dtype: DType, scaling: Scaling | None = None) -> Problem:
        """Return the Problem of this call for `tokens` tokens of all ranks. Raises ValueError as Problem does.

        scaling: the scales of FP8 operands. Rows that are sent before they are multiplied have rowwise scales."""
        rows = -(-tokens * self.visits // world_size) if self.op in EXCHANGES else tokens
        if scaling is not None and scaling.recipe == "tensorwise" and self.op in GATHERS:
            scaling = replace(scaling, recipe="rowwise")
        return Problem(op=self.op, m=rows, n=self.n, k=self.k, world_size=world_size, dtype=dtype, scaling=scaling)

    def __str__(self) -> str:
        return f"{self.name}: {self.op} N={self.n} K={self.k}"


@dataclass(frozen=True, kw_only=True)
class ExpertsCall(OperatorCall):
    """ExpertsCall is a call with splits on the device, as weft.ExpertParallel makes it. experts: the experts of all ranks."""

    experts: int

    def problem(self, tokens: int, world_size: int, dtype: DType, scaling: Scaling | None = None) -> Problem:
        """Return the problem of a call in which every rank sends and receives equally many rows. Raises ValueError as
        RaggedProblem does."""
        even = super().problem(tokens, world_size, dtype, scaling)
        op: Op = "ragged_all_to_all_matmul" if self.op == "all_to_all_matmul" else "ragged_matmul_all_to_all"
        experts = self.experts // world_size
        return RaggedProblem(
            op=op,
            m=even.m,
            n=self.n,
            k=self.k,
            world_size=world_size,
            dtype=dtype,
            scaling=even.scaling,
            capacity=even.m,
            experts=experts,
        )


@dataclass(frozen=True, kw_only=True)
class EmbeddingCall(OperatorCall):
    """EmbeddingCall looks up bags of `k` rows on average in tables of `n` columns in total.

    dims: the columns of each table. pooling: the rows of a bag of each table; empty if all have `k`."""

    dims: tuple[int, ...]
    pooling: tuple[int, ...] = ()

    def problem(self, tokens: int, world_size: int, dtype: DType, scaling: Scaling | None = None) -> Problem:
        """Return the problem of a batch of `tokens` samples, with the tables spread over all ranks.

        All bags of the problem have equally many rows: as many as the busiest rank reads for one of its columns.

        Raises ValueError as LookupProblem does, and for FP8."""
        if scaling is not None:
            raise ValueError(f"dtype is {scaling.a!r}; {self.name} looks up rows of tables, use {', '.join(ITEMSIZE)}")
        tables, rows = split(len(self.dims), world_size), self.pooling or (self.k,) * len(self.dims)
        dims = tuple(self.dims[low:high] for low, high in tables)
        read = [sum(map(operator.mul, own, rows[low:high])) for own, (low, high) in zip(dims, tables, strict=True)]
        pooling = max(1, -(-max(read) // max(map(sum, dims))))
        return LookupProblem.of(batch=tokens, dims=dims, pooling=pooling, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Uncovered:
    """Uncovered is a matmul that weft has no operator for. It multiplies a token `visits` times, from k to n columns.

    name: its path within the layer. layers: the number of layers that have it. share: its share of the FLOPs of the weight
    matmuls in these layers."""

    name: str
    n: int
    k: int
    visits: int = 1
    layers: int
    share: float

    def __str__(self) -> str:
        return f"{self.name} N={self.n} K={self.k}: {self.share:.1%} of the weight matmuls' FLOPs in {self.layers} layers"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Place is where a model communicates after weft.parallelize, as weft.overlap_report lists it.

    module: its name in the model, with * for the number of a layer. parts: the children that share the collective.
    count: how often the model has this place. operators: those that run there, the first one in a training step; empty if weft
    does not overlap the place. reason: why not, or another remark. n, k: the sizes of the first operator's problem; 0 if only
    the model's sizes say them. backward_only: the operators run in the backward pass only."""

    module: str
    parts: tuple[str, ...] = ()
    count: int = 1
    operators: tuple[str, ...] = ()
    reason: str = ""
    n: int = 0
    k: int = 0
    backward_only: bool = False

    @property
    def name(self) -> str:
        """The place's name, as in weft.overlap_report."""
        return ": ".join(filter(None, (self.module, ", ".join(self.parts))))

    def __str__(self) -> str:
        verdict = "" if self.operators else "not overlapped"
        return f"{self.count} x {self.name}: " + "; ".join(filter(None, (", ".join(self.operators), verdict, self.reason)))


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model has one model's static sizes. A size that does not apply is 0.

    source: the origin of the numbers.
    hidden: the width of the residual stream.
    heads, kv_heads, head_dim: the sizes of attention; 0 if the config leaves them out or layers differ.
    intermediate: the width of the dense MLP, or of the shared expert in a model with experts.
    gated: the MLP multiplies two up-projections, as SwiGLU does. qk_norm: queries and keys are normalised, as in Qwen 3.
    experts, experts_per_token, expert_intermediate: the sizes of a mixture of experts.
    tables, embedding_dim: the sizes of a recommendation model. pooling: the rows that a sample looks up in each table.
    read: the operator calls as read from the model's modules; empty if they follow from the sizes.
    uncovered: the layers' matmuls that no operator call covers.
    without_operator: operator calls that weft.parallelize does not make; their matmuls run without weft.
    places: where the model communicates after weft.parallelize; empty if that is not known.
    notes: remarks on the model for the readers of a plan.

    Raises ValueError for a negative size, and if kv_heads does not divide heads.
    """

    name: str
    source: str
    hidden: int = 0
    layers: int = 1
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    gated: bool = True
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    tables: int = 0
    embedding_dim: int = 0
    pooling: tuple[int, ...] = ()
    read: tuple[OperatorCall, ...] = ()
    uncovered: tuple[Uncovered, ...] = ()
    without_operator: tuple[OperatorCall, ...] = ()
    places: tuple[Place, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and value < 0:
                raise ValueError(f"{each.name} is {value}; it must not be negative")
        if self.pooling and (len(self.pooling) != self.tables or min(self.pooling) < 0):
            raise ValueError(f"pooling is {self.pooling}; it must have a count of at least 0 for each of {self.tables} tables")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}; it must divide the {self.heads} heads")

    def __str__(self) -> str:
        if self.tables:
            return f"{self.name}: {self.tables} embedding tables of dim {self.embedding_dim}"
        parts = [f"{self.name}: {self.layers} layers", f"hidden {self.hidden}"]
        if self.heads:
            groups = f" ({self.kv_heads} for keys and values)" if self.kv_heads else ""
            parts.append(f"{self.heads} heads{groups} of {self.head_dim}")
        if self.experts:
            parts.append(f"{self.experts} experts" + (f" of {self.expert_intermediate}" if self.expert_intermediate else ""))
        elif self.intermediate:
            parts.append(f"MLP {self.intermediate}")
        return ", ".join(parts)


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
    without = tuple(call for call in model.read if (call.op, call.n, call.k) not in made)
    before = notes_on_layers(model.read, model.uncovered, model.layers)
    notes = [f"weft.parallelize runs no operator for {', '.join(call.name for call in without)}"] if without else []
    notes += [note for note in model.notes if note not in before]
    return replace(
        model,
        read=tuple(calls),
        without_operator=without,
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
