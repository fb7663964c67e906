"""Mixture of experts: a router and stacked experts, in one process or over all ranks.

    MoE(x [..., H])                                    -> [..., H]     router, top-k, Experts
    Experts(x [T, H], index [T, k], weights [T, k])    -> [T, H]       the sum of each token's k experts, by weights

Legend: T tokens of this rank, k experts of a token, E experts of all ranks, e of one rank, H hidden size, F an expert's width.
weft.models.expert_parallel shards a module's experts over ranks. Unsharded, these are plain modules of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from weft.core.experts import refused_index
from weft.ops.experts import Float8Operand, experts_quantise, experts_route, experts_spread, experts_total, swiglu
from weft.ops.ragged_all_to_all import ragged_combine, ragged_dispatch, ragged_gated, rows_of_ranks
from weft.ops.scaled import ScaleAndBias

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""An activation maps [rows, 2 F], the product with both halves of the first weight, to [rows, F]. The sum of the second
argument is the number of valid rows. The results of other rows are ignored."""


class Routing:
    """The rows that experts work on: each token's row once for each of its experts, sorted by expert.

    index: [T, k], experts of 0 to E - 1, or -1 for none. With skips_last, E is none, too.
    order: [T k], for each row by expert its position in index.
    place: [T, k], the inverse of order: the row by expert of each position, or -1.
    counts: [E], the rows of each expert.

    All of them stay on the device. An invalid index is found in counts (weft.core.experts).

    >>> routing = Routing(torch.tensor([[2, 0], [0, -1]]), 3)
    >>> routing.order.tolist(), routing.place.tolist(), routing.counts.tolist()
    ([1, 2, 0, 3], [[2, 0], [1, -1]], [2, 0, 1])
    """

    def __init__(self, index: torch.Tensor, experts: int, *, skips_last: bool = False) -> None:
        self.order, self.place, self.counts = experts_route(index, experts, experts if skips_last else experts - 1)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Copy tokens [T, H] to rows by expert, [T k, H]."""
        return experts_spread(x, self.place)

    def gather(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum each token's rows by expert to [T, H], in float32 and rounded once. weights: [T, k]."""
        return experts_total(rows, self.place, weights)


