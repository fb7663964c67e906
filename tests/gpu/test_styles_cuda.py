"""weft's styles and weft.parallelize on GPUs: in bfloat16, compiled by Inductor, decoding in CUDA graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpus import NEEDS_TWO, SIZES, alarm
from rank_pools import ranks_on_gpus
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO
BF16 = torch.bfloat16
pool = ranks_on_gpus(SIZES[-1:], 20)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.RMSNorm(512), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(512, 1024), nn.Linear(512, 1024), nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def sharded(block: Block, *, decode: bool) -> Block:
    lies = Replicate() if decode else Shard(1)
    plan: dict[str, Any] = {
        "inner": weft.SharedInput(["gate", "up"], input_layouts=lies),
        "inner.down": weft.RowwiseParallel(output_layouts=lies),
    }
    plan |= {} if decode else {"norm": weft.SequenceParallel(use_local_output=True)}
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    return parallelize_module(block, mesh, plan)  # type: ignore[return-value]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to what bfloat16 rounds, of the largest element."""
    worst = float((got.float() - expected.float()).abs().max() / expected.float().abs().max())
    assert worst < 0.03, worst


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone().requires_grad_()


@alarm(85)
def _steps() -> None:
    """Forward and backward, eager and compiled, with new data each time, against one GPU alone."""
    torch.manual_seed(0)
    alone = Block().to("cuda", BF16)
    model = sharded(copy.deepcopy(alone), decode=False)
    for call, run in enumerate((model, model, torch.compile(model, fullgraph=True, dynamic=False))):
        torch.manual_seed(call)
        x, flow = (torch.randn(2, 128 * dist.get_world_size(), 512, device="cuda", dtype=BF16) for _ in range(2))
        whole, part = x.clone().requires_grad_(), mine(x)
        outs = alone(whole), run(part)
        outs[0].backward(flow)
        outs[1].backward(mine(flow).detach())
        close(outs[1], mine(outs[0].detach()))
        close(part.grad, mine(whole.grad))
        for expected, got in zip(alone.parameters(), model.parameters(), strict=True):
            close(got.grad.full_tensor(), expected.grad)
        alone.zero_grad()
        model.zero_grad()
    weft.close()


def test_steps_eager_and_compiled(pool: Ranks) -> None:
    pool.run(_steps)


@alarm(60)
def _decoding() -> str:
    """A step of decoding in a CUDA graph, replayed with new data."""
    torch.manual_seed(0)
    alone = Block().to("cuda", BF16)
    model, x = sharded(copy.deepcopy(alone), decode=True), torch.zeros(8, 1, 512, device="cuda", dtype=BF16)
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = model(x)
        for seed in range(6):
            torch.manual_seed(seed)
            x.copy_(torch.randn_like(x))
            graph.replay()
            close(out, alone(x))
    report = str(weft.overlap_report(model))
    torch.cuda.synchronize()
    del graph, out
    weft.close()
    return report


def test_decoding_in_a_graph(pool: Ranks) -> None:
    for report in pool.run(_decoding):
        assert "matmul_all_reduce M=8" in report
        assert "measured)" in report


@alarm(85)
def _llama() -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = dist.get_world_size()
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 1000}
    alone = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=size, **sizes)).to("cuda", BF16)
    model = weft.parallelize(copy.deepcopy(alone), dist.init_device_mesh("cuda", (size,)))
    for length in (256, 301, 20):
        ids = torch.randint(1000, (2, length), device="cuda")
        dist.broadcast(ids, 0)
        outs = [each(input_ids=ids, labels=ids) for each in (alone, model)]
        close(outs[1].logits, outs[0].logits)
        for out in outs:
            out.loss.backward()
    close(model.model.layers[0].mlp.up_proj.weight.grad.full_tensor(), alone.model.layers[0].mlp.up_proj.weight.grad)
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert written.shape == (2, 24)
    report = str(weft.overlap_report(model))
    weft.close()
    return report


def test_a_llama(pool: Ranks) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for report in pool.run(_llama):
        assert "matmul_all_reduce M=2 " in report
        assert "_scatter M=512" in report
