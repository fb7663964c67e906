r"""CudaResources holds what programs of a process group share on a GPU: symmetric memory, streams, temporaries, the watchdog.

The watchdog bounds every call (weft.runtime.watchdog). Lanes of the same name in different programs use the same stream.

A program's lanes have streams that fork from the caller's stream when a call begins and join it when the call ends.

    caller's stream (compute)  fork ---------------------------- join
    a lane's stream                 \-> launches of the lane ---/
    side stream                            \-> signals --------/      forked where the compute lane raises them

The compute lane sends signals to the side stream while it has more work. A write into a peer's memory takes 10 us or more when
the links are full, and the next matmul need not wait for it.

A CallTimer measures when each step of a GPU call ran, by events around every launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import DeviceHeap, heap_of
from weft.compat.device import capabilities, idle
from weft.compat.streams import Driver, Word, comm_stream, current_lane_priority, give_back, raw_stream
from weft.core.errors import warn_once
from weft.core.hardware import hardware_queues
from weft.core.problem import Scaling
from weft.core.schedule import Lane, Schedule
from weft.core.span import Span
from weft.core.work import span
from weft.kernels.launch import Launcher, record_launches
from weft.perf.shapes import shapes_for
from weft.runtime.bindings import Where
from weft.runtime.choose import agreed_profile
from weft.runtime.launches import FlagOperations, IssuedCall, Launch
from weft.runtime.mailboxes import SharedMailboxes
from weft.runtime.network import CudaWire
from weft.runtime.order import FIRST_S, Order, PendingCall
from weft.runtime.replay import give_captures, private_pool, take_captures
from weft.runtime.watchdog import POLL_S, Releaser, Watchdog
from weft.schedules import spec

if TYPE_CHECKING:
    from weft.runtime.ragged_kernels import RaggedKernels

_LARGE = 2 << 20
"""Torch's allocator rounds requests of 1 MiB and more up by at most 2 MiB."""
_LOOKS_PER_S = 20_000_000
"""A block reads a flag less often than this per second, so a kernel gives up after the watchdog does."""
_DRAINED_S = 30.0
"""Calls have at least 30 s to end after a failure, while their waits are released repeatedly."""
_LONGEST_S = 1000.0
"""A block counts up to 2^31 looks at a flag. It looks about 1.5 million times a second, so that takes longer than this."""


