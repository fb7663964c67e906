"""A model of transformers writes on, tensor parallel by weft: a prompt that is sharded over ranks, then token by token.

    torchrun --nproc-per-node 2 examples/generate_tp.py
    torchrun --nproc-per-node 4 examples/generate_tp.py --model path/to/a/model --prompt "The warp is what"

It runs on GPUs (NCCL, bfloat16) where there is one for every rank, else on CPUs (gloo, float32). Without --model, a small
Qwen 3 with random weights writes numbers, and one process' answer is compared. The prompt's matmuls hide all_gather and
reduce_scatter; each new token's end in matmul_all_reduce, one kernel on GPUs.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from world import join

import weft


def small() -> Qwen3ForCausalLM:
    """A model of 4 layers, the same on every rank."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        vocab_size=300,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def written(model: torch.nn.Module, prompt_BT: torch.Tensor, tokens: int) -> tuple[torch.Tensor, float]:
    """(the text with what follows, the likeliest each time; seconds)"""
    begin = time.perf_counter()
    asked = {"attention_mask": torch.ones_like(prompt_BT), "max_new_tokens": tokens, "do_sample": False}
    with torch.no_grad():
        text_BT = model.generate(prompt_BT, **asked)
    return text_BT, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder of transformers' with weights and a tokenizer")
    parser.add_argument("--prompt", default="The warp is what")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--few-tokens", type=int, default=128)
    options = parser.parse_args()
    device = join()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.model) if options.model else small()
    model = model.to(device, dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else None
    prompt_BT = tokenizer(options.prompt, return_tensors="pt").input_ids if tokenizer else torch.arange(180)[None] % 300
    prompt_BT = prompt_BT.to(device)
    alone_BT = None if options.model else written(model, prompt_BT, options.tokens)[0]
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    weft.parallelize(model, mesh, few_tokens=options.few_tokens)
    text_BT, seconds = written(model, prompt_BT, options.tokens)
    if dist.get_rank() == 0:
        words = tokenizer.decode(text_BT[0]) if tokenizer else text_BT[0, prompt_BT.shape[1] :].tolist()
        print(f"{mesh.size()} {device.type} ranks, {options.tokens} tokens in {seconds:.2f} s: {words}")
        if alone_BT is not None:
            print(f"as in one process: {float((text_BT == alone_BT).float().mean()):.0%}")
        print(weft.overlap_report(model))
    weft.close(mesh.get_group())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
