"""Mixture of experts: a router, stacked experts, and what both do over all ranks.

    MoE(x [..., H])                                    -> [..., H]     router, top-k, Experts
    Experts(x [T, H], index [T, k], weights [T, k])    -> [T, H]       the sum of each token's k experts, by weights

Legend: T tokens of this rank, k experts of a token, E experts of all ranks, e of one rank, H hidden size, F an expert's width.
weft.models.expert_parallel shards a module's experts over ranks; unsharded, these are plain modules of one process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from weft.ops import all_to_all_matmul, matmul_all_to_all
from weft.ops.experts import experts_spread, experts_total, swiglu
from weft.ops.ragged_all_to_all import ragged_gated, room, room_home

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From [rows, 2 F], what both halves of the first weight make, to [rows, F]. The second argument's sum is how many of the rows
there are; what is made of the others does not count."""


class Routing:
    """Which rows experts work on: a token's row once for each of its experts, by expert.

    index: [T, k], experts of 0 to E - 1. order: [T k], where each row by expert is in index; place: [T, k], its inverse, which
    row by expert is each token's; counts: [E] rows of each. On the device, with no word to the host.

    >>> routing = Routing(torch.tensor([[2, 0], [0, 1]]), 3)
    >>> routing.order.tolist(), routing.place.tolist(), routing.counts.tolist()
    ([1, 2, 3, 0], [[3, 0], [1, 2]], [2, 1, 1])
    """

    def __init__(self, index: torch.Tensor, experts: int) -> None:
        flat = index.flatten()
        # A radix sort goes over its keys once for each of their bytes.
        self.order = flat.to(torch.uint8 if experts <= 256 else torch.int32).argsort(stable=True)
        self.place = torch.empty_like(self.order).scatter_(0, self.order, torch.arange(len(flat), device=flat.device))
        self.place = self.place.view(index.shape)
        zeros = torch.zeros(experts, dtype=torch.int64, device=index.device)
        self.counts = zeros.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] to rows by expert, [T k, H]."""
        return experts_spread(x, self.place)

    def gather(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Rows by expert to the sum of each token's, [T, H], in float32 and rounded once. weights: [T, k]."""
        return experts_total(rows, self.place, weights)


def experts_alone(
    x: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    into: torch.Tensor,
    out: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """All experts on this rank. into: [E, H, 2 F]. out: [E, F, H]. Returns [T, H]. The host waits for the counts."""
    parts = torch.split(routing.spread(x), routing.counts.tolist())
    found = [act(part @ first) @ second for part, first, second in zip(parts, into, out, strict=True)]
    return routing.gather(torch.cat(found), weights)


def experts_apart(
    x: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    into: torch.Tensor,
    out: torch.Tensor,
    act: Activation,
    group: dist.ProcessGroup,
    capacity: float | None,
) -> torch.Tensor:
    """Experts over ranks, E / world_size on each in the order of ranks: rows go to their experts and come home.

    Replaces
        all_to_all_single(received, rows); grouped matmuls; all_to_all_single(home, results)

    x: [T, H], this rank's tokens, as many as every rank's. into: [e, H, 2 F], out: [e, F, H], this rank's experts. capacity:
    the most rows that may arrive at a rank, in multiples of T k, rounded up (weft.ops.ragged_all_to_all.room); None: all that
    ranks can send. Returns [T, H].

        rows by expert ~all_to_all_matmul~> act ~matmul_all_to_all~> rows by expert, home

    Where no gradient is asked for and act is swiglu, it is the end of the first matmul, whose product is never stored.
    """
    size, sent = group.size(), routing.order.shape[0]
    most = room(size * sent if capacity is None else int(capacity * sent))
    splits, rows = routing.counts.view(size, -1), routing.spread(x)
    if act is swiglu and not (torch.is_grad_enabled() and (rows.requires_grad or into.requires_grad)):
        middle, arrived = ragged_gated(rows, into, group, splits, most)
    else:
        keep = torch.is_grad_enabled() and into.requires_grad
        hidden, arrived, *_ = all_to_all_matmul(rows, into, group, splits=splits, max_rows=most, return_received=keep)
        middle = act(hidden, arrived)
    home, _ = matmul_all_to_all(middle, out, group, splits=arrived, max_rows=room_home(sent, most))
    return routing.gather(home, weights)


class Experts(nn.Module):
    """Stacked experts, each act(x @ gate) * (x @ up) @ down.

    gate_up_proj: [E, 2 F, H], gate's rows first. down_proj: [E, H, F]. As stacked experts lie in transformers, with its names.
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
        """Uniform, as nn.Linear's."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(weight, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]. top_k_index, top_k_weights: [T, k]."""
        into, out = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        return experts_alone(hidden_states, Routing(top_k_index, self.num_experts), top_k_weights, into, out, self._apply_gate)


class MoE(nn.Module):
    """A mixture of experts: softmax over a linear router's logits, the top k of E experts, weights that sum to one.

    hidden: H. width: F. Weights are computed in float32. [..., H] -> [..., H]. weft.ExpertParallel shards the experts; every
    rank has the router. Source: Mixtral (arXiv 2401.04088).
    """

    def __init__(self, hidden: int, width: int, num_experts: int, top_k: int = 2) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k is {top_k}; of {num_experts} experts it must be 1 to {num_experts}")
        self.top_k = top_k
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = Experts(num_experts, hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        rows = x.reshape(-1, x.shape[-1])
        weights, index = self.gate(rows).float().softmax(-1).topk(self.top_k)
        out: torch.Tensor = self.experts(rows, index, weights / weights.sum(-1, keepdim=True))
        return out.view(x.shape)
