"""A program replays a call from a CUDA graph if its tensors have the same addresses as those of an earlier call.

Enqueuing a call step by step costs the host about 5 us per step. A graph of the same steps is one launch, but its addresses are
fixed. In loops, such as training steps, allocators return the same addresses again. A set of addresses is captured when it
occurs for the second time. Until then, and if addresses never repeat, calls are enqueued step by step.

A capture takes as long as several calls, so captures have to be earned. A program starts with credit for _FIRST_CREDIT
captures, and each replay adds credit for _EARNED of one. So a program whose addresses repeat soon has all its graphs, and one
whose addresses keep changing soon captures no more.

A graph's copies refer to the allocation that they were captured with, and not to its address. If that allocation was freed,
as by torch.cuda.empty_cache(), and another one has the same address, launching the graph ends the process with a segmentation
fault in cuGraphLaunch (driver 580). So before each replay the driver is asked whether the allocation is still the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from functools import cached_property
from typing import Any

import torch

from weft.compat.streams import Driver, comm_stream
from weft.core.errors import warn_once
from weft.runtime.bindings import Inputs, Outputs
from weft.runtime.order import Exclusive
from weft.runtime.products import settings

Addresses = tuple[int, ...]
"""The addresses of the tensors of a call: of its inputs, and then of its outputs."""
Key = tuple[tuple[object, ...], Addresses]
"""The layout of a call and its addresses."""
_MAX_SETS = 256
"""A program keeps this many graphs, and remembers as many sets of addresses without one: as many as a model has layers of the
same shape."""
_FIRST_CREDIT, _EARNED, _MOST_CREDIT = 8.0, 0.5, 16.0
"""The captures for which a program has credit at first, how many captures a replay earns, and the most credit."""
ANY_STRIDES = ("b", "tables")
"""Inputs that may have any strides, because only kernels read them, and no copies. All others are contiguous. Kernels refer to
an address, whatever allocation it belongs to."""


class CapturedCall:
    """A CapturedCall is the CUDA graph of one call.

    graph: the graph.
    memory: the address and the allocation number of each tensor of the caller that copies touch (Driver.memory_behind).
    """

    __slots__ = ("graph", "memory")

    def __init__(self, graph: torch.cuda.CUDAGraph, memory: tuple[tuple[int, int], ...]) -> None:
        self.graph, self.memory = graph, memory


def private_pool() -> torch.cuda.MemPool | None:
    """Return a memory pool of torch's allocator for one use. Return None with cudaMallocAsync, which has no pools."""
    return torch.cuda.MemPool() if torch.cuda.get_allocator_backend() == "native" else None


