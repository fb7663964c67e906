"""Collectives whose data copy engines move, and a set number of SMs sum. They leave most SMs to a concurrent matmul.

These write into the caller's tensors, with torch.distributed's names and arguments:

    all_gather_into_tensor(output, input)        reduce_scatter_tensor(output, input, op)
    all_to_all_single(output, input)             all_reduce(tensor, op)

These are functions, which support autograd and torch.compile:

    all_gather(x)    reduce_scatter(x, op)       all_to_all(x)    all_reduced(x, op)

Peers can write tensors of `empty` directly. Results in such tensors need no staging memory and no final copy.

A sum adds the ranks in order, in float32, and rounds once. So every call gives the same bits, and all_reduce gives the same
bits on every rank. All ranks of the group make the same calls in the same order.

A running call is a Work, as torch.distributed's. The caller's stream continues until the caller waits.

Every function takes these arguments. Only those into the caller's tensors take `stream`:

    schedule        "auto", "sequential" (NCCL), "copy_engine", "copy_engine_pull", or a weft.schedule.Schedule. :CHUNKS after a
                    copy-engine name cuts each part into that many pieces. "auto" runs the fastest of a short autotuning run.
                    On CPUs, for results above 1 GiB and for results in tensors of `empty` it runs the predicted fastest
    staging_bytes   symmetric memory per rank through which pieces pass; larger data passes in several turns. Default:
                    WEFT_STAGING_BYTES, or 1 GiB on a GPU (less if less is free) and 16 MiB on a CPU
    sms             SMs that sum. Default: twice the machine's `stores.sms`
    stream          the stream of a call with async_op=True on GPUs. Default: a stream of high priority

The former return None, or with async_op=True a Work, whose wait() makes the current stream wait, as torch's does. Tensors are
contiguous, on one device. All raise ValueError that names a wrong argument, RankMismatch if ranks make different calls, and
PeerLost or WaitTimeout if a rank is lost. Call once with the same sizes before you capture a call in a CUDA graph.

The latter work along the first dimension, and support autograd and torch.compile:

    forward                    backward
    all_gather(x)              reduce_scatter(grad)
    reduce_scatter(x)          all_gather(grad)
    all_to_all(x)              all_to_all(grad)
    all_reduced(x)             all_reduced(grad)

The backward pass is collective: all ranks run it, or none. It has the options of the forward pass, except that it uses "auto"
if its operator does not have the forward's schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist

from weft.core.errors import require
from weft.core.problem import CollectiveProblem, Op
from weft.core.schedule import Schedule
from weft.ops.collective import collective, collective_call
from weft.ops.common import check_own_memory, describe, resolve_group, schedule_to_spec
from weft.ops.front import OperatorRequest, public
from weft.runtime.bound_call import BoundCall, bind
from weft.runtime.collective_calls import CollectiveCall, check_summed
from weft.runtime.groups import GROUPS

__all__ = [
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduced",
    "all_to_all",
    "all_to_all_single",
    "empty",
    "reduce_scatter",
    "reduce_scatter_tensor",
]


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


@public
def all_gather_into_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Any:
    """Concatenate the inputs of all ranks in output, in the order of ranks. Replaces dist.all_gather_into_tensor(output,
    input).

    input: any dtype and shape, the same on every rank. It may be this rank's part of output.
    output: world_size times as many elements.
    """
    options = check_options("all_gather", group, "sum", schedule, staging_bytes, sms)
    return begin(options, output, input, group, async_op, stream)


@public
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Any:
    """Store this rank's part of the sum, or average, of all ranks' inputs in output.

    Replaces dist.reduce_scatter_tensor(output, input).

    input: bfloat16, float16 or float32, world_size parts with as many elements each as output.
    output: may be this rank's part of input.
    op: "sum" or "avg", or torch's.

    The bits do not depend on chunks, SMs or timing, except with "sequential", where NCCL sums in its own order.
    """
    options = check_options("reduce_scatter", group, op, schedule, staging_bytes, sms)
    return begin(options, output, input, group, async_op, stream)


@public
def all_reduce(
    tensor: torch.Tensor,
    op: Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Any:
    """Replace tensor by the sum, or average, of all ranks' tensors. Replaces dist.all_reduce(tensor).

    tensor: bfloat16, float16 or float32, of any number of elements.
    op: as for reduce_scatter_tensor. The bits are the same on every rank.
    """
    options = check_options("all_reduce", group, op, schedule, staging_bytes, sms)
    return begin(options, tensor, tensor, group, async_op, stream)


@public
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Any:
    """Send part d of input to rank d, and store the parts from all ranks in output, in their order.

    Replaces dist.all_to_all_single(output, input).

    input: any dtype and shape, world_size equal parts.
    output: as many elements as input, in separate memory.
    output_split_sizes, input_split_sizes: rows of the first dimension for each rank, as in torch. They must be equal.
    """
    options = check_options("all_to_all", group, "sum", schedule, staging_bytes, sms)
    check_splits("output_split_sizes", output_split_sizes, output, group)
    check_splits("input_split_sizes", input_split_sizes, input, group)
    return begin(options, output, input, group, async_op, stream)


@public
def all_gather(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> torch.Tensor:
    """Return [world_size * m, ...], the [m, ...] of all ranks in order. Any dtype. Options as for all_gather_into_tensor."""
    return _apply(x, group, check_options("all_gather", group, "sum", schedule, staging_bytes, sms))


@public
def reduce_scatter(
    x: torch.Tensor,
    op: Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> torch.Tensor:
    """Sum or average the [world_size * m, ...] of all ranks, and return this rank's [m, ...]. Options as for
    reduce_scatter_tensor."""
    return _apply(x, group, check_options("reduce_scatter", group, op, schedule, staging_bytes, sms))


@public
def all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> torch.Tensor:
    """Send part d of [world_size * m, ...] to rank d, and return the parts from all ranks, with the same shape. Options as for
    all_to_all_single."""
    return _apply(x, group, check_options("all_to_all", group, "sum", schedule, staging_bytes, sms))


@public
def all_reduced(
    x: torch.Tensor,
    op: Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    *,
    schedule: str | Schedule = "auto",
    staging_bytes: int | None = None,
    sms: int | None = None,
) -> torch.Tensor:
    """Return the sum, or average, of all ranks' x, as a new tensor. Options as for all_reduce."""
    return _apply(x, group, check_options("all_reduce", group, op, schedule, staging_bytes, sms))


