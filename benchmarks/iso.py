"""How much of a decoder layer's all-reduces does ISO hide in prefill, compared with weft's own overlap?

ISO (arXiv 2409.11155) splits a prompt's tokens into two halves, and runs the all-reduce of one half while the other half
computes. weft_studies.iso predicts what this benchmark measures.

Protocol: measure.py's; bf16, random weights; LAYERS layers of Llama 3 70B in a row, so that the last all-reduce of one layer
runs during the next layer's attention. Norms have no weights, and rotary embeddings are left out of all programs. Methods:

    sequential/default   each part on all tokens, then NCCL's all-reduce
    peer/iso             two halves, all-reduces by NCCL on its own stream
    peer/iso priority    the same, the stream has the highest priority       peer/iso 16 blocks   and NCCL takes 16 blocks
    weft/auto            sequence parallelism: all_gather_matmul and matmul_reduce_scatter, attention in between
    computation/torch    the parts without communication       communication/default   the all-reduces alone

Results are compared with sequential's; weft's is the rank's own rows of it. The study is of a layer between two others; here
the very last all-reduce of half a sequence, 1 of 4 LAYERS, is exposed. Half b attends to both halves by PyTorch's
lower right causal bias, which its flash attention takes.

    torchrun --nproc-per-node 2 -m benchmarks.iso --json benchmarks/results/h200x2/iso.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

import weft
from benchmarks.measure import ALONE, Work, close_to, parser, row, together, trial
from benchmarks.rows import Row
from benchmarks.runner import parse_only, run_parts
from weft.planner.models import Model, load_model

MODEL = "llama3-70b"
TOKENS = ("1024", "2048", "4096", "8192", "16384")
LAYERS = 4
ROUNDS, REPEAT, ALARM_S = 9, 2, 90
Keys = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of earlier tokens of the same prompt."""


class Layer:
    """A rank's part of one decoder layer, by columns and rows of its weights."""

    def __init__(self, model: Model, ranks: int, device: torch.device) -> None:
        self.heads, self.kv_heads, self.dim = model.heads // ranks, (model.kv_heads or model.heads) // ranks, model.head_dim
        width, inner = self.heads * self.dim, model.intermediate // ranks

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(columns, rows, device=device, dtype=torch.bfloat16).mul_(rows**-0.5).t()

        self.qkv, self.out = weight(model.hidden, width + 2 * self.kv_heads * self.dim), weight(width, model.hidden)
        self.up, self.down = weight(model.hidden, 2 * inner), weight(inner, model.hidden)

    def attend(self, projected: torch.Tensor, before: Keys | None = None) -> tuple[torch.Tensor, Keys]:
        """Attention of tokens behind those of `before`. projected: [tokens, (heads + 2 kv_heads) dim]."""
        tokens = projected.shape[0]
        q, k, v = projected.view(tokens, -1, self.dim).transpose(0, 1).split([self.heads, self.kv_heads, self.kv_heads])
        bias = None
        if before is not None:
            k, v = (torch.cat([old, new], 1) for old, new in zip(before, (k, v), strict=True))
            bias = causal_lower_right(tokens, k.shape[1])
        found = scaled_dot_product_attention(q[None], k[None], v[None], bias, is_causal=bias is None, enable_gqa=True)[0]
        return found.transpose(0, 1).reshape(tokens, -1), (k, v)

    def attention(self, x: torch.Tensor, before: Keys | None = None) -> tuple[torch.Tensor, Keys]:
        """A rank's part of the sum, and the keys and values so far."""
        found, keys = self.attend(normed(x) @ self.qkv, before)
        return found @ self.out, keys

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """A rank's part of the sum."""
        return activated(normed(x) @ self.up) @ self.down


def normed(x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, x.shape[-1:])


