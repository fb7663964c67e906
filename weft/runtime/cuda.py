"""The GPU executor runs a Schedule on GPUs, with one process for each GPU.

Lanes are streams. The compute lane is the caller's stream; every other lane has a stream of its own, which is forked from the
caller's and joined to it. Symmetric buffers are torch's symmetric memory among the ranks of a node, without multicast. Between
nodes NCCL sends and receives (weft.runtime.network). A call does not wait for the GPU.

    caller's stream (compute)       copy stream
    fork  ----------------------->  wait made >= tiles, write 0
    gemm, count made  ~~~~~~~~~~~>  peer copy, write 1 into the peer's arrived
    join  <-----------------------

A warm call replays a CUDA graph (weft.runtime.bound_call). Any other call comes here:

    play       replays the call from a CUDA graph, if its tensors have the same addresses as before, or enqueues it
    _enqueue   takes its place in the order of the GPU (weft.runtime.order), in which the watchdog bounds the call
    _issue     forks the lanes' streams, issues the launches (weft.runtime.launches), and joins the streams

The launches are prepared once, as a plain list in the order in which they are enqueued (weft.runtime.launch_plan).

Each (flag, step that waits for it) has a 32-bit word of its own (weft.runtime.launches). A signal writes 1 into the word of
each waiter, or a kernel adds one for each tile; the waiter writes 0 once it is past. The checker proves that no signal is lost.
A wait of a stream is a memory operation, and so is a signal, which writes into the memory of the rank that waits. Neither takes
an SM, so a kernel can never keep a flag from being raised.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from weft.comm.symmetric_heap import Allocation
from weft.compat.device import outside_graph_trees
from weft.compat.streams import Word
from weft.core.errors import LOGGER, warn_once
from weft.core.problem import CollectiveProblem
from weft.core.schedule import Collective, Flag, Gemm, Push, Region, Schedule, SendReceive, waits
from weft.perf.shapes import push_sms
from weft.runtime.bindings import Bindings, CallTensors, Inputs, Issue, NotPreparedError, Outputs, Where, scales_name
from weft.runtime.bound import NOTHING, BoundProgram, ScratchName, scratch_bytes, with_fused_steps
from weft.runtime.cuda_resources import CallTimer, CudaResources, LaneStreams
from weft.runtime.launches import CopyLaunch, FlagOperations, IssuedCall, TorchLaunch, WaiterWords
from weft.runtime.network import NcclCollective, describe_unfinished, describe_waits, sms_for
from weft.runtime.order import Exclusive, PendingCall, memory_of_outputs
from weft.runtime.products import Products, settings
from weft.runtime.replay import ANY_STRIDES, Replays, layout_key
from weft.runtime.watchdog import INVALID_BYTE
from weft.schedules import spec

_RELEASED = 0x3FFFFFFF
"""Every word is set to this value after a failure. It is more than any wait needs, and less than where the comparison wraps."""
_LAYOUTS = 256
"""A program remembers this many layouts of its tensors whose kernels are loaded."""
_NO_CONTEXT: AbstractContextManager[None] = nullcontext()
_IN_USE: list[Any] = []
"""The memory of closed programs whose calls have not ended."""


class Address(NamedTuple):
    """An Address locates a matrix in a call.

    find: returns the address of the first element.
    pitch: the bytes from row to row.
    """

    find: Callable[[Bindings], int]
    pitch: int


class AddressedCopy(NamedTuple):
    """An AddressedCopy is a copy (dst, src, stream) by address, and the functions that find both addresses in a call."""

    copy: Callable[[int, int, int], None]
    find_src: Callable[[Bindings], int]
    find_dst: Callable[[Bindings], int]


class CudaProgram(BoundProgram):
    """A CudaProgram is a schedule on one GPU. It has a data area, scratch, and a word for each step that waits for a flag.

    title: the names of the schedule and of the group.
    streams: the streams of the lanes.
    products: the matmul implementation of each lane.
    collectives: the NCCL collectives, by id of the step.
    sms_for_kernels, sms_for_pushes: the number of SMs that kernels and pushes may fill.
    memory: stands for the program's memory and flags in the order of calls.
    uses: what its calls use one after the other.
    replays: its graphs. None if its calls cannot be replayed.
    replayed: stands for its calls in graphs of the caller, whose replays weft does not see.
    ask: enqueues on a stream that the second word of each lane is 1, until the lane has passed its last wait of a call.
    allocates: the bytes that torch allocates for temporaries of a call with several lanes.
    """

    title = ""

    def __init__(self, resources: CudaResources, schedule: Schedule) -> None:
        self.resources, self.driver = resources, resources.driver
        given, schedule = schedule, with_fused_steps(resources, schedule)
        if schedule is not given:
            what = "this GPU" if given.problem.scaling is None else "weft"
            warn_once(f"schedule {schedule.name}: {what} has no kernel for its fused collective, so its steps run one by one")
        self.title = f"{schedule.problem.op} {spec(schedule.name, schedule.chunks)} of group {resources.rank_group.name}"
        self._scratch: dict[ScratchName, torch.Tensor] = {}
        self._pieces: list[Allocation] = []
        try:
            self._set_up(schedule)
        except BaseException:
            self._give_back()
            raise

    def _set_up(self, schedule: Schedule) -> None:
        resources = self.resources
        # Each lane has two words: how far it has come, and whether it has passed its last wait since the watchdog asked.
        words = self._take(4 * (WaiterWords(schedule).words + 2 * max(map(len, schedule.ranks))))
        self._words, self._addresses = words.local, words.addresses
        super().__init__(resources, schedule)
        self._area = self._take(self.layout.staging)
        lanes = schedule.ranks[self.rank]
        self._progress_at = {lane.name: self._words.data_ptr() + 4 * (self.flags.words + i) for i, lane in enumerate(lanes)}
        own = (self._words.data_ptr() + 4 * slot for slot in range(self.flags.words))
        kernels_own = self.ragged.releases() if self.ragged is not None else []
        # The flags of the other lanes need no SM. If matmuls fill the SMs, even a kernel of one warp would wait for a free one.
        alone = isinstance(schedule.problem, CollectiveProblem)
        without_kernels = frozenset(lane.name for lane in lanes if lane.kind in ("copy", "network") or alone)
        self._marked = [at for at, lane in enumerate(lanes) if lane.name not in without_kernels]
        self.ask = self.driver.words([Word("lower", self._mark_of(lanes[at].name), 1) for at in self._marked])
        self.replayed = PendingCall.of(self.title, self.describe_call, 0)
        self.replayed.enqueued = True
        self._raise_all = self.driver.words([*(Word("signal", address, _RELEASED) for address in own), *kernels_own])
        for slot, value in self.flags_of_previous_calls():
            self._words.view(torch.int32)[slot] = value
        self.fixed = self._fixed_bindings()
        self.memory = Exclusive()
        self._set_up_steps(schedule)
        self._rehearsing = self._rehearsed = self._loading = False
        self._loaded, self.allocates = set[Hashable](), 0
        self._timer: CallTimer | None = None
        self.streams = LaneStreams(resources, lanes, without_kernels)
        if self.ragged is not None:
            resources.ragged.append(self.ragged)
        resources.releaser.add(id(self), self._release, self._invalidate_arrivals if self.dtype.is_floating_point else None)

    def _set_up_steps(self, schedule: Schedule) -> None:
        """Set up the collectives and the matmuls of this rank's steps, and divide the SMs."""
        resources = self.resources
        mine = [(lane, position, step) for rank, lane, position, step in schedule if rank == self.rank]
        self.collectives = {
            id(step): NcclCollective(self.rank_group.group, step, schedule.problem)
            for _, _, step in mine
            if isinstance(step, Collective)
        }
        resources.releaser.has_collectives |= bool(self.collectives)
        sends = any(isinstance(step, SendReceive) for _, _, step in mine)
        # NCCL counts the graphs that contain its collectives, and ends no communicator while there is one. So schedules with
        # collectives are never replayed.
        self.replays: Replays | None = None
        if not self.collectives and not sends and self.ragged is None:
            self.replays = Replays(
                resources.captures,
                lambda inputs, outputs: self._issue(self.bind(inputs, outputs)),
                self.driver,
                self.dtype if schedule.problem.scaling is None else None,
                self._copied,
            )
        multiplies = {lane.name for lane, _, step in mine if isinstance(step, Gemm)}
        self.products = {lane: Products(resources.device, resources.machine) for lane in multiplies}
        kernels = self.kernels.values()
        pushes = any(isinstance(kernel.where.step, Push) for kernel in kernels)
        alone = not any(isinstance(kernel.where.step, Gemm) for kernel in kernels)
        self.sms_for_pushes = push_sms(resources.machine, resources.sms, alone=alone)
        self.sms_for_kernels = (
            resources.sms - (self.sms_for_pushes if pushes else 0) - (sms_for(self.rank_group) if sends else 0)
        )
        waiting = [kernel for kernel in kernels if kernel.waits_in_kernel]
        waits_on_sms = any(kernel.manages_own_flags for kernel in kernels) or any(
            not wait.on_previous_call for kernel in waiting for wait in waits(kernel.where.step)
        )
        self.uses = (self.memory, resources.order.sms) if waits_on_sms else (self.memory,)
        assert resources.order.sms in self.uses or not self._mailboxes, "calls that share a mailbox exclude each other"
        self.replay_uses = (*self.uses, resources.captures.uses) if self.products else self.uses
        """A graph with products also uses the cuBLAS workspace with which it was captured."""

    def mailbox(self, nbytes: int) -> tuple[list[int], torch.Tensor]:
        piece = self._take(nbytes)
        return piece.addresses, piece.local

    def _take(self, nbytes: int) -> Allocation:
        """Allocate symmetric memory until `close`."""
        piece = self.resources.heap.allocate(nbytes, reusable=True)
        self._pieces.append(piece)
        return piece

    def _give_back(self) -> None:
        while self._pieces:
            self.resources.heap.free(self._pieces.pop())
        self._give_mailboxes_back()

    @property
    def nbytes(self) -> int:
        symmetric = sum(piece.nbytes for piece in self._pieces) + sum(one.bytes_per_user for one in self._mailboxes)
        return symmetric + scratch_bytes(self.schedule, self.layout)

    def symmetric(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        return self._area.view(rank, offset, rows, cols, dtype)

    def scratch(self, name: ScratchName, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._scratch:
            self._scratch[name] = torch.empty(rows, cols, dtype=dtype, device=self.resources.device)
        return self._scratch[name]

    def own_bindings(self) -> Bindings:
        return self.fixed

    def close(self) -> None:
        # Waits are released until the calls have ended, because the peers of a call in flight may be lost.
        releaser = self.resources.releaser
        ended = self.resources.wait_for_calls(
            self.memory.last, captured=self.captured, forget=lambda: releaser.remove(id(self))
        )
        if not (self.resources.watchdog.captured_programs.remove(self) and ended):
            LOGGER.error("%s has calls that have not ended: its memory stays in use until the process ends", self.title)
            _IN_USE.append((self._pieces, self._mailboxes, self._words, self._area, self._scratch, self._plans, self.replays))
            self._pieces, self._mailboxes = [], ()
        if self.replays is not None:
            self.replays.close()
        self.resources.order.forget_results(self.replayed)
        self.memory.close(self.driver)
        self.streams.close()
        if self.ragged is not None:
            self.resources.ragged.remove(self.ragged)
        self._give_back()
        del self._words, self._area
        self.kernels, self.ragged = {}, None
        self._scratch, self._plans, self.products, self.fixed, self._reached = {}, {}, {}, Bindings(), NOTHING

    @property
    def submitter(self) -> LaneStreams:
        return self.streams

    def progress_word(self, where: Where) -> Word:
        """Return the operation by which a lane records that it has reached a step, before the step waits."""
        return Word("progress", self._progress_at[where.lane], where.position + 1)

    def end_words(self, lane: str) -> tuple[Word, ...]:
        # In a kernel of flag operations these words cost nothing. As memory operations they would lengthen the call.
        at = self._progress_at[lane]
        marked = list(self._progress_at).index(lane) in self._marked
        return (Word("lower", at, 0), Word("lower", self._mark_of(lane), 0)) if marked else ()

    def _mark_of(self, lane: str) -> int:
        """Return the address of a lane's second word."""
        return self._progress_at[lane] + 4 * len(self._progress_at)

    def look(self) -> tuple[tuple[int, ...], bool]:
        """Return where the call is that the GPU is in, and whether it is another one than when `ask` was enqueued.

        It waits for copies on torch's current stream. They need no SM.

        The first is, for each lane that has a second word, the step (from 1 on) whose flag operations it has begun, or 0 before
        the first ones and after its last wait; and, for each kernel, the number of the call that it is in, or 0.
        """
        lanes = len(self._progress_at)
        words = self._words.view(torch.int32)[self.flags.words :][: 2 * lanes].cpu().tolist() if self._marked else []
        steps = [words[at] for at in self._marked]
        calls = [kernel.call_under_way() for kernel in self.kernels.values()]
        return (*steps, *calls), any(words[at] and not words[at + lanes] for at in self._marked)

    def waiters(self, flag: Flag) -> list[int]:
        """Return the addresses of the words that a signal raises."""
        return [self._address_on(flag.rank) + 4 * slot for slot in self.flags.slots[flag]]

    def _address_on(self, rank: int) -> int:
        """Return the address of the words of a rank of this node."""
        return self._addresses[rank - self.rank_group.ranks_on_node.start]

    def gate_address(self, flag: Flag, where: Where) -> int:
        return self._address_on(self.rank) + 4 * self.flags.slot[flag, where.lane, where.position]

    def copier(self, src: Region, dst: Region) -> Callable[[Bindings, int], None]:
        copies = self._copies(src, dst)

        def run(bindings: Bindings, stream: int) -> None:
            for copy, find_src, find_dst in copies:
                there, here = find_dst(bindings), find_src(bindings)
                if there != here:
                    copy(there, here, stream)

        return run

    def prepare_copy(self, src: Region, dst: Region) -> Callable[[CallTensors], Issue]:
        def prepare(tensors: CallTensors) -> Issue:
            addresses, number = tensors.addresses, tensors.number
            ready = [
                (copy, number(find_src(tensors.bindings)), number(find_dst(tensors.bindings)))
                for copy, find_src, find_dst in self._copies(src, dst)
            ]

            def run(stream: int) -> None:
                for copy, here, there in ready:
                    if addresses[there] != addresses[here]:
                        copy(addresses[there], addresses[here], stream)

            return run

        return prepare

    def _copies(self, src: Region, dst: Region) -> list[AddressedCopy]:
        """Return the copies that copy one region to another, in order."""
        row_bytes = src.shape[1] * self.dtype_of(src.buffer).itemsize
        copies = [(src.shape[0], row_bytes, self._address_of(src), self._address_of(dst))]
        if self.schedule.buffer[src.buffer].operand:
            # The scales come first, because they would wait behind the long copy.
            (rows, width), from_scales = self._scales_of(src)
            copies.insert(0, (rows, 4 * width, from_scales, self._scales_of(dst)[1]))
        copier = self.driver.copier
        return [
            AddressedCopy(copier(rows=rows, row_bytes=width, pitches=(here.pitch, there.pitch)), here.find, there.find)
            for rows, width, here, there in copies
        ]

    def _address_of(self, region: Region) -> Address:
        key, buffer = (region.buffer, region.rank), self.schedule.buffer[region.buffer]
        item = self.dtype_of(region.buffer).itemsize
        pitch = buffer.cols[region.rank] * item
        offset = region.rows[0] * pitch + region.cols[0] * item
        if buffer.kind in ("symmetric", "local"):
            fixed = self.fixed.tensors[key][0][0].data_ptr() + offset
            return Address(lambda _: fixed, pitch)
        return Address(lambda bindings: bindings.tensors[key][0][0].data_ptr() + offset, pitch)

    def _scales_of(self, region: Region) -> tuple[tuple[int, int], Address]:
        """Return the shape of a region's scales, and their address in a call."""
        key, buffer = (region.buffer, region.rank), self.schedule.buffer[region.buffer]
        assert buffer.operand, f"{region} is not of FP8"
        (top, bottom), (left, right) = self.schedule.problem.scalings[buffer.operand].scales_of(
            buffer.operand, region.rows, region.cols
        )
        pitch = 4 * self.scales_shape(region.buffer, region.rank)[1]
        offset = top * pitch + 4 * left
        return (bottom - top, right - left), Address(lambda bindings: bindings.scales[key][0].data_ptr() + offset, pitch)

    def collective(self, step: Collective, where: Where) -> Callable[[IssuedCall], None]:
        collective = self.collectives[id(step)]

        def run(call: IssuedCall) -> None:
            if call.skips_outputs:
                collective.rehearse(self.device)
            elif not call.loads:
                for src, dst in zip(call.bindings.moved(step.src), call.bindings.moved(step.dst), strict=True):
                    collective.run(src, dst)

        return run

    def prepare_collective(self, step: Collective) -> Callable[[IssuedCall, CallTensors], Issue]:
        def prepare(call: IssuedCall, tensors: CallTensors) -> Issue:
            run, bindings, views = self.collectives[id(step)].whole, tensors.bindings, tensors.views
            dst, src = bindings.view(step.dst), bindings.view(step.src)
            if run is None or bindings.scalings or not (dst.is_contiguous() and src.is_contiguous()):
                raise NotPreparedError("it is not one collective of whole matrices")
            there, here = tensors.view(dst), tensors.view(src)
            return lambda stream: run(views[there], views[here])

        return prepare

    def messages(self, step: SendReceive, where: Where) -> Callable[[IssuedCall], None]:
        def run(call: IssuedCall) -> None:
            if call.skips_outputs or call.loads:
                return  # no rank exchanges data: all ranks rehearse together, and loading runs nothing
            wire = self.resources.wire
            assert wire, f"{where} on one node"
            wire.exchange(*call.bindings.messages(step))

        return run

    def prepared(self, inputs: Inputs) -> Inputs:
        # A strided copy is a kernel, and would wait for SMs that a gated GEMM holds.
        return {name: some if name in ANY_STRIDES else [one.contiguous() for one in some] for name, some in inputs.items()}

    def play(self, inputs: Inputs, outputs: Outputs) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        with _NO_CONTEXT if capturing else outside_graph_trees(self.resources.device):
            self._play(inputs, outputs, capturing=capturing)

    def _play(self, inputs: Inputs, outputs: Outputs, *, capturing: bool) -> None:
        if self.ragged is not None:
            self.ragged.check_before(inputs["a"][0])
        if not self._rehearsed:
            self._rehearse(self.bind(inputs, outputs))
            self._loaded.add(self._layout_of(inputs, outputs))
        if self.replays is not None and self.spans is None and not capturing:
            captured = self.replays.find(inputs, outputs)
            if captured is not None:
                self._enqueue(captured.graph, self._invalid(outputs))
                return
        bindings = self.bind(inputs, outputs)
        if capturing:
            self.captured = True
            self.resources.watchdog.captured(self)
            stream = self.resources.current_stream()
            self.resources.order.capture(stream, self.rank_group, self.uses, lambda: self._issue(bindings))
            self.resources.order.add_results(self.replayed, memory_of_outputs(self._invalid(outputs)))
            return
        if not self.streams:  # one lane waits for nothing that is enqueued later, so it may allocate and load meanwhile
            self.plan_of(bindings)
            self._enqueue(bindings, self._invalid(outputs))
            return
        self._load(bindings, self._layout_of(inputs, outputs))
        self._enqueue(bindings, self._invalid(outputs), allocates=self.allocates)

    def _enqueue(self, work: Bindings | torch.cuda.CUDAGraph, outputs: Outputs, *, allocates: int = 0) -> None:
        """Enqueue a call on the caller's stream, after the last call of this program, and have it watched.

        work: the tensors of the call, or its graph.
        outputs: the tensors that the call writes, which a failure invalidates.
        allocates: the bytes that torch allocates for temporaries.
        """
        resources, group, caller = self.resources, self.rank_group, self.resources.current_stream()
        order, rehearses = resources.order, self._rehearsing
        timer = self._timer = None if self.spans is None else CallTimer(resources)
        order.await_room(group, self.describe_call)  # not while other threads wait for the lock
        call = PendingCall.of(self.title, self.describe_call, caller, rehearses=rehearses)
        with order.alone(group) if rehearses else order.held(group):
            order.begin(call, resources.watchdog.pending, self.uses if isinstance(work, Bindings) else self.replay_uses)
            call.results = memory_of_outputs(outputs)
            if timer is not None:
                timer.begin(caller)
            try:
                with resources.temporaries(allocates) if allocates else _NO_CONTEXT:
                    if isinstance(work, Bindings):
                        self._issue(work)
                    else:
                        work.replay()
            finally:
                # This also ends a call that raises. Its lanes wait until they are released, and `close` must wait for that.
                order.end(call)
                self._timer = None
        resources.watchdog.raise_if_failed()
        if timer is not None:
            self._read_spans(timer, call)

    def _issue(self, bindings: Bindings) -> None:
        """Enqueue every lane's launches on its stream.

        The compute lane uses the caller's stream. The streams of the other lanes are forked from it first, and joined to it at
        the end, even if an error is raised.
        """
        caller, plan, timer = self.resources.current_stream(), self.plan_of(bindings), self._timer
        call = self._call(bindings)
        try:
            self.streams.fork(caller)
            for lane, launches, by_torch in plan.batches if timer is None else plan.unmerged_batches:
                own = None if lane.kind == "compute" else self.resources.stream(lane.name)
                stream = caller if own is None else own.cuda_stream
                with torch.cuda.stream(own) if by_torch and own is not None else nullcontext():
                    for launch in launches:
                        if timer is None:
                            launch.issue(call, stream)
                        else:
                            timer.issue(launch, call, stream)
        finally:
            self.streams.join(caller)

    def _call(self, bindings: Bindings) -> IssuedCall:
        times = self._rehearsing and self.times_products
        return IssuedCall(
            bindings=bindings,
            rehearses=self._rehearsing,
            loads=self._loading,
            skips_outputs=self._rehearsing and isinstance(self.schedule.problem, CollectiveProblem),
            matmuls={lane: partial(products.multiply, times=times) for lane, products in self.products.items()},
        )

    def _rehearse(self, bindings: Bindings) -> None:
        """Run the steps of the first call once without flags, on all ranks, and discard the result.

        CUDA loads a kernel at its first use, and may wait for all streams then (`_load`). So earlier calls must have ended.
        """
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"schedule {self.schedule.name}: call the operator once with these sizes before capturing a graph")
        with self.resources.order.alone(self.rank_group):
            self.resources.captures.prepare()
            self._prepare_tables(bindings)  # before `allocates` is measured, because tables are no temporaries
        spans, self.spans, self._rehearsing = self.spans, None, True
        before = self.resources.allocated()
        self._enqueue(bindings, {})
        self._count_temporaries(before)
        self.spans, self._rehearsing, self._rehearsed = spans, False, True
        self.resources.settle()

    def _load(self, bindings: Bindings, layout: Hashable) -> None:
        """Load the kernels of a call whose tensors have other strides or alignments than those of earlier calls.

        While CUDA loads a kernel it may wait for all streams, and the watchdog cannot release any. If a lane of this call
        waited for another lane then, it would be a deadlock. So a capture, which runs nothing, loads all kernels before the
        call is enqueued, and after weft's earlier calls have ended. If there is only one lane, it waits for nothing that is
        enqueued later.
        """
        if layout in self._loaded:
            return
        with self.resources.order.alone(self.rank_group):
            self._prepare_tables(bindings)
            spans, self.spans, self._loading = self.spans, None, True
            before = self.resources.allocated()
            try:
                self.resources.captures.record(lambda: self._issue(bindings), loads=True)
            finally:
                self.spans, self._loading = spans, False
        self._count_temporaries(before)
        if len(self._loaded) == _LAYOUTS:
            self._loaded.clear()
        self._loaded.add(layout)

    def _count_temporaries(self, before: int) -> None:
        """Count what torch has allocated since it had allocated `before` bytes.

        A call with one lane may wait for all streams, because nothing that it waits for is enqueued later.
        """
        if self.streams:
            self.allocates = max(self.allocates, self.resources.allocated() - before)

    def _copied(self, inputs: Inputs, outputs: Outputs) -> set[str]:
        """Return the names of the caller's tensors that copies of a call may read or write.

        Work of torch may copy any of them.
        """
        launches = [one for run in self.plan_of(self.bind(inputs, outputs)).batches for one in run.launches]
        given = {name for name in (*inputs, *outputs) if name not in ANY_STRIDES}
        if any(isinstance(one, TorchLaunch) for one in launches):
            return given
        touched = {region.buffer for one in launches if isinstance(one, CopyLaunch) for region in (one.src, one.dst)}
        return given & {name for buffer in touched for name in (buffer, scales_name(buffer))}

    def _layout_of(self, inputs: Inputs, outputs: Outputs) -> Hashable:
        """Return the layout of the matrices of a call, and torch's matmul settings. Lookups load their kernels themselves."""
        known = {name: some for name, some in inputs.items() if name in self._given or name in self._scale_names}
        return settings(), layout_key(known, outputs)

    def _prepare_tables(self, bindings: Bindings) -> None:
        """Make the tables that a call's kernels read. They are copied to the GPU, which is impossible in a capture."""
        plan = self.plan_of(bindings)
        for kernel in self.kernels.values():
            if kernel.runs(bindings):
                kernel.lay_out(bindings)
        for launch in chain.from_iterable(run.launches for run in plan.batches):
            if isinstance(launch, FlagOperations):
                launch.load()

    def _read_spans(self, timer: CallTimer, call: PendingCall) -> None:
        """Wait until the call has ended, and read when each step ran."""
        self.rank_group.wait_until(lambda: self.resources.order.has_ended(call), self.describe_call)
        assert self.spans is not None
        self.spans += timer.spans(self.schedule)

    def describe_call(self) -> str:
        """Return a text with the steps that the lanes of the call in flight have reached, and the flags that are missing."""
        with torch.cuda.stream(self.resources.asking):
            seen = self._words.view(torch.int32).cpu().tolist()
            stuck = list(filter(None, (kernel.missing() for kernel in self.kernels.values())))
        # Each lane has written the number of steps that it has reached, or 0 after its last wait.
        counts = zip(self._progress_at, seen[self.flags.words :], strict=False)
        reached = {lane: count - 1 for lane, count in counts}
        stuck = stuck + describe_waits(self, seen, reached) or list(describe_unfinished(self, reached))
        stuck = stuck or [f"rank {self.rank}: no flag is missing, but the GPU has not ended the call"]
        return "\n".join(filter(None, (*stuck, self.resources.order.others(self.rank_group, self.title))))

    def _invalid(self, outputs: Outputs) -> Outputs:
        """Return the tensors that a failure invalidates: the outputs, or the tensors that the caller passed for results."""
        return {"invalidated": list(self._invalidated)} if self._invalidated else outputs

    def _invalidate_arrivals(self, stream: int) -> None:
        """Set the memory for peers' data to NaN, so that everything computed from it is NaN."""
        memory = self._area.local
        self.driver.fill(memory.data_ptr(), INVALID_BYTE, memory.numel(), stream)

    def _release(self) -> None:
        """Raise every word of this rank beyond what any wait needs, so that its streams drain.

        Stream memory operations do it, because a memset is a kernel, which waits for SMs that a spinning kernel may hold, and a
        copy waits for a copy engine. This function does not wait.
        """
        stream = self.resources.rescue
        self._raise_all(stream.cuda_stream)
        with torch.cuda.stream(stream):
            for kernel in self.kernels.values():
                kernel.abort()
