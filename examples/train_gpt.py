"""A small GPT, trained with data parallelism, with PyTorch's own collectives and with weft's beside the backward pass.

    torchrun --nproc-per-node 4 examples/train_gpt.py
    torchrun --nproc-per-node 8 examples/train_gpt.py --layers 24 --width 2048 --heads 16 --length 1024 --batch 4 --steps 120

It runs on GPUs (NCCL) where there is one for every rank, else on CPUs (gloo). DistributedDataParallel and fully_shard train the
same model on the same tokens, first as they are, then with weft: `weft.hooks.replicate(model)` for the one, and for the other
`weft.overlap.hooks.units(model.blocks)`, which says what to take together, and `weft.hooks.fsdp(model)`. Losses have to agree
within rounding. `auto` is the planner's choice; what was chosen, and why, is printed.

Legend: B batch of a rank, T tokens, C width, H heads, V vocabulary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from world import join

import weft

VOCABULARY = 512


class Block(nn.Module):
    """Causal attention, then an MLP of four times the width, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x_BTC.shape
        parts = self.qkv(self.before(x_BTC)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x_BTC = x_BTC + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x_BTC + self.down(nn.functional.gelu(self.up(self.between(x_BTC))))


class Gpt(nn.Module):
    """Tokens of all but the last place to the mean cross entropy of the next ones."""

    def __init__(self, *, layers: int, width: int, heads: int, length: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, text_BT: torch.Tensor) -> torch.Tensor:
        given, wanted = text_BT[:, :-1], text_BT[:, 1:]
        x_BTC = self.tokens(given) + self.places.weight[: given.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return nn.functional.cross_entropy(self.head(self.norm(x_BTC)).flatten(0, 1).float(), wanted.flatten())


def sharded(model: Gpt) -> Gpt:
    """Each block's parameters, and the rest, over all ranks."""
    mesh = dist.init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(model: Gpt) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=25)


def sharded_by_weft(model: Gpt) -> Gpt:
    mesh = dist.init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for unit in weft.overlap.hooks.units(model.blocks):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weft.hooks.fsdp(model, method="nccl+ahead=1")
    return model


def counting(batch: int, length: int, draw: torch.Generator) -> torch.Tensor:
    """Texts that can be learnt: from a random token on, each is the one before plus three."""
    first_B1 = torch.randint(VOCABULARY, (batch, 1), generator=draw)
    return (first_B1 + 3 * torch.arange(length)) % VOCABULARY


def losses(wrap: Callable[[Gpt], nn.Module], options: argparse.Namespace, device: torch.device) -> tuple[list[float], float]:
    """(the mean loss of all ranks, step by step; seconds of the last step)."""
    torch.manual_seed(0)
    model = wrap(Gpt(layers=options.layers, width=options.width, heads=options.heads, length=options.length).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    seen, seconds = [], 0.0
    for _ in range(options.steps):
        text_BT = counting(options.batch, options.length + 1, draw).to(device)
        begin = time.perf_counter()
        loss = model(text_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        seen.append(float(mean) / dist.get_world_size())
        seconds = time.perf_counter() - begin
    return seen, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 2), ("width", 64), ("heads", 4), ("length", 32), ("batch", 2), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--method", default="auto", help="of DistributedDataParallel: auto, or a method such as nccl or copy_engine"
    )
    options = parser.parse_args()
    device = join()
    worst = 0.0
    kinds: dict[str, tuple[Callable[[Gpt], nn.Module], Callable[..., nn.Module]]] = {
        "ddp": (replicated, partial(weft.hooks.replicate, method=options.method)),
        "fsdp": (sharded, sharded_by_weft),
    }
    for name, (stock, ours) in kinds.items():
        plain, plain_s = losses(stock, options, device)
        mine, mine_s = losses(ours, options, device)
        worst = max(worst, *(abs(a - b) / abs(a) for a, b in zip(plain, mine, strict=True)))
        if dist.get_rank() == 0:
            print(f"{name}: loss {plain[0]:.4f} to {plain[-1]:.4f}, with weft {mine[-1]:.4f}")
            print(f"{name}: last step {plain_s:.4f} s, with weft {mine_s:.4f} s")
    if dist.get_rank() == 0:
        print(*weft.concurrent_choices(), f"largest difference of losses: {worst:.1e}", sep="\n")
    weft.close()
    dist.destroy_process_group()
    if not worst <= 1e-3:  # also where it is nan
        raise SystemExit("that is more than rounding explains")


if __name__ == "__main__":
    main()
