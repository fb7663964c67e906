"""What a call enqueues, prepared once: each object here puts one thing on a lane with the tensors of a call.

FlagOperations     waits and writes of flags, at addresses that never change
CopyLaunch         one copy between two regions
KernelLaunch       a step as one kernel
TorchLaunch        what torch or a library runs: matmuls and sums that are no kernels, collectives, messages

A lane is a stream on a GPU, and a thread on CPUs. Both issue the same launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch

from weft.compat.streams import Word
from weft.core.problem import Scaling
from weft.core.schedule import Region
from weft.runtime.bindings import Bindings, Where

if TYPE_CHECKING:
    from weft.runtime.step_kernels import StepKernel


class FactorScales(NamedTuple):
    """The scales of the FP8 operands a and b of one product, and what shares them."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: Scaling


class Matmul(Protocol):
    """How a device multiplies: out = a @ b, or out += a @ b; a step's result may be float32 where a and b are not. scales: of
    FP8 operands."""

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool, scales: FactorScales | None = None
    ) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedCall:
    """One call, as its launches see it.

    rehearses: nothing waits for a flag or raises one. loads: the call is captured and never replayed, so that its kernels are
    loaded. skips_outputs: the caller's outputs must not be written, as in the rehearsal of a call that may work in place.
    matmuls: by lane, what multiplies. on_kernel_done: is called with each kernel that has
    ended, on devices where a launch returns when its kernel has ended.
    """

    bindings: Bindings
    rehearses: bool = False
    loads: bool = False
    skips_outputs: bool = False
    matmuls: Mapping[str, Matmul] = field(default_factory=dict)
    on_kernel_done: Callable[[StepKernel], None] | None = None


@dataclass(kw_only=True, slots=True)
class Launch:
    """A Launch is one thing to enqueue.

    stage: the stage of the step, as weft.runtime.order numbers them. The launches of long lanes are interleaved by it.
    by_torch: torch's current stream must be the lane's while this is issued, because torch, or the first launch of a kernel,
        uses that one.
    """

    where: Where
    stage: int = 0
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
    """A copy of one region to another, as the program's device copies. to_output: dst is the caller's."""

    by_torch: ClassVar[bool] = False
    src: Region
    dst: Region
    copy: Callable[[Bindings, int], None]
    to_output: bool

    def issue(self, call: IssuedCall, stream: int) -> None:
        if not (self.to_output and call.skips_outputs):
            self.copy(call.bindings, stream)


@dataclass(kw_only=True, slots=True)
class KernelLaunch(Launch):
    """A step as one kernel on `sms` SMs. Where the program has pushes as kernels, or messages between nodes, every other kernel
    leaves SMs free for them, because peers wait for them."""

    kernel: StepKernel
    sms: int
    tries: int

    def issue(self, call: IssuedCall, stream: int) -> None:
        self.kernel.launch(call.bindings, silent=call.rehearses, tries=self.tries, sms=self.sms, stream=stream)
        if call.on_kernel_done is not None:
            call.on_kernel_done(self.kernel)


@dataclass(kw_only=True, slots=True)
class TorchLaunch(Launch):
    """Work of torch's, or of a library's, on torch's current stream."""

    work: Callable[[IssuedCall], None]

    def issue(self, call: IssuedCall, stream: int) -> None:
        self.work(call)
