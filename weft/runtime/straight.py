"""A Straight enqueues a call step by step, for tensors of one layout, with all that can be prepared once.

It is for calls that are not replayed: their addresses have no graph, or they contain collectives of NCCL (weft.runtime.cuda
says why). It holds the bindings and the launches of one layout. A call only puts its tensors into the bindings, and issues the
launches (weft.runtime.launches). Two kinds of work are most of the calls of torch, and have functions of their own here:

    a collective of NCCL on whole matrices     the process group's own function
    a product of whole matrices                torch.mm, or the algorithm of cuBLAS that was chosen

So the schedule `sequential` is these two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from weft.compat.cublaslt import ALIGN_BYTES
from weft.compat.dispatch import autocast_enabled
from weft.compat.graph_trees import outside_graph_trees
from weft.core.problem import LookupProblem
from weft.core.schedule import Collective, Gemm, Region
from weft.runtime.bound import Inputs, Outputs
from weft.runtime.calls import PLAIN
from weft.runtime.launches import IssuedCall, Launch, TorchLaunch

if TYPE_CHECKING:
    from weft.runtime.cuda import CudaProgram

Issue = Callable[[int], None]
"""Enqueues one launch on a stream."""


class Straight:
    """A Straight enqueues the calls of one program whose tensors have the layout of these.

    inputs, outputs: the tensors of a call that was made, with the strides that the program's steps need. All are aligned.
    """

    def __init__(self, program: CudaProgram, inputs: Inputs, outputs: Outputs) -> None:
        self._program, self._resources = program, program.resources
        bindings = self._bindings = program.bind(inputs, outputs)
        call = IssuedCall(
            bindings=bindings,
            matmuls={lane: partial(products.multiply, times=False) for lane, products in program.products.items()},
        )
        self._shapes = [one.shape for one in chain.from_iterable((*inputs.values(), *outputs.values()))]
        self._slots: list[tuple[dict[Any, Any], Any, list[Any], range]] = []
        """For each name of tensors: the part of the bindings and the key that hold them, the columns of each tensor of a
        buffer, and the numbers of the tensors."""
        first = 0
        for name, matrices in (*inputs.items(), *outputs.items()):
            place = program.place_of(bindings, name)
            columns = [cols for _, cols in place[0][place[1]]] if place[0] is bindings.tensors else [None] * len(matrices)
            self._slots.append((*place, columns, range(first, first + len(matrices))))
            first += len(matrices)
        plan = program.plan_of(bindings)
        self._batches: list[tuple[torch.cuda.Stream | None, bool, list[Issue]]] = []
        """For each run of launches of a lane: its stream, or None for the caller's; whether it must be torch's current one; and
        the functions that enqueue them."""
        for lane, launches, by_torch in plan.batches:
            own = None if lane.kind == "compute" else self._resources.stream(lane.name)
            self._batches.append((own, by_torch and own is not None, [self._prepare(launch, call) for launch in launches]))
        self._clear()

    def issue(self, matrices: Sequence[torch.Tensor], stream: int) -> None:
        """Enqueue a call on the caller's stream. matrices: its inputs and outputs in the order of those of the constructor."""
        try:
            for part, key, columns, numbers in self._slots:
                found: list[Any] = []
                for cols, number in zip(columns, numbers, strict=True):
                    one, shape = matrices[number], self._shapes[number]
                    if one.shape != shape:
                        one = one.view(shape)
                    found.append(one if cols is None else (one, cols))
                part[key] = found
            # torch's contexts take several microseconds, so they are entered only where they change something.
            if autocast_enabled() or torch.is_inference_mode_enabled():
                with PLAIN:
                    self._enqueue(stream)
            else:
                self._enqueue(stream)
        finally:
            self._clear()

    def _enqueue(self, stream: int) -> None:
        program, resources = self._program, self._resources
        if not program.streams and not program.allocates:
            for _, _, launches in self._batches:
                for issue in launches:
                    issue(stream)
            return
        with outside_graph_trees(resources.device), resources.temporaries(program.allocates):
            try:
                program.streams.fork(stream)
                for own, current, launches in self._batches:
                    with torch.cuda.stream(own) if current else nullcontext():
                        for issue in launches:
                            issue(stream if own is None else own.cuda_stream)
            finally:
                program.streams.join(stream)

    def _clear(self) -> None:
        """Drop the tensors of the last call."""
        for part, key, *_ in self._slots:
            part[key] = ()

    def _prepare(self, launch: Launch, call: IssuedCall) -> Issue:
        if isinstance(launch, TorchLaunch):
            step = launch.where.step
            found = None
            if isinstance(step, Collective):
                found = self._prepare_collective(step)
            elif isinstance(step, Gemm) and len(step.parts) == 1 and not step.parts[0].inner:
                found = self._prepare_product(step, launch.where.lane)
            if found is not None:
                return found
        return partial(launch.issue, call)

    def _prepare_collective(self, step: Collective) -> Issue | None:
        """Return a function that runs a collective, or None if it moves parts of matrices."""
        run = self._program.collectives[id(step)].whole
        if run is None or self._bindings.scaling is not None or not (self._is_whole(step.src) and self._is_whole(step.dst)):
            return None
        tensors, src, dst = self._bindings.tensors, (step.src.buffer, step.src.rank), (step.dst.buffer, step.dst.rank)

        def issue(stream: int) -> None:
            run(tensors[src][0][0], tensors[dst][0][0])

        return issue

    def _prepare_product(self, step: Gemm, lane: str) -> Issue | None:
        """Return a function that multiplies whole matrices, or None if there is more to do."""
        (part,) = step.parts
        whole = self._is_whole(part.a) and self._is_whole(part.out) and self._is_whole(step.b)
        if not whole or part.adds or step.accumulate or self._bindings.scaling is not None:
            return None
        tensors = self._bindings.tensors
        a, b, out = ((one.buffer, one.rank) for one in (part.a, step.b, part.out))
        multiply = self._program.products[lane].prepare(tensors[a][0][0], tensors[b][0][0], tensors[out][0][0])

        def issue(stream: int) -> None:
            multiply(tensors[a][0][0], tensors[b][0][0], tensors[out][0][0])

        return issue

    def _is_whole(self, region: Region) -> bool:
        """Return whether a region is one whole matrix."""
        columns = self._bindings.tensors[region.buffer, region.rank]
        return len(columns) == 1 and columns[0][0].shape == region.shape


def is_aligned(addresses: Sequence[int]) -> bool:
    """Return whether all addresses are aligned as a Straight needs it."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % ALIGN_BYTES == 0


def can_go_straight(program: CudaProgram) -> bool:
    """Return whether a program's calls need nothing between their launches: no row counts, and no tables of lookups.

    Lookups may also load a kernel while they are enqueued (Order.alone), which a BoundCall does not allow for.
    """
    return program.ragged is None and not isinstance(program.schedule.problem, LookupProblem)
