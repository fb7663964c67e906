"""Checks the arguments of collectives, makes calls of them, and runs these calls.

A running call is a Work, as torch.distributed's. The caller's stream continues until the caller waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist

from weft.core.errors import require
from weft.core.problem import CollectiveProblem, Op
from weft.core.schedule import Schedule
from weft.ops.collective import collective_call
from weft.ops.common import check_own_memory, describe, resolve_group, schedule_to_spec
from weft.ops.front import OperatorRequest
from weft.runtime.bound_call import BoundCall, bind
from weft.runtime.collective_calls import CollectiveCall, check_summed
from weft.runtime.groups import GROUPS

Reduction = str | dist.ReduceOp | dist.ReduceOp.RedOpType
"""A reduction as weft's operators name it, "sum" or "avg", or as torch.distributed does."""


def reduction(op: Reduction, name: str = "op") -> Literal["sum", "avg"]:
    """Return the reduction that `op` names. `name` is the argument's name in the ValueError for a reduction that weft does not
    have."""
    require(name, op, (str, dist.ReduceOp, dist.ReduceOp.RedOpType), "use 'sum' or 'avg', or dist.ReduceOp.SUM or AVG")
    known = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
    for text, value in known.items():
        if op in (text, value):
            return cast(Literal["sum", "avg"], text)
    raise ValueError(f"{name} is {op!r}; use 'sum' or 'avg', or dist.ReduceOp.SUM or AVG")


class CheckedOptions(NamedTuple):
    """CheckedOptions are the options of a collective, which some rank could run.

    group: the name of the process group.
    schedule: a string that names the schedule. A Schedule value sets the staging memory, the SMs and the next two.
    reachable: whether peers may write the result.
    unit: the dtype as which elements are moved if nothing is summed.
    """

    op: Op
    reduce_op: Literal["sum", "avg"]
    group: str
    rank: int
    world_size: int
    schedule: str
    staging_bytes: int | None
    sms: int | None
    reachable: bool
    unit: torch.dtype

    def make(self, output: torch.Tensor, input: torch.Tensor) -> CollectiveCall:
        """Return the call that writes the first tensor and reads the second one."""
        find_reach = partial(GROUPS.reach, self.group) if self.reachable else None
        return collective_call(
            self.op,
            input,
            output,
            self.group,
            self.schedule,
            self.reduce_op,
            self.staging_bytes,
            self.sms,
            reach=None if find_reach is None else find_reach(output),
            find_reach=find_reach,
            unit=self.unit,
        )

    def make_checked(self, output: torch.Tensor, input: torch.Tensor) -> CollectiveCall:
        """Do as `make`. Raise ValueError for tensors that no rank could use."""
        check_pair(self.op, output, input, self.rank, self.world_size)
        if self.op in ("reduce_scatter", "all_reduce"):
            check_summed(self.op, "output" if self.op == "reduce_scatter" else "tensor", output)
        return self.make(output, input)