def activated(hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden.chunk(2, -1)
    return silu(gate) * up


class Prompt:
    """One prompt length on this rank, and every program that is timed."""

    def __init__(self, tokens: int, model: Model, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.layers = [Layer(model, self.ranks, device) for _ in range(LAYERS)]
        x = torch.randn(tokens, model.hidden, device=device, dtype=torch.bfloat16)
        dist.broadcast(x, 0)
        self.x, self.own, self.sent = x, x.chunk(self.ranks)[self.rank].contiguous(), torch.zeros_like(x)

    def works(self, groups: Mapping[str, dist.ProcessGroup]) -> dict[str, Work]:
        """groups: of all ranks, by the name of ISO's method that uses it."""
        return {
            "sequential/default": lambda: self.one_after_the_other(dist.all_reduce),
            **{name: partial(self.iso, group) for name, group in groups.items()},
            "weft/auto": self.overlapped,
            "computation/torch": lambda: self.one_after_the_other(lambda part: None),
            "communication/default": lambda: [dist.all_reduce(self.sent) for _ in range(2 * LAYERS)],
        }

    def one_after_the_other(self, reduce: Callable[[torch.Tensor], object]) -> torch.Tensor:
        x = self.x
        for layer in self.layers:
            attended, _ = layer.attention(x)
            reduce(attended)
            x = x + attended
            hidden = layer.mlp(x)
            reduce(hidden)
            x = x + hidden
        return x

    def iso(self, group: dist.ProcessGroup) -> torch.Tensor:
        """Each all-reduce is waited for where its half goes on."""
        halves = list(self.x.chunk(2))
        sums: list[tuple[Any, torch.Tensor] | None] = [None, None]

        def arrived(at: int) -> torch.Tensor:
            """Half `at` with the last sum that was added up for it."""
            if (pending := sums[at]) is not None:
                work, added = pending
                work.wait()
                halves[at] = halves[at] + added
            return halves[at]

        for layer in self.layers:
            keys: Keys | None = None
            for part in (layer.attention, layer.mlp):
                for at in range(2):
                    x = arrived(at)
                    if part == layer.attention:
                        added, keys = layer.attention(x, keys)
                    else:
                        added = layer.mlp(x)
                    sums[at] = dist.all_reduce(added, group=group, async_op=True), added
        return torch.cat([arrived(at) for at in range(2)])

    def overlapped(self) -> torch.Tensor:
        """This rank's rows."""
        x = self.own
        for layer in self.layers:
            attended, _ = layer.attend(weft.all_gather_matmul(normed(x), layer.qkv))
            x = x + weft.matmul_reduce_scatter(attended, layer.out)
            x = x + weft.matmul_reduce_scatter(activated(weft.all_gather_matmul(normed(x), layer.up)), layer.down)
        return x

    def check(self, expected: torch.Tensor) -> Callable[[str, object], None]:
        whole, own = close_to(expected), close_to(expected.chunk(self.ranks)[self.rank])

        def check(name: str, result: object) -> None:
            if not name.startswith(ALONE):
                (own if name.startswith("weft/") else whole)(name, result)  # type: ignore[arg-type]

        return check


@cache
def groups() -> dict[str, dist.ProcessGroup]:
    """Of all ranks, by how NCCL shares the GPU. Collective at the first call."""
    made = {"peer/iso": dist.group.WORLD}
    for name, blocks in (("peer/iso priority", 0), ("peer/iso 16 blocks", 16)):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if blocks:
            options.config.max_ctas = blocks
        made[name] = dist.new_group(backend="nccl", pg_options=options)
    return made


def measured(tokens: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """One prompt length in every mode."""
    torch.manual_seed(1 + dist.get_rank())
    prompt = Prompt(int(tokens), load_model(MODEL), torch.device("cuda", torch.cuda.current_device()))
    works = prompt.works(groups())
    check = prompt.check(together("sequential/default", works["sequential/default"]).float())  # type: ignore[attr-defined]
    for mode in arguments.modes.split(","):
        needed = ("sequential/default", "computation/torch", "communication/default")
        times, missing = trial(works, [mode], check=check, needed=needed, rounds=arguments.rounds, repeat=REPEAT)
        yield row(
            bench="iso",
            op="layers",
            case=f"{MODEL} x {LAYERS} layers, prefill {tokens}",
            dtype="bfloat16",
            mode=mode,
            times=times[mode],
            chosen=", ".join(dict.fromkeys(choice.spec for choice in weft.choices())) or None,
            missing=missing,
            arguments=arguments,
        )


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS)
    options.add_argument("--tokens", default=",".join(TOKENS), help="prompt lengths, with commas (%(default)s)")
    arguments = options.parse_args()
    run_parts(parse_only(arguments.tokens, TOKENS), measured, arguments, alarm_s=ALARM_S)


if __name__ == "__main__":
    main()
