"""Hooks for PyTorch's data parallelism: weft averages DDP's gradients, and sets when FSDP2 gathers parameters.

`ddp` averages each bucket of gradients concurrently with the rest of the backward pass:

    autograd's stream            collectives' stream
    ... gradients of bucket 0
    fork  -------------------->  average bucket 0
    ... gradients of bucket 1
    fork  -------------------->  average bucket 1
    end of backward: join  <---

`fsdp` sets when FSDP2 gathers parameters, and how long they stay gathered. fully_shard moves parameters and gradients by NCCL
on streams of its own. A schedule's name (`method`) says how many parameter groups are gathered ahead of the computation, and
whether they are gathered once or twice a step. `nccl` alone is fully_shard's own behaviour, and registers no hooks.

    ahead=0    gather 0 | compute 0 | gather 1 is enqueued when the host reaches group 1, so it is late if the host is late
    ahead=1    gather 0, gather 1 | compute 0 | gather 2 | compute 1 ...

Each group that is gathered ahead needs memory for its gathered parameters. With unsharded, a group's parameters are gathered
once a step instead of twice, and need that memory from its forward pass to its backward pass.

`units` groups modules for fully_shard. Each unit of fully_shard costs the host about 0.6 ms per pass, whatever its size. With
small blocks the GPU waits for the host, so overlap gains nothing. Larger units move the same bytes with fewer calls.

blocks  0 1 2 3 4 5 6 7 ...       in the order in which they are computed
units   [------] [------] ...     all about the same size
"""

# No `from __future__ import annotations`: DistributedDataParallel compares its hook's annotations with types, not strings.

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from weft.compat.dispatch import NO_BACKWARD, backward_pass
from weft.compat.dtensors import (
    before_registered_methods,
    forward_has_begun,
    is_part_of_a_mesh,
    param_groups,
    prefetched,
    reshards_after_forward,
    set_prefetched,
    state_of,
)
from weft.core.concurrent import ConcurrentProblem, OpaqueCollective
from weft.core.errors import require
from weft.core.problem import CollectiveProblem
from weft.ops.common import DTYPES, resolve_group
from weft.overlap.concurrent.calls import GroupCaches, get_caches
from weft.overlap.concurrent.choice import ConcurrentChoice, planned
from weft.overlap.concurrent.collectives import AllReduce
from weft.overlap.concurrent.executor import Program
from weft.runtime.choose import automatic
from weft.runtime.groups import GROUPS
from weft.schedules.concurrent import PLAIN, Method, parse

__all__ = ["ddp", "fsdp", "replicate", "units"]


def check_method(method: str, *, plain: str, without: Sequence[str], like: Sequence[str]) -> str:
    """Return `method`, or `plain` for auto if WEFT_SCHEDULE is sequential.

    plain: the method that PyTorch uses by itself.
    without: the options that the framework decides. A method with one of them is a ValueError.
    like: examples for the error.
    """
    require("method", method, str, "use auto, or a method such as nccl+unsharded under fully_shard, or nccl+priority")
    if method == "auto":
        return plain if automatic() == "sequential" else method
    for name in without:
        if getattr(parse(method), name):
            raise ValueError(f"method is {method!r}; {name} is not supported here: use auto, or one like {', '.join(like)}")
    return method


METHODS = ("nccl", "sequential", "nccl+priority", "nccl+priority+ctas=16")
"""The planner chooses among these. `nccl` is plain NCCL. Copy engines and free SMs are not among them: with either, steps of a
GPT on 2 x H200 took 0.98 to 1.03 times as long as with `nccl`, depending on which gradients share a bucket. The planner cannot
predict that, because it does not know the backward pass."""
_BUCKET_MIB, _PYTORCH_BUCKET_MIB = 100, 25
"""Bucket sizes. A GPT's step took 2% less with buckets of 100 MiB than with PyTorch's 25, and no less with 400."""
_MIN_BUCKETS = 8
"""A smaller model has 8 buckets, or fewer of 25 MiB, so that most of its averaging overlaps the backward pass."""
_DDP_DECIDES = ("late", "resident", "ahead", "unsharded")


