"""Gradients of DistributedDataParallel, averaged bucket by bucket beside the backward pass.

autograd's stream            collectives' stream
... gradients of bucket 0
fork  -------------------->  average bucket 0
... gradients of bucket 1
fork  -------------------->  average bucket 1
end of backward: join  <---
"""

# Annotations are not put off here: DistributedDataParallel compares those of its hook with its own types.

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from weft.core.concurrent import ConcurrentProblem, OpaqueCollective
from weft.core.problem import CollectiveProblem
from weft.ops.common import DTYPES, group_of
from weft.overlap.concurrent.calls import Calls, calls_of
from weft.overlap.concurrent.choice import Chooser, ConcurrentChoice
from weft.overlap.concurrent.collectives import AllReduce
from weft.overlap.concurrent.executor import Executor, HostExecutor
from weft.overlap.concurrent.program import Program
from weft.overlap.hooks.ways import named
from weft.runtime.groups import GROUPS
from weft.schedules.concurrent import PLAIN, parse

WAYS = ("vendor", "sequential", "vendor+priority", "vendor+priority+ctas=16")
"""What the planner chooses among. On 2 x H200 a GPT's steps by copy engines, or with SMs left free, took 0.98 to 1.03 times as
long as with vendor, depending on how gradients lie in buckets. The planner cannot tell: it does not know the backward pass."""
_BUCKET_MIB, _PYTORCHS_MIB = 100, 25
"""Of gradients that are averaged together. A GPT's step took 2% less with 100 than with PyTorch's 25, and no less with 400."""
_BUCKETS = 8
"""At least, so that most of a smaller model's gradients, too, are averaged beside the rest of the backward pass."""
_DDP_DECIDES = ("late", "resident", "ahead", "keep")


def replicate(
    module: nn.Module, *, way: str = "auto", key: str = "ddp", process_group: dist.ProcessGroup | None = None, **options: Any
) -> DistributedDataParallel:
    """DistributedDataParallel of a module, with settings by which a step takes less, and with weft's hook.

    Gradients lie in the buckets in which they are averaged, so that none is copied there and back; `detach_()` of such a one
    raises. Buckets have 100 MiB, or an eighth of all gradients where that is less, but not less than PyTorch's 25.

    Args:
        module: on its device, and not in a DistributedDataParallel yet.
        way: as `ddp` takes it.
        key: names this model in weft.concurrent_choices.
        process_group: the ranks that average. Default: the default group.
        options: of DistributedDataParallel's, also in the place of these settings.

    Raises ValueError for a DistributedDataParallel, DTensors, or another way, and what DistributedDataParallel raises.
    """
    if isinstance(module, DistributedDataParallel):
        raise ValueError("module is a DistributedDataParallel already; give the module in it, or call weft.hooks.ddp on it")
    _check_plain(module)
    model = DistributedDataParallel(module, process_group=process_group, **settings(module) | options)
    ddp(model, way=way, key=key)
    return model


