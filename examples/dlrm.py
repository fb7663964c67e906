"""A recommendation model whose embedding tables lie on several ranks, trained, saved, and loaded again.

    torchrun --nproc-per-node 4 examples/dlrm.py
    torchrun --nproc-per-node 8 examples/dlrm.py --batch 16384 --rows 1000000 --steps 50

A rank looks up the whole batch in its own tables, and gets all tables' columns for its part of the batch, in one operator; in
the backward, gradients go back to their tables, which row-wise Adagrad updates at once. The MLPs are data parallel, by torch's
DistributedDataParallel. Clicks can be learnt: each row of each table has a weight, and a sample's weights decide.

It runs on GPUs (NCCL) where there is one for every rank, else on CPUs (gloo).
"""

from __future__ import annotations

import argparse
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dlrm_model import DLRM
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from world import join

import weft

DENSE, DIM = 8, 16
POOLING = (1, 8, 2, 1, 4, 1)


class Data:
    """Batches, the same on all ranks for a seed: indices by table, bags of a set length, and clicks."""

    def __init__(self, rows: int, batch: int, device: torch.device) -> None:
        self.rows, self.batch, self.device = rows, batch, device
        draw = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(rows, generator=draw) for _ in POOLING]

    def draw(self, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dense, indices, lengths, clicks) of the whole batch."""
        draw = torch.Generator().manual_seed(1 + seed)
        bags = [torch.randint(0, self.rows, (self.batch, pooling), generator=draw) for pooling in POOLING]
        score = sum((weight[bag].mean(1) for weight, bag in zip(self.weights, bags, strict=True)), torch.zeros(self.batch))
        lengths = torch.tensor(POOLING).repeat_interleave(self.batch)
        drawn = torch.randn(self.batch, DENSE, generator=draw), torch.cat([bag.flatten() for bag in bags]), lengths, score > 0
        return tuple(each.to(self.device) for each in drawn)


def build(options: argparse.Namespace, device: torch.device) -> DLRM:
    """The same MLPs on every rank, which average their gradients; this rank's tables, which update themselves."""
    torch.manual_seed(0)
    sizes = [(options.rows, DIM)] * len(POOLING)
    adagrad = weft.RowwiseAdagrad(lr=0.1)
    model = DLRM(DENSE, sizes, bottom=(32, DIM), top=(32, 1), pooling=POOLING, optimizer=adagrad, device=device)
    model.bottom, model.top = DistributedDataParallel(model.bottom), DistributedDataParallel(model.top)
    return model


def step(model: DLRM, optimizer: torch.optim.Optimizer | None, drawn: tuple[torch.Tensor, ...]) -> float:
    """The mean loss of all ranks. optimizer: of the MLPs; None: only look."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dense, indices, lengths, clicks = drawn
    with torch.set_grad_enabled(optimizer is not None):
        logits = model(dense.chunk(size)[rank], *model.bags.own_bags(indices, lengths))
        loss = binary_cross_entropy_with_logits(logits, clicks.chunk(size)[rank].float())
    if optimizer is not None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / size


def loaded(model: DLRM, options: argparse.Namespace, device: torch.device) -> DLRM:
    """A fresh model with everything of this one, by way of a checkpoint."""
    folder = [tempfile.mkdtemp(prefix="dlrm-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(model.state_dict(), checkpoint_id=folder[0])
    again = build(options, device)
    state = again.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    again.load_state_dict(state)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return again


def trained(options: argparse.Namespace, device: torch.device) -> tuple[list[float], list[int]]:
    """(losses: of the first and the last step, then of samples not seen, before and after loading; tables by rank). The models
    end here: DistributedDataParallel must not outlive the process group."""
    data = Data(options.rows, options.batch, device)
    model = build(options, device)
    optimizer = torch.optim.SGD([*model.bottom.parameters(), *model.top.parameters()], lr=0.1)
    losses = [step(model, optimizer, data.draw(seed)) for seed in range(options.steps)]
    unseen = data.draw(options.steps)
    before, after = step(model, None, unseen), step(loaded(model, options, device), None, unseen)
    return [losses[0], losses[-1], before, after], [len(own) for own in model.bags.ranges]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("batch", 256), ("rows", 40), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    device = join()
    (first, last, before, after), by_rank = trained(options, device)
    if dist.get_rank() == 0:
        print(f"{len(POOLING)} tables on {dist.get_world_size()} {device.type} ranks, {by_rank} each")
        print(f"loss {first:.4f} to {last:.4f}, of samples not seen {before:.4f}, loaded {after:.4f}")
    weft.close()
    dist.destroy_process_group()
    if not abs(before - after) <= 1e-6:  # also where it is nan
        raise SystemExit("what was loaded is not what was saved")


if __name__ == "__main__":
    main()
