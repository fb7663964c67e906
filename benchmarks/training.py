"""What does a training step gain, forward and backward, and how much of the exposed communication is hidden?

Layers (2) of Llama 3 8B and 70B, Qwen 3 32B and Mixtral 8x7B (decoder.py), with 2048 and 8192 tokens of the group in one
sequence; bfloat16, random weights, tensor and sequence parallel over all ranks. Mixtral's experts are spread over the ranks.
Their routing is drawn uniformly, and given, so that it is the same for all methods. With checkpointing, each layer is computed
again in its backward (torch.utils.checkpoint, use_reentrant=False).

Modes, and their methods:

    eager      torch's styles; weft's styles; by hand, as Megatron writes it (hand_decoder.py)
    compiled   torch's styles, also with async TP or with weft's pass; weft's styles; by hand with rotary positions and SwiGLU
               as kernels of Inductor's. Each layer is compiled by itself, inside of its checkpoint if there is one. A layer of
               Mixtral's has graph breaks where torch's host waits for numbers of rows

By hand, the backward gathers the inputs of QKV and of gate and up again, during the product for the input's gradient, and
reduce-scatters that gradient during the product for the weights' gradients. Its group has a stream of high priority, so that
collectives begin before matmuls that are enqueued after them (for which Megatron sets CUDA_DEVICE_MAX_CONNECTIONS=1). Norms'
gradients are summed at the end of a step, in one collective; for torch's styles, which leave them as addends, in the same way.
weft's styles sum them in the backward. torch has no style for experts: they are exchanged as by hand.

computation: the program by hand, of one rank, where what others would send lies there already; no group, no collective, and no
copy in its place. communication: all collectives of the program by hand, one after the other, and nothing else.

Protocol: measure.py's. Output, the input's gradient and all weights' gradients are compared with those of torch's styles, by
the norm of the difference over the norm (TOLERANCE), before anything is timed. All methods of a run take turns. A row has all
methods of a case, and in `extra`

    hidden             by each of weft's methods, the share of the exposed communication that it hides (training_table.py)
    step_bytes         what torch's allocator hands out in a step at most, beyond what is held before it, of the largest rank.
                       weft's symmetric buffers and NCCL's are not counted. Nothing on CPUs
    memory_over_hand   its ratio to the hand-written program of the same mode
    prediction         by mode, the step that weft.planner.plan_training predicts for all layers, in us: with weft, sequential
                       (torch's styles), and the computation alone. None without a profile of the machine. alone.py measures the
                       computation alone on one GPU

    torchrun --nproc-per-node 2 -m benchmarks.training --models llama3-8b --json benchmarks/results/h200x2/training.jsonl
    torchrun --nproc-per-node 2 -m benchmarks.training --models llama3-70b --tokens 8192 --modes eager --budget out/budget
    python -m benchmarks.training_table benchmarks/results/h200x2/training.jsonl

--budget times nothing: it writes traces of rank 0, of hand-written, weft and computation alone, and prints where the time of a
step goes, side by side (traces.py has the lines; python -m benchmarks.traces --budget 3 prints them again).

Estimated durations on 2 x H200, not measured: a case takes 20 s eager when schedules are known, and 60 s when weft tries them;
compiled adds 2 to 3 min the first time, mostly Inductor's, and 1 min from its cache. So --models ONE --modes eager is 4 cases
and 2 to 4 min, and --models ONE --tokens ONE --modes compiled is 2 cases and 4 to 7 min. Everything together takes about an
hour the first time. Cases of a run follow each other in one process, which frees their memory.
Traps: give WEFT_CACHE_DIR a folder, and run twice: what the first run chose is taken over. At 2048 tokens an eager step may be
bound by the host; host_us says. The rows of two runs, such as one a mode, did not take turns. On CPUs everything is tiny and in
float32, and only shows that it works.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import weft
from benchmarks import measure, traces
from benchmarks.by_hand import Link, NoLink, Plain, sum_gradients
from benchmarks.checked_options import count
from benchmarks.decoder import Decoder, Sizes, run_layers, torchs, wefts
from benchmarks.hand_decoder import HandDecoder
from benchmarks.host.clock import difference
from benchmarks.measure import ALONE, Work, WrongResult, parser, row, say, step_bytes, together, trial
from benchmarks.models import METHODS, compile_for, world
from benchmarks.rows import Row
from benchmarks.runner import run_parts
from benchmarks.training_table import BENCH, MODES, hidden, memory, summary
from weft.core.machine import Machine
from weft.core.problem import DType
from weft.planner import plan_training
from weft.planner.models import Model
from weft.runtime.choose import profile_for

Tensor = torch.Tensor
ROUNDS, REPEAT, ALARM_S = 9, 1, 280
"""Inductor compiles a method in one stage."""
TOLERANCE = 0.08
"""Of the norm. In bfloat16 the gradients of queries and keys, which are differences of close numbers, differ most."""
MODELS = {
    "llama3-8b": Sizes(hidden=4096, width=14336, heads=32),
    "llama3-70b": Sizes(),
    "qwen3-32b": Sizes(hidden=5120, width=25600, qk_norm=True),
    "mixtral-8x7b": Sizes(hidden=4096, width=14336, heads=32, experts=8),
}
TOKENS = {"cuda": "2048,8192", "cpu": "16,32"}
"""By device. Those of CPUs only show that the benchmark works."""
PROGRAMS = {"eager": ("torch", "weft"), "compiled": ("torch_compiled", "async_tp", "weft_compiled", "weft_pass")}
"""A mode's methods of benchmarks.models.METHODS."""
REFERENCE, COMMUNICATION = "sequential/torch", "communication/default"
CHECKPOINTING = {"off": False, "on": True}
STEPS = 3
"""Of a trace."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """tokens: of the group."""

    model: str
    sizes: Sizes
    tokens: int
    checkpointing: bool

    def __str__(self) -> str:
        name = f"{self.model} x {self.sizes.layers} layers, {self.tokens} tokens"
        return f"{name}, checkpointing" if self.checkpointing else name


def tiny(sizes: Sizes) -> Sizes:
    """The same layers, so small that CPUs compute them at once."""
    experts = min(sizes.experts, 4)
    return replace(sizes, hidden=64, width=96, heads=sizes.heads // 8, kv_heads=sizes.kv_heads // 4, head=16, experts=experts)


@dataclass(kw_only=True)
class Step:
    """One method's training step; a Work. called: makes hidden states after the last layer from those before the first.
    gradients: by name, those of a rank's parts of the weights, after a step."""

    called: Callable[[Tensor], Tensor]
    module: nn.Module
    gradients: Callable[[], Iterable[tuple[str, Tensor]]]
    x: Tensor
    grad: Tensor
    link: Link
    out: Tensor | None = None

    def __call__(self) -> Step:
        self.clear()
        out = self.called(self.x)
        out.backward(self.grad)  # type: ignore[no-untyped-call]
        addends = [grad for p in self.module.parameters() if p.dim() == 1 and (grad := _addend(p.grad)) is not None]
        if addends:
            sum_gradients(addends, self.link)
        self.out = out.detach()
        return self

    def clear(self) -> None:
        self.out = self.x.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None

    def outcome(self) -> dict[str, Tensor]:
        """Of the last step."""
        assert self.out is not None
        assert self.x.grad is not None
        return {"output": self.out, "input": self.x.grad, **dict(self.gradients())}


