"""A lane's fused steps as one kernel, on any device whose memory has addresses: one_shot and two_shot.

A range of fused steps runs so if it is one that `weft.schedules.matmul_all_reduce` or `matmul_reduce_scatter` makes: the kernel
stands for those steps, tile by tile, and for no others. The buffers that nothing but such steps touch are not needed then: the
kernel has a mailbox.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from weft.core.errors import WaitTimeout
from weft.core.problem import Op
from weft.core.schedule import Gemm, Lane, Schedule, regions
from weft.kernels.all_reduce import COPIES, Hops, Mailbox, Plan, all_reduce, launcher, mailbox, plan
from weft.runtime.bindings import Bindings, Where
from weft.schedules import matmul_reduce_scatter as scatter
from weft.schedules.matmul_all_reduce import one_shot, owned_columns, two_shot

_KINDS: tuple[tuple[Op, Callable[..., Schedule], Hops], ...] = (
    ("matmul_all_reduce", one_shot, "one"),
    ("matmul_all_reduce", two_shot, "two"),
    ("matmul_reduce_scatter", scatter.one_shot, "scatter"),
)
"""(operator, what builds such steps, how they exchange)."""


class MailboxOwner(Protocol):
    """Where a device keeps mailboxes."""

    def mailbox(self, nbytes: int) -> tuple[list[int], torch.Tensor]:
        """Zeroed bytes on every rank that all may address: their addresses by rank, and this rank's. Collective."""
        ...


def exchanges(schedule: Schedule, rank: int, device: torch.device, owner: MailboxOwner, blocks: int) -> list[FusedExchange]:
    """The kernels of a rank's fused steps. Raises ValueError for steps that are none of theirs. Collective."""
    return [
        FusedExchange(schedule, Where(rank, lane.name, low, lane.steps[low]), high - low, device, owner, blocks)
        for lane in schedule.ranks[rank]
        for low, high in lane.fused
    ]


def unneeded(schedule: Schedule) -> frozenset[str]:
    """Buffers that only fused steps touch, and that are not the caller's."""
    used = {
        region.buffer
        for _, lane, position, step in schedule
        if not any(low <= position < high for low, high in lane.fused)
        for region in regions(step)
    }
    return frozenset(b.name for b in schedule.buffers if b.kind in ("symmetric", "local") and b.name not in used)


def _kind(schedule: Schedule, rank: int, lane: Lane, low: int, high: int) -> Hops:
    """How fused steps exchange. Raises ValueError if they are of no known kind."""
    for op, build, hops in _KINDS:
        if schedule.problem.op == op and low <= 1:
            (like,) = build(schedule.problem, schedule.name, first_fused=low).ranks[rank] or (None,)
            if like is not None and (like.name, like.steps, like.fused) == (lane.name, lane.steps, ((low, high),)):
                return hops
    raise ValueError(
        f"schedule {schedule.name}: rank {rank}, lane {lane.name} has steps {low} to {high} as one kernel, and there is none "
        "for them; leave `fused` empty, or build one_shot or two_shot"
    )


class FusedExchange:
    """One range of fused steps of one rank, ready to launch call after call."""

    def __init__(
        self, schedule: Schedule, where: Where, length: int, device: torch.device, owner: MailboxOwner, blocks: int
    ) -> None:
        self.where, self.length = where, length
        lane = next(lane for lane in schedule.ranks[where.rank] if lane.name == where.lane)
        low = where.position
        hops = _kind(schedule, where.rank, lane, low, low + length)
        self.plan: Plan = plan(
            schedule.problem,
            where.rank,
            schedule.problem.shards if hops == "scatter" else owned_columns(schedule.problem),
            hops=hops,
            multiply=isinstance(where.step, Gemm),
            device=device,
            sms=blocks,
        )
        addresses, self._box = owner.mailbox(self.plan.mailbox_bytes)
        self._memory: Mailbox = mailbox(addresses, self.plan.blocks(blocks), device)
        self._launcher = launcher()
        # Pinned now: to pin memory may wait for the GPU, whose blocks may wait for this.
        one = torch.ones(1, dtype=torch.int32)
        self._raised = one.pin_memory() if device.type == "cuda" else one

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, stream: int | None = None) -> None:
        """Run it. silent: neither send nor wait, for a rehearsal. stream: default, torch's current one."""

        def whole(name: str) -> torch.Tensor:
            ((matrix, _),) = bindings.tensors[name, self.where.rank]
            return matrix

        addends = {name: whole(name) if name in self.plan.problem.addends else None for name in ("bias", "residual")}
        all_reduce(
            self.plan,
            self._memory,
            whole("out"),
            factors=(whole("a"), whole("b")) if self.plan.multiply else None,
            partial=None if self.plan.multiply else whole("partial"),
            live=not silent,
            tries=tries,
            launched_by=self._launcher,
            stream=stream,
            **addends,
        )

    def raise_if_late(self, check_peers: Callable[[], object]) -> None:
        """Raise WaitTimeout if a wait of the last launch ended early. check_peers: raises first, if a peer is lost."""
        region, call = self._memory.status.tolist()
        if region:
            self._memory.status.zero_()
            check_peers()
            raise WaitTimeout(self._missing(call) or f"{self.where}: call {call}: {self._source(region - 1)} was late")

    def missing(self) -> str:
        """What the call under way has yet to receive, in words; nothing if it waits for nothing. For a call that is stuck: it
        takes no SM of the GPU, only copies."""
        return self._missing(int(self._memory.epochs.cpu().min()) + 1)

    def _missing(self, call: int) -> str:
        whole = self._whole(call)
        late = [region for region in self._expected() if not whole[region]]
        return f"{self.where}: call {call}: {self._source(late[0])} has not arrived" if late else ""

    def _expected(self) -> list[int]:
        """The regions of this rank that a call fills: of each tile all sources' pieces, and all owners' sums."""
        layout, size = self.plan, self.plan.problem.world_size
        filled = 2 * size if layout.hops == "two" else size
        return [tile * layout.regions + i for tile in range(layout.count) for i in range(filled)]

    def _whole(self, call: int) -> torch.Tensor:
        """By region, whether all of its words have come, in the rows that travel."""
        layout = self.plan
        words = (
            self._box.cpu()[: layout.mailbox_bytes]
            .view(torch.int32)
            .view(COPIES, layout.count, layout.regions, layout.region_rows, -1)
        )
        tiles = torch.arange(layout.count)[:, None]
        rows = tiles % layout.row_tiles * layout.region_rows + torch.arange(layout.region_rows)
        travels = rows < layout.received_rows
        return ((words[call % COPIES] != 0).all(-1) | ~travels[:, None]).all(-1).flatten()

    def _source(self, region: int) -> str:
        tile, index = divmod(region, self.plan.regions)
        size = self.plan.problem.world_size
        return f"the partial tile {tile} of rank {index}" if index < size else f"the sum of tile {tile} by rank {index - size}"

    def abort(self) -> None:
        """End every wait of the kernel, now and later: the call has failed. Enqueued on torch's current stream; needs no SM."""
        self._memory.abort.copy_(self._raised, non_blocking=True)
