"""A DistributedDataParallel hook that averages each bucket of gradients concurrently with the rest of the backward pass.

autograd's stream            collectives' stream
... gradients of bucket 0
fork  -------------------->  average bucket 0
... gradients of bucket 1
fork  -------------------->  average bucket 1
end of backward: join  <---
"""

# No `from __future__ import annotations`: DistributedDataParallel compares its hook's annotations with types, not strings.

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from weft.compat.dtensors import is_part_of_a_mesh
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
from weft.schedules.concurrent import PLAIN, parse


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
