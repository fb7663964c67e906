"""A running collective, as torch.distributed's Work. The caller's stream continues until the caller waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from weft.ops.front import OperatorRequest
from weft.runtime.bound_call import BoundCall, bind
from weft.runtime.collective_calls import CollectiveCall
from weft.runtime.groups import GROUPS

MakeCall = Callable[[torch.Tensor, torch.Tensor], CollectiveCall]
"""Returns the call that writes the first tensor and reads the second one."""


class Work:
    """The Work of a call with async_op=True. It holds `tensors`, which the call reads and writes, until the caller has
    waited."""

    def __init__(self, tensors: Sequence[torch.Tensor], out: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self._tensors, self._out, self._stream = list(tensors), out, stream
        self._done = torch.cuda.Event() if stream else None  # type: ignore[no-untyped-call]
        if self._done is not None:
            self._done.record(stream)

    def wait(self, timeout: object = None) -> bool:
        """Make the caller's current stream wait for the collective, and return True. The host does not wait.

        timeout: ignored, for compatibility with torch. WEFT_TIMEOUT_S limits every wait of weft.
        """
        if self._done is not None:
            torch.cuda.current_stream(self._out.device).wait_event(self._done)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has finished."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of [output], as DDP's communication hooks do. Waiting for it makes the waiter's stream wait."""
        if self._stream is None:
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            future.set_result([self._out])
            return future
        future = torch.futures.Future(devices=[self._out.device])
        with torch.cuda.stream(self._stream):
            future.set_result([self._out])
        return future


class InPlace:
    """An InPlace runs collectives whose results are tensors of the caller's. It is the operator of their Requests."""

    single = False

    def is_recorded(self, tensors: Sequence[torch.Tensor]) -> bool:
        return False

    def __call__(self, output: torch.Tensor, given: torch.Tensor, make: MakeCall) -> list[torch.Tensor]:
        return self.compute((output, given), (make,))[0]

    def compute(
        self, tensors: Sequence[torch.Tensor], options: Sequence[Any], bind_to: Sequence[torch.Tensor] | None = None
    ) -> tuple[list[torch.Tensor], BoundCall | None, tuple[int, ...]]:
        """Make the call as LibraryOperator.compute does. It returns no results."""
        (make,) = options
        call = make(*tensors)
        agreed, outputs = GROUPS.make_call(call.group, call)
        return [], None if bind_to is None else bind(agreed, call, outputs, bind_to), ()


IN_PLACE = InPlace()


def begin(
    make: MakeCall,
    output: torch.Tensor,
    given: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    async_op: bool,
    stream: torch.cuda.Stream | None,
) -> OperatorRequest | Work:
    """Make a call on the caller's stream, or with async_op on `stream` or a stream of weft, after the caller's work so far.

        caller: ... a ready --+------------ compute ------------+-- wait: out is there
        stream:               +--> collective, its lanes --done-+

    On CPUs the call has ended when this function returns. Without async_op this returns the OperatorRequest of the call. Raises
    ValueError for a stream without async_op, or on a CPU.
    """
    call = make(output, given)
    if stream is not None and not (async_op and call.device.type == "cuda"):
        raise ValueError("stream is for calls with async_op=True on GPUs; else enter it: with torch.cuda.stream(stream)")
    if not async_op:
        return OperatorRequest(cast(Any, IN_PLACE), (output, given), (make,), group, after=_return_nothing)
    if call.device.type != "cuda":
        GROUPS.run(call.group, call)
        return Work((), call.out, None)
    return _begin_on(call.group, call, stream or GROUPS.state(call.group).side_stream(call.device))


def _return_nothing(results: list[torch.Tensor]) -> None:
    return None


def _begin_on(group: str, call: CollectiveCall, stream: torch.cuda.Stream) -> Work:
    stream.wait_stream(torch.cuda.current_stream(call.device))
    with torch.cuda.stream(stream):
        if not torch.cuda.is_current_stream_capturing():
            # The allocator must not reuse their memory while the stream uses it, even if nobody waits or this call raises.
            for tensor in (call.a, call.out):
                tensor.record_stream(stream)
        GROUPS.run(group, call)
        return Work((call.a, call.out), call.out, stream)
