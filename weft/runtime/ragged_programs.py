"""A group's programs of calls with splits on the device: made at the first call of their sizes, dropped for others."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from weft.comm.rank_group import RankGroup
from weft.runtime.turn import Turn

if TYPE_CHECKING:
    from weft.runtime.host_wire import HostWire
    from weft.runtime.ragged import Arrived, RaggedCall, RaggedProgram
    from weft.triton.peers import Peers

KEPT, BYTES = 8, 2 << 30
"""Programs: so many are kept whatever they take, others only while all take no more than these bytes. Each has room for as many
rows as may arrive, and numbers of tokens may change at every step."""


class RaggedPrograms:
    """in_graphs: which of some programs any rank's graphs hold; collective. turn: of a GPU. wire: the group's messages, for
    CPUs."""

    def __init__(
        self,
        rank_group: RankGroup,
        in_graphs: Callable[[Sequence[Any]], set[Any]],
        turn: Callable[[torch.device], Turn],
        wire: Callable[[], HostWire],
    ) -> None:
        self._rank_group, self._in_graphs, self._turn, self._wire = rank_group, in_graphs, turn, wire
        self.kept: OrderedDict[tuple[object, ...], tuple[int, RaggedProgram]] = OrderedDict()
        self.peers: Peers | None = None

    def run(self, call: RaggedCall) -> Arrived:
        """One call, on this thread alone."""
        from weft.runtime.ragged import on_host

        rank_group = self._rank_group
        interpreted = os.environ.get("TRITON_INTERPRET") == "1" and call.a.dtype == torch.float16
        if call.a.device.type == "cpu" and not interpreted:
            rank_group.enter(call.describe())
            return on_host(self._wire(), call)
        capturing = call.a.is_cuda and torch.cuda.is_current_stream_capturing()
        number, program = self.kept.get(call.key) or self._bind(call, capturing=capturing)
        if not capturing:
            self.kept.move_to_end(call.key)
        program.captured |= capturing
        rank_group.check_usable()
        with rank_group.failing():
            program.check_room(call)
            program.raise_noted()
            if not capturing:
                rank_group.repeat(number)
            if call.a.is_cuda and not capturing:
                self._turn(call.a.device).take(torch.cuda.current_stream(call.a.device).cuda_stream)
            return program.run(call)

    def _bind(self, call: RaggedCall, *, capturing: bool) -> tuple[int, RaggedProgram]:
        """Agree with the other ranks on a call, and allocate. Collective."""
        from weft.runtime.ragged import RaggedProgram, check_kernels
        from weft.triton.peers import Peers

        if capturing:
            raise ValueError("splits: call the operator once with these sizes before capturing a graph")
        text = call.describe()
        heights = self._rank_group.enter(text, call.a.shape[0])
        check_kernels(call, self._rank_group.world_size)
        try:
            self.peers = self.peers or Peers(self._rank_group.group)
            self._make_room()
            program = RaggedProgram(self.peers, call, a_rows=max(9 * max(heights) // 8, call.max_rows))
            self._rank_group.enter(f"bound: {text}")
        except BaseException as error:
            alike = self._rank_group.nodes if self.peers is None else not self.peers.broken
            if alike and isinstance(error, ValueError):
                raise  # of what ranks have agreed on, and so on all
            # One rank's alone, for want of memory, say: it ends the calls of all.
            raise self._rank_group.fail(error) from error.__cause__
        return self.kept.setdefault(call.key, (self._rank_group.remember(text), program))

    def _make_room(self) -> None:
        """Free programs that were not used for the longest. Those in graphs stay. Collective."""
        if len(self.kept) < KEPT:
            return
        held = self._in_graphs([program for _, program in self.kept.values()])
        idle = [key for key, (_, program) in self.kept.items() if program not in held]
        for key in idle[: max(0, len(self.kept) + 1 - KEPT)]:
            if sum(program.nbytes for _, program in self.kept.values()) <= BYTES:
                return
            with self._rank_group.failing():
                self.kept.pop(key)[1].close()

    def synchronize(self) -> None:
        """Wait until the calls so far have ended on this rank's device; raise what they have noted, which ends the calls of all
        ranks. Not collective."""
        for _, program in list(self.kept.values()):
            program.raise_all_noted(self._rank_group)

    def close(self) -> None:
        if self.peers is not None:
            if self.peers.device.type == "cuda":
                torch.cuda.synchronize(self.peers.device)
            for _, program in self.kept.values():
                program.let_go()
            self.peers.close()
