"""Calls that are replayed: a CUDA graph for each set of tensors that a program meets again.

Enqueuing a call step by step costs the host some 5 us a step; a graph of the same steps is one launch. Its addresses are
fixed, so a graph serves only calls whose tensors lie where they lay before. Allocators hand out the same addresses again in
loops: a training step, a layer's weights. A set of addresses is captured when it comes for the second time; until then, and
where addresses never repeat, calls are enqueued step by step.

A graph's copies hold on to the memory that they were captured with, not to its address: where that was freed, as by
torch.cuda.empty_cache(), and other memory has come to lie there, launching the graph ends the process (a segmentation fault
within cuGraphLaunch, driver 580). So before each replay the driver is asked whether the memory is still the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from weft.compat.comm_streams import comm_stream
from weft.compat.streams import Driver
from weft.core.logs import warn_once
from weft.runtime.bound import Inputs, Outputs
from weft.runtime.products import settings

Addresses = tuple[object, ...]
_KEPT = 256
"""Sets of addresses a program: as many as layers that share a shape."""
_KERNELS_ALONE = ("b", "tables")
"""Inputs that no copy touches. A kernel has no more than an address."""


@dataclass(frozen=True, slots=True)
class Kept:
    """graph: of one call. memory: where its copies found the caller's tensors, and what lay there (Driver.memory_behind)."""

    graph: torch.cuda.CUDAGraph
    memory: tuple[tuple[int, int], ...]


def private_pool() -> torch.cuda.MemPool | None:
    """Memory of torch's allocator that nobody else is given; None with CUDA's own asynchronous one, which has no pools."""
    return torch.cuda.MemPool() if torch.cuda.get_allocator_backend() == "native" else None


class Captures:
    """Where graphs are made: a stream of our own, and cuBLAS's workspace of it.

    cuBLAS has a workspace of 32 MiB for each stream, whose address a captured matmul keeps. torch gives all of them back to its
    allocator where somebody asks for that (`torch._C._cuda_clearCublasWorkspaces`: torch's cudagraph trees do), and later
    replays would write into other tensors. So this one comes from a pool of which nothing else is ever given, and is asked for
    before each capture: one of a capture would be the graph's, and go with it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @cached_property
    def _made(self) -> tuple[torch.cuda.Stream, torch.cuda.MemPool | None, torch.Tensor]:
        one = torch.ones(16, 16, device=self.device, dtype=torch.bfloat16)
        return comm_stream(priority="normal", device=self.device), private_pool(), one

    def ready(self) -> None:
        """Have the workspace, of this thread. The first time, where no lane waits: it loads kernels."""
        stream, pool, one = self._made
        with torch.cuda.stream(stream):
            product = torch.empty_like(one)
            with torch.cuda.use_mem_pool(pool, self.device) if pool else nullcontext():
                torch.mm(one, one, out=product)

    def record(self, enqueue: Callable[[], None], *, loads: bool = False, pool: Any = None) -> torch.cuda.CUDAGraph:
        """The graph of what `enqueue` puts on torch's current stream. Runs nothing; other threads may use CUDA meanwhile.
        loads: also what CUDA refuses in a capture otherwise. pool: a handle of where what is allocated on the way comes from;
        default, one of the graph's own. What is raised on the way is the reason."""
        with suppress(torch.OutOfMemoryError):
            return self._recorded(enqueue, loads, pool)
        # In a pool of its own, and in a capture, the allocator gives nothing back that it keeps for later. Not while the error
        # is handled: it holds the graph that failed.
        torch.cuda.empty_cache()
        return self._recorded(enqueue, loads, pool)

    def _recorded(self, enqueue: Callable[[], None], loads: bool, pool: Any) -> torch.cuda.CUDAGraph:
        self.ready()
        graph, mode = torch.cuda.CUDAGraph(), "relaxed" if loads else "thread_local"
        with torch.cuda.stream(self._made[0]):
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
    """For one user alone, whose graphs are replayed one after the other, until `give_captures`. They live as long as the
    process, as streams do, and the workspaces that torch keeps for them."""
    with _TAKING:
        idle = _IDLE.setdefault(device, [])
        return idle.pop() if idle else Captures(device)


