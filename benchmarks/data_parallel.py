"""What does a data-parallel training step of a 1.5 B-parameter GPT gain, under DistributedDataParallel and fully_shard?

The model is examples/train_gpt.py's, of GPT-2 XL's size (48 layers, width 1600, 25 heads), in bfloat16, with activations of a
batch of 4 x 1024 tokens a GPU; a step is forward, backward and SGD.

    computation   one rank's step without any data parallelism: nothing can be faster
    silent        PyTorch's data parallelism, whose collectives move nothing: its own copies, hooks and host time remain. What
                  it takes less than stock is all that any overlap of its collectives could win
    stock         PyTorch as it is; the other peers: with other settings of its own
    methods       weft's hook with one method for all steps; `auto`: the planner's choice

Kinds: ddp; replicate, which is weft's settings of DistributedDataParallel's, and its hook; fsdp; units, where weft says which
blocks fully_shard takes together; room, where there is memory to keep all parameters gathered, too. Stock is
DistributedDataParallel and fully_shard of each block, as in PyTorch's tutorials, for all of them.

Protocol: under DistributedDataParallel weft's methods take turns on one model; all others have models of their own.
After WARM_UP steps of each, methods take turns round by round, in another order each round: a step that is not counted, then
STEPS that are, timed as a whole between two GPU events. A round's time is the slowest rank's; medians. gain is the median over
rounds of stock over auto in the same round. phases are the parts of a step on the GPU and on the host, of rank 0, in ms: where
the host takes as long as the GPU, no overlap on the GPU helps.

Traps: a step may be bound by the host (fully_shard of many small parameters is). Streams of several models share hardware
queues: on models of their own weft's nccl took 6% longer than stock, which it is. What moves nothing leaves other ranks'
parameters in the order of memory.

    torchrun --nproc-per-node 2 -m benchmarks.data_parallel --json benchmarks/results/h200x2/data_parallel.jsonl
    torchrun --nproc-per-node 4 -m benchmarks.data_parallel --kinds fsdp --batch 16 --methods nccl+ahead=1,nccl+unsharded
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.nn.parallel import DistributedDataParallel

import weft
from benchmarks import measure
from benchmarks.measure import alarm, append, parser, release, row, say, start, stop, together
from benchmarks.rows import Row
from weft.overlap.concurrent.choice import ConcurrentChoice
from weft.overlap.hooks import METHODS as DDP_METHODS
from weft.overlap.hooks import Averaging, settings

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train_gpt import Gpt, replicated, sharded

ALARM_S = 40
FSDP_METHODS = ("nccl", "nccl+ahead=1", "nccl+ahead=2")
UNSHARDED = ("nccl+unsharded", "nccl+unsharded+ahead=1")
STEPS, WARM_UP, ROUNDS = 4, 2, 3
LENGTH, VOCABULARY = 1024, 50304
PARTS = ("forward", "backward", "update")
Wrap = Callable[[Gpt], nn.Module]


def bucket_views(model: Gpt) -> nn.Module:
    """Gradients are views of the buckets, so that none is copied there."""
    return DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)


def larger_buckets(model: Gpt) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=100)


def set_by_weft(model: Gpt) -> nn.Module:
    """What weft.hooks.replicate has before it hooks."""
    return DistributedDataParallel(model, **settings(model))


def sharded_pairs(model: Gpt) -> nn.Module:
    """Two blocks are gathered and scattered together."""
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    for pair in zip(model.blocks[::2], model.blocks[1::2], strict=True):
        fully_shard(list(pair), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_units(model: Gpt) -> nn.Module:
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    for unit in weft.overlap.hooks.units(model.blocks):
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def silent_ddp(model: Gpt) -> nn.Module:
    wrapped = replicated(model)
    device = next(model.parameters()).device

    def nothing(state, bucket):  # no annotations: DistributedDataParallel would compare them with its own types
        done = torch.futures.Future(devices=[device])
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, nothing)
    return wrapped


class _Allocated:
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class SilentGather(_Allocated, AllGather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        """This rank's part is there already."""


class SilentScatter(_Allocated, ReduceScatter):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def silenced(wrap: Wrap, model: Gpt) -> nn.Module:
    """fully_shard whose collectives move nothing."""
    wrapped = wrap(model)
    for module in wrapped.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None:
            group._all_gather_comm, group._reduce_scatter_comm = SilentGather(), SilentScatter()
    return wrapped


