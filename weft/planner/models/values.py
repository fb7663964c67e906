"""Values: a model's sizes, its operator calls, and the matmuls that weft has no operator for."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields, replace

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
        verdict = "" if self.operators else "sequential"
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
    places: tuple[Place, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 0:
                raise ValueError(f"{field.name} is {value}; it must not be negative")
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
