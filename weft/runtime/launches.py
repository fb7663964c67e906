"""What a GPU call enqueues, prepared once: each object here puts one thing on a stream with the tensors of a call.

FlagOperations     waits and writes of flags, at addresses that never change
CopyLaunch         one copy by a copy engine
KernelLaunch       a step as one kernel: a GEMM, a sum, a lookup
PushLaunch, FusedCollectiveLaunch     a push, or a fused collective, as one kernel
RaggedLaunch       a step whose row counts live on the device, as one kernel
CollectiveLaunch, MessageLaunch     a collective, or messages between nodes, of NCCL
MatmulLaunch, SliceLaunch, SumLaunch     torch operations, where a step is no kernel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from weft.compat.streams import Word
from weft.core.schedule import Collective, Gemm, Part, SendReceive, Step, Sum
from weft.runtime.arithmetic import Sliced, add_up, multiply
from weft.runtime.bindings import Bindings, Where
from weft.runtime.nccl import NcclCollective
from weft.runtime.network import CudaWire
from weft.runtime.products import Products

if TYPE_CHECKING:
    from weft.runtime.fused import FusedStep
    from weft.runtime.fused_collective import FusedCollectiveKernel
    from weft.runtime.pushes import FusedPush
    from weft.runtime.ragged_kernels import RaggedKernels


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedCall:
    """One call, as its launches see it.

    rehearses: nothing waits for a flag or raises one. loads: a capture runs it that only loads kernels. keeps_outputs: results
    must not be written, as in the rehearsal of what may work in place. times_products: now is the time to look for the fastest
    algorithm of a matmul.
    """

    bindings: Bindings
    rehearses: bool = False
    loads: bool = False
    keeps_outputs: bool = False
    times_products: bool = False


@dataclass(kw_only=True, slots=True)
class Launch:
    """One thing to enqueue. moment: of the step, at which it is enqueued (weft.runtime.order). by_torch: it goes to torch's
    current stream, which must then be the lane's."""

    where: Where
    moment: int = 0
    by_torch: ClassVar[bool] = True

    def issue(self, call: IssuedCall, stream: int) -> None:
        """Enqueue it on `stream`."""
        raise NotImplementedError


class FlagSubmitter(Protocol):
    """How the flag operations of a program reach a stream."""

    def prepare(self, operations: FlagOperations) -> Callable[[int], None]:
        """A function that enqueues these operations on a stream."""
        ...

    def aside(self, stream: int) -> int:
        """The stream for signals that later work on `stream` does not wait for. It comes after what `stream` has so far."""
        ...


@dataclass(kw_only=True, slots=True)
class FlagOperations(Launch):
    """Memory operations on flags, in this order. aside: signals that what follows them in the lane does not wait for."""

    by_torch: ClassVar[bool] = False
    words: tuple[Word, ...]
    aside: bool = False
    submitter: FlagSubmitter | None = field(default=None, compare=False, repr=False)
    _submit: Callable[[int], None] | None = field(default=None, init=False, compare=False, repr=False)

    def prepare(self) -> Callable[[int], None]:
        """Make what `issue` submits. It loads a kernel where a kernel does the operations."""
        if self._submit is None:
            assert self.submitter is not None, "flag operations of no program"
            self._submit = self.submitter.prepare(self)
        return self._submit

    def issue(self, call: IssuedCall, stream: int) -> None:
        submit = self._submit or self.prepare()
        if call.rehearses:
            return
        if self.aside:
            assert self.submitter is not None
            stream = self.submitter.aside(stream)
        submit(stream)


@dataclass(kw_only=True, slots=True)
class CopyLaunch(Launch):
    """A copy by a copy engine. src, dst: find the address of the first element in a call. copy: as Driver.copier returns it."""

    by_torch: ClassVar[bool] = False
    src: Callable[[Bindings], int]
    dst: Callable[[Bindings], int]
    copy: Callable[[int, int, int], None]
    to_output: bool

    def issue(self, call: IssuedCall, stream: int) -> None:
        there, here = self.dst(call.bindings), self.src(call.bindings)
        if there != here and not (self.to_output and call.keeps_outputs):
            self.copy(there, here, stream)


