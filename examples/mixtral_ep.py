"""A small Mixtral, trained with its experts on every rank, and with each expert on one rank.

    torchrun --nproc-per-node 4 examples/mixtral_ep.py
    torchrun --nproc-per-node 8 examples/mixtral_ep.py --layers 8 --width 1024 --experts 16 --length 512 --batch 8 --steps 40

Attention and all else is data parallel: a rank has sequences of its own. `weft.ExpertParallel` spreads the experts of each
layer over the ranks; rows go to their experts within the first matmul and come home within the second. Both models train on the
same tokens, and their losses have to agree within rounding.

It runs on GPUs (NCCL, bfloat16) where there is one for every rank, else on CPUs (gloo, float32).
Legend: B batch of a rank, T tokens, C width, H heads, V vocabulary.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from world import join

import weft
from weft.models.experts import MoE

VOCABULARY, HEADS = 256, 4


class Block(nn.Module):
    """Causal attention, then a mixture of experts, each after a norm and beside a residual."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.moe = MoE(width, 4 * width, experts)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x_BTC.shape
        parts = self.qkv(self.before(x_BTC)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x_BTC = x_BTC + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x_BTC + self.moe(self.between(x_BTC))


class Mixtral(nn.Module):
    """Tokens of all but the last place to the mean cross entropy of the next ones."""

    def __init__(self, *, layers: int, width: int, experts: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, experts) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text_BT: torch.Tensor) -> torch.Tensor:
        given, wanted = text_BT[:, :-1], text_BT[:, 1:]
        x_BTC = self.tokens(given)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return nn.functional.cross_entropy(self.head(self.norm(x_BTC)).flatten(0, 1).float(), wanted.flatten())


def average(model: nn.Module) -> None:
    """Gradients of the mean loss of all ranks. Experts of this rank have seen all ranks' tokens already."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def losses(*, spread: bool, options: argparse.Namespace, device: torch.device) -> tuple[list[float], int]:
    """(the mean loss of all ranks, step by step; bytes of a rank's parameters)."""
    torch.manual_seed(0)
    model = Mixtral(layers=options.layers, width=options.width, experts=options.experts)
    model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    if spread:
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        parallelize_module(model, mesh, {"blocks.*.moe": weft.ExpertParallel(capacity=options.capacity)})
    parameters = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    seen = []
    for _ in range(options.steps):
        first_B1 = torch.randint(VOCABULARY, (options.batch, 1), generator=draw)
        text_BT = (first_B1 + 3 * torch.arange(options.length + 1)) % VOCABULARY
        loss = model(text_BT.to(device))
        loss.backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        seen.append(float(mean) / dist.get_world_size())
    return seen, sum(p.numel() * p.element_size() for p in parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {"layers": 2, "width": 64, "experts": 4, "length": 32, "batch": 4, "steps": 12}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--capacity", type=float, help="rows that may arrive at a rank, over those that it sends; all if left out"
    )
    options = parser.parse_args()
    device = join()
    whole, whole_bytes = losses(spread=False, options=options, device=device)
    spread, spread_bytes = losses(spread=True, options=options, device=device)
    worst = max(abs(a - b) / abs(a) for a, b in zip(whole, spread, strict=True))
    if dist.get_rank() == 0:
        print(
            f"{options.experts} experts on {dist.get_world_size()} {device.type} ranks: loss {whole[0]:.4f} to {whole[-1]:.4f}"
        )
        print(f"each expert on one rank: loss {spread[0]:.4f} to {spread[-1]:.4f}")
        print(f"parameters of a rank: {whole_bytes / 1e6:.1f} MB, then {spread_bytes / 1e6:.1f} MB")
        print(f"largest difference of losses: {worst:.1e}")
    weft.close()
    dist.destroy_process_group()
    if not worst <= (0.03 if device.type == "cuda" else 1e-3):  # also where it is nan
        raise SystemExit("that is more than rounding explains")


if __name__ == "__main__":
    main()
