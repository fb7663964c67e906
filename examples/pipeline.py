"""A pipeline of one stage a rank: activations travel to the next stage while the stage computes its next microbatch.

    torchrun --nproc-per-node 4 examples/pipeline.py
    torchrun --nproc-per-node 4 examples/pipeline.py --rows 4096 --width 8192 --microbatches 32

It runs on GPUs (NCCL) where there is one for every rank, else on CPUs (gloo). In a tick every stage sends what it computed in
the tick before, receives what it will compute in the next one, and computes what it has. So microbatch b is in stage s at tick
b + 2 * s, and a stage that has nothing to compute takes part in the tick all the same: all ranks make the same calls.

    tick          t                      t + 1                   t + 2
    stage 0       compute b + 2          compute b + 3           compute b + 4
                  send b + 1   ~~~~~~~>  send b + 2    ~~~~~~~>
    stage 1       compute b, send b - 1  compute b + 1           compute b + 2

Legend: B rows of a microbatch, C width.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from world import join

import weft


def weight(stage: int, width: int, device: torch.device) -> torch.Tensor:
    """A stage's parameters, which every rank could make."""
    draw = torch.Generator().manual_seed(stage)
    return (torch.randn(width, width, generator=draw) * width**-0.5).to(device)


def microbatch(index: int, rows: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 + index)).to(device)


def piped(options: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """What the last stage computes, by microbatch; nothing on the others."""
    stage, stages = dist.get_rank(), dist.get_world_size()
    w_CC = weight(stage, options.width, device)
    given_BC, arriving_BC, leaving_BC = (torch.zeros(options.rows, options.width, device=device) for _ in range(3))
    done = []
    for tick in range(options.microbatches + 2 * (stages - 1)):
        mine = tick - 2 * stage
        if stage == 0 and mine < options.microbatches:
            given_BC = microbatch(mine, options.rows, options.width, device)
        send = {"send": leaving_BC, "to": stage + 1} if stage + 1 < stages else {}
        receive = {"receive": arriving_BC, "source": stage - 1} if stage else {}
        with weft.concurrent(collectives=weft.SendReceive(**send, **receive), key="tick"):
            out_BC = torch.tanh(given_BC @ w_CC)
        if stage + 1 == stages and 0 <= mine < options.microbatches:
            done.append(out_BC)
        leaving_BC = out_BC
        given_BC, arriving_BC = arriving_BC, given_BC if stage else arriving_BC
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 64), ("width", 128), ("microbatches", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    device = join()
    done = piped(options, device)
    if dist.get_rank() + 1 == dist.get_world_size():
        worst = 0.0
        for index, out_BC in enumerate(done):
            expected_BC = microbatch(index, options.rows, options.width, device)
            for stage in range(dist.get_world_size()):
                expected_BC = torch.tanh(expected_BC @ weight(stage, options.width, device))
            worst = max(worst, float((out_BC - expected_BC).abs().max()))
        print(f"{len(done)} microbatches through {dist.get_world_size()} stages, largest difference {worst:.1e}")
        print(*weft.concurrent_choices(), sep="\n")
        if len(done) != options.microbatches or not worst <= 1e-3:
            raise SystemExit("that is more than rounding explains")
    weft.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
