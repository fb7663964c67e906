"""The Study of ISO: its gain in prefill, compared with the sequential program and with weft's own overlap.

A decoder layer under tensor parallelism has two parts, attention and MLP, each of which ends with an all-reduce. ISO splits the
tokens of a prompt into two halves, a and b, and lets each all-reduce run while the other half computes:

    compute      attention a | attention b    | MLP a          | MLP b          | attention a of the next layer | ..
    all-reduce               | of attention a | of attention b | of MLP a       | of MLP b                      | ..

Each column except the first is one weft Schedule. Its ConcurrentProblem has the computation of one half and the all-reduce of
the other on two streams. The engine includes the SMs that a collective occupies. A layer takes the four phases of the steady
state. Half b attends to the keys of both halves, so its attention takes longer.

    sequential   attention, all-reduce, MLP, all-reduce, each on all tokens
    iso          the four phases
    weft         sequence parallelism: all_gather_matmul before each part and matmul_reduce_scatter after it, with the schedules
                 that weft's planner chooses; attention itself in between

Contract: `run(machine)` is a pure function. The time of attention is that of its two matrix products, of which a causal mask
leaves half. Norms and rotary embeddings are left out of all three programs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.core.concurrent import ConcurrentProblem
from weft.core.machine import Machine
from weft.core.machine import load as load_machine
from weft.core.problem import CollectiveProblem, DType
from weft.core.span import Span
from weft.perf import Outcome
from weft.perf import run as simulate
from weft.perf.terms import collective_us, gemm_us
from weft.planner import plan
from weft.planner.models import Model, load_model, operator_calls
from weft.schedules import build
from weft_studies.figures import Evidence, Figure, Row
from weft_studies.profile import Progress
from weft_studies.study import Chart, ColumnChart, Study, StudyTable

MACHINE = "a100x8"
A800_LINKS = 400 / 600
"""The NVLink rate of an A800 divided by that of an A100 (NVIDIA's data sheets, GB/s, sum of both directions)."""
MODEL = "llama3-70b"
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
DTYPE: DType = "bfloat16"
METHODS = ("nccl", "nccl+priority", "nccl+priority+ctas=16")
"""The ways in which the two streams of a phase can share the GPU. The fastest is used, as by a user who tries them all."""


@dataclass(frozen=True, kw_only=True)
class PromptRun:
    """PromptRun has the times of a layer in each program for one prompt length.

    compute_us, all_reduce_us: the computation and the two all-reduces of the sequential program.
    halves_us: the computation by halves, alone.
    iso_us, weft_us: the times with ISO, and with weft's overlap. The latter is None if it was not planned.
    methods: the schedules of ISO's four phases."""

    tokens: int
    compute_us: float
    all_reduce_us: float
    halves_us: float
    iso_us: float
    weft_us: float | None
    methods: tuple[str, ...]

    @property
    def sequential_us(self) -> float:
        return self.compute_us + self.all_reduce_us

    @property
    def iso_saved(self) -> float:
        """The share of the sequential time that ISO saves."""
        return 1 - self.iso_us / self.sequential_us

    @property
    def weft_saved(self) -> float:
        """The share of the sequential time that weft saves. Raises ValueError if weft's overlap was not planned."""
        if self.weft_us is None:
            raise ValueError("weft_us is None; plan weft's overlap, too")
        return 1 - self.weft_us / self.sequential_us

    @property
    def bound(self) -> float:
        """The share that would be saved if the shorter of computation and communication were hidden completely."""
        return 1 - max(min(self.compute_us, self.halves_us), self.all_reduce_us) / self.sequential_us


@dataclass(frozen=True, kw_only=True)
class IsoStudy:
    """IsoStudy has the results of all prompt lengths on one machine."""

    machine: Machine
    runs: tuple[PromptRun, ...]


def load() -> Machine:
    """Return a machine with eight A800s, which are A100s whose NVLink has two thirds of the rate."""
    machine = load_machine(MACHINE)
    changed = machine.what_if({"links.gbps": repr(machine.links.gbps * A800_LINKS)})
    return replace(changed, name="a800x8", description="8 x NVIDIA A800 80 GB SXM on NVSwitch")


def run(machine: Machine, tokens: Sequence[int] = TOKENS, progress: Progress = lambda text, done, total: None) -> IsoStudy:
    """Simulate all prompt lengths. progress: called with the next item, the items done and the total."""
    found = []
    for at, length in enumerate(tokens):
        progress(f"{length} tokens", at, len(tokens))
        found.append(prompt(LayerModel(machine, machine.world_size), length))
    return IsoStudy(machine=machine, runs=tuple(found))


def prompt(layer: LayerModel, tokens: int, *, overlapped: bool = True) -> PromptRun:
    """Simulate one prompt length. overlapped: whether to also plan weft's own overlap, which takes the most time."""
    phases = layer.phases(tokens).values()
    ran = [layer.phase(us, rows) for us, rows in phases]
    return PromptRun(
        tokens=tokens,
        compute_us=layer.attention_us(tokens, 0) + layer.mlp_us(tokens),
        all_reduce_us=2 * layer.all_reduce_us(tokens),
        halves_us=sum(us for us, _ in phases),
        iso_us=sum(outcome.total_us for outcome in ran),
        weft_us=layer.planned_us(tokens) if overlapped else None,
        methods=tuple(outcome.schedule.name for outcome in ran),
    )


@dataclass(frozen=True)
class LayerModel:
    """LayerModel gives the times of the parts of a decoder layer that is sharded over `ranks` GPUs of a machine."""

    machine: Machine
    ranks: int
    model: Model = field(default_factory=lambda: load_model(MODEL))

    def phases(self, tokens: int) -> dict[str, tuple[float, int]]:
        """Return ISO's four phases: the time of the computation, and the tokens of the concurrent all-reduce."""
        half, rest = tokens // 2, tokens - tokens // 2
        return {
            "attention b": (self.attention_us(rest, half), half),
            "MLP a": (self.mlp_us(half), rest),
            "MLP b": (self.mlp_us(rest), half),
            "attention a": (self.attention_us(half, 0), rest),
        }

    def phase(self, compute_us: float, tokens: int) -> Outcome:
        """Simulate a computation during the all-reduce of `tokens` tokens with each method, and return the fastest."""
        problem = ConcurrentProblem(
            collectives=(self._all_reduce(tokens),),
            world_size=self.ranks,
            dtype=DTYPE,
            compute_us=compute_us,
            communication_us=self.all_reduce_us(tokens),
        )
        return min((simulate(build(problem, name), self.machine) for name in METHODS), key=lambda outcome: outcome.total_us)

    def all_reduce_us(self, tokens: int) -> float:
        """Return the time of NCCL's all-reduce of [tokens, hidden]."""
        return collective_us(self.machine, "all_reduce", self._all_reduce(tokens).shard_bytes, self.ranks)

    def _all_reduce(self, tokens: int) -> CollectiveProblem:
        return CollectiveProblem(op="all_reduce", m=tokens * self.model.hidden, world_size=self.ranks, dtype=DTYPE)

    def attention_us(self, tokens: int, before: int) -> float:
        """Return the time of a rank's projections and attention for `tokens` tokens after `before` earlier ones."""
        model, width = self.model, self.model.heads * self.model.head_dim
        qkv = (model.heads + 2 * (model.kv_heads or model.heads)) * model.head_dim
        projected = self._gemm_us(tokens, qkv // self.ranks, model.hidden)
        projected += self._gemm_us(tokens, model.hidden, width // self.ranks)
        return projected + self.core_us(tokens, before)

    def core_us(self, tokens: int, before: int) -> float:
        """Return the time of the scores and their product with the values, for a rank's heads.

        They are two GEMMs with the rows of all heads. The number of keys is the mean that a causal mask leaves."""
        rows, keys = tokens * self.model.heads // self.ranks, before + -(-tokens // 2)
        return self._gemm_us(rows, keys, self.model.head_dim) + self._gemm_us(rows, self.model.head_dim, keys)

    def mlp_us(self, tokens: int) -> float:
        """Return the time of a rank's part of the gated MLP."""
        width = self.model.intermediate // self.ranks
        return self._gemm_us(tokens, 2 * width, self.model.hidden) + self._gemm_us(tokens, self.model.hidden, width)

    def planned_us(self, tokens: int) -> float:
        """Return the time of a layer's four matmuls with collectives, as weft plans them, and attention."""
        problems = (call.problem(tokens, self.ranks, DTYPE) for call in operator_calls(self.model))
        return sum(plan(problem, self.machine).chosen.predicted_us for problem in problems) + self.core_us(tokens, 0)

    def spans(self, tokens: int) -> dict[str, tuple[Span, ...]]:
        """Return the spans of each phase by its name."""
        return {name: self.phase(us, rows).spans for name, (us, rows) in self.phases(tokens).items()}

    def _gemm_us(self, m: int, n: int, k: int) -> float:
        return gemm_us(self.machine, m, n, k, DTYPE)


SAVED = "prefill time saved on A800s, mean"
PREDICTED = Evidence(
    label="predicted",
    because="No number of the machine was chosen with it in view. The paper's mean is over prompts and numbers of GPUs that we "
    "do not know; ours is over the lengths of the table.",
)
PHASES = "how the streams share the GPU (plain; the collective's with priority; that, and NCCL on 16 blocks)"
SHORT = {"nccl": "plain", "nccl+priority": "priority", "nccl+priority+ctas=16": "16 blocks"}


def facts(machine: Machine) -> list[tuple[str, str]]:
    """Return a summary of the machine."""
    return [
        ("Machine", f"{machine.description}, {machine.links.gbps:g} GB/s a GPU"),
        ("Model", f"{MODEL}, one decoder layer, prefill"),
        ("GEMM peak", f"{machine.gpu.tflops['bfloat16']:g} TFLOP/s, bfloat16"),
    ]


def figures(done: IsoStudy) -> tuple[Figure, ...]:
    """Return the one published figure for this machine."""
    return _saved(done.runs)


def _saved(runs: Sequence[PromptRun]) -> tuple[Figure, ...]:
    return (PREDICTED.percent(SAVED, 0.15, statistics.fmean(run.iso_saved for run in runs), 0.05),)


def sample(machine: Machine) -> tuple[Figure, ...]:
    """Return the figure of a machine without planning weft's own overlap, which it does not need."""
    layer = LayerModel(machine, machine.world_size)
    return _saved([prompt(layer, tokens, overlapped=False) for tokens in TOKENS])


def tables(done: IsoStudy) -> tuple[StudyTable, ...]:
    """Return a table by prompt length: computation and all-reduces alone, the three programs, and what they save."""
    return (StudyTable(name="prompts", title=f"A layer's prefill. Phases: {PHASES}", rows=_prompts(done.runs), words=(9,)),)


def variants(done: IsoStudy, progress: Progress) -> tuple[StudyTable, ...]:
    """Simulate the study on H200s, for which the slowdown of a computation by a concurrent collective was measured."""
    machine = load_machine("h200x8")
    found = []
    for at, ranks in enumerate((2, 8)):
        progress(f"{ranks} x H200", at, 2)
        runs = [prompt(LayerModel(machine, ranks), tokens) for tokens in TOKENS]
        found.append(StudyTable(name=f"h200x{ranks}", title=f"The same on {ranks} H200s", rows=_prompts(runs), words=(9,)))
    return tuple(found)


def _prompts(runs: Sequence[PromptRun]) -> list[Row]:
    heads = (
        *("tokens", "compute us", "all-reduces us", "sequential us", "ISO us", "weft us"),
        *("ISO saves", "weft saves", "at most", "phases"),
    )
    return [heads, *map(_prompt, runs)]


def _prompt(run: PromptRun) -> Row:
    times = (run.compute_us, run.all_reduce_us, run.sequential_us, run.iso_us, run.weft_us or math.nan)
    shares = (run.iso_saved, run.weft_saved, run.bound)
    methods = ", ".join(SHORT[name] for name in dict.fromkeys(run.methods))
    return (str(run.tokens), *(f"{us:.0f}" for us in times), *(f"{100 * share:.1f} %" for share in shares), methods)


def charts(done: IsoStudy) -> tuple[Chart, ...]:
    """Return a chart of the time that each program saves by prompt length."""
    saved = {
        "ISO": [100 * run.iso_saved for run in done.runs],
        "weft's overlap": [100 * run.weft_saved for run in done.runs],
        "at most": [100 * run.bound for run in done.runs],
    }
    places = [f"{run.tokens} tokens" for run in done.runs]
    return (ColumnChart(name="saved", title="Prefill time saved", places=places, series=saved, unit="% of sequential"),)


def spans(done: IsoStudy) -> dict[str, tuple[Span, ...]]:
    """Return the spans of each phase of the longest prompt."""
    return LayerModel(done.machine, done.machine.world_size).spans(done.runs[-1].tokens)


STUDY = Study(
    name="iso",
    title="ISO",
    paper="2409.11155",
    example="links.gbps=270",
    load=load,
    apply_settings=lambda machine, settings: machine.what_if(settings),
    facts=facts,
    run=lambda machine, progress: run(machine, progress=progress),
    figures=figures,
    tables=tables,
    charts=charts,
    spans=spans,
    variants=variants,
    sample=sample,
    headlines={SAVED: "percent"},
)
