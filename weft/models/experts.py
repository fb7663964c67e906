"""Mixture of experts: a router and stacked experts, in one process or over all ranks.

    MoE(x [..., H])                                    -> [..., H]     router, top-k, Experts
    Experts(x [T, H], index [T, k], weights [T, k])    -> [T, H]       the sum of each token's k experts, by weights

Legend: T tokens of this rank, k experts of a token, E experts of all ranks, e of one rank, H hidden size, F an expert's width.
Unsharded, these are plain modules of one process.

ExpertParallel is a style for torch's parallelize_module that shards a layer's experts over ranks. Each rank routes its own
tokens. The first matmul sends their rows to the experts' ranks, and the second one sends the results back. The module keeps its
class's name and the names of its parameters, which become DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from weft.compat.dtensors import averaging_around, data_parallel_state
from weft.core.experts import refused_index
from weft.models.communicating import CommunicatingLayer, LayerCalls, record_layer
from weft.models.linear import require_one_dimension
from weft.models.products import in_one_dtype
from weft.ops.experts import (
    Float8Operand,
    experts_quantise,
    experts_route,
    experts_spread,
    experts_total,
    quantised_weights,
    swiglu,
)
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


_STACKED = ("gate_up_proj", "down_proj")
"""The stacked parameters, in the order in which all ranks shard them. Sharding each one is collective."""
_OPERATORS = ("all_to_all_matmul", "matmul_all_to_all")
_LISTED = {"w1.weight", "w2.weight", "w3.weight"}


class ExpertParallel(ParallelStyle):
    """Shards experts over the ranks of a mesh of one dimension, an equal number on each.

        parallelize_module(model, mesh, {"layers.0.mlp": weft.ExpertParallel()})

    It takes weft.models.experts.MoE, and blocks of transformers (5.0 or later) whose `experts` are stacked, gate_up_proj [E, 2
    F, H] and down_proj [E, H, F] (Mixtral, Qwen-MoE and others), or those stacked experts alone. It also takes Mixtral's block
    of earlier versions, whose list of experts becomes stacked experts: load its weights first.

    The block's input and output are this rank's own tokens. Their number may be 0, and may differ between ranks and calls. An
    expert's index of -1 names no expert: it adds nothing to the token, and gets no gradient. transformers' experts treat the
    index num_experts in the same way. Any other index out of range is a ValueError: at once and on all ranks on CPUs, in a
    later call on GPUs. Parameters of experts become DTensors with Shard(0), and their gradients are sums over the tokens of all
    ranks. All other parameters, such as the router's, are unchanged, and their gradients are of this rank's tokens only.

    gradients: "sum" leaves the experts' gradients as sums over the losses of all ranks. "mean" divides them by the number of
    ranks. Use "sum" if the loss is the sum of the ranks' losses (also with weft.parallelize). Use "mean" if it is their mean,
    as in data parallelism, where something else (fully_shard) averages the gradients of all other parameters over the same
    ranks. With None they are sums, and a forward with gradients raises ValueError if fully_shard or DistributedDataParallel
    averages the other parameters' gradients over these ranks.

    capacity: limits the rows that a rank receives to capacity x S. S is the number of rows (tokens times top k) of the rank
    with the most tokens, padded to a bucket; with max_tokens it is max_tokens times top k. Rows beyond the limit are left out,
    and a ValueError says so, on GPUs in a later call. With None every row fits.

    max_tokens: the most tokens that a rank will have. Every call has memory for that many, and no call asks the other ranks.
    More tokens are a ValueError. With None, ranks exchange their numbers of tokens on the host in each forward.

    float8: "blockwise" multiplies in float8_e4m3fn, for inference, as in DeepSeek-V3. Tokens are quantised in groups of 128
    columns before they are sent, which halves the bytes, and weights in blocks of 128 x 128. Results are sent back in the
    tokens' dtype. Parameters keep their dtype; their FP8 copy is made in the first forward, and again when they have changed. A
    forward that needs gradients is a ValueError: use torch.no_grad(). H and F must be multiples of 128. With None, experts
    multiply in the tokens' dtype.

    Operators: all_to_all_matmul and matmul_all_to_all with splits on the device; on GPUs they take bfloat16 and float16. Raises
    ValueError for modules that have no such experts, and for a number of experts that is no multiple of the number of ranks.
    """

    def __init__(
        self,
        *,
        capacity: float | None = None,
        max_tokens: int | None = None,
        float8: Literal["blockwise"] | None = None,
        gradients: Literal["sum", "mean"] | None = None,
    ) -> None:
        super().__init__()
        if capacity is not None and not (isinstance(capacity, (int, float)) and 0 < capacity < float("inf")):
            raise ValueError(f"capacity is {capacity!r}; it must be above 0, or None for all that ranks can send")
        if max_tokens is not None and not (type(max_tokens) is int and max_tokens > 0):
            raise ValueError(f"max_tokens is {max_tokens!r}; it must be a whole number above 0, or None for any number")
        if float8 not in (None, "blockwise"):
            raise ValueError(f"float8 is {float8!r}; it must be 'blockwise', or None")
        if gradients not in (None, "sum", "mean"):
            raise ValueError(f"gradients is {gradients!r}; it must be 'sum' or 'mean', or None")
        self.float8, self.gradients = float8, gradients
        self.limits = ExpertLimits(capacity=capacity, max_tokens=max_tokens)

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Raise the ValueError that applying the style would raise, without changing the module."""
        require_one_dimension(device_mesh)
        experts = getattr(module, "experts", module)
        count = _listed(module, experts) if isinstance(experts, nn.ModuleList) else _checked(experts)
        if count % device_mesh.size():
            name = "Experts" if isinstance(experts, nn.ModuleList) else type(experts).__name__
            raise ValueError(f"{name} has {count} experts; {device_mesh.size()} ranks do not divide them")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh)
        found = getattr(module, "experts", module)
        experts = _stacked(found) if isinstance(found, nn.ModuleList) else found
        if experts is not found:
            _take_in(module, experts)
        for name in _STACKED:
            weight = distribute_tensor(getattr(experts, name), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            experts.register_parameter(name, nn.Parameter(weight, requires_grad=getattr(experts, name).requires_grad))
        experts.__dict__["_weft_limits"] = self.limits
        experts.__dict__["_weft_divisor"] = {None: None, "sum": 0, "mean": device_mesh.size()}[self.gradients]
        experts.__dict__["_weft_fits"] = None
        experts.__dict__["_weft_float8"] = None if self.float8 is None else _Float8Weights()
        experts.__class__ = _spread_class(cast(Any, type(experts)))
        ran = experts.__dict__["_weft_ran"] = LayerCalls()
        record_layer(experts, CommunicatingLayer(operators=_OPERATORS, reason=f"{experts.num_experts} experts", ran=ran))
        return module


class _Apart(nn.Module):
    """The forward of stacked experts that are sharded over ranks."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        weights = cast(DTensor, self.gate_up_proj), cast(DTensor, self.down_proj)
        into, out = (weight.to_local() for weight in weights)
        divisor = self.__dict__["_weft_divisor"]
        if divisor is None and (into.requires_grad or out.requires_grad) and (why := _why_not_sums(self)):
            raise ValueError(why)
        if divisor:
            into, out = _DividedGradient.apply(into, divisor), _DividedGradient.apply(out, divisor)  # type: ignore[no-untyped-call]
        if not getattr(self, "is_transposed", False):
            into, out = into.transpose(1, 2), out.transpose(1, 2)
        # The decorator of transformers' experts sets has_bias, and their code skips an index of num_experts.
        routing = Routing(top_k_index, cast(int, self.num_experts), skips_last=hasattr(self, "has_bias"))
        group, limits, float8 = weights[0].device_mesh.get_group(), self.__dict__["_weft_limits"], self.__dict__["_weft_float8"]
        act = _activation(self)
        if float8 is None:
            hidden_states, into, out = in_one_dtype(hidden_states, (into, out))
            found = run_experts_on_ranks(hidden_states, routing, top_k_weights, into, out, act, group, limits)
        else:
            _refuse_gradients(hidden_states, into, out)
            (hidden_states,) = in_one_dtype(hidden_states, ())
            into, out = float8.of("into", weights[0], into), float8.of("out", weights[1], out)
            found = run_float8_experts_on_ranks(hidden_states, routing, top_k_weights, into, out, act, group, limits)
        self.__dict__["_weft_ran"].record(_OPERATORS, routing.order.shape[0], eager=not torch.compiler.is_compiling())
        return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _why_not_sums(experts: nn.Module) -> str:
    """Return why gradients that are sums do not fit those of other parameters, or "".

    Compiled code calls it when it is traced. Modules are wrapped before.
    """
    state, known = data_parallel_state(), experts.__dict__["_weft_fits"]
    if state == known:
        return ""
    what, name, ranks = averaging_around(experts)
    group = cast(DTensor, experts.gate_up_proj).device_mesh.get_group()
    shared = sorted(ranks & set(dist.get_process_group_ranks(group)))
    if len(shared) > 1:
        return (
            f"{what} averages gradients over ranks {', '.join(map(str, shared))}, while those of {name or 'the experts'} are "
            'sums over the tokens of these ranks; choose: ExpertParallel(gradients="mean") averages them, too, and '
            'gradients="sum" leaves them as they are'
        )
    experts.__dict__["_weft_fits"] = state
    return ""


class _DividedGradient(torch.autograd.Function):
    """Returns a tensor, with its gradient divided by a number."""

    @staticmethod
    def forward(x: torch.Tensor, divisor: int) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.divisor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] / ctx.divisor, None


def _refuse_gradients(*tensors: torch.Tensor) -> None:
    """Raise ValueError if one of these tensors needs a gradient."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            'ExpertParallel(float8="blockwise") has no gradients, and some are asked for: call the model under '
            "torch.no_grad(), or leave float8 out"
        )