def _addend(grad: Tensor | None) -> Tensor | None:
    """This rank's part of a sum over ranks; None for a gradient that is the sum."""
    if not isinstance(grad, DTensor):
        return grad
    return grad.to_local() if grad.placements[0].is_partial() else None


class Bench:
    """A case's input and models. A compiled method shares its model with the eager one of the same styles."""

    def __init__(self, case: Case, device: str, capacity: float) -> None:
        self.case, self.device, self.capacity = case, device, capacity
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.mesh, self.link = world(device), Link.of(hand_group(device))
        torch.manual_seed(7)
        whole = (torch.randn(1, case.tokens, case.sizes.hidden, device=device, dtype=self.dtype) for _ in range(2))
        self.x, self.grad = (self._own(tensor, 1) for tensor in whole)
        self.x.requires_grad_()
        scores, index = torch.rand(case.tokens, max(2, case.sizes.experts), device=device).topk(case.sizes.top_k)
        self.index, self.weights = self._own(index, 0), self._own(scores / scores.sum(1, keepdim=True), 0)
        self._sharded: dict[str, Decoder] = {}

    def _own(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(self.link.ranks, dim)[self.link.rank].contiguous()

    def whole(self) -> Decoder:
        """The unsharded model, whose weights are the same on every rank and for every method."""
        torch.manual_seed(0)
        model = Decoder(self.case.sizes, positions=self.case.tokens, device=self.device, dtype=self.dtype)
        model.checkpointing = self.case.checkpointing
        if self.case.sizes.experts:
            model.route(self.index, self.weights)
        return model

    def sharded(self, kind: str) -> Decoder:
        if kind not in self._sharded:
            limits = {"capacity": self.capacity, "max_tokens": len(self.index)}
            sizes, model = self.case.sizes, self.whole()
            for layer in model.layers:
                makes = partial(wefts, limits=limits) if kind == "weft" else partial(torchs, link=self.link)
                parallelize_module(layer, self.mesh, makes(sizes, decode=False), src_data_rank=None)
            self._sharded[kind] = model
        return self._sharded[kind]

    def by_styles(self, name: str) -> Step:
        model = self.sharded("weft" if name in ("weft", "weft_compiled") else "torch")
        return self._step(self._called(name, model), model, partial(_local_gradients, model))

    def _called(self, name: str, model: Decoder) -> Callable[[Tensor], Tensor]:
        if name in PROGRAMS["eager"]:
            return model
        # Dynamo refuses a checkpoint around a layer of weft's, which stores products on modules: it is around compiled code.
        layers = [compile_for(name, layer, fullgraph=not self.case.sizes.experts) for layer in model.layers]
        return partial(run_layers, layers, self.case.checkpointing)

    def by_hand(self, link: Link, *, fused: bool) -> Step:
        model = HandDecoder(self.whole(), link, fused=fused)
        return self._step(model, model, model.gradients)

    def alone(self) -> NoLink:
        """A link without a group, with this case's rows of experts."""
        experts = self.case.sizes.experts
        routing = Plain(self.index, experts) if experts else None
        known = self.link.splits(routing.counts.view(self.link.ranks, -1)) if routing else None
        return NoLink(ranks=self.link.ranks, rank=self.link.rank, known=known)

    def _step(self, called: Any, module: nn.Module, gradients: Callable[[], Iterable[tuple[str, Tensor]]]) -> Step:
        link: Any = getattr(module, "link", self.link)
        return Step(called=called, module=module, gradients=gradients, x=self.x, grad=self.grad, link=link)

    def steps(self, modes: Sequence[str], methods: Sequence[str]) -> dict[str, Step]:
        """Everything that is timed but communication, by name."""
        made: dict[str, Step] = {}
        for mode in modes:
            made |= {METHODS[name]: self.by_styles(name) for name in PROGRAMS[mode] if name in methods}
            names, fused = MODES[mode], mode == "compiled"
            made[names.hand] = self.by_hand(self.link, fused=fused)
            made[names.computation] = self.by_hand(self.alone(), fused=fused)
        return made

    def communication(self, step: Step) -> Work:
        """All collectives of a step by hand."""
        self.link.made = []
        together("hand-written", step)
        work = self.link.replay(self.x.detach())
        self.link.made = None
        return work


@cache
def hand_group(device: str) -> dist.ProcessGroup | None:
    """NCCL's collectives on a stream of high priority; None for all ranks' own group."""
    if device == "cpu":
        return None
    return dist.new_group(backend="nccl", pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))