class Captures:
    """Captures records CUDA graphs on a stream of its own, with a cuBLAS workspace that outlives them.

    cuBLAS has a workspace of 32 MiB for each stream, and a captured matmul refers to its address. torch returns all workspaces
    to its allocator on request (`torch._C._cuda_clearCublasWorkspaces`, which torch's cudagraph trees call), and later replays
    would then write into other tensors. So this workspace comes from a memory pool that is used for nothing else. It is
    allocated before a capture begins, because memory that is allocated during a capture belongs to the graph and is freed with
    it.

    uses: stands for the workspace in the order of replays. Each process group has a workspace of its own, because ranks may
        call two groups in different orders, and then one replay must not wait for another group's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.uses = device, Exclusive()

    @cached_property
    def _workspace(self) -> tuple[torch.cuda.Stream, torch.cuda.MemPool | None, torch.Tensor]:
        one = torch.ones(16, 16, device=self.device, dtype=torch.bfloat16)
        return comm_stream(priority="normal", device=self.device), private_pool(), one

    def prepare(self) -> None:
        """Allocate the workspace of this thread. The first call loads kernels, so no lane may wait for a flag then."""
        stream, pool, one = self._workspace
        with torch.cuda.stream(stream):
            product = torch.empty_like(one)
            with torch.cuda.use_mem_pool(pool, self.device) if pool else nullcontext():
                torch.mm(one, one, out=product)

    def record(self, enqueue: Callable[[], None], *, loads: bool = False, pool: Any = None) -> torch.cuda.CUDAGraph:
        """Return the graph of what `enqueue` enqueues on torch's current stream. Nothing runs, and other threads may use CUDA.

        loads: permit what CUDA refuses in a capture otherwise, such as loading kernels.
        pool: the handle of the memory pool for allocations of the call. By default the graph has a pool of its own.
        """
        with suppress(torch.OutOfMemoryError):
            return self._capture(enqueue, loads, pool)
        # The allocator does not release its cached memory for a private pool, nor during a capture. This cannot run while the
        # error is handled, because the error refers to the graph that failed.
        torch.cuda.empty_cache()
        return self._capture(enqueue, loads, pool)

    def _capture(self, enqueue: Callable[[], None], loads: bool, pool: Any) -> torch.cuda.CUDAGraph:
        self.prepare()
        graph, mode = torch.cuda.CUDAGraph(), "relaxed" if loads else "thread_local"
        with torch.cuda.stream(self._workspace[0]):
            try:
                graph.capture_begin(pool, capture_error_mode=mode)
                enqueue()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph


_IDLE: dict[torch.device, list[Captures]] = {}
_TAKING = threading.Lock()


def take_captures(device: torch.device) -> Captures:
    """Return a Captures for one user, whose graphs are replayed one after the other, until `give_captures`.

    Captures live as long as the process, like streams and their workspaces in torch.
    """
    with _TAKING:
        idle = _IDLE.setdefault(device, [])
        return idle.pop() if idle else Captures(device)


def give_captures(captures: Captures) -> None:
    """Return a Captures to the list of idle ones. Its graphs must not be replayed any more."""
    _IDLE[captures.device].append(captures)


class Replays:
    """Replays holds the graphs of one program.

    captures: records them.
    enqueue: enqueues a call with these tensors on the current stream.
    dtype: the dtype of the factors of its products; None if it is unknown.
    copied: returns the names of the tensors that copies of such a call may read or write.
    """

    def __init__(
        self,
        captures: Captures,
        enqueue: Callable[[Inputs, Outputs], None],
        driver: Driver,
        dtype: torch.dtype | None,
        copied: Callable[[Inputs, Outputs], Collection[str]],
    ) -> None:
        self._captures, self._enqueue, self._driver, self._dtype = captures, enqueue, driver, dtype
        self._copied = copied
        self._by_layout: dict[tuple[object, ...], dict[Addresses, CapturedCall]] = {}
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._captured: OrderedDict[Key, None] = OrderedDict()
        """The layouts and addresses that have occurred and have no graph, and those that have one, the oldest first."""
        self._full, self.credit = False, _FIRST_CREDIT

    @cached_property
    def _pool(self) -> torch.cuda.MemPool | None:
        """The memory pool of all graphs, for temporaries of calls.

        The graphs are replayed one after the other and no temporary outlives its call, so they can share it. A pool for each of
        256 graphs would hold 20 MiB or more each. It is held here, because torch refuses to capture into a pool whose graphs
        are all gone.
        """
        return private_pool()

    def layout(self, inputs: Inputs) -> tuple[object, ...]:
        """Return what a graph depends on besides addresses, and what the schedule does not fix.

        That is torch's matmul settings, the strides of b and tables (all others are contiguous), the rows of tables, and the
        length and dtype of vectors.
        """
        found: list[object] = [*settings(self._dtype)]
        for name, tensors in inputs.items():
            for tensor in tensors:
                if name in ANY_STRIDES:
                    found += tensor.stride()
                if name == "tables":
                    found.append(tensor.shape[0])
                if tensor.dim() == 1:
                    found += (tensor.numel(), tensor.dtype)
        return tuple(found)

    def of_layout(self, layout: tuple[object, ...]) -> dict[Addresses, CapturedCall]:
        """Return the graphs of a layout by addresses."""
        return self._by_layout.setdefault(layout, {})

    def find(self, inputs: Inputs, outputs: Outputs) -> CapturedCall | None:
        """Return the graph for a call with these tensors, or None if it must be enqueued.

        It must be enqueued after memory for a graph was exhausted once. If there is no graph, it must be enqueued if the
        addresses are new, if captures have not been earned, if there is no result (torch warns about empty graphs), and if the
        driver cannot identify allocations.
        """
        if self._full:
            return None
        layout, addresses = self.layout(inputs), addresses_of(inputs, outputs)
        graphs = self.of_layout(layout)
        captured = graphs.get(addresses)
        if captured is not None and self.is_valid(captured):
            self.earn()
            return captured
        if not self._has_occurred((layout, addresses)) or self.credit < 1:
            return None
        self.credit -= 1  # also if the call cannot be captured: otherwise `wants` would say so at each call
        captured = self._capture(inputs, outputs)
        if captured is None:
            graphs.pop(addresses, None)
        else:
            self._keep((layout, addresses), captured)
        return captured

    def wants(self, layout: tuple[object, ...], addresses: Addresses) -> bool:
        """Return whether `find` should capture a call with these addresses now, and record that they have occurred."""
        return not self._full and self._has_occurred((layout, addresses)) and self.credit >= 1

    def _has_occurred(self, key: Key) -> bool:
        """Return whether this layout and these addresses have occurred before, and record them."""
        if key in self._seen or key in self._captured:
            return True
        self._seen[key] = None
        if len(self._seen) > _MAX_SETS:
            self._seen.popitem(last=False)
        return False

    def _keep(self, key: Key, captured: CapturedCall) -> None:
        """Keep a graph, and drop the oldest one if there are too many."""
        self._seen.pop(key, None)
        self._captured.pop(key, None)
        self._captured[key] = None
        self.of_layout(key[0])[key[1]] = captured
        if len(self._captured) > _MAX_SETS:
            layout, addresses = self._captured.popitem(last=False)[0]
            self.of_layout(layout).pop(addresses, None)

    def is_valid(self, captured: CapturedCall) -> bool:
        """Return whether the memory that the graph's copies refer to is still the same."""
        memory_at = self._driver.memory_at
        return all(memory_at(address) == number for address, number in captured.memory)

    def earn(self) -> None:
        """Count a replay."""
        self.credit = min(self.credit + _EARNED, _MOST_CREDIT)

    def _capture(self, inputs: Inputs, outputs: Outputs) -> CapturedCall | None:
        if not any(matrix.numel() for matrices in outputs.values() for matrix in matrices):
            return None
        memory: list[tuple[int, int]] = []
        copied = self._copied(inputs, outputs)
        for tensor in [one for name, some in (*inputs.items(), *outputs.items()) if name in copied for one in some]:
            behind = self._driver.memory_behind(tensor.data_ptr(), tensor.nbytes)
            if behind is None:
                return None
            memory += behind
        try:
            pool = None if self._pool is None else self._pool.id
            return CapturedCall(self._captures.record(lambda: self._enqueue(inputs, outputs), pool=pool), tuple(memory))
        except torch.OutOfMemoryError as error:
            self._full = True
            warn_once(
                "there is no memory for another CUDA graph, so calls are enqueued step by step and take longer on the host: "
                f"{error}"
            )
            return None

    def close(self) -> None:
        for graphs in self._by_layout.values():
            graphs.clear()
        self._by_layout.clear()
        self._seen.clear()
        self._captured.clear()
        # CUDA may refuse to free the pool in a garbage collection while a stream is captured.
        self.__dict__.pop("_pool", None)


def addresses_of(inputs: Inputs, outputs: Outputs) -> Addresses:
    """Return the addresses of the tensors of a call."""
    return tuple([tensor.data_ptr() for some in (*inputs.values(), *outputs.values()) for tensor in some])


def layout_key(inputs: Inputs, outputs: Outputs) -> tuple[object, ...]:
    """Return the alignment, shape, strides and dtype of each tensor of a call. They decide which kernels it needs."""
    tensors = [*inputs.values(), *outputs.values()]
    return tuple(one for some in tensors for t in some for one in (t.data_ptr() & 15, t.shape, t.stride(), t.dtype))
