"""Megatron-core's column and row parallel linears, with their collectives hidden by weft.

    torchrun --nproc-per-node 2 examples/recipes/megatron_mlp.py

Megatron-core's specs name the classes of a layer's linears. `overlapped(spec)` replaces ColumnParallelLinear and
RowParallelLinear in a spec by subclasses whose forward and backward passes call weft. They apply with sequence parallelism
(`sequence_parallel=True`), without fused weight gradients (`gradient_accumulation_fusion=False`), and outside experts. In
any other case the subclasses run Megatron's own code.

    spec = overlapped(get_gpt_layer_local_spec(...))
    model = GPTModel(config, spec, ...)

This program compares Megatron's MLP on two or more ranks with the same MLP computed whole on each rank. Megatron's own
sequence-parallel linears do not run on CPUs; with weft they do.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu

import weft

SEQUENCE, BATCH, HIDDEN, INNER = 16, 2, 64, 128


class OverlappedColumn(ColumnParallelLinear):  # type: ignore[misc]
    """x [sequence / ranks, batch, hidden] -> [sequence, batch, columns / ranks]."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *, bias: Any = None, **rest: Any) -> torch.Tensor:
        if not rest["sequence_parallel"] or rest["gradient_accumulation_fusion"]:
            return super()._forward_impl(input, weight, bias=bias, **rest)
        y = weft.all_gather_matmul(input.flatten(0, 1), weight.t(), self.tp_group).unflatten(0, (-1, input.shape[1]))
        return y if bias is None else y + bias


class OverlappedRow(RowParallelLinear):  # type: ignore[misc]
    """x [sequence, batch, columns / ranks] -> [sequence / ranks, batch, hidden]."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.sequence_parallel or self.gradient_accumulation_fusion or self.explicit_expert_comm:
            return super().forward(input_)
        y = weft.matmul_reduce_scatter(input_.flatten(0, 1), self.weight.t(), self.tp_group).unflatten(0, (-1, input_.shape[1]))
        if self.skip_bias_add or self.bias is None:
            return y, self.bias if self.skip_bias_add else None
        return y + self.bias, None


CLASSES = {ColumnParallelLinear: OverlappedColumn, RowParallelLinear: OverlappedRow}


def overlapped(spec: Any) -> Any:
    """Return a spec, or a dataclass of submodules, with weft's classes in place of Megatron's, at any depth."""
    if isinstance(spec, type):
        return CLASSES.get(spec, spec)
    if is_dataclass(spec):
        return replace(spec, **{field.name: overlapped(getattr(spec, field.name)) for field in fields(spec) if field.init})
    return spec


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=INNER,
        tensor_model_parallel_size=size,
        sequence_parallel=True,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(0)  # Megatron draws the whole weight on every rank and keeps a part
    mlp = MLP(config, overlapped(MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)))
    torch.manual_seed(1)
    whole = torch.randn(SEQUENCE, BATCH, HIDDEN)
    x = whole.chunk(size)[rank].clone().requires_grad_()
    y, _ = mlp(x)
    y.square().sum().backward()

    fc1, fc2 = (gathered(linear.weight, dim) for linear, dim in ((mlp.linear_fc1, 0), (mlp.linear_fc2, 1)))
    whole.requires_grad_()
    # Each rank's columns are its part of the gate, then its part of the other half.
    gate, up = (whole @ fc1.t()).unflatten(-1, (size, 2, -1)).unbind(-2)
    expected = (silu(gate) * up).flatten(-2) @ fc2.t()
    expected.square().sum().backward()
    assert whole.grad is not None
    assert x.grad is not None
    worst = max(relative(y, expected.chunk(size)[rank]), relative(x.grad, whole.grad.chunk(size)[rank]))
    if rank == 0:
        print(f"largest difference from the whole MLP: {worst:.1e} of the largest element")
        print(weft.choices(mlp.linear_fc1.tp_group))
    assert worst < 1e-4
    dist.destroy_process_group()


def gathered(part: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach())
    return torch.cat(parts, dim)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


if __name__ == "__main__":
    main()
