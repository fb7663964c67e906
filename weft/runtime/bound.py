"""A BoundProgram is a checked schedule on one rank of a group: the addresses of its buffers and flags, and the tensors of a
call.

host.py and cuda.py add memory, flag words and lanes of each kind of device. Both run the launches of weft.runtime.launch_plan.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from weft.core.errors import warn_once
from weft.core.fused_collective import spelled_out
from weft.core.problem import CollectiveProblem, RaggedProblem
from weft.core.schedule import (
    Collective,
    Copy,
    Flag,
    FusedCollective,
    Gemm,
    GroupedGemm,
    Lookup,
    Norm,
    Push,
    Reduce,
    Schedule,
    SegmentCopies,
    SendReceive,
    ShareCounts,
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
from weft.runtime.bindings import Bindings, Inputs, Outputs, Where, scales_name
from weft.runtime.cuda_resources import CudaResources
from weft.runtime.host_resources import HostResources
from weft.runtime.launch_plan import LaunchPlan
from weft.runtime.launches import Place, Site, StepKernel, WaiterWords
from weft.runtime.mailboxes import SharedMailbox

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "uint8": torch.uint8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
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


class BoundProgram(Site):
    """A BoundProgram is one rank's part of a schedule. Collective: every rank constructs it for the same schedule."""

    _given: frozenset[str] = frozenset()
    _scale_names: Mapping[str, str] = {}
    _mailboxes: tuple[SharedMailbox, ...] = ()

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
        if isinstance(step, Norm) and problem.norm_recipe and not resources.quantises:
            if resources.device.type == "cuda":
                warn_once(f"{resources.device} cannot convert to FP8 in kernels: norms are quantised by torch's operations")
            return False
        # If tiles of a GEMM wait on SMs, the steps that they wait for run on reserved SMs.
        return resources.runs_kernels(self.dtype, problem.scaling if isinstance(step, (Gemm, Push)) else None)

    def dtype_of(self, buffer: str) -> torch.dtype:
        """Return the dtype of a buffer's elements."""
        found = self.schedule.buffer[buffer]
        if scaling := self.schedule.problem.scalings.get(found.operand):
            return DTYPES[scaling.b if found.operand == "b" else scaling.a]
        return torch.float32 if found.float32 else self.dtype

    def scales_shape(self, buffer: str, rank: int) -> tuple[int, int]:
        """Return the shape of the scales of a buffer of FP8 elements on a rank."""
        found = self.schedule.buffer[buffer]
        assert found.operand, f"{buffer} is not of FP8"
        return self.schedule.problem.scalings[found.operand].scales_shape(found.operand, found.rows[rank], found.cols[rank])

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

    @abstractmethod
    def play(self, inputs: Inputs, outputs: Outputs) -> None:
        """Run every lane of this rank once."""

    @abstractmethod
    def symmetric(self, rank: int, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a matrix in a rank's data area."""

    @abstractmethod
    def scratch(self, name: ScratchName, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a local matrix, which has the same memory in every call."""

    def shared_mailbox(self, copy_bytes: int) -> SharedMailbox:
        found = self._resources.mailboxes.take(copy_bytes)
        self._mailboxes += (found,)
        return found

    def _give_mailboxes_back(self) -> None:
        for mailbox in self._mailboxes:
            self._resources.mailboxes.give_back(mailbox)
        self._mailboxes = ()

    @property
    def nbytes(self) -> int:
        """The bytes of device memory that only this program uses, and its part of shared mailboxes, on the rank that needs
        most.

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
        bindings = self.own_bindings().of_call(inputs, outputs)
        for name, by_rank in self._reached.items():
            for rank, tensor in enumerate(by_rank):
                if rank != self.rank:
                    bindings.bind(name, rank, tensor)
        return bindings

    def own_bindings(self) -> Bindings:
        """Return the bindings of all buffers except the caller's tensors."""
        return self._fixed_bindings()

    def _fixed_bindings(self) -> Bindings:
        bindings = Bindings(
            scalings=self.schedule.problem.scalings,
            buffers=self.schedule.buffer,
            rank=self.rank,
            given=self._given,
            scale_names=self._scale_names,
            stacks_b=self.schedule.problem.products > 1,
        )
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

    @abstractmethod
    def close(self) -> None:
        """Release the memory of buffers and flags."""


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


def _fused() -> Any:
    from weft.runtime import fused

    return fused


def _pushes() -> Any:
    from weft.runtime import pushes

    return pushes


def _lookups() -> Any:
    from weft.runtime import lookups

    return lookups


def _fused_collective() -> Any:
    from weft.runtime import fused_collective

    return fused_collective


def _ragged() -> Any:
    from weft.runtime import ragged_kernels

    return ragged_kernels.RaggedStepKernel


# These modules load Triton, so they are imported only if a program has such a step and its device runs kernels.
KERNELS: dict[type[Step], Callable[[], Callable[..., StepKernel | None]]] = {
    Gemm: lambda: _fused().kernel_of,
    Reduce: lambda: _fused().kernel_of_sum,
    Norm: lambda: _fused().FusedNorm,
    Push: lambda: _pushes().kernel_of,
    Lookup: lambda: _lookups().FusedLookup,
    FusedCollective: lambda: _fused_collective().FusedCollectiveKernel,
    ShareCounts: _ragged,
    SegmentCopies: _ragged,
    GroupedGemm: _ragged,
    Wait: _ragged,
}
"""By type of step, what makes its kernel from the site, the place and the step. It returns None if the step has none there."""
SIGNAL_VALUES: dict[type[Step], Callable[[], Any]] = {Gemm: _fused, Push: _pushes, Lookup: _lookups}
"""By type of step whose kernel counts tiles, the module whose `signal_values(site, rank, step)` returns the values of its
flags. All ranks choose kernels for the same steps, so each knows the value of every flag. If a kernel cannot load a rank's
tensors, the rank runs the step part by part, and signals the same values."""


def kernel_of(program: BoundProgram, where: Where) -> StepKernel | None:
    """Return the kernel of a step, or None if torch or operations of a stream run the step."""
    make = KERNELS.get(type(where.step))
    return make()(program, where, where.step) if make is not None and program.runs_as_kernel(where.step) else None


def signal_values(program: BoundProgram) -> dict[Flag, int]:
    """Return the value of each signalled flag that a kernel of any rank counts."""
    found: dict[Flag, int] = {}
    for rank, _, _, step in program.schedule:
        module = SIGNAL_VALUES.get(type(step))
        if module is not None and program.runs_as_kernel(step):
            found |= module().signal_values(program, rank, step)
    return found
