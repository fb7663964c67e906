"""The CUDA executor: a Schedule on GPUs, one process a GPU.

Lanes are streams: the compute lane is the caller's, every other lane has one of its own that is forked from it and joined
to it. Symmetric buffers are torch's symmetric memory, of the ranks of a node; no multicast. Between nodes go NCCL's sends and
receives (weft.runtime.network). A call does not wait for the GPU; the space's watch bounds it.

Each (flag, step that waits for it) has a 32-bit word of its own (weft.runtime.flag_words): a signal writes 1 into each waiter's
word (a kernel adds one for each tile), and the waiter, once past, writes 0. The checker proves that no signal is lost.

    caller's stream (compute)       copy stream
    fork  ----------------------->  wait made >= tiles, write 0
    gemm, count made  ~~~~~~~~~~~>  peer copy, write 1 into the peer's arrived
    join  <-----------------------

A wait is a stream memory operation, a signal another, which writes into the memory of the rank that waits: neither takes
an SM, so a kernel can never keep a flag from being raised. A GEMM with gates, counts or stores to peers is one kernel
(weft.kernels.gemm) for 16-bit types whose rows TMA can load; else each part is a GEMM of its own. A sum is one kernel
(weft.kernels.reduce) behind its waits. What a call enqueues is prepared once (weft.runtime.tape): a call by Python steps
alone took 0.5 to 0.7 ms of host time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING

import torch

from weft.comm.symmetric_heap import Allocation
from weft.compat.streams import Word
from weft.core.problem import CollectiveProblem
from weft.core.schedule import Collective, Flag, Gemm, Lane, Region, Schedule, SendReceive, Wait, waits
from weft.core.work import span
from weft.kernels.shapes import push_sms
from weft.runtime.bindings import Bindings, Where
from weft.runtime.bound import NOTHING, BoundProgram, Inputs, Outputs
from weft.runtime.cuda_space import CudaSpace
from weft.runtime.flag_words import WaiterWords
from weft.runtime.invalid import INVALID_BYTE, results_in
from weft.runtime.network import sms_for
from weft.runtime.products import Products, settings
from weft.runtime.replay import Replays, lie
from weft.runtime.tape import Item, Tape, Words, Work
from weft.runtime.vendor import Vendor

if TYPE_CHECKING:
    from weft.runtime.fused import FusedStep
    from weft.runtime.fused_collective import FusedCollectiveKernel
    from weft.runtime.pushes import FusedPush

_RELEASED = 0x3FFFFFFF
"""What every word is set to after a failure: past anything that a wait asks for, short of where the comparison wraps."""
_WAYS_KEPT = 256
"""In which a program remembers that matrices have lain."""


class CudaProgram(BoundProgram):
    """A schedule on one GPU, with memory of its own: a data area, scratch, and a word for each step that waits for a flag."""

    _waits_on_sms = False

    def __init__(self, space: CudaSpace, schedule: Schedule) -> None:
        self.space, self.driver = space, space.driver
        self.flags = WaiterWords(schedule)
        self._scratch: dict[str, torch.Tensor] = {}
        self._pieces: list[Allocation] = []
        try:
            self._set_up(schedule)
        except BaseException:
            self._give_back()
            raise

    def _set_up(self, schedule: Schedule) -> None:
        space = self.space
        words = self._take(4 * (self.flags.words + max(map(len, schedule.ranks))))  # and how far each lane has come
        self._words, self._addresses = words.local, words.addresses
        super().__init__(space, schedule)
        schedule = self.schedule  # in which a FusedCollective is spelled out where the device has no kernel for it
        self._area = self._take(self.layout.staging)
        lanes = schedule.ranks[self.rank]
        self._progress_at = {lane.name: self._words.data_ptr() + 4 * (self.flags.words + i) for i, lane in enumerate(lanes)}
        own = (self._words.data_ptr() + 4 * slot for slot in range(self.flags.words))
        self._raise_all = self.driver.words([Word("signal", address, _RELEASED) for address in own])
        self._raise_what_no_call_left()
        self.fixed = self._fixed_bindings()
        self._tapes: dict[frozenset[int], Tape] = {}
        self._batches: dict[int, Callable[[int], None]] = {}
        self._replays = Replays(
            space.captures,
            lambda inputs, outputs: self._fork_and_join(self.bind(inputs, outputs)),
            self.driver,
        )
        self._vendors = {
            id(step): Vendor(self.team.group, step, schedule.problem)
            for rank, _, _, step in schedule
            if rank == self.rank and isinstance(step, Collective)
        }
        space.releaser.has_collectives |= bool(self._vendors)
        self._sends = any(isinstance(step, SendReceive) for rank, _, _, step in schedule if rank == self.rank)
        self._replayable = not self._vendors and not self._sends
        multiplies = {lane.name for rank, lane, position, step in schedule if rank == self.rank and isinstance(step, Gemm)}
        self._products = {lane: Products(space.device) for lane in multiplies}
        beside = any(isinstance(kernel.step, Gemm) for kernel in self.kernels.values())
        self._push_sms = push_sms(space.capabilities, alone=not beside)
        # What runs beside matmuls that fill the SMs: a kernel for its flags, even of one warp, would wait for room.
        alone = isinstance(schedule.problem, CollectiveProblem)
        self._off_sms = {lane.name for lane in lanes if lane.kind in ("copy", "network") or alone}
        self._waits_on_sms = bool(self.fused_collectives) or any(
            isinstance(kernel.step, Gemm) and any(wait.at_least for wait in waits(kernel.step))
            for kernel in self.kernels.values()
        )
        self._silent = self._rehearsed = self._loads = self._has_asides = False
        self._loaded, self._allocates = set[Hashable](), 0
        self._times: list[tuple[Where | None, torch.cuda.Event, torch.cuda.Event]] = []
        self._last_stream: int | None = None
        self._last_ticket = 0
        self._forks = {lane.name: (self.driver.event(), self.driver.event()) for lane in lanes if lane.kind != "compute"}
        self._aside = self.driver.event(), self.driver.event()
        space.releaser.add(id(self), self._release, self._invalidate_arrivals if self.dtype.is_floating_point else None)

    def _raise_what_no_call_left(self) -> None:
        """What a call waits for of the calls before it is raised for the first one."""
        words = self._words.view(torch.int32)
        for _, lane, position, step in (entry for entry in self.schedule if entry[0] == self.rank):
            for wait in waits(step):
                if wait.at_least == 0:
                    words[self.flags.slot[wait.flag, lane.name, position]] = self.growth_of(wait.flag)

    def mailbox(self, nbytes: int) -> tuple[list[int], torch.Tensor]:
        piece = self._take(nbytes)
        return piece.addresses, piece.local

    def _take(self, nbytes: int) -> Allocation:
        """Symmetric memory, until `close`."""
        piece = self.space.heap.allocate(nbytes, reusable=True)
        self._pieces.append(piece)
        return piece

    def _give_back(self) -> None:
        while self._pieces:
            self.space.heap.free(self._pieces.pop())

    def symmetric(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        return self._area.view(rank, offset, rows, cols, dtype)

    def scratch(self, name: str, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._scratch:
            self._scratch[name] = torch.empty(rows, cols, dtype=dtype, device=self.space.device)
        return self._scratch[name]

    def own_bindings(self) -> Bindings:
        return Bindings(dict(self.fixed.tensors))

    def itemsize(self, region: Region) -> int:
        """Bytes of an element of a region."""
        return 4 if self.schedule.buffer[region.buffer].float32 else self.dtype.itemsize

    def close(self) -> None:
        # Waits are released until the streams have drained, since a call may be under way whose peers are lost; and what was
        # released last has been written before the words are given back.
        torch.cuda.synchronize(self.space.device)
        self.space.releaser.remove(id(self))
        torch.cuda.synchronize(self.space.device)
        self._replays.close()
        for event in chain(self._aside, *self._forks.values()):
            self.driver.forget(event)
        self._give_back()
        del self._words, self._area
        self.fused_collectives = {}
        self._scratch, self._tapes, self._products, self.fixed, self._reached = {}, {}, {}, Bindings(), NOTHING

    def here(self, where: Where) -> Word:
        """Before a step may wait: let its lane say where it is."""
        return Word("here", self._progress_at[where.lane], where.position + 1)

    def waiters(self, flag: Flag) -> list[int]:
        """The words that a signal raises."""
        return [self._address_on(flag.rank) + 4 * slot for slot in self.flags.slots[flag]]

    def _address_on(self, rank: int) -> int:
        """Where the words of a rank of this node begin."""
        return self._addresses[rank - self.team.near.start]

    def gate_address(self, flag: Flag, where: Where) -> int:
        return self._address_on(self.rank) + 4 * self.flags.slot[flag, where.lane, where.position]

    def count_address(self, flag: Flag) -> int:
        (address,) = self.waiters(flag)
        return address

    def gate_need(self, wait: Wait) -> tuple[int, int]:
        return 0, self.growth_of(wait.flag) if wait.at_least else 0

    def launch(self, kernel: FusedStep, bindings: Bindings, stream: int) -> None:
        """A step as one kernel, beside what pushes and messages take of the SMs. A sum's gates have been waited for by its
        stream."""
        silent = self._silent or kernel.gated_by_stream
        sms = self.space.sms - (self._push_sms if self.pushes else 0) - (sms_for(self.team) if self._sends else 0)
        kernel.launch(bindings, 0, silent=silent, tries=self.space.tries, sms=sms, stream=stream)

    def fused_collective(self, run: FusedCollectiveKernel, bindings: Bindings, stream: int) -> None:
        """The kernel waits itself, for nothing that needs an SM of this GPU."""
        run.launch(bindings, silent=self._silent, tries=self.space.tries, stream=stream)

    def push(self, run: FusedPush, bindings: Bindings, stream: int) -> None:
        """Copies by SMs that a gated kernel leaves free: what it waits for can run."""
        run.launch(bindings, silent=self._silent, sms=self._push_sms, stream=stream)

    def prepare(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        # A strided copy is a kernel, and would wait for SMs that a gated GEMM holds.
        return tensor if name in ("b", "tables") else tensor.contiguous()

    def matmul(self, lane: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
        """On torch's current stream, the lane's. In a rehearsal the fastest way is looked for."""
        times = self._silent and self.times_products
        self._products[lane].multiply(a, b, out, accumulate=accumulate, times=times)

    @property
    def keeps_outputs(self) -> bool:
        """Whether results must not be touched now: in a rehearsal, of what may work in place."""
        return self._silent and isinstance(self.schedule.problem, CollectiveProblem)

    def collective(self, step: Collective, bindings: Bindings) -> None:
        if self.keeps_outputs:
            self._vendors[id(step)].rehearse(self.space.device)
        elif not self._loads:
            self._vendors[id(step)].run(bindings.view(step.src), bindings.view(step.dst))

    def send_receive(self, step: SendReceive, where: Where, bindings: Bindings) -> None:
        """On torch's current stream."""
        if self.keeps_outputs or self._loads:
            return  # on no rank: all rehearse at once, and where one loads it runs nothing
        assert self.space.wire, f"{where} on one node"
        sends = [(bindings.view(send.src), send.to) for send in step.sends]
        self.space.wire.exchange(sends, [(bindings.view(got.dst), got.source) for got in step.receives])

    def play(self, inputs: Inputs, outputs: Outputs) -> None:
        if not self._rehearsed:
            self._rehearse(self.bind(inputs, outputs))
            self._loaded.add(self._how(inputs, outputs))
        capturing = torch.cuda.is_current_stream_capturing()
        # A vendor collective keeps books of its own about graphs: those schedules are never replayed.
        graph = None
        if self._replayable and self.spans is None and not capturing:
            graph = self._replays.find(inputs, outputs)
        if graph is not None:
            self._replay(graph, self._invalid(outputs))
            return
        bindings = self.bind(inputs, outputs)
        if capturing:
            self.captured = True
            self.space.watchdog.captured()
            self._replays.branches.enqueue(self.space.current_stream(), lambda: self._fork_and_join(bindings))
            return
        if self._forks:
            self._load(bindings, self._how(inputs, outputs))
        self._submit(lambda: self._fork_and_join(bindings), self._invalid(outputs), allocates=self._allocates)

    def _replay(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        if not self._products:
            self._submit(graph.replay, outputs)
            return
        caller = self.space.current_stream()
        self.space.after_replays(caller)
        self._submit(graph.replay, outputs)
        self.space.replayed(caller)

    def _tape(self, bindings: Bindings) -> Tape:
        running = frozenset(step for step, kernel in self.kernels.items() if kernel.runs(bindings))
        if running not in self._tapes:
            self._tapes[running] = Tape(self, running)
        return self._tapes[running]

    def _rehearse(self, bindings: Bindings) -> None:
        """Run the first call's steps once without flags, on all ranks, and throw the result away.

        CUDA loads a kernel at first use, and waits for all streams then (`_load`). So what was enqueued before is waited for.
        """
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"schedule {self.schedule.name}: call the operator once with these sizes before capturing a graph")
        torch.cuda.synchronize(self.space.device)
        self.space.captures.ready()
        spans, self.spans, self._silent = self.spans, None, True
        before = self.space.allocated()
        self._submit(lambda: self._fork_and_join(bindings), {})
        self._allocates = self.space.allocated() - before
        self.spans, self._silent, self._rehearsed = spans, False, True
        self.space.settle()

    def _load(self, bindings: Bindings, how: Hashable) -> None:
        """Load what a call needs whose tensors lie otherwise than those before: kernels for other strides and alignments.

        CUDA waits for all streams where it loads a kernel, and keeps the watch from releasing any: for good, behind a lane of
        this call that waits for another one. So all is loaded by a capture, which runs nothing, before any of it is enqueued,
        and once what was enqueued before has ended, which is watched. One lane alone waits for nothing that comes later.
        """
        if how in self._loaded:
            return
        torch.cuda.synchronize(self.space.device)
        self._lay_out(bindings)
        spans, self.spans, self._loads, before = self.spans, None, True, self.space.allocated()
        try:
            self.space.captures.record(lambda: self._fork_and_join(bindings), loads=True)
        finally:
            self.spans, self._loads = spans, False
        self._allocates = max(self._allocates, self.space.allocated() - before)
        if len(self._loaded) == _WAYS_KEPT:
            self._loaded.clear()
        self._loaded.add(how)

    def _how(self, inputs: Inputs, outputs: Outputs) -> Hashable:
        """How the matrices of a call lie, and are multiplied. Lookups load what their tables and indices need themselves."""
        return settings(), lie({name: some for name, some in inputs.items() if name in self.schedule.buffer}, outputs)

    def _lay_out(self, bindings: Bindings) -> None:
        """Make the tables that a call's kernels read: they are copied to the GPU, which no capture takes."""
        tape = self._tape(bindings)
        for kernel in self.kernels.values():
            if kernel.runs(bindings):
                kernel.lay_out(bindings)
        for push in self.pushes.values():
            push.laid_out(bindings)
        for item in chain.from_iterable(items for _, items in tape.runs):
            if isinstance(item, Words):
                self._submission(item)

    def _submit(self, enqueue: Callable[[], None], outputs: Outputs, *, allocates: int = 0) -> None:
        """One call on the caller's stream, after the program's last one, and under watch. outputs: what it writes, which a
        failure makes invalid. allocates: bytes, on the way."""
        caller = self.space.current_stream()
        if self._last_stream not in (None, caller):
            self.space.tickets.after(caller, self._last_ticket)
        if self._waits_on_sms and not self._silent:
            self.space.turn.take(caller)
        zero_us, watched = time.perf_counter_ns() / 1e3, self.spans is not None
        ticket = self.space.watchdog.begin(caller, self._stuck, rehearses=self._silent, results=results_in(outputs))
        self._times = []
        if watched:
            self._timed(None, caller, lambda: None)
        try:
            with self.space.temporaries(allocates):
                enqueue()
        finally:
            self.space.tickets.end(caller, ticket)
        self.space.watchdog.raise_if_failed()
        self._last_stream, self._last_ticket = caller, ticket
        if watched:
            self._read_spans(ticket, zero_us)

    def _fork_and_join(self, bindings: Bindings) -> None:
        """Enqueue every lane: the compute lane on the caller's stream, the others forked from it first, and joined to it.

        Joined also where something is raised on the way: what a lane has yet to write is the caller's memory, which is given to
        others at once, on the caller's stream; and a capture whose streams are not joined cannot end.
        """
        caller, tape = self.space.current_stream(), self._tape(bindings)
        forked: list[str] = []
        self._has_asides = False
        try:
            for name, (fork, _) in self._forks.items():
                forked.append(name)
                self.driver.after(self.space.stream(name).cuda_stream, caller, fork)
            for lane, items in tape.runs if self.spans is None else tape.runs_apart:
                if lane.kind == "compute":
                    self._enqueue(items, bindings, caller)
                else:
                    self._beside(lane.name, items, bindings)
        finally:
            for name in forked:
                self.driver.after(caller, self.space.stream(name).cuda_stream, self._forks[name][1])
            if self._has_asides:
                self.driver.after(caller, self.space.aside.cuda_stream, self._aside[1])

    def _beside(self, lane: str, items: Sequence[Item], bindings: Bindings) -> None:
        """Enqueue items of a lane that has forked from the caller's stream."""
        stream = self.space.stream(lane)
        with torch.cuda.stream(stream) if any(isinstance(item, Work) and item.by_torch for item in items) else nullcontext():
            self._enqueue(items, bindings, stream.cuda_stream)

    def _enqueue(self, items: Sequence[Item], bindings: Bindings, stream: int) -> None:
        for item in items:
            if self.spans is None:
                self._one(item, bindings, stream)
            else:
                self._timed(item.where, stream, lambda i=item: self._one(i, bindings, stream))  # type: ignore[misc]

    def _one(self, item: Item, bindings: Bindings, stream: int) -> None:
        if isinstance(item, Work):
            item.run(bindings, stream)
            return
        submit = self._submission(item)
        if self._silent:
            return
        if item.aside:
            side = self.space.aside.cuda_stream
            self.driver.after(side, stream, self._aside[0])
            self._has_asides, stream = True, side
        submit(stream)

    def _submission(self, item: Words) -> Callable[[int], None]:
        if id(item) not in self._batches:
            by_kernel = not item.aside and item.where.lane not in self._off_sms
            self._batches[id(item)] = self.space.words(item.words, by_kernel=by_kernel)
        return self._batches[id(item)]

    def _timed(self, where: Where | None, stream: int, work: Callable[[], None]) -> None:
        on = self.space.named(stream)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(on)
        work()
        end.record(on)
        self._times.append((where, start, end))

    def _read_spans(self, ticket: int, zero_us: float) -> None:
        """Wait for the call's end, and read when each step ran: a step of several items from its first to its last."""
        self.team.until(lambda: self.space.tickets.done(ticket), self._stuck)
        torch.cuda.synchronize(self.space.device)
        (_, begin, _), *times = self._times
        found: dict[Where, tuple[float, float]] = {}
        for where, *events in times:
            assert where is not None
            first, last = (zero_us + 1e3 * float(begin.elapsed_time(event)) for event in events)
            found[where] = (found.get(where, (first, 0.0))[0], max(first, last))
        assert self.spans is not None
        self.spans += [span(self.schedule, self.rank, w.lane, w.step, first, last) for w, (first, last) in found.items()]

    def _stuck(self) -> str:
        """What each lane waits for: the step that its progress names, and the words of it that are low."""
        with torch.cuda.stream(self.space.asking):
            seen = self._words.view(torch.int32).cpu().tolist()
            stuck = list(filter(None, (kernel.missing() for kernel in self.fused_collectives.values())))
        come_to = dict(zip(self._progress_at, seen[self.flags.words :], strict=False))
        for lane in self.schedule.ranks[self.rank]:
            for where, wait in self._may_wait_for(lane, come_to[lane.name] - 1):
                value, need = seen[self.flags.slot[wait.flag, lane.name, where.position]], self.growth_of(wait.flag)
                if value < need:
                    stuck.append(f"{where}: {wait.flag}: expected {need}, seen {value}; {self.raiser(wait.flag)}")
                    break
        stuck = stuck or list(self._unsent(come_to))
        return "\n".join(stuck) or f"rank {self.rank}: no flag is missing, but the GPU has not ended the call"

    def _unsent(self, come_to: Mapping[str, int]) -> Iterator[str]:
        """The messages that a lane came to last, and collectives: nothing tells whether they are through."""
        others = ", ".join(f"rank {peer}" for peer in range(self.team.world_size) if peer != self.rank)
        for rank, lane, at, collective in self.schedule:
            if rank == self.rank and id(collective) in self._vendors:
                where = Where(rank, lane.name, at, collective)
                yield f"{where}: no flag is missing; perhaps not all ranks have begun it ({others})"
        for lane in self.schedule.ranks[self.rank]:
            position = come_to[lane.name] - 1
            step = lane.steps[position] if position >= 0 else None
            if isinstance(step, SendReceive):
                where = Where(self.rank, lane.name, position, step)
                yield f"{where}: no flag is missing; perhaps not all of ranks {sorted(step.peers)} have begun their ends"

    def _may_wait_for(self, lane: Lane, position: int) -> Iterator[tuple[Where, Wait]]:
        """The waits of a lane that has come to `position`: of that step, and of those that it waits for at once with it."""
        for at in range(position, len(lane.steps) if position >= 0 else position):
            step = lane.steps[at]
            yield from ((Where(self.rank, lane.name, at, step), wait) for wait in waits(step))
            if not isinstance(step, Wait):
                return

    def _invalid(self, outputs: Outputs) -> Outputs:
        """What a failure makes invalid: the outputs, or what the caller gave for results."""
        return {"invalidated": list(self._invalidated)} if self._invalidated else outputs

    def _invalidate_arrivals(self, stream: int) -> None:
        """Set the memory in which peers' data arrive to NaN: what is computed from it is NaN, too."""
        memory = self._area.local
        self.driver.fill(memory.data_ptr(), INVALID_BYTE, memory.numel(), stream)

    def _release(self) -> None:
        """Raise every word of this rank beyond what any wait needs, so that its streams drain.

        By memory operations of a stream: a memset is a kernel, and waits for SMs that a spinning kernel may hold; a copy waits
        for a copy engine. Waits for nothing itself.
        """
        stream = self.space.rescue
        self._raise_all(stream.cuda_stream)
        with torch.cuda.stream(stream):
            for kernel in self.fused_collectives.values():
                kernel.abort()
