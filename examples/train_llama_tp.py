"""A Llama of transformers, trained tensor parallel by weft, and what of it is overlapped.

    torchrun --nproc-per-node 2 examples/train_llama_tp.py
    torchrun --nproc-per-node 8 examples/train_llama_tp.py --dp 2 --hidden 4096 --layers 8 --length 4096 --checkpoint run/

It runs on GPUs (NCCL, bfloat16) where there is one for every rank, else on CPUs (gloo, float32). Each group of world_size / dp
ranks holds the model once, by weft.parallelize; with --dp more than 1, fully_shard spreads that over the groups. A few batches
learn to count; the loss is printed, then weft's report. --checkpoint writes the weights with torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from world import join

import weft

VOCABULARY = 512


def sharded(options: argparse.Namespace, device: torch.device) -> tuple[LlamaForCausalLM, dist.DeviceMesh]:
    """The model with random weights, over a mesh of (dp, tp)."""
    shape = (options.dp, dist.get_world_size() // options.dp)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    heads = max(4, options.hidden // 128)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=VOCABULARY,
        max_position_embeddings=options.length,
    )
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    weft.parallelize(model, mesh["tp"], few_tokens=options.few_tokens)
    if options.dp > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model, mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = (("dp", 1), ("hidden", 64), ("layers", 2), ("length", 48), ("batch", 4), ("steps", 12), ("few-tokens", 128))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--checkpoint", type=Path, help="a folder for the weights")
    parser.add_argument("--report", type=Path, help="a file for the report, as a page")
    options = parser.parse_args()
    device = join()
    model, mesh = sharded(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Ranks that hold the model together see the same text.
    draw = torch.Generator().manual_seed(1 + mesh["dp"].get_local_rank())
    losses = []
    for _ in range(options.steps):
        first_B1 = torch.randint(VOCABULARY, (options.batch, 1), generator=draw)
        text_BT = ((first_B1 + 3 * torch.arange(options.length)) % VOCABULARY).to(device)
        loss = model(input_ids=text_BT, labels=text_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if options.checkpoint:
        checkpoint.save(get_model_state_dict(model), checkpoint_id=options.checkpoint)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} {device.type} ranks, dp {options.dp}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
        report = weft.overlap_report(model)
        print(report)
        if options.report:
            report.write(options.report)
    weft.close(mesh["tp"].get_group())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