class CudaResources:
    """CudaResources holds what the programs of one process group share on one GPU.

    order: the Order that all process groups of the GPU share. By default a new one.
    tries: how often a kernel reads a flag before it gives up.
    Raises ValueError for a bound of calls above _LONGEST_S.
    """

    def __init__(self, rank_group: RankGroup, device: torch.device, order: Order | None = None) -> None:
        if (bound_s := rank_group.timeout_s) > _LONGEST_S:
            raise ValueError(
                f"WEFT_TIMEOUT_S is {bound_s:g}; on GPUs it can be {_LONGEST_S:g} at most: kernels would give up before"
            )
        self.rank_group, self.device = rank_group, device
        self.order = order or Order(Driver())
        self.driver = self.order.driver
        heap = heap_of(rank_group, device)
        assert isinstance(heap, DeviceHeap)
        self.heap = heap
        self.wire = CudaWire(rank_group, device) if rank_group.nodes else None
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.machine = agreed_profile(rank_group, device)
        self.capabilities = capabilities(device)
        self.sms = self.capabilities.sms
        self.mailboxes = SharedMailboxes(heap, device, self.sms)
        self.ragged: list[RaggedKernels] = []
        """What notes the errors of calls with splits, of all programs."""
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._aside: torch.cuda.Stream | None = None
        self._ready: dict[int, int] = {}
        """The bytes that are ready for each stream in the pool of temporaries."""
        self._priority = current_lane_priority()
        self.rescue = comm_stream(priority="high", device=device)
        self.asking = comm_stream(priority="high", device=device)
        """The stream for copies that read what a call waits for. Such a copy may not end while another thread loads a kernel,
        and the release must not wait behind it."""
        self._invalidating = comm_stream(priority="high", device=device)
        self.tries = min(int(rank_group.timeout_s * _LOOKS_PER_S), 2**31 - 1)
        self._flag_launcher = Launcher()
        self.captures = take_captures(device)
        self.releaser = Releaser(
            rank_group, device, driver=self.driver, order=self.order, rescue=self.rescue, invalidating=self._invalidating
        )
        self.watchdog = Watchdog(
            rank_group,
            self.index,
            driver=self.driver,
            order=self.order,
            releaser=self.releaser,
            wire=self.wire,
            asking=self.asking,
        )

    def runs_kernels(self, dtype: torch.dtype, scaling: Scaling | None = None) -> bool:
        """Return whether fused steps run as kernels. They need 16 bits or FP8 operands, and a tile that fits the GPU."""
        if dtype not in (torch.bfloat16, torch.float16) and scaling is None:
            return False
        fits = bool(shapes_for(self.capabilities, scaling))
        if not fits:
            warn_once(f"no tile of weft's matmul kernels fits {self.device}: steps run part by part, by torch's operations")
        return fits

    @property
    def quantises(self) -> bool:
        """True if a kernel quantises rows while it sends them. GPUs with TMA convert to FP8."""
        return self.capabilities.tma

    def fuses(self, dtype: torch.dtype, scaling: Scaling | None = None) -> bool:
        """Return whether the kernel of fused collectives runs on this GPU.

        scaling: the scaling of FP8 operands. Every GPU with TMA has matrix units for these.
        """
        return self.capabilities.matrix_16bit and (scaling is None or self.capabilities.tma)

    @property
    def blocks(self) -> int:
        return self.sms

    def runs_lookups(self, dtype: torch.dtype) -> bool:
        return True

    def settle(self) -> None:
        """Wait until every rank has called this, and its GPU has ended the work of its current stream. Collective."""
        self.heap.settle()

    def loading(self) -> AbstractContextManager[None]:
        """Return a context in which kernels may be loaded, because no call of weft is in flight on the GPU."""
        return self.order.alone(self.rank_group)

    def wait_for_calls(self, last: PendingCall | None, *, captured: bool, forget: Callable[[], None]) -> bool:
        """Wait, bounded, until a program's last call and its release have ended. Return whether they have.

        captured: a graph of the caller also contains a call. weft does not see its replays, so it waits until the GPU is idle.
        forget: called when the calls have ended. It ends the release.
        """
        bound_s = FIRST_S if self.rank_group.broken is None else max(self.rank_group.timeout_s, _DRAINED_S)
        deadline = time.monotonic() + bound_s
        ended = last is None or _wait_until(lambda: self.order.has_ended(last), deadline)
        ended = ended and (not captured or idle(self.device, deadline - time.monotonic()))
        forget()
        return _wait_until(self.rescue.query, deadline) and ended

    def stream(self, name: str) -> torch.cuda.Stream:
        """Return a lane's stream (lane_priority)."""
        if name not in self._streams:
            self._streams[name] = comm_stream(priority=self._priority, device=self.device)
        return self._streams[name]

    @property
    def aside(self) -> torch.cuda.Stream:
        """The side stream for the compute lane's signals."""
        if self._aside is None:
            self._aside = comm_stream(priority="high", device=self.device)
        return self._aside

    def temporaries(self, nbytes: int) -> AbstractContextManager[None]:
        """Return a context in which torch allocates from a private pool that has nbytes ready for the current stream.

        Otherwise the allocator of a full GPU would return cached memory to the driver, which waits for all streams. Lanes of a
        half-enqueued call wait for the other half, so this wait would never end.
        """
        if not nbytes or self._private is None:
            return nullcontext()
        stream = self.current_stream()
        if self._ready.get(stream, 0) < nbytes:
            with torch.cuda.use_mem_pool(self._private, self.device):
                # Large pieces are split. Small ones come from a separate list of the allocator.
                for size in (nbytes + _LARGE, 1):
                    torch.empty(size, dtype=torch.uint8, device=self.device)
            self._ready[stream] = nbytes
        return torch.cuda.use_mem_pool(self._private, self.device)

    @cached_property
    def _private(self) -> torch.cuda.MemPool | None:
        return private_pool()

    def allocated(self) -> int:
        """Return the bytes that torch's allocator has allocated so far, including those that were freed since."""
        return int(torch.cuda.memory_stats(self.device)["allocated_bytes.all.allocated"])

    def current_stream(self) -> int:
        """Return the caller's stream."""
        return raw_stream(self.index)

    def torch_stream(self, stream: int) -> torch.cuda.Stream:
        """Return a stream as torch's object. ExternalStream would take 0, the default stream, as a request for a new one."""
        if stream == self.current_stream():
            return torch.cuda.current_stream(self.device)
        return torch.cuda.ExternalStream(stream, device=self.device)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]

    def words(self, words: Sequence[Word], *, by_kernel: bool) -> Callable[[int], None]:
        """Return a function that enqueues memory operations on a stream."""
        if not by_kernel:
            return self.driver.words(words)
        from weft.kernels.flag_operations import make_flag_table, run_flag_operations, split_into_phases

        table = make_flag_table(split_into_phases(words), self.device)
        # The kernel is loaded now, because loading waits for all streams, and later one of them may wait for a flag.
        run_flag_operations(table, tries=0, launched_by=self._flag_launcher)
        tries, launched_by = self.tries, self._flag_launcher
        (launch,) = record_launches(lambda: run_flag_operations(table, tries=tries, launched_by=launched_by))
        interpreted = partial(run_flag_operations, table, tries=tries, launched_by=launched_by)
        return launch.prepare() or (lambda stream: interpreted(stream=stream))

    def close(self) -> None:
        self.watchdog.close()
        lanes = (*self._streams.values(), *([self._aside] if self._aside else ()))
        for stream in (self.rescue, self.asking, self._invalidating, *lanes):
            give_back(stream)
        give_captures(self.captures)
        self._streams = {}
        # The pool is freed here, because CUDA may refuse to free it in a garbage collection while a stream is captured.
        self.__dict__.pop("_private", None)
        self.heap.free_cached()
        if self.wire:
            self.wire.close()
        self.wire = None