def replicate(
    module: nn.Module, *, method: str = "auto", key: str = "ddp", process_group: dist.ProcessGroup | None = None, **options: Any
) -> DistributedDataParallel:
    """Wrap a module in DistributedDataParallel with faster settings, and register weft's hook.

    A module with DTensors, of tensor parallelism, needs device_mesh=mesh["dp"], the other dimension of its mesh.

    Gradients are views of their buckets (`gradient_as_bucket_view`), so they are not copied there and back. Calling `detach_()`
    on such a gradient raises an error. A bucket holds 100 MiB, or an eighth of all gradients if that is less, but at least
    PyTorch's 25 MiB.

    Args:
        module: a module on its device that is not wrapped yet.
        method: the schedule, as `ddp` takes it.
        key: names this model in weft.concurrent_choices.
        process_group: the ranks that average. Default: the default group, or that of device_mesh.
        options: arguments of DistributedDataParallel. They override these settings.

    Raises ValueError for a DistributedDataParallel, for DTensors without such a mesh and for an unknown method, and any error
    of DistributedDataParallel.
    """
    if isinstance(module, DistributedDataParallel):
        raise ValueError("module is a DistributedDataParallel already; give the module in it, or call weft.hooks.ddp on it")
    _check_dtensors(module, options.get("device_mesh"))
    model = DistributedDataParallel(module, process_group=process_group, **settings(module) | options)
    ddp(model, method=method, key=key)
    return model


def _check_dtensors(module: nn.Module, mesh: Any) -> None:
    """Raise ValueError for DTensors that DistributedDataParallel cannot put into buckets of plain memory.

    With a part of a larger mesh it takes each rank's part of a DTensor. DTensors that it is set to ignore are allowed.
    """
    if isinstance(mesh, DeviceMesh) and is_part_of_a_mesh(mesh):
        return
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and name not in ignored:
            raise ValueError(
                f"module has DTensors ({name}); for tensor and data parallelism pass device_mesh=mesh['dp'], the other "
                "dimension of the mesh on which they are, or use fully_shard over it"
            )


