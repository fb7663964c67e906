"""torchtitan's Llama, with weft in place of torchtitan's own fused matmuls.

    torchrun --nproc-per-node 2 examples/recipes/torchtitan_llama.py

torchtitan 0.3 can fold the collectives of tensor parallelism into matmuls: a model that is built with
`tp_gemm_backend="dist_gemm"` calls three autograd functions of torchtitan.models.common.dist_gemm. They use PyTorch's
async TP, which needs CUDA. `use_weft` replaces the three; everything else of torchtitan stays as it is. In your own training
run, call `use_weft()` before the first forward pass.

This program compares the sharded model with a whole one on each rank: logits and gradients. On CPUs it replaces torchtitan's
FlexAttention, which has no backward pass there, by PyTorch's scaled_dot_product_attention.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.models.common import dist_gemm
from torchtitan.models.llama3 import Llama3Model, llama3_configs
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

import weft

LAYERS, BATCH, TOKENS = 2, 2, 32


class AllGatherLinear:
    """x [M / ranks, K], weight [N / ranks, K] -> [M, N / ranks]."""

    @staticmethod
    def apply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, group_name: str
    ) -> torch.Tensor:
        y = weft.all_gather_matmul(x, weight.t(), group)
        assert isinstance(y, torch.Tensor)
        return y if bias is None else y + bias


class AllGatherLinearMulti:
    """The same for two weights, which share one gathered x."""

    @staticmethod
    def apply(
        x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, group: dist.ProcessGroup, group_name: str
    ) -> list[torch.Tensor]:
        found = weft.all_gather_matmul(x, [first.t(), second.t()], group)
        assert isinstance(found, list)
        return found


class LinearReduceScatter:
    """x [M, K / ranks], weight [N, K / ranks] -> [M / ranks, N]."""

    @staticmethod
    def apply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, group_name: str
    ) -> torch.Tensor:
        y = weft.matmul_reduce_scatter(x, weight.t(), group)
        return y if bias is None else y + bias


def use_weft() -> None:
    """Let torchtitan's "dist_gemm" backend run on weft."""
    dist_gemm.AllGatherLinear = AllGatherLinear
    dist_gemm.AllGatherLinearMulti = AllGatherLinearMulti
    dist_gemm.LinearReduceScatter = LinearReduceScatter


class CausalAttention(torch.nn.Module):
    """q, k, v [batch, tokens, heads, dim] -> the same shape as q."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_masks: None, scale: float | None, enable_gqa: bool
    ) -> torch.Tensor:
        heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        return scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)


def build(tp_gemm_backend: str) -> Llama3Model:
    """torchtitan's debug model, with fewer layers."""
    config = llama3_configs["debugmodel"](attn_backend="flex", tp_gemm_backend=tp_gemm_backend)
    config.layers = config.layers[:LAYERS]
    set_llama3_sharding_config(config, enable_sp=True)
    model = config.build()
    for layer in model.layers.values():
        layer.attention.inner_attention = CausalAttention()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().square().sum()


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights and tokens on every rank
    whole, sharded = build("default"), build("dist_gemm")
    sharded.load_state_dict(whole.state_dict())
    tokens = torch.randint(0, 2048, (BATCH, TOKENS))
    positions = torch.arange(TOKENS).expand(BATCH, -1).contiguous()
    expected = whole(tokens, positions)
    loss_of(expected).backward()

    use_weft()
    parallel_dims.device_type = "cpu"
    dims = parallel_dims.ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=size, pp=1, ep=1, world_size=size)
    dims.build_mesh()
    sharded.parallelize(dims)
    with set_current_spmd_mesh(dims.spmd_dense_mesh()):
        logits = sharded(tokens, positions)
        loss_of(logits).backward()

    worst = relative(logits, expected.chunk(size, -1)[rank])
    for (name, one), (_, part) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
        if "norm" not in name:  # the gradient of a norm is a rank's part of a sum, which torchtitan adds up later
            (dim,) = [at for at in range(one.dim()) if one.shape[at] != part.shape[at]]
            worst = max(worst, relative(part.grad, one.grad.chunk(size, dim)[rank]))
    if rank == 0:
        print(f"largest difference from the whole model: {worst:.1e} of the largest element")
        print(weft.choices(dims.get_mesh("tp").get_group()))
    assert worst < 1e-3
    dist.destroy_process_group()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


if __name__ == "__main__":
    main()
