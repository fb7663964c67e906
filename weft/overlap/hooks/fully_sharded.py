"""FSDP2's collectives, parameters gathered and gradients scattered, by NCCL held to some blocks, or by copy engines.

fully_shard starts them itself, on streams of its own; a way says here who moves the bytes, on how many blocks, how far ahead of
the layers that need them, and how often a step. `vendor` alone is what fully_shard does by itself, and wins ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.compat.autograd import NO_BACKWARD, backward_pass
from weft.compat.fsdp import (
    AllGather,
    ReduceScatter,
    before_registered_methods,
    collectives_of,
    forward_has_begun,
    param_groups,
    scatter_dtypes,
    set_collectives,
)
from weft.overlap import collectives
from weft.overlap.concurrent.collectives import COPY_ENGINE, Works, vendor_all_gather, vendor_reduce_scatter
from weft.overlap.concurrent.steps import StepTuner, specs_of, why_not_summed
from weft.overlap.controls import comm_stream
from weft.overlap.hooks.gathered import GatherOrder
from weft.schedules.concurrent import PLAIN

WAYS = ("vendor", "vendor+ahead=1", "vendor+ahead=2", "vendor+ctas=16", "copy_engine+ctas=32+ahead=1")
"""What blocks of steps take in turn, where the device has it; first the one to beat, what fully_shard does by itself."""
KEPT = ("vendor+keep", "vendor+keep+ahead=1")
"""Likewise, where there is room for all parameters."""
_FSDP_DECIDES = ("late", "pull", "left", "resident", "priority")


def fsdp(
    model: nn.Module,
    *,
    way: str = "vendor",
    group: dist.ProcessGroup | None = None,
    key: str = "fsdp",
    spare_bytes: int = 0,
) -> StepTuner:
    """Let every module of `model` that fully_shard was applied to communicate by weft. Once, before the first step.

    Args:
        model: one of whose modules fully_shard was applied to.
        way: vendor or copy_engine, with +ctas=N, +ahead=N (groups gathered ahead in forward) and +keep (gathered once a step,
            not twice), for all steps, or auto, for which the first steps take WAYS in turn; streams and their priority are
            fully_shard's.
        group: the ranks that agree on it. Default: the default group.
        key: names this model in weft.concurrent_choices.
        spare_bytes: what gathered parameters may take more of this device's memory than fully_shard has them take: auto tries
            KEPT where all of them fit into it. The same on every rank.

    What is returned has the way that steps take now.
    Any mixed precision, reshard_after_forward and offloading to CPUs may be fully_shard's; what it sums has to be of a dtype
    that copy engines sum, and not of set_gradient_divide_factor's, for ways that have them.
    Raises ValueError for a model without such a module, on no device yet, or that communicates by weft already, and for
    another way.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    parameter = next((each for each in model.parameters() if isinstance(each, DTensor)), None)
    if not sharded or parameter is None:
        raise ValueError("model has no module of fully_shard's; call torch.distributed.fsdp.fully_shard on it first")
    if parameter.device.type == "meta":
        raise ValueError("model is on the meta device; materialise it first")
    specs = specs_of(way, _tried(model, spare_bytes), without=_FSDP_DECIDES, no_copies=_why_no_copies(sharded))
    if specs == ("sequential",):
        raise ValueError("way is 'sequential', but fully_shard overlaps by itself; use auto, vendor or copy_engine")
    if any(isinstance(collectives_of(group)[0], _Ours) for module in sharded for group in param_groups(module)):
        raise ValueError("model communicates by weft already; call weft.hooks.fsdp once a model")
    device = _computing(parameter.device, parameter.device_mesh.device_type)
    steps = _Steps(StepTuner(key, specs, device, group), GatherOrder(sharded), sharded)
    model.register_forward_pre_hook(steps.forward, prepend=True)
    for module in sharded:
        before_registered_methods(module, steps.enter)
    return steps.tuner


def _tried(model: nn.Module, spare_bytes: int) -> tuple[str, ...]:
    """WAYS, and KEPT where they fit. A communicator of its own is tried where parameters are sharded over all ranks: those of a
    part of them may not be able to make one (weft.overlap.controls.nccl_group)."""
    sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    meshes = [parameter.device_mesh for parameter in sharded]
    whole = all(mesh.ndim == 1 and mesh.size() == dist.get_world_size() for mesh in meshes)
    kept = KEPT if sum(parameter.numel() * parameter.element_size() for parameter in sharded) <= spare_bytes else ()
    return tuple(spec for spec in WAYS + kept if whole or not spec.startswith("vendor+ctas"))


