"""What ranks do in the tests of weft.concurrent, on CPUs and on GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import weft
from weft.overlap.concurrent import ConcurrentCollective

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class Exchange:
    """One collective with data of its own, new at each `fill`, and what it has to give."""

    def __init__(
        self,
        op: str,
        device: torch.device,
        *,
        part: int = 1000,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.op, self.group, self.part = op, group, part
        world = dist.group.WORLD if group is None else group
        assert world is not None
        self.rank, self.size = world.rank(), world.size()
        whole, small = torch.empty(part * self.size, device=device), torch.empty(part, device=device)
        self.given = small if op == "all_gather" else whole
        self.out = {"all_reduce": whole, "reduce_scatter": small}.get(op, torch.empty_like(whole))

    @property
    def collective(self) -> ConcurrentCollective:
        if self.op == "all_reduce":
            return weft.AllReduce(self.out, self.group)
        kinds: dict[str, Callable[..., ConcurrentCollective]] = {
            "all_gather": weft.AllGather,
            "reduce_scatter": weft.ReduceScatter,
            "all_to_all": weft.AllToAll,
        }
        return kinds[self.op](self.out, self.given, self.group)

    def _of(self, rank: int, turn: int) -> torch.Tensor:
        """What a rank gives: small whole numbers, so that every sum is exact in any order."""
        draw = torch.Generator().manual_seed(100 * turn + rank)
        return torch.randint(-8, 8, (self.given.numel(),), generator=draw).to(self.given)

    def fill(self, turn: int) -> None:
        if self.op != "all_reduce":
            self.out.fill_(-99)
        self.given.copy_(self._of(self.rank, turn))

    def check(self, turn: int) -> None:
        given = [self._of(rank, turn) for rank in range(self.size)]
        mine = slice(self.rank * self.part, (self.rank + 1) * self.part)
        expected = {
            "all_reduce": lambda: torch.stack(given).sum(0),
            "all_gather": lambda: torch.cat(given),
            "reduce_scatter": lambda: torch.stack(given).sum(0)[mine],
            "all_to_all": lambda: torch.cat([part[mine] for part in given]),
        }[self.op]()
        assert torch.equal(self.out, expected), f"{self.op} turn {turn}"


class Products:
    """A computation whose result is known: a chain of matmuls by a permutation."""

    def __init__(self, device: torch.device, *, size: int = 64, count: int = 4) -> None:
        self.x = torch.arange(size * size, device=device).remainder(251).view(size, size).float()
        self.shift = torch.eye(size, device=device).roll(1, 0)
        self.count, self.calls = count, 0

    def __call__(self, *kernels: object) -> torch.Tensor:
        self.calls += 1
        y = self.x
        for _ in range(self.count):
            y = y @ self.shift
        return y

    def check(self, out: torch.Tensor) -> None:
        assert torch.equal(out, self.x.roll(-self.count, 1))