def settings(module: nn.Module) -> dict[str, Any]:
    """Return the arguments of DistributedDataParallel that `replicate` sets."""
    parts = (each.to_local() if isinstance(each, DTensor) else each for each in module.parameters() if each.requires_grad)
    trained = sum(each.numel() * each.element_size() for each in parts)
    bucket_mib = max(_PYTORCH_BUCKET_MIB, min(_BUCKET_MIB, (trained >> 20) // _MIN_BUCKETS))
    return {"bucket_cap_mb": bucket_mib, "gradient_as_bucket_view": True}


def ddp(model: DistributedDataParallel, *, method: str = "auto", key: str = "ddp") -> "Averaging":
    """Let weft average the model's gradients. Call it once for each model, before the first backward pass.

    This replaces the model's own averaging. The gradients are the same, except that copy engines add in another order.

    Args:
        model: a DistributedDataParallel.
        method: "auto", with which the planner chooses among METHODS, or the name of a schedule: sequential, nccl or
            copy_engine, with any of +priority, +pull, +ctas=N and +left=N. +left=N leaves N SMs free from the first bucket of
            a backward pass to the last.
        key: names this model in weft.concurrent_choices.

    Printing the returned object shows the schedule of each bucket. Its `method` is the schedule that steps run.
    The model's first step always uses NCCL on a second stream. DistributedDataParallel then has all gradients in one bucket,
    for which copy engines would need memory that no later bucket needs.
    Raises ValueError for another kind of model, or a method that a hook does not support.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"model is a {type(model).__name__}; wrap it in torch.nn.parallel.DistributedDataParallel first")
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError("model has mixed_precision, which averages gradients by a hook of its own; use torch.autocast instead")
    if getattr(model, "_comm_hooks", ()):
        raise ValueError("model has a communication hook; register one a model")
    method = check_method(method, plain="nccl", without=_DDP_DECIDES, like=METHODS)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    others = sorted({str(parameter.dtype) for parameter in trained if parameter.dtype not in DTYPES})
    if method != "auto" and parse(method).transport == "copy_engine" and others:
        raise ValueError(
            f"method is {method!r}, but gradients are {', '.join(others)}; copy engines sum {', '.join(DTYPES.values())}; "
            "use nccl"
        )
    group = model.process_group
    caches, device = get_caches(GROUPS.state(resolve_group(group)[0])), next(model.parameters()).device
    probe = AllReduce(torch.zeros(1, device=device), group)
    if method == "auto":
        problem = ConcurrentProblem(
            collectives=(_full_bucket(model, caches),), world_size=group.size(), nodes=caches.list_nodes(group.size())
        )
        able = caches.get_executor(device).abilities((probe,))
        choice = planned(key, problem, device, able, METHODS)
    else:
        choice = ConcurrentChoice(key=key, method=method, note="the caller chose it")
    averaging = Averaging(caches, choice, device, group)
    averaging.use_method(choice.method)
    caches.add_hook(choice)
    model.register_comm_hook(averaging, _average_bucket)
    return averaging


def _full_bucket(model: DistributedDataParallel, caches: GroupCaches) -> CollectiveProblem | OpaqueCollective:
    """Return the problem of averaging one full bucket."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    largest = max(trained, key=torch.Tensor.numel)
    if largest.dtype not in DTYPES:
        return OpaqueCollective(name=f"all_reduce of {largest.dtype}")
    nbytes = min(model.bucket_bytes_cap, sum(each.numel() * each.element_size() for each in trained))
    size = model.process_group.size()
    return CollectiveProblem(
        op="all_reduce",
        m=max(1, nbytes // largest.element_size()),
        world_size=size,
        dtype=DTYPES[largest.dtype],  # type: ignore[arg-type]
        reduce_op="avg",
        nodes=caches.list_nodes(size),
    )


class Averaging:
    """Averaging is the state of the hook that `ddp` registers on one model.

    A step begins with bucket 0, whose gradients are ready first. With +left=N, the backward pass leaves N SMs free from its
    first bucket to its last. That limit belongs to autograd's thread, which calls the hook for both buckets. If a backward pass
    raises an error in between, the next one removes the limit. No computation runs concurrently with the last bucket, so that
    bucket uses `_last_bucket_method`, which is the method without +ctas.
    """

    def __init__(self, caches: GroupCaches, choice: ConcurrentChoice, device: torch.device, group: dist.ProcessGroup) -> None:
        self.choice, self.group = choice, group
        self._caches, self._executor = caches, caches.get_executor(device)
        self._bucket_method = self._last_bucket_method = str(PLAIN)
        self._limits = self._program(self._bucket_method)
        self._steps = 0
        self._sm_limit = ExitStack()
        self._buckets: dict[int, tuple[str, str]] = {}

    def _program(self, method: str) -> Program:
        """Return the program of a method. It has the method's limits on the backward pass."""
        return self._caches.find_program(method, (AllReduce(torch.zeros(1, device=self._executor.device), self.group),))

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the average of one bucket, and return a future of its gradients."""
        if bucket.index() == 0:
            self._begin_step()
        gradients, method = bucket.buffer(), self._bucket_method if self._steps > 1 else str(PLAIN)
        if bucket.is_last():
            self._sm_limit.close()
            method = self._last_bucket_method if self._steps > 1 else method
        if gradients.layout != torch.strided:
            self._buckets[bucket.index()] = f"{gradients.numel()} elements, sparse", str(PLAIN)
            gradients.div_(self.group.size())
            return self._executor.sum_sparse(gradients, self.group)  # NCCL or gloo: each rank has different rows
        mean = AllReduce(gradients, self.group, reduction="avg")
        self._buckets[bucket.index()] = mean.describe(), method
        return self._executor.future(self._caches.find_program(method, (mean,)), mean, gradients)

    @property
    def method(self) -> str:
        """Return the name of the schedule that steps run."""
        return self.choice.method

    def use_method(self, method: str) -> None:
        """Average by another method from the next step on. Collective. Raises ValueError if the device does not support it."""
        program = self._program(method)
        self._executor.prepare(program, (AllReduce(torch.zeros(1, device=self._executor.device), self.group),))
        self._bucket_method, self._last_bucket_method, self._limits = method, str(replace(parse(method), ctas=0)), program

    def _begin_step(self) -> None:
        """Count a step, and set the limits of its backward pass."""
        self._steps += 1
        if self._steps < 3:  # DistributedDataParallel rebuilds its buckets after the first step
            self._buckets.clear()
        self._sm_limit.close()
        if self._steps > 1:
            self._sm_limit.enter_context(self._executor.limit_computation(self._limits))

    def __str__(self) -> str:
        title = f"weft.hooks.ddp averages gradients bucket by bucket among {self.group.size()} ranks. {self.choice}"
        lines = (f"bucket {i}: {what}, {method}" for i, (what, method) in sorted(self._buckets.items()))
        return "\n  ".join([title, *lines])


def _average_bucket(averaging: Averaging, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket. This is the communication hook that DistributedDataParallel calls."""
    return averaging.average(bucket)


UNSHARDED = "nccl+unsharded"
"""auto uses this if memory has room for all parameters: they are gathered once a step instead of twice."""
_SET_BY_FSDP = ("late", "pull", "left", "resident", "priority", "ctas")
_EXAMPLES = ("nccl", "nccl+ahead=1", UNSHARDED)


def fsdp(
    model: nn.Module,
    *,
    method: str = "nccl",
    group: dist.ProcessGroup | None = None,
    key: str = "fsdp",
    spare_bytes: int = 0,
) -> ConcurrentChoice:
    """Set when a model that uses fully_shard gathers its parameters. Call it once, before the first step.

    Args:
        model: a model in which fully_shard was applied to at least one module.
        method: "nccl", with any of +ahead=N (gather N groups ahead in the forward pass) and +unsharded (parameters stay
            unsharded after the forward pass, so they are gathered once a step instead of twice), or "auto".
            "auto" is nccl+unsharded if all parameters fit into spare_bytes, and nccl otherwise.
        group: the ranks that must use the same schedule. Default: the default group.
        key: names this model in weft.concurrent_choices.
        spare_bytes: how much more of this device's memory gathered parameters may take than with fully_shard alone. It must be
            the same on every rank.

    The `method` of the returned choice is the schedule that steps run. fully_shard may use any mixed precision,
    reshard_after_forward and CPU offloading. Raises ValueError for a model without fully_shard, on the meta device, or with
    this hook already, and for an unknown method. Raises RankMismatch if ranks use different methods.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    parameters = [each for each in model.parameters() if isinstance(each, DTensor)]
    if not sharded or not parameters:
        raise ValueError("model has no module of fully_shard's; call torch.distributed.fsdp.fully_shard on it first")
    if parameters[0].device.type == "meta":
        raise ValueError("model is on the meta device; materialise it first")
    method = check_method(method, plain="nccl", without=_SET_BY_FSDP, like=_EXAMPLES)
    if method != "auto" and parse(method).transport != "nccl":
        raise ValueError(
            f"method is {method!r}, but fully_shard overlaps by itself, by NCCL; use auto, or one like {', '.join(_EXAMPLES)}"
        )
    if any(isinstance(getattr(hook, "__self__", None), _ForwardHooks) for hook in model._forward_pre_hooks.values()):
        raise ValueError("model has this hook already; call weft.hooks.fsdp once a model")
    choice = ConcurrentChoice(key=key, method=method, note="the caller chose it")
    if method == "auto":
        nbytes = sum(each.numel() * each.element_size() for each in parameters)
        fits = nbytes <= spare_bytes
        why = f"all parameters take {nbytes} bytes, and spare_bytes is {spare_bytes}"
        choice = ConcurrentChoice(key=key, method=UNSHARDED if fits else str(PLAIN), note=why)
    get_caches(GROUPS.state(resolve_group(group)[0])).add_hook(choice)
    chosen = parse(choice.method)
    if chosen != PLAIN:
        steps = _ForwardHooks(chosen, GatherOrder(sharded))
        model.register_forward_pre_hook(steps.forward, prepend=True)
        for module in sharded:
            before_registered_methods(module, steps.enter)
    return choice


class _ForwardHooks:
    """_ForwardHooks sets the gather method at the start of each forward pass.

    A forward pass without gradients uses fully_shard's own method. Parameters that stay gathered after it would be stale once
    the optimizer has changed them. A pass may also begin in another method of a module, which torch's
    register_fsdp_forward_method registers. Forward hooks do not see such calls, so `enter` handles them.
    """

    def __init__(self, method: Method, gathered: "GatherOrder") -> None:
        self._method, self._gathered = method, gathered

    def forward(self, module: nn.Module, args: Any) -> None:
        self._gathered.use_method(self._method if torch.is_grad_enabled() else PLAIN)

    def enter(self, module: Any) -> None:
        """Prepare a forward pass before a registered method of a module. Do nothing while a backward pass recomputes it."""
        if backward_pass() != NO_BACKWARD:
            return
        if not forward_has_begun(module):
            self.forward(module, ())
        self._gathered.record_module(module)


class GatherOrder:
    """A GatherOrder has the sharded modules of one model, in the order in which the first forward pass runs them."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._order: dict[Any, None] = {}
        self._recording_hooks = [module.register_forward_pre_hook(self._before) for module in modules]
        self._resharding: tuple[Any, ...] = ()
        self._prefetched: dict[Any, list[Any]] = {}
        """The groups that each group prefetches by the caller's own settings, in the order of the forward pass."""
        self._applied: tuple[int, bool] = (0, False)

    def _before(self, module: Any, args: Any) -> None:
        self.record_module(module)

    def record_module(self, module: Any) -> None:
        """Record that a module runs, in the first forward pass. Its later runs in that pass are ignored."""
        if self._recording_hooks:
            self._order.setdefault(module)

    def use_method(self, method: Method) -> None:
        """Use a method from this forward pass on. The first pass changes nothing, because the order is not known yet."""
        if self._order and self._recording_hooks:
            self._end_recording()
        if not self._recording_hooks and self._applied != (method.ahead, method.unsharded):
            self._apply(method)

    def _end_recording(self) -> None:
        for hook in self._recording_hooks:
            hook.remove()
        self._recording_hooks = []
        self._resharding = tuple(module for module in self._order if _reshards_after_forward(module))
        states = dict.fromkeys(state_of(module) for module in self._order)  # modules of one unit share a state
        self._prefetched = {state: prefetched(state) for state in states}

    def _apply(self, method: Method) -> None:
        order = list(self._prefetched)
        if method.ahead != self._applied[0]:
            for at, state in enumerate(order):
                ahead = order[at + 1 : at + 1 + method.ahead]
                set_prefetched(state, ahead if method.ahead else self._prefetched[state])
        for module in self._resharding:
            module.set_reshard_after_forward(not method.unsharded, recurse=False)
        self._applied = method.ahead, method.unsharded


def _reshards_after_forward(module: FSDPModule) -> bool:
    """Return whether a module's parameters are resharded after its forward pass, to the shards that they had before."""
    groups = param_groups(module)
    return bool(groups) and all(map(reshards_after_forward, groups))


LEAST_BYTES = 256 << 20
"""The least size of a gathered unit. With blocks of 61 MB a GPT's step took 0.66 of its time with units of 4 blocks, and 0.5
with units of 12."""
LEAST_UNITS = 4
"""A smaller model still has 4 units, so that one unit can be computed while the next one is gathered."""


def units(modules: Iterable[nn.Module], *, least_bytes: int = LEAST_BYTES) -> list[list[nn.Module]]:
    """Group modules that are computed one after the other into lists that fully_shard takes.

    Write `for unit in units(model.blocks): fully_shard(unit)` instead of `for block in model.blocks: fully_shard(block)`. Each
    unit has about least_bytes of parameters, and at least one module. There are at least LEAST_UNITS units if there are as many
    modules. Blocks of least_bytes or more stay alone. One unit is computed while the next one is gathered, so a step needs
    memory for two.

    Args:
        modules: the modules in the order in which they are computed, such as a model's layers.
        least_bytes: the least size of a unit: this rank's share under other parallelism, in the parameters' current dtype.

    Raises ValueError if modules is empty or has anything but modules, or if least_bytes is below 1.
    """
    require("modules", modules, Iterable, "give modules that are computed one after the other, as model.blocks has them")
    found = [*modules]
    for at, module in enumerate(found):
        if not isinstance(module, nn.Module):
            raise ValueError(f"modules[{at}] is a {type(module).__name__}; give modules, as model.blocks has them")
    if not found:
        raise ValueError("modules is empty; give those that are computed one after the other, as model.blocks has them")
    if least_bytes < 1:
        raise ValueError(f"least_bytes is {least_bytes}; it must be at least 1")
    # Only the parts of parameters count that other kinds of parallelism leave to this rank.
    parts = [[each.to_local() if isinstance(each, DTensor) else each for each in module.parameters()] for module in found]
    sizes = [sum(part.numel() * part.element_size() for part in own) for own in parts]
    places = _places(sizes, max(LEAST_UNITS, sum(sizes) // least_bytes))
    return [[module for _, module in unit] for _, unit in groupby(zip(places, found, strict=True), key=lambda each: each[0])]


def _places(sizes: Sequence[int], count: int) -> list[int]:
    """Return the unit of each module: of `count` equal units, the one that contains the module's middle byte."""
    ends = accumulate(sizes)
    return [int((end - size / 2) * count / max(1, sum(sizes))) for end, size in zip(ends, sizes, strict=True)]
