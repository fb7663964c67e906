"""A Straight enqueues a call step by step, for tensors of one layout, with all that can be prepared once.

It is for calls that are not replayed: their addresses have no graph, or they contain collectives of NCCL (weft.runtime.cuda
says why). It is one flat list of functions that enqueue the launches of one layout (Launch.prepare):

    flag operations      the driver's batch of memory operations, or the kernel, whose arguments never change
    copies               the driver's copy, from and to addresses of the call
    products             torch.mm on views of the call's matrices, or the algorithm of cuBLAS that was chosen, on addresses
    kernels              Triton's launcher, with all arguments ready except the addresses
    collectives          the process group's own function

A call only fills in its addresses and views (weft.runtime.bindings). So the schedule `sequential` is a collective and a
product. Launches that cannot be prepared are issued as on the slow path (weft.runtime.launches).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from weft.compat.cublas import ALIGN_BYTES
from weft.compat.device import has_graph_trees, outside_graph_trees
from weft.compat.dispatch import autocast_enabled
from weft.runtime.bindings import CallTensors, Inputs, Issue, NotPreparedError, Outputs
from weft.runtime.calls import PLAIN
from weft.runtime.cuda import CudaProgram
from weft.runtime.launches import FlagOperations, IssuedCall, Launch, TorchLaunch


class Straight:
    """A Straight enqueues the calls of one program whose tensors have the layout of these.

    inputs, outputs, given: as for weft.runtime.bindings.CallTensors. All are aligned.
    """

    def __init__(
        self, program: CudaProgram, inputs: Inputs, outputs: Outputs, given: Sequence[torch.Tensor] | None = None
    ) -> None:
        self._program, self._resources, self._streams = program, program.resources, program.streams
        tensors = self._tensors = CallTensors(program.bind(inputs, outputs), inputs, outputs, given)
        call = IssuedCall(
            bindings=tensors.bindings,
            matmuls={lane: partial(products.multiply, times=False) for lane, products in program.products.items()},
            products=program.products,
        )
        batches = program.plan_of(tensors.bindings).batches
        signals_aside = any(isinstance(one, FlagOperations) and one.aside for _, some, _ in batches for one in some)
        self._forks = bool(program.streams) or signals_aside
        self._batches: list[tuple[torch.cuda.Stream | None, int | None, list[Issue]]] = []
        """For each run of launches of a lane: its stream if it must be torch's current one, the number of its stream, or None
        for the caller's, and the functions that enqueue the launches."""
        for lane, launches, _ in batches:
            own, self._by_torch = None if lane.kind == "compute" else self._resources.stream(lane.name), False
            found = [self._prepare(one, call) for one in launches]
            self._batches.append((own if self._by_torch else None, None if own is None else own.cuda_stream, found))
        tensors.release()

    def issue(self, matrices: Sequence[torch.Tensor], stream: int) -> None:
        """Enqueue a call on the caller's stream. matrices: its inputs and outputs in the order of `given`."""
        tensors = self._tensors
        try:
            tensors.hold(matrices)
            # torch's contexts take several microseconds, so they are entered only where they change something.
            if autocast_enabled() or torch.is_inference_mode_enabled():
                with PLAIN:
                    self._enqueue(stream)
            else:
                self._enqueue(stream)
        finally:
            tensors.release()

    def _enqueue(self, stream: int) -> None:
        if not self._forks and not has_graph_trees():
            for _, _, launches in self._batches:
                for issue in launches:
                    issue(stream)
        elif self._program.allocates or has_graph_trees():
            with outside_graph_trees(self._resources.device), self._resources.temporaries(self._program.allocates):
                self._enqueue_lanes(stream)
        else:
            self._enqueue_lanes(stream)

    def _enqueue_lanes(self, stream: int) -> None:
        try:
            self._streams.fork(stream)
            for current, number, launches in self._batches:
                on = stream if number is None else number
                if current is None:
                    for issue in launches:
                        issue(on)
                else:
                    with torch.cuda.stream(current):
                        for issue in launches:
                            issue(on)
        finally:
            self._streams.join(stream)

    def _prepare(self, launch: Launch, call: IssuedCall) -> Issue:
        try:
            found = launch.prepare(call, self._tensors)
            self._by_torch |= isinstance(launch, TorchLaunch)
        except NotPreparedError:
            found, self._tensors.binds = partial(launch.issue, call), True
            self._by_torch |= launch.by_torch
        return found


def is_aligned(addresses: Sequence[int]) -> bool:
    """Return whether all addresses are aligned as a Straight needs it."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % ALIGN_BYTES == 0
