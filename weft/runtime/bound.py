"""A BoundProgram is a checked schedule on one rank of a group: the addresses of its buffers and flags, and the tensors of a
call.

host.py and cuda.py add memory, flag words and lanes of each kind of device. Both run the launches of weft.runtime.launch_plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from weft.core.fused_collective import spelled_out
from weft.core.problem import CollectiveProblem, RaggedProblem
from weft.core.schedule import (
    Buffer,
    Collective,
    Copy,
    Flag,
    FusedCollective,
    Gemm,
    Lookup,
    Push,
    Region,
    Schedule,
    SendReceive,
    Step,
    Wait,
    quantises,
    regions,
    segments,
    signalled_flags,
    waits,
)
from weft.core.span import Span
from weft.core.work import region_bytes
from weft.runtime.bindings import Bindings, Where, scales_name
from weft.runtime.flag_words import WaiterWords
from weft.runtime.host_rows import HostRows
from weft.runtime.launch_plan import LaunchPlan
from weft.runtime.launches import FlagSubmitter, IssuedCall
from weft.runtime.step_kernels import Place, StepKernel, kernel_of, signal_values

if TYPE_CHECKING:
    from weft.compat.streams import Word
    from weft.runtime.call_tensors import CallTensors, Issue
    from weft.runtime.cuda_resources import CudaResources
    from weft.runtime.host_resources import HostResources
    from weft.runtime.ragged_kernels import RaggedKernels

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "uint8": torch.uint8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
Inputs = Mapping[str, Sequence[torch.Tensor]]
"""The matrices of each input buffer by name, plus tensors that are not schedule buffers: embedding tables and indices."""
Outputs = dict[str, list[torch.Tensor]]
"""The matrices of each output buffer by name."""
NOTHING: Mapping[str, Sequence[torch.Tensor]] = {}
ScratchName = tuple[str, Literal["elements", "scales"]]
"""The name of a buffer, and which of its matrices is meant. Only buffers of FP8 elements have scales."""
_ALIGN = 256


class Closes(Protocol):
    """Closes is an object that can be attached to a group."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """A Layout holds the byte offsets of a schedule's shared buffers in every rank's data area.

    offsets: the offset of each buffer, by name and rank.
    scales: the offset of its scales.
    staging: the offset of the staging area of collectives.
    nbytes: the size of the data area.
    """

    offsets: dict[tuple[str, int], int]
    scales: dict[tuple[str, int], int]
    staging: int
    nbytes: int


def layout(schedule: Schedule) -> Layout:
    """Return the layout: the symmetric buffers that peers access, in the order of their declaration on every rank."""
    touched = {region.buffer for rank, _, _, step in schedule for region in regions(step) if region.rank != rank}
    touched |= {segment.buffer for rank, _, _, step in schedule for segment in segments(step) if segment.rank != rank}
    offsets, scales = dict[tuple[str, int], int](), dict[tuple[str, int], int]()
    ends = []
    for rank in range(schedule.problem.world_size):
        at = 0
        for buffer in schedule.buffers:
            if buffer.kind == "symmetric" and buffer.name in touched:
                offsets[buffer.name, rank] = at
                nbytes = region_bytes(schedule, buffer.whole(rank))
                if buffer.operand:
                    at += -(-buffer.whole(rank).size // _ALIGN) * _ALIGN
                    scales[buffer.name, rank] = at
                    nbytes -= buffer.whole(rank).size
                at += -(-nbytes // _ALIGN) * _ALIGN
        ends.append(at)
    collectives = [step for _, _, _, step in schedule if isinstance(step, Collective)]
    staged = max((region_bytes(schedule, step.src) for step in collectives), default=0)
    return Layout(offsets, scales, max(ends), max(ends) + staged)


def scratch_bytes(schedule: Schedule, shared: Layout) -> int:
    """Return the bytes of a rank's local buffers, on the rank that has most."""
    local = [each for each in schedule.buffers if each.kind in ("local", "symmetric")]
    return max(
        sum(region_bytes(schedule, buffer.whole(rank)) for buffer in local if (buffer.name, rank) not in shared.offsets)
        for rank in range(schedule.problem.world_size)
    )