def _local_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        yield name, grad.to_local() if isinstance(grad, DTensor) else grad


def checks(expected: Mapping[str, Tensor], differences: dict[str, float]) -> Callable[[str, object], None]:
    """Compare a step's output and gradients. differences: is given the largest of each method. Raises WrongResult."""

    def check(name: str, result: object) -> None:
        if name.startswith(ALONE):
            return
        assert isinstance(result, Step)
        found = result.outcome()
        if set(found) != set(expected):
            raise WrongResult(f"{name} has {', '.join(sorted(set(found) ^ set(expected)))} in its place only")
        each = {what: difference(found[what], part) for what, part in expected.items()}
        wrong = {what: round(value, 4) for what, value in each.items() if not value <= TOLERANCE}
        if wrong:
            raise WrongResult(f"{name}: relative differences {wrong}; {TOLERANCE} is allowed")
        differences[name] = round(max(each.values()), 6)

    return check


def model_of(case: Case) -> Model:
    """The sizes of a case as weft's planner takes them."""
    sizes, experts = case.sizes, case.sizes.experts
    return Model(
        name=case.model,
        source="benchmarks.training",
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head,
        intermediate=0 if experts else sizes.width,
        qk_norm=sizes.qk_norm,
        experts=experts,
        experts_per_token=sizes.top_k if experts else 0,
        expert_intermediate=sizes.width if experts else 0,
    )


