"""A Launch enqueues one thing on a lane. A plan of launches is made once, and each call issues them with its own tensors.

FlagOperations     waits for flags and writes of flags, at addresses that never change
CopyLaunch         one copy between two regions
KernelLaunch       a step as one kernel
TorchLaunch        work of torch or of a library: matmuls and sums without a kernel of weft, collectives, messages

A lane is a stream on a GPU, and a thread on CPUs. Both issue the same launches. For calls whose tensors have one layout, a
launch can be prepared further (`prepare`): then a call only fills in addresses (weft.runtime.straight).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch

from weft.compat.streams import Word
from weft.core.problem import Scaling
from weft.core.schedule import Region
from weft.runtime.bindings import Bindings, Where

if TYPE_CHECKING:
    from weft.runtime.call_tensors import CallTensors, Issue
    from weft.runtime.products import Products
    from weft.runtime.step_kernels import StepKernel


class NotPreparedError(Exception):
    """A launch cannot be prepared, so that it must find the tensors of each call itself."""


def in_turn(found: Sequence[Issue]) -> Issue:
    """Return a function that calls these in turn."""
    if len(found) == 1:
        return found[0]

    def run(stream: int) -> None:
        for issue in found:
            issue(stream)

    return run


class FactorScales(NamedTuple):
    """FactorScales holds the scales of the FP8 operands a and b of one product.

    scaling: says which elements share a scale.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: Scaling


class Matmul(Protocol):
    """A Matmul computes out = a @ b, or out += a @ b, on a device. out may be float32 when a and b are not.

    scales: the scales of FP8 operands.
    """

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool, scales: FactorScales | None = None
    ) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedCall:
    """An IssuedCall has what the launches of one call need.

    rehearses: the call neither waits for flags nor raises them.
    loads: the call is captured and never replayed, which loads its kernels.
    skips_outputs: the call must not write the caller's outputs, as in the rehearsal of a call that may work in place.
    matmuls: the function that multiplies, by lane.
    products: the products of each lane, for calls that are prepared.
    on_kernel_done: called with each kernel that has ended, on devices where a launch returns when its kernel has ended.
    """

    bindings: Bindings
    rehearses: bool = False
    loads: bool = False
    skips_outputs: bool = False
    matmuls: Mapping[str, Matmul] = field(default_factory=dict)
    products: Mapping[str, Products] = field(default_factory=dict)
    on_kernel_done: Callable[[StepKernel], None] | None = None


@dataclass(kw_only=True, slots=True)
class Launch:
    """A Launch is one thing to enqueue.

    stage: the stage of the step, as weft.runtime.launch_order numbers them. The launches of long lanes are interleaved by it.
    by_torch: whether the lane's stream must be torch's current stream during `issue`. torch uses the current stream, and so
        does the first launch of a kernel.
    """

    where: Where
    stage: int = 0
    by_torch: ClassVar[bool] = True

    def issue(self, call: IssuedCall, stream: int) -> None:
        """Enqueue this launch on `stream`."""
        raise NotImplementedError

    def prepare(self, call: IssuedCall, tensors: CallTensors) -> Issue:
        """Return a function that enqueues this launch, on a stream, for the tensors that `tensors` holds by then.

        call: the first such call, which is over. It was no rehearsal. Its bindings are those of `tensors`.
        Raises NotPreparedError if only `issue` can find the tensors.
        """
        raise NotPreparedError("only `issue` enqueues it")


class FlagSubmitter(Protocol):
    """A FlagSubmitter enqueues the flag operations of a program."""

    def prepare(self, operations: FlagOperations) -> Callable[[int], None]:
        """Return a function that enqueues these operations on a stream."""
        ...

    def aside(self, stream: int) -> int:
        """Return a side stream for signals, ordered after the work that `stream` has now.

        Later work on `stream` does not wait for these signals.
        """
        ...


@dataclass(kw_only=True, slots=True)
class FlagOperations(Launch):
    """FlagOperations are memory operations on flags, done in order.

    aside: they go to a side stream, so that later work of the lane does not wait for them.
    """

    by_torch: ClassVar[bool] = False
    words: tuple[Word, ...]
    aside: bool = False
    submitter: FlagSubmitter | None = field(default=None, compare=False, repr=False)
    _submit: Callable[[int], None] | None = field(default=None, init=False, compare=False, repr=False)

    def load(self) -> Callable[[int], None]:
        """Make the function that `issue` calls. This loads a kernel if a kernel does the operations."""
        if self._submit is None:
            assert self.submitter is not None, "flag operations of no program"
            self._submit = self.submitter.prepare(self)
        return self._submit

    def issue(self, call: IssuedCall, stream: int) -> None:
        submit = self._submit or self.load()
        if call.rehearses:
            return
        if self.aside:
            assert self.submitter is not None
            stream = self.submitter.aside(stream)
        submit(stream)

    def prepare(self, call: IssuedCall, tensors: CallTensors) -> Issue:
        submit = self.load()
        if not self.aside:
            return submit
        assert self.submitter is not None
        aside = self.submitter.aside
        return lambda stream: submit(aside(stream))


@dataclass(kw_only=True, slots=True)
class CopyLaunch(Launch):
    """A CopyLaunch copies one region to another.

    copy: the device's copy function.
    prepare_copy: returns the same copy for calls of one layout.
    to_output: whether dst is an output of the caller.
    """

    by_torch: ClassVar[bool] = False
    src: Region
    dst: Region
    copy: Callable[[Bindings, int], None]
    to_output: bool
    prepare_copy: Callable[[CallTensors], Issue] | None = None

    def issue(self, call: IssuedCall, stream: int) -> None:
        if not (self.to_output and call.skips_outputs):
            self.copy(call.bindings, stream)

    def prepare(self, call: IssuedCall, tensors: CallTensors) -> Issue:
        return Launch.prepare(self, call, tensors) if self.prepare_copy is None else self.prepare_copy(tensors)


@dataclass(kw_only=True, slots=True)
class KernelLaunch(Launch):
    """A KernelLaunch runs a step as one kernel on `sms` SMs.

    If the program pushes by kernels or sends messages between nodes, every other kernel leaves SMs free for these, because
    peers wait for them.
    """

    kernel: StepKernel
    sms: int
    tries: int

    def issue(self, call: IssuedCall, stream: int) -> None:
        self.kernel.launch(call.bindings, silent=call.rehearses, tries=self.tries, sms=self.sms, stream=stream)
        if call.on_kernel_done is not None:
            call.on_kernel_done(self.kernel)

    def prepare(self, call: IssuedCall, tensors: CallTensors) -> Issue:
        return self.kernel.prepare(tensors, tries=self.tries, sms=self.sms)


@dataclass(kw_only=True, slots=True)
class TorchLaunch(Launch):
    """A TorchLaunch runs work of torch, or of a library, on torch's current stream.

    prepare_work: returns the same work for calls of one layout.
    """

    work: Callable[[IssuedCall], None]
    prepare_work: Callable[[IssuedCall, CallTensors], Issue] | None = None

    def issue(self, call: IssuedCall, stream: int) -> None:
        self.work(call)

    def prepare(self, call: IssuedCall, tensors: CallTensors) -> Issue:
        return Launch.prepare(self, call, tensors) if self.prepare_work is None else self.prepare_work(call, tensors)
