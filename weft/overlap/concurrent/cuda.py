"""Runs programs on GPUs: streams fork and join, NCCL runs on a stream with priority or with few blocks, and SMs are left free.

A collective that is enqueued without async_op runs on torch's current stream, and has that stream's priority. The number of
blocks belongs to a communicator. So each (group, number) has a communicator of its own, which all ranks make when a schedule
first uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from weft.compat.cublas import has_carveout
from weft.compat.device import idle
from weft.overlap import controls
from weft.overlap.concurrent.collectives import ConcurrentCollective, SendReceive
from weft.overlap.concurrent.executor import CollectivePart, Executor, Program
from weft.runtime.groups import GROUPS
from weft.runtime.network import Abort
from weft.schedules.concurrent import Abilities

_IDLE_S = 10.0
"""How long `close` waits for the device to become idle before it gives streams back."""


class CudaExecutor(Executor):
    """A CudaExecutor runs programs on one GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._streams: dict[tuple[bool, bool], list[torch.cuda.Stream]] = defaultdict(list)
        """Streams that no use has at present, by whether they have priority, and whether the caller joins them. Work that was
        enqueued on them may still run."""
        self._groups: dict[tuple[str, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}

    def abilities(self, collectives: Sequence[ConcurrentCollective]) -> Abilities:
        """NCCL runs sends and receives on its own stream and with its own number of blocks."""
        streams = not any(isinstance(collective, SendReceive) for collective in collectives)
        moved = all(collective.moves and _on_one_node(collective.ranks) for collective in collectives)
        return Abilities(
            priority=streams,
            ctas=streams and all(_can_be_made_anew(collective.ranks) for collective in collectives),
            left=has_carveout(),
            copy_engine=moved,
            pull=moved,
        )

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def prepare(self, program: Program, collectives: Sequence[ConcurrentCollective]) -> None:
        wanted = dict.fromkeys((collectives[part.number].ranks, part.ctas) for part in program.parts if part.ctas)
        for group, ctas in wanted:  # all ranks make the groups in the same order
            self.limit_group_ctas(group, ctas)
        if program.computation.left >= self._sms:
            raise ValueError(
                f"method has left={program.computation.left}; this device has {self._sms} SMs, leave one to the computation"
            )

    @property
    def _sms(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def limit_computation(self, program: Program) -> AbstractContextManager[object]:
        left = program.computation.left
        return controls.sm_budget(self._sms - left, device=self.device) if left else nullcontext()

    @contextmanager
    def _beside(self, program: Program, collectives: Sequence[ConcurrentCollective]) -> Iterator[Callable[[], None]]:
        caller = torch.cuda.current_stream(self.device)
        with self._forked(program, joined=True) as stream:

            def start() -> None:
                if not program.late:
                    controls.launch_order(stream, caller)
                with torch.cuda.stream(stream):
                    self._enqueue_all(program.beside, collectives)

            try:
                yield start
            finally:
                caller.wait_stream(stream)

    @contextmanager
    def _forked(self, program: Program, *, joined: bool) -> Iterator[torch.cuda.Stream]:
        """Yield a stream for the collectives of a program, after the work that the caller's stream has now.

        No other use has it before the context ends. joined: the caller joins it there.
        """
        free = self._streams[program.priority, joined]
        priority: controls.Priority = "high" if program.priority else "normal"
        stream = free.pop() if free else controls.comm_stream(priority=priority, device=self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            yield stream
        finally:
            free.append(stream)

    def _run_library_collective(self, part: CollectivePart, collective: ConcurrentCollective) -> None:
        collective.enqueue(self.limit_group_ctas(collective.ranks, part.ctas), async_op=False)

    def future(
        self, program: Program, collective: ConcurrentCollective, result: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """The future records its events on the collective's stream, so waiting for it waits on streams."""
        made: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self.device])
        with ExitStack() as stack:
            if program.beside:
                stack.enter_context(torch.cuda.stream(stack.enter_context(self._forked(program, joined=False))))
            self._enqueue_all(program.parts, [collective])
            made.set_result(result)
        return made

    def sum_sparse(self, gradients: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(gradients, group=group, async_op=True)
        summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return summed

    def limit_group_ctas(self, group: dist.ProcessGroup, ctas: int) -> dist.ProcessGroup:
        """Return a group of the same ranks whose NCCL kernels have at most `ctas` blocks, or the group itself for 0.

        Collective if the group has not been created before. Raises ValueError if it cannot be created.
        """
        if not ctas:
            return group
        known = self._groups.get((group.group_name, ctas))
        if known is None or known[0] is not group:
            if self.capturing:
                raise ValueError(f"method has ctas={ctas}: use it once before capturing a graph, to make its communicator")
            if not _can_be_made_anew(group):
                raise ValueError(
                    f"method has ctas={ctas}, but {group.size()} ranks of a world that is bound to devices cannot have a "
                    "communicator of their own: leave out device_id in init_process_group, or ctas"
                )
            known = self._groups[group.group_name, ctas] = group, controls.nccl_group(group, max_ctas=ctas)
        return known[1]

    def close(self, *, broken: bool) -> None:
        groups, self._groups = self._groups, {}
        end = _abort_process_group if broken else dist.destroy_process_group
        ends = [partial(_ended, end, group) for _, group in groups.values()]
        if broken:
            # A CUDA graph that holds their collectives can delay an abort, so all aborts run at once, for a limited time.
            for abort in [Abort(each, "concurrent") for each in ends]:
                abort.ended()
        else:
            for each in ends:
                each()
            if idle(self.device, _IDLE_S):  # a stream with unfinished work must not go to another user
                for free in self._streams.values():
                    while free:
                        controls.give_back(free.pop())


def _ended(end: Callable[[dist.ProcessGroup], object], group: dist.ProcessGroup) -> None:
    """End a group. If the default group has been destroyed, this group has been, too."""
    with suppress(ValueError, AssertionError):
        end(group)


def _on_one_node(group: dist.ProcessGroup) -> bool:
    """Return whether copy engines reach all memory of a group. The call is collective if weft has not used the group yet."""
    return not GROUPS.state(group.group_name).rank_group.nodes


def _can_be_made_anew(group: dist.ProcessGroup) -> bool:
    """Return whether the ranks of this group alone can make a communicator.

    If the world is bound to devices, NCCL splits the world's communicator, so all its ranks must take part.
    """
    world = dist.group.WORLD
    assert world is not None
    return group.size() == world.size() or world.bound_device_id is None