def predict_steps(case: Case, machine: Machine, ranks: int, dtype: DType) -> dict[str, dict[str, float]]:
    """By mode, the predicted computation_us, sequential_us and weft_us of all layers of a case."""
    plan = plan_training(model_of(case), machine, tokens=case.tokens, ranks=ranks, dtype=dtype)
    steps = {mode: plan.step(checkpointing=case.checkpointing, compiled=mode == "compiled") for mode in MODES}
    return {mode: {name: case.sizes.layers * us for name, us in asdict(step).items()} for mode, step in steps.items()}


def predictable(device: str, ranks: int) -> Machine | None:
    return profile_for(torch.device(device), ranks) if device == "cuda" else None


def measured(case: Case, arguments: argparse.Namespace) -> Iterator[Row]:
    """The row of a case, with all methods of the modes."""
    torch._dynamo.config.recompile_limit = 64  # all layers and methods of a case share the code of Layer.forward
    bench = Bench(case, arguments.device, arguments.capacity)
    modes = arguments.modes.split(",")
    expected = together(REFERENCE, lambda: {name: part.clone() for name, part in bench.by_styles("torch")().outcome().items()})
    bench.by_styles("torch").clear()
    steps = together(str(case), lambda: bench.steps(modes, arguments.methods))
    differences: dict[str, float] = {}
    check = checks(expected, differences)
    made = partial(row, op=BENCH, case=str(case), dtype=str(bench.dtype).removeprefix("torch."), arguments=arguments)
    made = partial(made, mode="eager", device=arguments.device)
    about = {"model": case.model, "tokens": case.tokens, "layers": case.sizes.layers, "checkpointing": case.checkpointing}
    if arguments.budget:
        for found in budgets(steps, modes, check, str(case), arguments.budget):
            yield made(bench="traces", extra={**about, **found})
        return
    hands = [MODES[mode].hand for mode in modes]
    works: dict[str, Work] = {**steps, COMMUNICATION: bench.communication(steps[hands[-1]])}
    needed = (*hands, *(MODES[mode].computation for mode in modes), COMMUNICATION)
    times, missing = trial(works, ["eager"], check=check, needed=needed, rounds=arguments.rounds, repeat=REPEAT)
    left = {name: step for name, step in steps.items() if name not in missing}
    choices = weft.choices(bench.mesh.get_group())
    machine, dtype = predictable(arguments.device, bench.link.ranks), "bfloat16" if bench.dtype == torch.bfloat16 else "float32"
    found = predict_steps(case, machine, bench.link.ranks, dtype) if machine else {}
    prediction = {mode: found[mode] for mode in modes} if machine else None
    extra = about | {
        "modes": modes,
        "difference": differences,
        "step_bytes": largest_bytes(left),
        "prediction": prediction,
        "choices": {str(choice.problem): choice.us or {choice.spec: None} for choice in choices},
    }
    found_row = made(bench=BENCH, times=times["eager"], missing=missing, extra=extra)
    yield with_figures(found_row)


def with_figures(found: Row) -> Row:
    """A row with the shares that follow from it, without those that are unknown."""
    methods = [name for mode in MODES.values() for name in mode.wefts if name in found.us]
    ratios = {name: round(memory(found, name), 4) for name in found.extra["step_bytes"]}
    shares = {name: round(hidden(found, name), 4) for name in methods}
    known = {what: {n: v for n, v in each.items() if not math.isnan(v)} for what, each in (("h", shares), ("m", ratios))}
    return replace(found, extra={**found.extra, "hidden": known["h"], "memory_over_hand": known["m"]})