def give_captures(captures: Captures) -> None:
    """No graph that was captured there is replayed any more."""
    _IDLE[captures.device].append(captures)


class Replays:
    """Graphs of one program. captures: where they are made. enqueue: puts a call with these tensors on the current stream."""

    def __init__(self, captures: Captures, enqueue: Callable[[Inputs, Outputs], None], driver: Driver) -> None:
        self._captures, self._enqueue, self._driver = captures, enqueue, driver
        self._graphs: OrderedDict[Addresses, Kept | None] = OrderedDict()
        self._full = False

    @cached_property
    def _pool(self) -> Any:
        """Of all graphs, for what a call allocates on the way: they are replayed one after the other, and none of it outlives
        its call. Each graph's own would keep 20 MiB and more, 256 times. It goes with the last graph."""
        return torch.cuda.graph_pool_handle()

    def find(self, inputs: Inputs, outputs: Outputs) -> torch.cuda.CUDAGraph | None:
        """The graph for a call with these tensors; None if they are here for the first time, where there is no result (torch
        warns of graphs that hold nothing), where the driver does not tell memory apart, and once there was none for a graph.
        """
        if self._full:
            return None
        addresses = (*settings(), *_addresses(inputs, outputs))
        if addresses not in self._graphs:
            self._graphs[addresses] = None
            if len(self._graphs) > _KEPT:
                self._graphs.popitem(last=False)
            return None
        self._graphs.move_to_end(addresses)
        kept = self._graphs[addresses]
        if kept is None or not self._still(kept.memory):
            kept = self._graphs[addresses] = self._made(inputs, outputs)
        return None if kept is None else kept.graph

    def _still(self, memory: tuple[tuple[int, int], ...]) -> bool:
        memory_at = self._driver.memory_at
        return not [address for address, number in memory if memory_at(address) != number]

    def _made(self, inputs: Inputs, outputs: Outputs) -> Kept | None:
        if not any(matrix.numel() for matrices in outputs.values() for matrix in matrices):
            return None
        memory: list[tuple[int, int]] = []
        for tensor in _copied(inputs, outputs):
            behind = self._driver.memory_behind(tensor.data_ptr(), tensor.nbytes)
            if behind is None:
                return None
            memory += behind
        try:
            return Kept(self._captures.record(lambda: self._enqueue(inputs, outputs), pool=self._pool), tuple(memory))
        except torch.OutOfMemoryError as error:
            self._full = True
            warn_once(f"calls are not replayed from a CUDA graph, and take longer on the host: {error}")
            return None

    def close(self) -> None:
        self._graphs.clear()


def lie(inputs: Inputs, outputs: Outputs) -> tuple[object, ...]:
    """How the tensors of a call lie: all that decides which kernels it needs."""
    tensors = [*inputs.values(), *outputs.values()]
    return tuple(one for some in tensors for t in some for one in (t.data_ptr() & 15, t.shape, t.stride(), t.dtype))


def _copied(inputs: Inputs, outputs: Outputs) -> Iterator[torch.Tensor]:
    """The tensors that copies may touch. All are contiguous."""
    for name, tensors in (*inputs.items(), *outputs.items()):
        if name not in _KERNELS_ALONE:
            yield from tensors


def _addresses(inputs: Inputs, outputs: Outputs) -> Addresses:
    """Where the tensors lie, and how b and tables do: all others are contiguous. What no schedule says: how many rows tables
    have, how long vectors are, and of what."""
    found: list[object] = []
    for name, tensors in inputs.items():
        for tensor in tensors:
            found.append(tensor.data_ptr())
            if name in _KERNELS_ALONE:
                found += tensor.stride()
            if name == "tables":
                found.append(tensor.shape[0])
            if tensor.dim() == 1:
                found += (tensor.numel(), tensor.dtype)
    for matrices in outputs.values():
        found += [matrix.data_ptr() for matrix in matrices]
    return tuple(found)