class BoundProgram(ABC):
    """A BoundProgram is one rank's part of a schedule. Collective: every rank constructs it for the same schedule."""

    sms_for_kernels: int
    sms_for_pushes: int
    ragged: RaggedKernels | None = None
    """The state that the kernels of a call with splits share, on devices that run kernels."""
    _given: frozenset[str] = frozenset()
    """The names of the caller's buffers. The caller's other tensors are never those of a buffer, whatever a schedule's author
    has called its scratch."""
    _scale_names: Mapping[str, str] = {}
    """The caller's buffer of FP8 elements, by the name of its scales."""

    @property
    @abstractmethod
    def submitter(self) -> FlagSubmitter:
        """The object that submits flag operations to lanes."""

    def __init__(self, resources: HostResources | CudaResources, schedule: Schedule) -> None:
        self.rank_group, self.schedule = resources.rank_group, schedule
        self.rank = self.rank_group.rank
        self.dtype = DTYPES[schedule.problem.dtype]
        self.device, self.machine = resources.device, resources.machine
        self.tries, self.blocks = resources.tries, resources.blocks
        schedule = self.schedule = with_fused_steps(resources, schedule)
        self.layout = layout(schedule)
        self.flags = WaiterWords(schedule)
        self.writers = flag_writers(schedule)
        self.captured = False
        self.times_products = True
        """True if its rehearsal may measure matmul algorithms, if the device has several."""
        self.last_used = 0
        """The number of the group's last call of this program. It is the same on every rank."""
        given = [buffer for buffer in schedule.buffers if buffer.kind in ("input", "output")]
        self._given = frozenset(buffer.name for buffer in given)
        self._scale_names = {scales_name(buffer.name): buffer.name for buffer in given if buffer.operand}
        self._outputs = [(each, self.dtype_of(each.name)) for each in schedule.buffers if each.kind == "output"]
        self.spans: list[Span] | None = None
        self._reached: Mapping[str, Sequence[torch.Tensor]] = NOTHING
        self._invalidated: Sequence[torch.Tensor] = ()
        self._resources = resources
        self.refused: ValueError | None = None
        """The error that all ranks raise once the call has ended."""
        self._signal_values = signal_values(self)
        wheres = [Where(rank, lane.name, position, step) for rank, lane, position, step in schedule if rank == self.rank]
        made = {(where.lane, where.position): kernel_of(self, where) for where in wheres}
        self.kernels: dict[Place, StepKernel] = {place: kernel for place, kernel in made.items() if kernel is not None}
        self._plans: dict[frozenset[Place], LaunchPlan] = {}

    def runs_as_kernel(self, step: Step) -> bool:
        """Return whether steps of this type may run as kernels here. It is the same on every rank."""
        problem, resources = self.schedule.problem, self._resources
        if isinstance(problem, RaggedProblem):
            return resources.device.type == "cuda" or resources.runs_kernels(self.dtype)
        if isinstance(step, (Wait, FusedCollective)):
            return isinstance(step, FusedCollective)
        if isinstance(step, Lookup):
            return resources.runs_lookups(self.dtype)
        if isinstance(problem, CollectiveProblem):
            return problem.sums and resources.runs_lookups(self.dtype)
        if isinstance(step, Push) and quantises(step, self.schedule):
            return resources.quantises
        # If tiles of a GEMM wait on SMs, the steps that they wait for run on reserved SMs.
        return resources.runs_kernels(self.dtype, problem.scaling if isinstance(step, (Gemm, Push)) else None)

    def dtype_of(self, buffer: str) -> torch.dtype:
        """Return the dtype of a buffer's elements."""
        found, scaling = self.schedule.buffer[buffer], self.schedule.problem.scaling
        if found.operand and scaling is not None:
            return DTYPES[scaling.a if found.operand == "a" else scaling.b]
        return torch.float32 if found.float32 else self.dtype

    def scales_shape(self, buffer: str, rank: int) -> tuple[int, int]:
        """Return the shape of the scales of a buffer of FP8 elements on a rank."""
        found, scaling = self.schedule.buffer[buffer], self.schedule.problem.scaling
        assert found.operand, f"{buffer} is not of FP8"
        assert scaling is not None, "the problem has no scaling"
        return scaling.scales_shape(found.operand, found.rows[rank], found.cols[rank])

    def buffers_of(self, kind: str) -> set[str]:
        """Return the names of the buffers of a kind."""
        return {buffer.name for buffer in self.schedule.buffers if buffer.kind == kind}

    def loading(self) -> AbstractContextManager[None]:
        """Return a context in which kernels may be loaded."""
        return self._resources.loading()

    def plan_of(self, bindings: Bindings) -> LaunchPlan:
        """Return the launch plan for a call. The strides and alignments of its tensors decide which steps run as kernels."""
        kernel_steps = frozenset([place for place, kernel in self.kernels.items() if kernel.runs(bindings)])
        if kernel_steps not in self._plans:
            self._plans[kernel_steps] = LaunchPlan(self, kernel_steps)
        return self._plans[kernel_steps]

    def refuse_several_results(self, count: int) -> None:
        """Raise ValueError if `out` is several matrices, one for each b, and a step moves rows of it as if it were one."""
        if count < 2:
            return
        moving = (Copy, Push, Collective, SendReceive)
        for rank, lane, position, step in self.schedule:
            if isinstance(step, moving) and any(region.buffer == "out" for region in regions(step)):
                where = f"rank {rank}, lane {lane.name}, step {position} ({step})"
                raise ValueError(
                    f"schedule {self.schedule.name}: {where} moves whole rows of out, but with {count} b the result is {count} "
                    "matrices; pass one b, or another schedule"
                )

    def flags_of_previous_calls(self) -> Iterator[tuple[int, int]]:
        """Yield the word and the value of each flag for which the first call would wait, because it has no previous call."""
        for _, lane, position, step in (entry for entry in self.schedule if entry[0] == self.rank):
            for wait in (wait for wait in waits(step) if wait.on_previous_call):
                yield self.flags.slot[wait.flag, lane.name, position], self.signal_value(wait.flag)

    def signal_value(self, flag: Flag) -> int:
        """Return the value of a flag's word once it is signalled: the number of tiles if a kernel counts, or else 1."""
        return self._signal_values.get(flag, 1)

    @abstractmethod
    def play(self, inputs: Inputs, outputs: Outputs) -> None:
        """Run every lane of this rank once."""

    @abstractmethod
    def waiters(self, flag: Flag) -> list[int]:
        """Return the addresses of the words that a signal raises."""

    @abstractmethod
    def gate_address(self, flag: Flag, where: Where) -> int:
        """Return the address of the word that a step of this rank waits for."""

    @abstractmethod
    def progress_word(self, where: Where) -> Word:
        """Return the operation by which a lane records that it has reached a step, before the step waits."""

    @abstractmethod
    def copier(self, src: Region, dst: Region) -> Callable[[Bindings, int], None]:
        """Return a function that copies one region to another, with the tensors of a call, on a stream."""

    def prepare_copy(self, src: Region, dst: Region) -> Callable[[CallTensors], Issue] | None:
        """Return CopyLaunch.prepare_copy for what `copier` returns. None if the device prepares nothing."""
        return None

    @abstractmethod
    def collective(self, step: Collective, where: Where) -> Callable[[IssuedCall], None]:
        """Return a function that runs a collective."""

    def prepare_collective(self, step: Collective) -> Callable[[IssuedCall, CallTensors], Issue] | None:
        """Return TorchLaunch.prepare_work for what `collective` returns. None if the device prepares nothing."""
        return None

    @abstractmethod
    def messages(self, step: SendReceive, where: Where) -> Callable[[IssuedCall], None]:
        """Return a function that sends and receives between nodes."""

    @property
    def row_counts(self) -> HostRows:
        """The row counts of all ranks on the host, for steps that do not run as kernels."""
        raise AssertionError("the steps of calls with splits are kernels here, or the problem has no splits")

    def count_address(self, flag: Flag) -> int:
        """Return the address of the word that a kernel of this rank adds to. A flag that a kernel counts has one waiter."""
        (address,) = self.waiters(flag)
        return address

    def gate_need(self, wait: Wait) -> int:
        """Return the value of its word that opens a gate. It is 0 for a gate that is passed before the kernel starts."""
        return 0 if wait.on_previous_call else self.signal_value(wait.flag)

    @abstractmethod
    def mailbox(self, nbytes: int) -> tuple[list[int], torch.Tensor]:
        """Allocate zeroed bytes on every rank that all ranks can address. Collective.

        Return the addresses by rank, and this rank's bytes.
        """

    @abstractmethod
    def symmetric(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a matrix in a rank's data area."""

    @abstractmethod
    def scratch(self, name: ScratchName, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a local matrix, which has the same memory in every call."""

    @property
    def nbytes(self) -> int:
        """The bytes of device memory that only this program uses, on the rank that needs most.

        It is the same on every rank, because it decides which programs are closed. It is 0 if all programs share their memory.
        """
        return 0

    def run(
        self,
        inputs: Inputs,
        *,
        outputs: Outputs | None = None,
        reached: Mapping[str, Sequence[torch.Tensor]] = NOTHING,
        invalidated: Sequence[torch.Tensor] = (),
        spans: list[Span] | None = None,
    ) -> Outputs:
        """Run a call, and return the output buffers by name: `out` as a matrix for each b, gradients of weights as one for each
        a.

        outputs: the caller's tensors, contiguous. By default new ones are allocated.
        reached: the tensors of every rank, by rank, for outputs that peers write.
        invalidated: the tensors that a failure invalidates, if they are not the outputs.
        spans: a list that is filled with the time of each step, if given.
        """
        self.spans, self._reached, self._invalidated = spans, reached, invalidated
        inputs = self.prepared(inputs)
        outputs = self._allocate(inputs) if outputs is None else outputs
        self.play(inputs, outputs)
        return outputs

    def _allocate(self, inputs: Inputs) -> Outputs:
        """Allocate this call's outputs, with `out` as one matrix for each b."""
        outputs = {}
        for buffer, dtype in self._outputs:
            several = buffer.name == "out" and len(inputs.get("b", ())) > 1 and self.schedule.problem.products == 1
            widths = [b.shape[1] for b in inputs["b"]] if several else [buffer.cols[self.rank]]
            rows = buffer.rows[self.rank]
            device = self._resources.device
            if buffer.by_columns:  # the gradients of weights: one for each a
                outputs[buffer.name] = [torch.empty(a.shape[1], rows, dtype=dtype, device=device) for a in inputs["a"]]
                continue
            outputs[buffer.name] = [torch.empty(rows, width, dtype=dtype, device=device) for width in widths]
            if buffer.operand:
                shape = self.scales_shape(buffer.name, self.rank)
                outputs[scales_name(buffer.name)] = [torch.empty(shape, dtype=torch.float32, device=device)]
        if isinstance(problem := self.schedule.problem, RaggedProblem):
            counts = torch.zeros(problem.arriving, dtype=torch.int32, device=self._resources.device)
            outputs["counts"] = [counts]
        return outputs

    def bind(self, inputs: Inputs, outputs: Outputs) -> Bindings:
        """Return the bindings of all buffers of one call."""
        own = self.own_bindings()
        bindings = Bindings(dict(own.tensors), {}, {}, dict(own.scales), own.scaling, own.buffers)
        for tensors in (inputs, outputs):
            for name, matrices in tensors.items():
                if name == "b" and self.schedule.problem.products > 1:
                    bindings.stacked[name, self.rank] = matrices
                elif name in self._given:
                    bindings.bind(name, self.rank, *(as_buffer(self.schedule.buffer[name], one) for one in matrices))
                elif name in self._scale_names:
                    bindings.scales[self._scale_names[name], self.rank] = matrices
                else:
                    bindings.loose[name] = matrices
        for name, by_rank in self._reached.items():
            for rank, tensor in enumerate(by_rank):
                if rank != self.rank:
                    bindings.bind(name, rank, tensor)
        return bindings

    def place_of(self, bindings: Bindings, name: str) -> tuple[dict[Any, Any], Any]:
        """Return the part of the bindings, and the key, that hold the caller's tensors of this name."""
        if name == "b" and self.schedule.problem.products > 1:
            return bindings.stacked, (name, self.rank)
        if name in self._given:
            return bindings.tensors, (name, self.rank)
        if name in self._scale_names:
            return bindings.scales, (self._scale_names[name], self.rank)
        return bindings.loose, name

    def own_bindings(self) -> Bindings:
        """Return the bindings of all buffers except the caller's tensors."""
        return self._fixed_bindings()

    def _fixed_bindings(self) -> Bindings:
        bindings = Bindings(scaling=self.schedule.problem.scaling, buffers=self.schedule.buffer)
        for buffer in self.schedule.buffers:
            shared, dtype = (buffer.name, self.rank) in self.layout.offsets, self.dtype_of(buffer.name)
            if buffer.kind == "local" or (buffer.kind == "symmetric" and not shared):
                matrix = self.scratch((buffer.name, "elements"), buffer.rows[self.rank], buffer.cols[self.rank], dtype)
                bindings.bind(buffer.name, self.rank, matrix)
                if buffer.operand:
                    shape = self.scales_shape(buffer.name, self.rank)
                    bindings.scales[buffer.name, self.rank] = [self.scratch((buffer.name, "scales"), *shape, torch.float32)]
            elif shared:
                for rank in self.rank_group.ranks_on_node:
                    offset, rows, cols = self.layout.offsets[buffer.name, rank], buffer.rows[rank], buffer.cols[rank]
                    bindings.bind(buffer.name, rank, self.symmetric(rank, offset, rows, cols, dtype))
                    if buffer.operand:
                        offset, shape = self.layout.scales[buffer.name, rank], self.scales_shape(buffer.name, rank)
                        bindings.scales[buffer.name, rank] = [self.symmetric(rank, offset, *shape, torch.float32)]
        return bindings

    @abstractmethod
    def prepared(self, inputs: Inputs) -> Inputs:
        """Return the inputs with the strides that the device's copies and matmuls need."""

    def raiser(self, flag: Flag) -> str:
        """Return a text that says which lane signals a flag."""
        return f"{self.writers.get(flag, 'nobody')} raises it"

    @abstractmethod
    def close(self) -> None:
        """Release the memory of buffers and flags."""


def as_buffer(buffer: Buffer, matrix: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the caller as a part of its buffer."""
    return matrix.t() if buffer.by_columns else matrix


def with_fused_steps(resources: HostResources | CudaResources, schedule: Schedule) -> Schedule:
    """Return the schedule. If the device has no kernel for one of its FusedCollectives, all of them are replaced by their
    steps."""
    dtype, scaling, single = DTYPES[schedule.problem.dtype], schedule.problem.scaling, schedule.problem.products == 1
    fused = [step for _, _, _, step in schedule if isinstance(step, FusedCollective)]
    runs = all(
        resources.fuses(dtype, scaling) and single if step.multiplies else resources.fuses(dtype, None) for step in fused
    )
    return schedule if runs else spelled_out(schedule).schedule


def flag_writers(schedule: Schedule) -> dict[Flag, str]:
    """Return the name of the lane that signals each flag."""
    return {flag: f"rank {rank}'s lane {lane.name}" for rank, lane, _, step in schedule for flag in signalled_flags(step)}