@public
def empty(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return a zeroed tensor that peers can write.

    As the result of all_gather_into_tensor, all_to_all_single and all_reduce it needs no staging memory and no final copy. The
    same holds for a part of it at the same offset on every rank.

    The call is collective, with the same arguments on every rank. The memory belongs to the group until weft.close(group).
    device: "cpu" or "cuda"; default: torch's. Raises ValueError for another device, extents below 0, or a group on several
    nodes.
    """
    where = _device(device)
    require("dtype", dtype, torch.dtype, "it must be one of torch's, as torch.float32")
    if any(not isinstance(extent, int) or isinstance(extent, bool) or extent < 0 for extent in shape):
        raise ValueError(f"shape is {shape}; every extent must be a whole number of 0 or more")
    if math.prod(shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"shape is {shape}, of {dtype}; no memory has 2^63 bytes")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    count = math.prod(shape)
    found = GROUPS.state(resolve_group(group)[0]).symmetric(count * dtype.itemsize, where)
    return found[: count * dtype.itemsize].view(dtype).view(shape)


def _device(device: torch.device | str | None) -> torch.device:
    """Return the device for a tensor of `empty`. Raises ValueError for a device that weft does not support."""
    try:
        where = torch.empty(0).device if device is None else torch.device(device)
    except (RuntimeError, TypeError):  # torch does not know the name, or it is no name
        where = None
    if where is None or where.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; weft runs on cpu and cuda")
    return where


def _apply(x: torch.Tensor, group: dist.ProcessGroup | None, options: CheckedOptions) -> torch.Tensor:
    op, reduce_op, name, _, world_size, spec, staging_bytes, sms, _, _ = options
    if not isinstance(x, torch.Tensor) or x.dim() < 1:
        raise ValueError(f"x is {describe(x)}; it must be a tensor of at least one dimension")
    check_tensor("x", x)
    if op in ("reduce_scatter", "all_to_all") and x.shape[0] % world_size:
        raise ValueError(f"x is {describe(x)}; its first dimension must be a multiple of world_size, {world_size}")
    if op in ("reduce_scatter", "all_reduce"):
        check_summed(op, "x", x)
    of_call = (op, reduce_op, name, world_size, spec, staging_bytes or 0, sms or 0)
    return cast(torch.Tensor, OperatorRequest(collective, (x,), of_call, group))  # `public` runs it
