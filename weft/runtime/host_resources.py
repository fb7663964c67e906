"""HostResources holds what the programs of a process group share on a CPU rank: memory, messages and the threads of lanes."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext

import torch

from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import HostAllocation, HostHeap
from weft.core.problem import Scaling
from weft.runtime.host_wire import HostWire
from weft.runtime.nearest import nearest_profile

INTERPRETED_BLOCKS = 4
"""The number of blocks of a kernel under Triton's interpreter."""
_LOOKS_PER_S = 3_000
"""An interpreted kernel reads a flag at most this many times per second."""


class LaneThread:
    """A LaneThread is a thread that runs the steps of one lane in each call."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"weft-{name}", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        torch.set_grad_enabled(False)  # a mode of the thread; the caller's is set by GroupState.run
        while (task := self._tasks.get()) is not None:
            raised = None
            try:
                task()
            except BaseException as error:
                raised = error
            task = None  # it refers to the tensors of the call, which must not live until the next one
            self._results.put(raised)
            raised = None

    def start(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def join(self) -> BaseException | None:
        """Wait for the started task. Return the exception that it raised, or None."""
        return self._results.get()

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()


class HostResources:
    """HostResources holds what the programs of one process group share on this rank.

    data: the shared memory of their buffers.
    """

    device = torch.device("cpu")

    def __init__(self, rank_group: RankGroup) -> None:
        self.rank_group, self.machine = rank_group, nearest_profile(self.device, rank_group.world_size)
        heap = rank_group.get_heap(self.device)
        assert isinstance(heap, HostHeap)
        self.heap = heap
        self.data: HostAllocation | None = None
        self._wire: HostWire | None = None
        self._scratch: dict[Hashable, torch.Tensor] = {}
        self._threads: dict[str, LaneThread] = {}

    def runs_kernels(self, dtype: torch.dtype, scaling: Scaling | None = None) -> bool:
        """Return whether fused steps run as the kernels that GPUs run, which needs Triton's interpreter.

        The interpreter has no bfloat16 matmul. Products of FP8 operands may be float32.
        """
        fits = dtype == torch.float16 or (scaling is not None and dtype == torch.float32)
        return os.environ.get("TRITON_INTERPRET") == "1" and fits

    @property
    def quantises(self) -> bool:
        """True if a kernel quantises rows while it sends them."""
        return os.environ.get("TRITON_INTERPRET") == "1"

    def fuses(self, dtype: torch.dtype, scaling: Scaling | None = None) -> bool:
        return self.runs_kernels(dtype, scaling)

    @property
    def blocks(self) -> int:
        return INTERPRETED_BLOCKS

    @property
    def tries(self) -> int:
        return int(self.rank_group.timeout_s * _LOOKS_PER_S)

    def runs_lookups(self, dtype: torch.dtype) -> bool:
        """Return whether lookups run as kernels. They multiply no matrices, so the interpreter runs them in float32, too."""
        return os.environ.get("TRITON_INTERPRET") == "1" and dtype != torch.bfloat16

    def loading(self) -> AbstractContextManager[None]:
        """Return a context in which kernels may be loaded. On CPUs they may always be loaded, because no work is enqueued."""
        return nullcontext()

    def reserve(self, nbytes: int) -> None:
        """Make the shared memory for data of every rank at least `nbytes`. Collective: all ranks ask for the same size."""
        if self.data is None or self.data.nbytes < nbytes:
            outgrown, self.data = self.data, self.heap.allocate(nbytes)
            if outgrown is not None:
                self.heap.free(outgrown)

    def scratch(self, key: Hashable, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the local matrix with this key. It has the same memory in each call, until a larger one is needed."""
        nbytes = rows * cols * dtype.itemsize
        if key not in self._scratch or self._scratch[key].numel() < nbytes:
            self._scratch[key] = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[key][:nbytes].view(dtype).view(rows, cols)

    @property
    def wire(self) -> HostWire:
        """The channel for the group's messages. Its first use is a collective operation."""
        if self._wire is None:
            self._wire = HostWire(self.rank_group)
        return self._wire

    def thread(self, lane: str) -> LaneThread:
        if lane not in self._threads:
            self._threads[lane] = LaneThread(f"{lane}-{self.rank_group.rank}")
        return self._threads[lane]

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close()
        if self.data is not None:
            self.heap.free(self.data)
        if self._wire:
            self._wire.close()
        self._threads, self.data, self._scratch, self._wire = {}, None, {}, None