def experts_alone(
    x: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    into: torch.Tensor,
    out: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run all experts on this rank, and return [T, H]. The host waits for the counts.

    into: [E, H, 2 F].
    out: [E, F, H].

    Raises ValueError for an invalid index.
    """
    counts = routing.counts.tolist()
    if counts and (index := refused_index(counts[0])) is not None:
        raise ValueError(f"top_k_index has {index}; of {len(counts)} experts it must be 0 to {len(counts) - 1}, or -1 for none")
    rows = routing.spread(x)
    *parts, behind = torch.split(rows, [*counts, rows.shape[0] - sum(counts)])
    found = [act(part @ first) @ second for part, first, second in zip(parts, into, out, strict=True)]
    return routing.gather(torch.cat([*found, found[0].new_zeros(behind.shape)]), weights)


def run_experts_on_ranks(
    x: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    into: torch.Tensor,
    out: torch.Tensor,
    act: Activation,
    group: dist.ProcessGroup,
    limits: ExpertLimits,
) -> torch.Tensor:
    """Run experts that are sharded over ranks, E / world_size on each in the order of ranks.

    Replaces
        all_to_all_single(received, rows); grouped matmuls; all_to_all_single(home, results)

    x: [T, H], this rank's tokens. T may differ between ranks.
    into, out: [e, H, 2 F] and [e, F, H], this rank's experts.

    Returns [T, H].

        rows by expert ~all_to_all_matmul~> act ~matmul_all_to_all~> rows by expert, on the tokens' rank

    If no gradient is needed and act is swiglu, the first matmul applies it, and its product is never stored.
    """
    sent, most = limits.rows(routing, group)
    splits, rows = routing.counts.view(group.size(), -1), routing.spread(x)
    trains = torch.is_grad_enabled() and (rows.requires_grad or into.requires_grad or out.requires_grad)
    if trains and not (rows.requires_grad or torch.compiler.is_compiling()):
        # A rank with an empty batch must take part in the collective backward pass, because other ranks need their gradients.
        rows.requires_grad_()
    if act is swiglu and not trains:
        middle, arrived = ragged_gated(rows, into, group, splits, most, a_rows=sent, limit=limits.text)
    else:
        keep = torch.is_grad_enabled() and into.requires_grad
        hidden, arrived, *_ = ragged_dispatch(
            rows, into, group, splits, most, return_received=keep, a_rows=sent, limit=limits.text
        )
        middle = act(hidden, arrived)
    home, _ = ragged_combine(middle, out, group, arrived, sent, a_rows=most, limit=limits.text)
    return routing.gather(home, weights)


def run_float8_experts_on_ranks(
    x: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    into: Float8Operand,
    out: Float8Operand,
    act: Activation,
    group: dist.ProcessGroup,
    limits: ExpertLimits,
) -> torch.Tensor:
    """Run experts as run_experts_on_ranks does, but multiply in FP8, without gradients.

    into, out: quantised_weights of [e, H, 2 F] and [e, F, H].

    Tokens are quantised before they are sent, and their scales are sent with them. Results are sent back in the dtype of x.
    """
    sent, most = limits.rows(routing, group)
    splits, (elements, scales) = routing.counts.view(group.size(), -1), experts_quantise(x)
    rows = routing.spread(elements.view(torch.uint8)).view(elements.dtype)
    given: ScaleAndBias = {"scale_a": routing.spread(scales), "scale_b": into.scales, "output_dtype": x.dtype}
    if act is swiglu:
        middle, arrived = ragged_gated(rows, into.elements, group, splits, most, a_rows=sent, limit=limits.text, **given)
    else:
        hidden, arrived, *_ = ragged_dispatch(
            rows, into.elements, group, splits, most, return_received=False, a_rows=sent, limit=limits.text, **given
        )
        middle = act(hidden, arrived)
    elements, scales = experts_quantise(middle, arrived)
    given = {"scale_a": scales, "scale_b": out.scales, "output_dtype": x.dtype}
    home, _ = ragged_combine(elements, out.elements, group, arrived, sent, a_rows=most, limit=limits.text, **given)
    return routing.gather(home, weights)


@dataclass(frozen=True, kw_only=True)
class ExpertLimits:
    """Limits the rows of experts over ranks, with the arguments of weft.ExpertParallel. text: how errors name the limit."""

    capacity: float | None = None
    max_tokens: int | None = None
    text: str = field(init=False)

    def __post_init__(self) -> None:
        given = {"capacity": self.capacity, "max_tokens": self.max_tokens}
        said = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        object.__setattr__(self, "text", f"ExpertParallel({said})")

    def rows(self, routing: Routing, group: dist.ProcessGroup) -> tuple[int, int]:
        """Return the memory, in rows, for what a rank sends, and for what may arrive at one. Both are the same on all ranks.

        Without max_tokens the call is collective, and hosts wait for each other.
        """
        if self.max_tokens is None:
            sent, total = rows_of_ranks(routing.order, group.group_name, self.text)
        else:
            sent = self.max_tokens * routing.place.shape[1]
            total = group.size() * sent
        if self.capacity is None:
            return sent, total
        bound: int = torch.sym_max(1, torch.sym_int(self.capacity * sent))  # type: ignore[no-untyped-call]
        return sent, bound


class Experts(nn.Module):
    """Stacked experts. Each computes act(x @ gate) * (x @ up) @ down.

    gate_up_proj: [E, 2 F, H], gate's rows first.
    down_proj: [E, H, F].

    These are the layouts and names of transformers.
    """

    def __init__(
        self, num_experts: int, hidden: int, width: int, act_fn: Callable[[torch.Tensor], torch.Tensor] = nn.functional.silu
    ) -> None:
        super().__init__()
        self.num_experts, self.act_fn = num_experts, act_fn
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights from a uniform distribution, as nn.Linear does."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(weight, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return [T, H] for hidden_states [T, H]. top_k_index, top_k_weights: [T, k]."""
        into, out = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        return experts_alone(hidden_states, Routing(top_k_index, self.num_experts), top_k_weights, into, out, self._apply_gate)


class MoE(nn.Module):
    """A mixture of experts: softmax over a linear router's logits, the top k of E experts, weights that sum to one.

    hidden: H.
    width: F.

    It maps [..., H] to [..., H], and computes weights in float32. weft.ExpertParallel shards the experts; every rank has the
    router. Source: Mixtral (arXiv 2401.04088).
    """

    def __init__(self, hidden: int, width: int, num_experts: int, top_k: int = 2) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k is {top_k}; of {num_experts} experts it must be 1 to {num_experts}")
        self.top_k = top_k
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = Experts(num_experts, hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., H] for x [..., H]."""
        rows = x.reshape(-1, x.shape[-1])
        weights, index = self.gate(rows).float().softmax(-1).topk(self.top_k)
        out: torch.Tensor = self.experts(rows, index, weights / weights.sum(-1, keepdim=True))
        return out.view(x.shape)
