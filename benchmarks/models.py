"""What does a whole decoder gain in serving, and in the forward of a training step? training.py has the whole step.

Layers of Llama 3 70B (decoder.py), bfloat16, random weights, tensor parallel over all ranks. Parts, one a run:

    forward    of 1 x 8192 tokens, sequence parallel, with what a backward would need
    prefill    1 x 8192 and 1 x 2048 tokens, sequence parallel, without gradients
    decode     one token for each of 1, 8 and 32 sequences, whole on every rank, with caches of 4096 tokens

Methods: torch's styles over NCCL, eager ("torch") and compiled ("torch_compiled"); compiled with PyTorch's async TP
("async_tp"; without it in decode, where it does nothing), or with weft's pass ("weft_pass"); weft's styles, eager and compiled
("weft", "weft_compiled"). All have the same weights. What is compiled is the whole decoder, by Inductor.

Protocol: measure.py's. A call goes through all layers; results are compared with torch's before anything is timed. computation:
a rank's part with no communication, eager; communication: all collectives of a call by NCCL, one after the other; ideal: the
larger. Traps: in mode eager, what is measured may be the host's time, host_us says; the first run compiles, and schedules are
tried, so give WEFT_CACHE_DIR a folder of its own, and run twice: what the first one chose is taken over, as in no other
benchmark but training.py.

    torchrun --nproc-per-node 2 -m benchmarks.models --part prefill --json benchmarks/results/h200x2/models.jsonl
    torchrun --nproc-per-node 4 -m benchmarks.models --part forward --layers 1 --methods torch,weft --profile docs/traces

With --profile nothing is timed: a trace of each method (and of computation) goes to that folder, and times by kind are said
(traces.py).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import weft
from benchmarks import measure, traces
from benchmarks.decoder import Alone, Decoder, Plan, Sizes, torchs, wefts
from benchmarks.measure import Work, check_of, parser, row, together, trial
from benchmarks.rows import Row
from benchmarks.runner import add_profile_option, get_profile_folder, run_parts

Tensor = torch.Tensor
ROUNDS, REPEAT = 9, 1
TOLERANCE = 0.06
"""Of the largest element: layers' roundings add up."""
METHODS = {
    "torch": "sequential/torch",
    "torch_compiled": "peer/torch_compile",
    "async_tp": "peer/async_tp",
    "weft": "weft/eager",
    "weft_compiled": "weft/compiled",
    "weft_pass": "weft/pass",
}
"""--methods, and their names in a row."""
PARTS = {
    "forward": ((1, 8192),),
    "prefill": ((1, 8192), (1, 2048)),
    "decode": ((1, 1), (8, 1), (32, 1)),
}
"""(batch, tokens) of a part's cases."""
Step = Callable[[Decoder], Work]


class Bench:
    """One case: a model for each method, all with the same weights."""

    def __init__(self, mesh: DeviceMesh, part: str, batch: int, tokens: int, sizes: Sizes) -> None:
        self.mesh, self.part, self.batch, self.tokens, self.sizes = mesh, part, batch, tokens, sizes
        self.ranks, self.decode = mesh.size(), part == "decode"
        torch.manual_seed(7)
        whole = torch.randn(batch, tokens, sizes.hidden, device="cuda", dtype=torch.bfloat16)
        self.x = whole if self.decode else whole.chunk(self.ranks, 1)[dist.get_rank()].contiguous()
        self._models: dict[str, Decoder] = {}

    def works(self, methods: Sequence[str]) -> dict[str, Work]:
        """Everything that is timed, by name."""
        made = {METHODS[name]: self._step(self._called(name)) for name in methods}
        alone = Alone(self.sizes.part(self.ranks), 1 if self.decode else self.ranks, **self._where)
        if self.decode:
            alone.cached(self.batch, self.sizes.part(self.ranks))
        return {**made, "computation/torch": self._step(alone), "communication/default": self._collectives()}

    @property
    def _where(self) -> dict[str, Any]:
        positions = self.sizes.context if self.decode else self.tokens
        return {"positions": positions, "device": "cuda", "dtype": torch.bfloat16}

    def _model(self, kind: str) -> Decoder:
        """torch's or weft's, made once for what is eager and compiled."""
        if kind not in self._models:
            torch.manual_seed(0)
            model = Decoder(self.sizes, **self._where)
            plan = (wefts if kind == "weft" else torchs)(self.sizes, decode=self.decode)
            self._models[kind] = self._sharded(model, plan)
        return self._models[kind]

    def _sharded(self, model: Decoder, plan: Plan) -> Decoder:
        for layer in model.layers:
            parallelize_module(layer, self.mesh, plan, src_data_rank=None)
        if self.decode:
            torch.manual_seed(1)
            model.cached(self.batch, self.sizes.part(self.ranks))
        return model

    def annotate(self, methods: Sequence[str]) -> None:
        """Give the blocks of eager models ranges in traces; a compiled one has no hooks."""
        for name in methods if {*methods} <= {"torch", "weft"} else ():
            traces.annotated(self._model(name), ("attention", "feed_forward"))

    def _called(self, name: str) -> Any:
        model = self._model("weft" if name in ("weft", "weft_compiled") else "torch")
        return model if name in ("torch", "weft") else compile_for(name, model)

    def _step(self, model: Any) -> Work:
        if self.part in ("prefill", "decode"):
            return lambda: _without_gradients(model, self.x)
        return lambda: model(self.x)

    def _collectives(self) -> Work:
        """A step's: for each layer a gather and a scatter of [B, S, H] before and after each block, or all-reduces."""
        whole = self.x.new_empty(self.batch * self.tokens, self.sizes.hidden)
        mine, calls = whole.chunk(self.ranks)[0].clone(), 2 * self.sizes.layers

        def gather_and_scatter() -> None:
            for _ in range(calls):
                dist.all_gather_into_tensor(whole, mine)
                dist.reduce_scatter_tensor(mine, whole)

        def reduce() -> None:
            for _ in range(calls):
                dist.all_reduce(whole)

        return reduce if self.decode else gather_and_scatter