def _computing(kept: torch.device, kind: str) -> torch.device:
    """The device that parameters are gathered on, of the mesh's kind. kept: where their shards are: offloaded, on a CPU."""
    return kept if kept.type == kind else torch.device(kind, torch.get_device_module(kind).current_device())


def _why_no_copies(sharded: Sequence[FSDPModule]) -> str:
    """Why copy engines cannot sum what these modules scatter; empty if they can."""
    groups = [group for module in sharded for group in param_groups(module)]
    if any(getattr(group, "gradient_divide_factor", None) is not None for group in groups):
        return "gradients are divided by set_gradient_divide_factor's number; copy engines take sums and means"
    return why_not_summed(dtype for group in groups for dtype in scatter_dtypes(group))


class _Steps:
    """A step begins with the first gradients that are scattered after a forward pass; its gathers are set before the next. A
    forward pass without gradients is fully_shard's own: kept parameters would be stale once the optimizer has changed them.
    Other methods begin one, too, by torch's register_fsdp_forward_method: a module's hooks are not told of them.

    What moves the bytes as fully_shard does is fully_shard's own, once the trial has ended: weft's collectives cost the host 8%
    of a step that it limits."""

    def __init__(self, tuner: StepTuner, gathered: GatherOrder, sharded: Sequence[FSDPModule]) -> None:
        self.tuner, self._gathered = tuner, gathered
        self._fresh = False
        self._groups = dict.fromkeys(group for module in sharded for group in param_groups(module))
        self._stock = [collectives_of(group) for group in self._groups]
        self._own = _AllGather(self), _ReduceScatter(self)
        self._ours = False
        self._move()

    def forward(self, module: nn.Module, args: Any) -> None:
        trains = torch.is_grad_enabled()
        self._fresh = self._fresh or trains
        self._gathered.take(self.tuner.way if trains else PLAIN)
        self._move()

    def _move(self) -> None:
        """From here on by weft's collectives, or by fully_shard's."""
        way = self.tuner.way
        ours = not self.tuner.settled or (way.transport, way.ctas) != (PLAIN.transport, PLAIN.ctas)
        if ours == self._ours:
            return
        self._ours = ours
        for group, stock in zip(self._groups, self._stock, strict=True):
            set_collectives(group, self._own if ours else stock)

    def enter(self, module: Any) -> None:
        """Before a registered method of a module, unless a backward pass makes up for what was not kept."""
        if backward_pass() != NO_BACKWARD:
            return
        if not forward_has_begun(module):
            self.forward(module, ())
        self._gathered.note(module)

    def scatter(self) -> None:
        if self._fresh:
            self._fresh = False
            self.tuner.turn()


class _Ours:
    """Buffers from torch's allocator. Copy engines have a stream of their own, apart from fully_shard's, whose priority weft's
    lanes have, too: streams of one priority may share a hardware queue, and one that waits would hold up the lane that it
    waits for."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps
        self._stream: torch.cuda.Stream | None = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _moved(self, start: Callable[..., Any], device: torch.device, *, async_op: bool) -> dist.Work | None:
        """start's collective, enqueued; joined on the caller's stream, unless async_op."""
        if device.type == "cuda" and self._stream is None:
            self._stream = comm_stream(priority="high", device=device)
        work = start(async_op=True, schedule=COPY_ENGINE, stream=self._stream)
        if async_op:
            return Works([work])
        work.wait()
        return None


class _AllGather(_Ours, AllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        tuner = self._steps.tuner
        if tuner.way.transport == "vendor":
            on = tuner.executor.group(group, tuner.way.ctas)
            return vendor_all_gather(output_tensor, input_tensor, group=on, async_op=async_op)  # type: ignore[no-any-return]
        start = partial(collectives.all_gather_into_tensor, output_tensor, input_tensor, group)
        return self._moved(start, output_tensor.device, async_op=async_op)


class _ReduceScatter(_Ours, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._steps.scatter()
        tuner = self._steps.tuner
        if tuner.way.transport == "vendor":
            on = tuner.executor.group(group, tuner.way.ctas)
            done = vendor_reduce_scatter(output_tensor, input_tensor, op=op, group=on, async_op=async_op)
            return done  # type: ignore[no-any-return]  # noqa: RET504
        start = partial(collectives.reduce_scatter_tensor, output_tensor, input_tensor, op, group, sms=tuner.way.ctas or None)
        return self._moved(start, output_tensor.device, async_op=async_op)