@dataclass(frozen=True, kw_only=True)
class Kind:
    """wraps: methods with a model of their own, by name. wrap: what weft's hook goes on. hook: (model, method, key) -> an
    object with `method`. tried: methods. switched: whether these take turns on one model, by `Averaging.use_method`."""

    wraps: dict[str, Wrap]
    wrap: Wrap
    hook: Callable[..., Averaging | ConcurrentChoice]
    tried: tuple[str, ...]
    switched: bool = False


ROOM = 1 << 40
MOVED = ("nccl+priority+ctas=8+left=8", "copy_engine+priority+pull+ctas=32")
"""Methods of weft.hooks.ddp that are measured in addition to those that auto chooses among."""
SHARDED: dict[str, Wrap] = {"stock": sharded, "silent": partial(silenced, sharded)}
UNITS: dict[str, Wrap] = {"stock": sharded, "silent": partial(silenced, sharded_units)}
KINDS = {
    "ddp": Kind(
        wraps={
            "stock": replicated,
            "silent": silent_ddp,
            "stock, bucket views": bucket_views,
            "stock, 100 MB buckets": larger_buckets,
        },
        wrap=replicated,
        hook=weft.hooks.ddp,
        tried=DDP_METHODS + MOVED,
        switched=True,
    ),
    "replicate": Kind(
        wraps={"stock": replicated, "silent": silent_ddp},
        wrap=set_by_weft,
        hook=weft.hooks.ddp,
        tried=DDP_METHODS + MOVED,
        switched=True,
    ),
    "fsdp": Kind(
        wraps={**SHARDED, "stock, pairs of blocks": sharded_pairs}, wrap=sharded, hook=weft.hooks.fsdp, tried=FSDP_METHODS
    ),
    "units": Kind(wraps=UNITS, wrap=sharded_units, hook=weft.hooks.fsdp, tried=FSDP_METHODS),
    "room": Kind(
        wraps=UNITS, wrap=sharded_units, hook=partial(weft.hooks.fsdp, spare_bytes=ROOM), tried=FSDP_METHODS + UNSHARDED
    ),
}


class Training:
    """One model, and its step. hook: weft's, once it has one."""

    hook: Averaging | ConcurrentChoice

    def __init__(self, wrap: Wrap, arguments: Namespace) -> None:
        torch.manual_seed(0)
        sizes = {"layers": arguments.layers, "width": arguments.width, "heads": arguments.heads}
        with torch.device("cuda"):
            model = Gpt(**sizes, length=LENGTH, vocabulary=VOCABULARY).to(torch.bfloat16)
            self.text = torch.randint(VOCABULARY, (arguments.batch, LENGTH + 1))
        self.model = wrap(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, mark: Callable[[], object] = lambda: None) -> None:
        """mark: called at the begin, and after each part."""
        mark()
        loss = self.model(self.text)
        mark()
        loss.backward()
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            alarm()


Method = Callable[[], Training]
"""What is to take steps now, set to what the method says."""


class Marks:
    """When the GPU and the host came somewhere."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []
        self.host_s: list[float] = []

    def __call__(self) -> None:
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()
        self.host_s.append(time.perf_counter())

    def parts_ms(self) -> dict[str, tuple[float, float]]:
        """Of each part of a step what it takes on the GPU and on the host, medians over steps."""
        gpu = [before.elapsed_time(after) for before, after in pairwise(self.events)]
        host = [1e3 * (after - before) for before, after in pairwise(self.host_s)]
        # Between the last mark of a step and the first of the next nothing happens.
        return {
            part: (round(statistics.median(gpu[at::4]), 2), round(statistics.median(host[at::4]), 2))
            for at, part in enumerate(PARTS)
        }


def timed(method: Method) -> tuple[float, Marks]:
    """A step's time in us on the slowest rank. Collective."""
    training = method()
    torch.cuda.synchronize()
    dist.barrier()
    training.step()
    marks = Marks()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(STEPS):
        training.step(marks)
    end.record()
    torch.cuda.synchronize()
    us = torch.tensor(1e3 * begin.elapsed_time(end) / STEPS, dtype=torch.float64)
    dist.all_reduce(us, op=dist.ReduceOp.MAX)
    return float(us), marks