class _Float8Weights:
    """The FP8 copies of a layer's weights. A copy is made again when its weight has changed."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[tuple[int, ...], Float8Operand]] = {}

    def of(self, name: str, weight: DTensor, b: torch.Tensor) -> Float8Operand:
        """Return the FP8 copy of a weight. b: this rank's part of the weight, as [experts, K, N]."""
        # A change in place raises the version of the tensor through which it was made: the DTensor or its local part.
        versions = (-1 if one.is_inference() else one._version for one in (weight, b))
        state, found = (b.data_ptr(), *versions), self._made.get(name)
        if found is None or found[0] != state:
            found = self._made[name] = state, quantised_weights(b)
        return found[1]


def _activation(experts: nn.Module) -> Activation:
    """Return what runs between the two matmuls: one kernel for silu(gate) * up, or else the module's own code."""
    own, act_fn = cast(Any, experts)._apply_gate, getattr(experts, "act_fn", None)
    usual = own.__func__ is Experts._apply_gate or own.__name__ == "_default_apply_gate"
    if usual and (act_fn is nn.functional.silu or type(act_fn).__name__ in ("SiLU", "SiLUActivation")):
        return swiglu
    return lambda hidden, counts: own(hidden)


@cache
def _spread_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class for experts that are sharded over ranks. All layers share it, because Dynamo compiles each class again."""
    return type(kind.__name__, (_Apart, kind), {"__module__": kind.__module__})


def _checked(experts: nn.Module) -> int:
    """Return the number of stacked experts. Raises ValueError for other modules."""
    if isinstance(experts, _Apart):
        raise ValueError(
            f"{type(experts).__name__} are already spread over ranks; name them once, by their block or by themselves"
        )
    own, name = {key for key, _ in experts.named_parameters()}, type(experts).__name__
    if own != set(_STACKED) or not hasattr(experts, "_apply_gate") or getattr(experts, "has_post_expert_norm", False):
        raise ValueError(
            f"{name} has parameters {', '.join(sorted(own)) or 'none'}; ExpertParallel takes experts with gate_up_proj and "
            "down_proj, stacked, without biases or norms between, as weft.models.experts.MoE and blocks of transformers 5 have"
        )
    return cast(torch.Tensor, experts.gate_up_proj).shape[0]


def _listed(block: nn.Module, experts: nn.ModuleList) -> int:
    """Return the number of experts of Mixtral's list. Raises ValueError for another module."""
    own = [{key for key, _ in expert.named_parameters()} for expert in experts]
    gate = getattr(block, "gate", None)
    if not own or any(names != _LISTED for names in own) or not isinstance(gate, nn.Linear) or not hasattr(block, "top_k"):
        raise ValueError(f"{type(block).__name__} has a list of experts that are not Mixtral's w1, w2, w3; stack them first")
    _trained(experts, "w1", "w3")
    _trained(experts, "w2")
    return len(experts)