def largest_bytes(steps: Mapping[str, Step]) -> dict[str, int]:
    """Each method's bytes of a step, of the largest rank. Nothing without a GPU."""
    found = {name: together(name, partial(step_bytes, step, step.clear)) for name, step in steps.items()}
    nbytes = {name: value for name, value in found.items() if value is not None}
    if not nbytes:
        return {}
    largest = torch.tensor(list(nbytes.values()), dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(nbytes, largest.tolist(), strict=True))


def budgets(
    steps: Mapping[str, Step], modes: Sequence[str], check: Callable[[str, object], None], case: str, folder: Path
) -> Iterator[dict[str, Any]]:
    """Trace a mode's hand-written program, weft's and the computation alone, and print their time budgets side by side."""
    for mode in modes:
        names = MODES[mode]
        chosen = [name for name in (names.hand, *names.wefts, names.computation) if name in steps]
        found = {}
        for name in chosen:
            step = steps[name]
            check(name, together(name, step))
            for _ in range(2):
                step()
            where = folder if dist.get_rank() == 0 else None
            parts = together(name, partial(traces.taken, f"{case} {name}", partial(_repeat, step), where))
            found[name] = traces.budget(parts, STEPS)
            yield {"method": name, "budget": found[name]}
        say(f"{case}, {mode}:\n{traces.budget_table(found)}")


def _repeat(step: Step) -> None:
    for _ in range(STEPS):
        step()


def after() -> None:
    torch.compiler.reset()
    gc.collect()
    weft.close(world("cuda" if torch.cuda.is_available() else "cpu").get_group())


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Those that the options name, one model after the other."""
    found = []
    for model in arguments.models:
        sizes = replace(MODELS[model], layers=arguments.layers)
        sizes = sizes if arguments.device == "cuda" else tiny(sizes)
        for tokens in arguments.tokens.split(",") if arguments.tokens else TOKENS[arguments.device].split(","):
            for text in arguments.checkpointing:
                found.append(Case(model=model, sizes=sizes, tokens=count(tokens), checkpointing=CHECKPOINTING[text]))
    return found


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an option with some of the known names, with commas."""
    listed = list(known)

    def parse(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in listed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(listed)}")
        return found

    return parse


def make_parser() -> argparse.ArgumentParser:
    options = parser(__doc__, rounds=ROUNDS, modes=",".join(MODES), known=list(MODES))
    case_options(options)
    programs = [name for mode in PROGRAMS.values() for name in mode]
    _add_names(options, "--methods", programs, "besides the hand-written program and the computation alone")
    options.add_argument("--capacity", type=float, default=1.25, help="rows of experts that fit, over those sent (%(default)s)")
    options.add_argument("--budget", type=Path, metavar="FOLDER", help="write traces of rank 0 there, and time nothing")
    return options


def case_options(options: argparse.ArgumentParser) -> None:
    """Add the options that `cases` reads."""
    _add_names(options, "--models", MODELS, "of the models")
    _add_names(options, "--checkpointing", CHECKPOINTING, "without and with activation checkpointing")
    options.add_argument("--tokens", default="", help=f"of the group, with commas ({TOKENS['cuda']})")
    options.add_argument("--layers", type=count, default=2, help="(%(default)s)")
    options.add_argument("--device", choices=tuple(TOKENS), default="cuda" if torch.cuda.is_available() else "cpu")


def _add_names(options: argparse.ArgumentParser, name: str, known: Iterable[str], text: str) -> None:
    options.add_argument(name, type=names_of(known), default=",".join(known), help=f"{text}, with commas (%(default)s)")


def main() -> None:
    options = make_parser()
    arguments = options.parse_args()
    try:
        found = cases(arguments)
    except argparse.ArgumentTypeError as error:
        options.error(f"--tokens: {error}")
    measure.PLANS = os.environ.get("WEFT_CACHE_DIR", "")
    run_parts(found, measured, arguments, alarm_s=ALARM_S, after=after, device=arguments.device, summarise=summary)


if __name__ == "__main__":
    main()