def _without_gradients(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(x)
        return found


def compile_for(name: str, model: nn.Module, *, fullgraph: bool = True) -> Any:
    """A model compiled as the method of METHODS has it."""
    if name == "weft_pass":
        return torch.compile(model, options=weft.CompilePass().options, fullgraph=fullgraph, dynamic=False)
    return torch.compile(model, backend=inductor(micro_pipeline=name == "async_tp"), fullgraph=fullgraph, dynamic=False)


def inductor(*, micro_pipeline: bool) -> Callable[..., Any]:
    """A backend of torch.compile: Inductor, with or without async TP. One a method, so that none runs another's code."""

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, config_patches={"_micro_pipeline_tp": micro_pipeline})

    return backend


@cache
def world(device: str = "cuda") -> DeviceMesh:
    return dist.init_device_mesh(device, (dist.get_world_size(),))


def measured(case: tuple[int, int], arguments: argparse.Namespace) -> Iterator[Row]:
    """One case, (batch, tokens), in each mode."""
    mesh, part, (batch, tokens) = world(), arguments.part, case
    bench = Bench(mesh, part, batch, tokens, Sizes(layers=arguments.layers))
    works = bench.works(arguments.methods)
    expected: Any = together("torch", works["sequential/torch"])
    check = check_of(expected.detach().float(), tolerance=TOLERANCE)
    name = f"llama3-70b x {arguments.layers} layers, {part} {batch} x {tokens}"
    made = partial(row, op=part, case=name, dtype="bfloat16", arguments=arguments)
    if arguments.profile:
        for method in arguments.methods:
            check(method, together(method, works[METHODS[method]]))
        bench.annotate(arguments.methods)
        chosen = {method: works[METHODS[method]] for method in arguments.methods} | {"computation": works["computation/torch"]}
        for found in traces.profiled(chosen, part, get_profile_folder(arguments)):
            yield made(bench="traces", mode="eager", extra=found)
        return
    modes = arguments.modes.split(",") if arguments.modes else ["graph"] if part in ("prefill", "decode") else ["eager"]
    needed = ("sequential/torch", "computation/torch", "communication/default")
    for mode in modes:
        times, missing = trial(works, [mode], check=check, needed=needed, rounds=arguments.rounds, repeat=REPEAT)
        choices = {str(choice.problem): choice.us or {choice.spec: None} for choice in weft.choices(mesh.get_group())}
        yield made(bench="models", mode=mode, times=times[mode], missing=missing, extra={"choices": choices})


def after() -> None:
    torch.compiler.reset()
    weft.close(world().get_group())


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS, modes="")
    options.add_argument("--part", choices=PARTS, required=True)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--cases", type=int, nargs="*", help="of the part's cases, by number from 0; default: all")
    options.add_argument("--methods", default=",".join(METHODS), help="with commas (%(default)s); torch is always there")
    add_profile_option(options)
    arguments = options.parse_args()
    wanted = {"torch", *arguments.methods.split(",")}
    if wanted - set(METHODS):
        options.error(f"--methods: {', '.join(sorted(wanted - set(METHODS)))}; there are {', '.join(METHODS)}")
    skipped = {"async_tp"} if arguments.part == "decode" else set()
    arguments.methods = [name for name in METHODS if name in wanted - skipped]
    cases = PARTS[arguments.part]
    measure.PLANS = os.environ.get("WEFT_CACHE_DIR", "")
    run_parts([cases[number] for number in arguments.cases or range(len(cases))], measured, arguments, after=after)


if __name__ == "__main__":
    main()