def _stacked(experts: nn.ModuleList) -> Experts:
    """Return stacked experts with the weights of Mixtral's list. The block does not change."""
    first = cast(Any, experts[0])
    made = Experts(len(experts), first.w1.in_features, first.w1.out_features, first.act_fn).to(first.w1.weight)
    with torch.no_grad():
        for at, expert in enumerate(cast(Any, experts)):
            made.gate_up_proj[at] = torch.cat([expert.w1.weight, expert.w3.weight])
            made.down_proj[at] = expert.w2.weight
    made.gate_up_proj.requires_grad_(_trained(experts, "w1", "w3"))
    made.down_proj.requires_grad_(_trained(experts, "w2"))
    return made


def _take_in(block: nn.Module, experts: nn.Module) -> None:
    """Replace a block's list by stacked experts. The block then runs them as newer blocks do."""
    block.experts = experts
    block.__class__ = _with_a_list(cast(Any, type(block)))


@cache
def _with_a_list(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of the same name that runs stacked experts instead of its list."""
    return type(kind.__name__, (_ListBlock, kind), {"__module__": kind.__module__})


def _trained(experts: nn.ModuleList, *names: str) -> bool:
    """Return whether these weights, which become one parameter, need gradients. Raises ValueError if only some are frozen."""
    found = {expert.get_submodule(name).weight.requires_grad for expert in experts for name in names}
    if len(found) > 1:
        raise ValueError(
            f"experts have a {' or '.join(names)} that is frozen, and one that is not; they become one parameter: "
            "freeze all of them, or none"
        )
    return True in found


class _ListBlock(nn.Module):
    """Mixtral's block as it was with a list. It also returns the router's logits."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, block = hidden_states.reshape(-1, hidden_states.shape[-1]), cast(Any, self)
        if self.training and getattr(block, "jitter_noise", 0) > 0:
            rows = rows * torch.empty_like(rows).uniform_(1 - block.jitter_noise, 1 + block.jitter_noise)
        logits = block.gate(rows)
        weights, index = logits.float().softmax(-1).topk(block.top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(rows.dtype)
        return block.experts(rows, index, weights).view(hidden_states.shape), logits