def _wait_until(ready: Callable[[], bool], deadline: float) -> bool:
    """Wait until `ready()` is true, or a time of time.monotonic. Return whether it is. A lost device counts as ready."""
    try:
        while not ready():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
    except RuntimeError:
        return True
    return True


def refuse_lanes(schedule: Schedule) -> None:
    """Raise ValueError if CUDA has fewer hardware queues than a call has streams.

    These are its lanes, and the streams for signals, for the watchdog's questions, for invalid results and for the release of
    waits. In a CUDA graph a lane that waits could hold up another one in its queue, and after a failure the release.
    """
    lanes = max(map(len, schedule.ranks))
    if lanes > 1 and lanes + 4 > (queues := hardware_queues()):
        raise ValueError(
            f"schedule is {spec(schedule.name, schedule.chunks)}, which needs {lanes + 4} hardware queues, and CUDA has "
            f"{queues}; set CUDA_DEVICE_MAX_CONNECTIONS=32 before the process uses a GPU, or take a schedule with fewer lanes"
        )


class LaneStreams:
    """LaneStreams forks and joins the streams of a program's lanes.

    flags_by_memory_operations: the lanes whose flag operations must run without an SM, because waiting blocks may hold all SMs.
    """

    def __init__(self, resources: CudaResources, lanes: Iterable[Lane], flags_by_memory_operations: frozenset[str]) -> None:
        self._resources, self._driver = resources, resources.driver
        self._without_kernels = flags_by_memory_operations
        event = self._driver.event
        self._fork_event, self._join_events = event(), {lane.name: event() for lane in lanes if lane.kind != "compute"}
        self._aside_events = event(), event()
        self._lanes: list[tuple[int, Any]] | None = None
        """The stream of each lane and the event of its join. They are made by the first fork."""
        self._forked: Sequence[tuple[int, Any]] = ()
        self._has_asides = False

    def __len__(self) -> int:
        """The number of lanes that run concurrently with the caller's stream."""
        return len(self._join_events)

    def fork(self, caller: int) -> None:
        """Order all later work of the lanes' streams after the work that the caller's stream has now."""
        if self._lanes is None:
            self._lanes = [(self._resources.stream(name).cuda_stream, join) for name, join in self._join_events.items()]
            self._numbers = [stream for stream, _ in self._lanes]
        self._has_asides, self._forked = False, self._lanes
        if self._numbers:
            self._driver.all_after(self._numbers, caller, self._fork_event)

    def join(self, caller: int) -> None:
        """Make the caller's stream wait for all streams that `fork` has forked.

        It must also be called after an exception. Lanes may still write the caller's memory, which the allocator reuses in the
        order of the caller's stream. A capture cannot end before its streams are joined. Only forked streams are joined,
        because during a capture any other stream is outside the graph.
        """
        for stream, event in self._forked:
            self._driver.all_after((caller,), stream, event)
        if self._has_asides:
            self._driver.after(caller, self._resources.aside.cuda_stream, self._aside_events[1])

    def prepare(self, operations: FlagOperations) -> Callable[[int], None]:
        """Return a function that enqueues flag operations, as one kernel or as memory operations of the stream."""
        by_kernel = not operations.aside and operations.where.lane not in self._without_kernels
        return self._resources.words(operations.words, by_kernel=by_kernel)

    def aside(self, stream: int) -> int:
        """Return the side stream for signals, ordered after the work that `stream` has now."""
        side = self._resources.aside.cuda_stream
        self._driver.after(side, stream, self._aside_events[0])
        self._has_asides = True
        return side

    def close(self) -> None:
        """Destroy the events."""
        for event in (self._fork_event, *self._aside_events, *self._join_events.values()):
            self._driver.forget(event)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class CallTimer:
    """A CallTimer records the times of one call. `begin` starts it."""

    def __init__(self, resources: CudaResources) -> None:
        self._resources, self._zero_us = resources, time.perf_counter_ns() / 1e3
        self._times: list[tuple[Where, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, caller: int) -> None:
        """Record the begin of the call on the caller's stream."""
        on = self._resources.torch_stream(caller)
        self._begin, end = _event(), _event()
        self._begin.record(on)
        end.record(on)

    def issue(self, launch: Launch, call: IssuedCall, stream: int) -> None:
        """Enqueue a launch between two events."""
        on = self._resources.torch_stream(stream)
        start, end = _event(), _event()
        start.record(on)
        launch.issue(call, stream)
        end.record(on)
        self._times.append((launch.where, start, end))

    def spans(self, schedule: Schedule) -> list[Span]:
        """Return when each step ran, from its first launch to its last one. The call must have ended."""
        found: dict[Where, tuple[float, float]] = {}
        for where, *events in self._times:
            first, last = (self._zero_us + 1e3 * float(self._begin.elapsed_time(event)) for event in events)
            found[where] = (found.get(where, (first, 0.0))[0], max(first, last))
        return [span(schedule, w.rank, w.lane, w.step, first, last) for w, (first, last) in found.items()]