def _check_plain(module: nn.Module) -> None:
    """Raises ValueError for DTensors, but for those that DistributedDataParallel is told to leave alone: it lays gradients in
    buckets of plain memory."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and name not in ignored:
            raise ValueError(
                f"module has DTensors ({name}), which DistributedDataParallel does not take; for tensor and data parallelism "
                "use fully_shard, over the mesh's other dimension"
            )


def settings(module: nn.Module) -> dict[str, Any]:
    """Of DistributedDataParallel's, what `replicate` says."""
    trained = sum(each.numel() * each.element_size() for each in module.parameters() if each.requires_grad)
    bucket_mib = max(_PYTORCHS_MIB, min(_BUCKET_MIB, (trained >> 20) // _BUCKETS))
    return {"bucket_cap_mb": bucket_mib, "gradient_as_bucket_view": True}


def ddp(model: DistributedDataParallel, *, way: str = "auto", key: str = "ddp") -> "Averaging":
    """Average the model's gradients by weft. Once a model, before its first backward pass.

    Replaces the model's own averaging; the gradients are the same, but for the order in which copy engines' sums are made.

    Args:
        model: a DistributedDataParallel.
        way: auto, for which the planner chooses among WAYS, or a name: sequential, vendor, copy_engine, with +priority, +pull,
            +ctas=N, and +left=N, which leaves SMs free from the first bucket of a backward pass to the last.
        key: names this model in weft.concurrent_choices.

    What is returned prints what the hook does and the way of each bucket; `way` is the way that steps take.
    The model's first step is NCCL's, two plain streams, whatever the way: DistributedDataParallel then has all gradients in one
    bucket, which would ask copy engines for room that no later one needs.
    Raises ValueError for another model, or a way that a hook cannot take.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"model is a {type(model).__name__}; wrap it in torch.nn.parallel.DistributedDataParallel first")
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError("model has mixed_precision, which averages gradients by a hook of its own; use torch.autocast instead")
    if getattr(model, "_comm_hooks", ()):
        raise ValueError("model has a communication hook; register one a model")
    way = named(way, plain="vendor", without=_DDP_DECIDES, like=WAYS)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    others = sorted({str(parameter.dtype) for parameter in trained if parameter.dtype not in DTYPES})
    if way != "auto" and parse(way).transport == "copy_engine" and others:
        raise ValueError(
            f"way is {way!r}, but gradients are {', '.join(others)}; copy engines sum {', '.join(DTYPES.values())}; use vendor"
        )
    group = model.process_group
    calls, device = calls_of(GROUPS.state(group_of(group)[0])), next(model.parameters()).device
    probe = AllReduce(torch.zeros(1, device=device), group)
    if way == "auto":
        problem = ConcurrentProblem(
            collectives=(_bucket(model, calls),), world_size=group.size(), nodes=calls.nodes(group.size())
        )
        able = calls.executor(device).abilities((probe,))
        choice = Chooser(key=key, problem=problem, device=device, abilities=able).planned(WAYS)
    else:
        choice = ConcurrentChoice(key=key, way=way, note="it was given")
    averaging = Averaging(calls, choice, device, group)
    averaging.take(choice.way)
    calls.add_hook(choice)
    model.register_comm_hook(averaging, _average)
    return averaging


def _bucket(model: DistributedDataParallel, calls: Calls) -> CollectiveProblem | OpaqueCollective:
    """The average of one full bucket."""
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
        nodes=calls.nodes(size),
    )


class Averaging:
    """A model's steps, whose gradients weft averages bucket by bucket. A step begins with the bucket whose gradients are ready
    first. Made by `ddp`.

    left: SMs that the backward pass leaves free, from its first bucket to its last, in autograd's thread, which has both. A
    pass that raised in between is made up for by the next one. Beside the last bucket nothing computes: it has all blocks.
    """

    def __init__(self, calls: Calls, choice: ConcurrentChoice, device: torch.device, group: dist.ProcessGroup) -> None:
        self.choice, self.group = choice, group
        self._calls, self._executor = calls, calls.executor(device)
        self._spec = self._last = str(PLAIN)
        self._limits = self._of(self._spec)
        self._begun = 0
        self._left = ExitStack()
        self._buckets: dict[int, tuple[str, str]] = {}

    def _of(self, spec: str) -> Program:
        """What a schedule says of the backward pass."""
        return self._calls.program(spec, (AllReduce(torch.zeros(1, device=self._executor.device), self.group),))

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._begin()
        gradients, spec = bucket.buffer(), self._spec if self._begun > 1 else str(PLAIN)
        if bucket.is_last():
            self._left.close()
            spec = self._last if self._begun > 1 else spec
        if gradients.layout != torch.strided:
            self._buckets[bucket.index()] = f"{gradients.numel()} elements, sparse", str(PLAIN)
            return _sparse_average(gradients, self.group, self._executor)
        mean = AllReduce(gradients, self.group, reduction="avg")
        self._buckets[bucket.index()] = mean.describe(), spec
        return self._executor.future(self._calls.program(spec, (mean,)), mean, gradients)

    @property
    def way(self) -> str:
        """What steps run."""
        return self.choice.way

    def take(self, way: str) -> None:
        """Let steps take another way from the next one on. Collective. Raises ValueError for what the device cannot do."""
        program = self._of(way)
        self._executor.prepare(program, (AllReduce(torch.zeros(1, device=self._executor.device), self.group),))
        self._spec, self._last, self._limits = way, str(replace(parse(way), ctas=0)), program

    def _begin(self) -> None:
        self._begun += 1
        if self._begun < 3:  # DistributedDataParallel lays its buckets out anew after the first step
            self._buckets.clear()
        self._left.close()
        if self._begun > 1:
            self._left.enter_context(self._executor.limits(self._limits))

    def __repr__(self) -> str:
        title = f"weft.hooks.ddp: gradients are averaged bucket by bucket among {self.group.size()} ranks; "
        title += f"{self.choice.key}: {self.way} ({self.choice.why})"
        lines = (f"bucket {i}: {what}, {spec}" for i, (what, spec) in sorted(self._buckets.items()))
        return "\n  ".join([title, *lines])


def _sparse_average(
    gradients: torch.Tensor, group: dist.ProcessGroup, executor: Executor
) -> torch.futures.Future[torch.Tensor]:
    """By the process group, whatever the way: its rows are others on each rank. On CPUs the wait is bounded."""
    gradients.div_(group.size())
    if isinstance(executor, HostExecutor):
        state = GROUPS.state(group.group_name)
        what = f"all_reduce of sparse gradients, {list(gradients.shape)}"
        wait = state.begun(what, lambda own: dist.all_reduce(gradients, group=own, async_op=True))
        return executor.ending(wait, gradients)
    work = dist.all_reduce(gradients, group=group, async_op=True)
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return averaged


def _average(averaging: Averaging, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook."""
    return averaging.average(bucket)