def check_options(
    op: Op,
    group: dist.ProcessGroup | None,
    reduce_op: Reduction = "sum",
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> CheckedOptions:
    """Return the options of a collective. Raises ValueError, which names the argument, for options that no rank could run."""
    reduces, of_group, least = reduction(reduce_op), resolve_group(group), CollectiveProblem.LEAST_STAGING
    if staging_bytes is not None and (not _is_count(staging_bytes) or staging_bytes < least):
        raise ValueError(f"staging_bytes is {staging_bytes!r}; it must be a whole number of at least {least}")
    if sms is not None and (not _is_count(sms) or sms < 1):
        raise ValueError(f"sms is {sms!r}; it must be a whole number of at least 1")
    reachable, unit = op != "reduce_scatter", torch.uint8
    if isinstance(schedule, Schedule) and isinstance(schedule.problem, CollectiveProblem):
        given = schedule.problem
        staging_bytes, sms, reachable = staging_bytes or given.staging_bytes, sms or given.sms, given.reachable
        unit = unit if given.sums else getattr(torch, given.dtype)
    spec = schedule_to_spec(schedule, op)
    return CheckedOptions(op, reduces, *of_group, spec, staging_bytes, sms, reachable, unit)


def check_pair(op: str, output: torch.Tensor, input: torch.Tensor, rank: int, world_size: int) -> None:
    """Check that two tensors of a collective are valid, and match. Raises ValueError."""
    for name, tensor in (("tensor", input),) if op == "all_reduce" else (("output", output), ("input", input)):
        check_tensor(name, tensor, contiguous=True)
    if output.dtype != input.dtype or output.device != input.device:
        have, need = f"{output.dtype} on {output.device}", f"{input.dtype} on {input.device}"
        raise ValueError(f"output is {have}, input {need}; they must agree")
    _check_sizes(op, output, input, world_size)
    check_overlap(op, output, input, rank)


def check_tensor(name: str, tensor: torch.Tensor, *, contiguous: bool = False) -> None:
    """Check a tensor that is given to a collective. Raises ValueError."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is {describe(tensor)}; it must be a tensor")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {tensor.device}; weft runs on cpu and cuda")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; it must be strided")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} is {describe(tensor)} with strides {tensor.stride()}; it must be contiguous")
    if contiguous:
        check_own_memory(name, tensor)


def _check_sizes(op: str, output: torch.Tensor, input: torch.Tensor, world_size: int) -> None:
    have, given = output.numel(), input.numel()
    if op == "all_gather" and have != given * world_size:
        raise ValueError(f"output has {have} elements; {world_size} ranks give {given} each: it needs {given * world_size}")
    if op == "reduce_scatter" and given != have * world_size:
        raise ValueError(f"input has {given} elements; {world_size} ranks get {have} each: it needs {have * world_size}")
    if op == "all_to_all" and (given != have or given % world_size):
        raise ValueError(f"output has {have} elements, input {given}; they must be as many, a multiple of {world_size}")


def check_splits(name: str, sizes: list[int] | None, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Check that split sizes, if there are any, are equal parts, which is what weft does without them. Raises ValueError."""
    if sizes is None:
        return
    require(name, sizes, (list, tuple), "it must be a list of numbers of rows, by rank, or None")
    world_size, rows = resolve_group(group)[2], tensor.shape[0] if tensor.dim() else 1
    if sizes and list(sizes) != [rows / world_size] * world_size:
        even = f"{world_size} times {rows // world_size}" if rows % world_size == 0 else f"a multiple of {world_size} rows"
        raise ValueError(f"{name} is {sizes}; weft exchanges equal parts, here {even}: pad them, or use torch.distributed")


def check_overlap(op: str, output: torch.Tensor, input: torch.Tensor, rank: int) -> None:
    """Check that input and output share no memory, or share it as CollectiveProblem allows. Raises ValueError."""
    a, out, a_bytes, out_bytes = input.data_ptr(), output.data_ptr(), input.nbytes, output.nbytes
    if not (a_bytes and out_bytes) or a + a_bytes <= out or out + out_bytes <= a:
        return
    places = {"all_gather": out + rank * a_bytes, "reduce_scatter": out - rank * out_bytes, "all_reduce": out}
    if a != places.get(op):
        part = {"all_gather": "input as this rank's part of output", "reduce_scatter": "output as this rank's part of input"}
        allowed = part.get(op, "one tensor for both" if op == "all_reduce" else "")
        raise ValueError(f"output overlaps input; {op} allows {allowed or 'no overlap'}{' alone' * bool(allowed)}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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

    def __call__(self, output: torch.Tensor, given: torch.Tensor, make: Any) -> list[torch.Tensor]:
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
    options: CheckedOptions,
    output: torch.Tensor,
    given: torch.Tensor,
    group: dist.ProcessGroup | None,
    async_op: bool,
    stream: torch.cuda.Stream | None,
) -> OperatorRequest | Work:
    """Make a call on the caller's stream, or with async_op on `stream` or a stream of weft, after the caller's work so far.

        caller: ... a ready --+------------ compute ------------+-- wait: out is there
        stream:               +--> collective, its lanes --done-+

    On CPUs the call has ended when this function returns. Without async_op this returns the OperatorRequest of the call. Raises
    ValueError for a stream without async_op, or on a CPU.
    """
    call = options.make_checked(output, given)
    if stream is not None and not (async_op and call.device.type == "cuda"):
        raise ValueError("stream is for calls with async_op=True on GPUs; else enter it: with torch.cuda.stream(stream)")
    if not async_op:
        return OperatorRequest(cast(Any, IN_PLACE), (output, given), (options.make_checked,), group, after=lambda _: None)
    if call.device.type != "cuda":
        GROUPS.run(call.group, call)
        return Work((), call.out, None)
    return _begin_on(call.group, call, stream or GROUPS.state(call.group).side_stream(call.device))


def _begin_on(group: str, call: CollectiveCall, stream: torch.cuda.Stream) -> Work:
    stream.wait_stream(torch.cuda.current_stream(call.device))
    with torch.cuda.stream(stream):
        if not torch.cuda.is_current_stream_capturing():
            # The allocator must not reuse their memory while the stream uses it, even if nobody waits or this call raises.
            for tensor in (call.a, call.out):
                tensor.record_stream(stream)
        GROUPS.run(group, call)
        return Work((call.a, call.out), call.out, stream)
