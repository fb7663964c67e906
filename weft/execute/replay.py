"""Calls that are replayed: a CUDA graph for each set of tensors that a program meets again.

Enqueuing a call step by step costs the host some 5 us a step; a graph of the same steps is one launch. Its addresses are
fixed, so a graph serves only calls whose tensors lie where they lay before. Allocators hand out the same addresses again in
loops: a training step, a layer's weights. A set of addresses is captured when it comes for the second time; until then, and
where addresses never repeat, calls are enqueued step by step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache

import torch

from weft.execute.bound import Inputs, Outputs

Addresses = tuple[int, ...]
_KEPT = 256
"""Sets of addresses a program: as many as layers that share a shape."""


class Replays:
    """Graphs of one program. stream: to capture on. enqueue: puts a call with these tensors on torch's current stream."""

    def __init__(self, stream: torch.cuda.Stream, enqueue: Callable[[Inputs, Outputs], None]) -> None:
        self._stream, self._enqueue = stream, enqueue
        self._graphs: OrderedDict[Addresses, torch.cuda.CUDAGraph | None] = OrderedDict()

    def find(self, inputs: Inputs, outputs: Outputs) -> torch.cuda.CUDAGraph | None:
        """The graph for a call with these tensors; None if they are here for the first time."""
        addresses = _addresses(inputs, outputs)
        if addresses not in self._graphs:
            self._graphs[addresses] = None
            if len(self._graphs) > _KEPT:
                self._graphs.popitem(last=False)
            return None
        self._graphs.move_to_end(addresses)
        graph = self._graphs[addresses]
        if graph is None:
            graph = self._graphs[addresses] = self._capture(inputs, outputs)
        return graph

    def _capture(self, inputs: Inputs, outputs: Outputs) -> torch.cuda.CUDAGraph:
        """Capturing runs nothing. Other threads may go on using CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._enqueue(inputs, outputs)
            finally:
                graph.capture_end()
        return graph

    def close(self) -> None:
        self._graphs.clear()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of this process on which calls are captured.

    cuBLAS keeps a workspace of 32 MiB for each stream, for good. It is asked for here, outside of any capture: one of a capture
    would be the graph's, and go with it.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        one = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        torch.mm(one, one)
    stream.synchronize()
    return stream  # type: ignore[no-any-return, unused-ignore]


def _addresses(inputs: Inputs, outputs: Outputs) -> Addresses:
    """Where the tensors lie, and how b does: all others are contiguous. How long vectors are: no schedule says it."""
    found: list[int] = []
    for name, tensors in inputs.items():
        for tensor in tensors:
            found += (tensor.data_ptr(), *tensor.stride()) if name == "b" else (tensor.data_ptr(),)
            if tensor.dim() == 1:
                found.append(tensor.numel())
    for matrices in outputs.values():
        found += [matrix.data_ptr() for matrix in matrices]
    return tuple(found)
