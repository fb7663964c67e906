"""Model: the sizes of one model that decide the shapes of its distributed sites."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model's static sizes; a size that it has no use for is 0.

    source: where the numbers are from. hidden: width of the residual stream. heads, kv_heads, head_dim: of attention.
    intermediate: width of the dense MLP, or of the shared expert of a model with experts. gated: the MLP multiplies two
    projections up (SwiGLU and its like). experts, experts_per_token, expert_intermediate: of a mixture of experts.
    tables, embedding_dim: of a recommendation model; pooling: rows that a sample looks up, by table. notes: how the sizes were
    read, where that was not plain.
    Raises ValueError for a negative size, or heads that kv_heads does not divide.
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
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    tables: int = 0
    embedding_dim: int = 0
    pooling: tuple[int, ...] = ()
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
        width = f"{self.experts} experts of {self.expert_intermediate}" if self.experts else f"MLP {self.intermediate}"
        heads = f"{self.heads} heads ({self.kv_heads} for keys and values) of {self.head_dim}"
        return f"{self.name}: {self.layers} layers, hidden {self.hidden}, {heads}, {width}"