def models(kind: Kind, arguments: Namespace) -> dict[str, Method]:
    """All methods that have a model of their own."""
    made: dict[str, Method] = {}
    for name, wrap in ({"computation": lambda model: model} | kind.wraps).items():
        training = together(name, partial(Training, wrap, arguments))
        together(name, partial(training.steps, WARM_UP))
        made[name] = lambda training=training: training
    return made


def methods_of(kind: Kind, arguments: Namespace, key: str, methods: Sequence[str]) -> dict[str, Method]:
    """Return what to time for each of weft's methods. Raises an error on all ranks if one of them cannot run a method."""
    made: dict[str, Method] = {}
    training: Training | None = None
    for method in ("auto", *methods):
        if training is None or not kind.switched:
            training = together(method, partial(Training, kind.wrap, arguments))
            key_of = key if method == "auto" else method
            training.hook = together(method, partial(kind.hook, training.model, method=method, key=key_of))
        taken = training.hook.method if method == "auto" else method
        made[method] = partial(_taking, training, taken) if kind.switched else lambda training=training: training
        together(method, lambda made_of=made[method]: made_of().steps(WARM_UP))
    return made


def _taking(training: Training, method: str) -> Training:
    training.hook.use_method(method)
    return training


def settle_host() -> None:
    """What was made so far is looked at by no garbage collection of the steps that are timed."""
    gc.collect()
    gc.freeze()


def compared(name: str, arguments: Namespace) -> Row:
    """All methods of one kind."""
    kind = KINDS[name]
    names = arguments.methods.split(",") if arguments.methods else kind.tried
    methods = models(kind, arguments) | methods_of(kind, arguments, name, list(names))
    chosen = next(choice.method for choice in weft.concurrent_choices() if choice.key == name)
    settle_host()
    us: dict[str, list[float]] = {method: [] for method in methods}
    marks: dict[str, Marks] = {}
    for round_ in range(arguments.rounds):
        for method in random.Random(round_).sample(list(methods), len(methods)):
            alarm()
            taken, marks[method] = timed(methods[method])
            us[method].append(taken)
    case = f"gpt {arguments.layers} x {arguments.width}{'' if arguments.batch == 4 else f', batch {arguments.batch}'}"
    # The median of the rounds' ratios, which does not follow from the medians of both.
    gain = statistics.median(stock / auto for stock, auto in zip(us["stock"], us["auto"], strict=True))
    phases = {method: marks[method].parts_ms() for method in ("computation", "silent", "stock", "auto")}
    return row(
        bench="data_parallel",
        op=name,
        case=case,
        dtype="bfloat16",
        mode="eager",
        us={method_name(method): statistics.median(rounds) for method, rounds in us.items()},
        chosen=chosen,
        extra={"gain": gain, "phases": phases},
        arguments=arguments,
    )


def method_name(method: str) -> str:
    """As a row has it: `silent` is the stock model whose collectives are left out."""
    if method == "computation":
        return "computation/torch"
    return "computation/silent" if method == "silent" else f"{'peer' if method.startswith('stock') else 'weft'}/{method}"


def sentences(row: Row) -> str:
    """What a row says, in ms."""
    every = " ".join(f"{method}={us / 1e3:.1f}" for method, us in row.us.items())
    bound = row.us["peer/stock"] / row.us["computation/silent"]
    parts = "; ".join(f"{method} {phases}" for method, phases in row.extra["phases"].items())
    return (
        f"{row.op} {row.case}, ms a step: {every}\n  auto took {row.chosen}: {row.extra['gain']:.3f}x of stock, where no "
        f"communication at all would be {bound:.3f}x\n  (GPU, host) ms: {parts}"
    )


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS, modes="eager")
    options.add_argument("--kinds", default=",".join(KINDS), help="with commas (%(default)s)")
    options.add_argument("--methods", default="", help="of one kind, with commas; default: what auto tries")
    for name, default in (("layers", 48), ("width", 1600), ("heads", 25), ("batch", 4)):
        options.add_argument(f"--{name}", type=int, default=default)
    arguments = options.parse_args()
    measure.ALARM_S = ALARM_S
    start()
    for kind in arguments.kinds.split(","):
        line = compared(kind, arguments)
        append(arguments.json, line)
        say(sentences(line))
        gc.unfreeze()
        gc.collect()
        release()
    stop()


if __name__ == "__main__":
    main()