@dataclass(kw_only=True, slots=True)
class KernelLaunch(Launch):
    """A step as one kernel on `sms` SMs. A sum's gates have been waited for by its stream."""

    kernel: FusedStep
    sms: int
    tries: int

    def issue(self, call: IssuedCall, stream: int) -> None:
        silent = call.rehearses or self.kernel.gated_by_stream
        self.kernel.launch(call.bindings, 0, silent=silent, tries=self.tries, sms=self.sms, stream=stream)


@dataclass(kw_only=True, slots=True)
class PushLaunch(Launch):
    """A push as one kernel, on SMs that a gated kernel leaves free, so that what that kernel waits for can run."""

    push: FusedPush
    sms: int

    def issue(self, call: IssuedCall, stream: int) -> None:
        self.push.launch(call.bindings, silent=call.rehearses, sms=self.sms, stream=stream)


@dataclass(kw_only=True, slots=True)
class FusedCollectiveLaunch(Launch):
    """A fused collective as one kernel. It waits itself, for nothing that needs an SM of this GPU."""

    kernel: FusedCollectiveKernel
    tries: int

    def issue(self, call: IssuedCall, stream: int) -> None:
        self.kernel.launch(call.bindings, silent=call.rehearses, tries=self.tries, stream=stream)


@dataclass(kw_only=True, slots=True)
class RaggedLaunch(Launch):
    """A step whose row counts live on the device as one kernel. It waits itself, and has words of its own, so all ranks
    rehearse it by running it."""

    step: Step
    kernels: RaggedKernels

    def issue(self, call: IssuedCall, stream: int) -> None:
        self.kernels.launch(self.step, self.where, call.bindings)


@dataclass(kw_only=True, slots=True)
class CollectiveLaunch(Launch):
    """A collective of NCCL."""

    step: Collective
    collective: NcclCollective
    device: torch.device

    def issue(self, call: IssuedCall, stream: int) -> None:
        if call.keeps_outputs:
            self.collective.rehearse(self.device)
        elif not call.loads:
            self.collective.run(call.bindings.view(self.step.src), call.bindings.view(self.step.dst))


@dataclass(kw_only=True, slots=True)
class MessageLaunch(Launch):
    """Messages between nodes."""

    step: SendReceive
    wire: CudaWire | None

    def issue(self, call: IssuedCall, stream: int) -> None:
        if call.keeps_outputs or call.loads:
            return  # on no rank: all rehearse at once, and where one loads it runs nothing
        assert self.wire, f"{self.where} on one node"
        sends = [(call.bindings.view(send.src), send.to) for send in self.step.sends]
        self.wire.exchange(sends, [(call.bindings.view(got.dst), got.source) for got in self.step.receives])


@dataclass(kw_only=True, slots=True)
class MatmulLaunch(Launch):
    """Parts of a GEMM that torch or cuBLAS multiplies together."""

    step: Gemm
    parts: Sequence[Part]
    products: Products

    def issue(self, call: IssuedCall, stream: int) -> None:
        multiply(call.bindings, self.step, self.parts, partial(self.products.multiply, times=call.times_products))


@dataclass(kw_only=True, slots=True)
class SliceLaunch(Launch):
    """One slice of K of a part with inner gates."""

    sliced: Sliced
    number: int
    products: Products

    def issue(self, call: IssuedCall, stream: int) -> None:
        self.sliced.multiply(call.bindings, self.number, partial(self.products.multiply, times=call.times_products))


@dataclass(kw_only=True, slots=True)
class SumLaunch(Launch):
    """One part of a sum, by torch."""

    part: Sum
    divide_by: int

    def issue(self, call: IssuedCall, stream: int) -> None:
        add_up(call.bindings, self.part, self.divide_by)
