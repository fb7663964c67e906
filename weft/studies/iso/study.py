"""Study: what splitting the sequence gains in prefill, compared with the sequential program and with weft's own overlap.

A decoder layer under tensor parallelism has two parts, attention and MLP, each of which ends with an all-reduce. ISO splits the
tokens of a prompt into two halves, a and b, and lets each all-reduce run while the other half computes:

    compute      attention a | attention b    | MLP a          | MLP b          | attention a of the next layer | ..
    all-reduce               | of attention a | of attention b | of MLP a       | of MLP b                      | ..

Each column but the first is one weft Schedule: a ConcurrentProblem with the computation of one half and the all-reduce of the
other, two streams, simulated by the engine with what it knows of SMs that a collective holds. A layer takes the four phases of
the steady state. Half b attends to the keys of both halves, so its attention takes longer.

    sequential   attention, all-reduce, MLP, all-reduce, each on all tokens
    iso          the four phases
    weft         sequence parallelism: all_gather_matmul before each part and matmul_reduce_scatter behind it, by the schedules
                 that weft's planner takes; attention itself in between

Contract: `run(machine)` is a pure function. Attention is priced as the two products that it consists of, half of which a causal
mask leaves; norms and rotary embeddings are left out of all three programs.
"""

from __future__ import annotations

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
from weft.studies.profile import Progress

MACHINE = "a100x8"
A800_LINKS = 400 / 600
"""NVLink of an A800 over that of an A100 (NVIDIA's data sheets, GB/s, sum of both directions)."""
MODEL = "llama3-70b"
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
DTYPE: DType = "bfloat16"
METHODS = ("nccl", "nccl+priority", "nccl+priority+ctas=16")
"""How the two streams of a phase share the GPU; the fastest is taken, as a user who tries them would."""


@dataclass(frozen=True, kw_only=True)
class PromptRun:
    """One prompt length: us of a layer by each program. compute_us, all_reduce_us: both parts of the sequential program, and
    its two all-reduces. halves_us: the computation by halves, alone. weft_us: None where it was not planned. methods: of ISO's
    four phases."""

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
        """Share of the sequential time."""
        return 1 - self.iso_us / self.sequential_us

    @property
    def weft_saved(self) -> float:
        """Share of the sequential time. Raises ValueError where weft's overlap was not planned."""
        if self.weft_us is None:
            raise ValueError("weft_us is None; plan weft's overlap, too")
        return 1 - self.weft_us / self.sequential_us

    @property
    def bound(self) -> float:
        """What would be saved if only the longer of computation and communication were left, whole or by halves."""
        return 1 - max(min(self.compute_us, self.halves_us), self.all_reduce_us) / self.sequential_us


@dataclass(frozen=True, kw_only=True)
class IsoStudy:
    """All prompt lengths on one machine."""

    machine: Machine
    runs: tuple[PromptRun, ...]


def load() -> Machine:
    """Eight A800s: A100s whose NVLink has two thirds of the rate."""
    machine = load_machine(MACHINE)
    changed = machine.what_if({"links.gbps": repr(machine.links.gbps * A800_LINKS)})
    return replace(changed, name="a800x8", description="8 x NVIDIA A800 80 GB SXM on NVSwitch")


def run(machine: Machine, tokens: Sequence[int] = TOKENS, progress: Progress = lambda text, done, total: None) -> IsoStudy:
    """Simulate all prompt lengths. progress: called with what comes next, how much is done, and of how much."""
    found = []
    for at, length in enumerate(tokens):
        progress(f"{length} tokens", at, len(tokens))
        found.append(prompt(LayerModel(machine, machine.world_size), length))
    return IsoStudy(machine=machine, runs=tuple(found))


def prompt(layer: LayerModel, tokens: int, *, overlapped: bool = True) -> PromptRun:
    """One prompt length. overlapped: whether weft's own overlap is planned, too, which takes longest."""
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
    """What the parts of a rank's decoder layer take on a machine, of whose GPUs `ranks` share the layer."""

    machine: Machine
    ranks: int
    model: Model = field(default_factory=lambda: load_model(MODEL))

    def phases(self, tokens: int) -> dict[str, tuple[float, int]]:
        """The four phases of ISO's steady state: us of the computation, and tokens of the all-reduce that runs meanwhile."""
        half, rest = tokens // 2, tokens - tokens // 2
        return {
            "attention b": (self.attention_us(rest, half), half),
            "MLP a": (self.mlp_us(half), rest),
            "MLP b": (self.mlp_us(rest), half),
            "attention a": (self.attention_us(half, 0), rest),
        }

    def phase(self, compute_us: float, tokens: int) -> Outcome:
        """A computation during the all-reduce of so many tokens, by the method that is fastest."""
        problem = ConcurrentProblem(
            collectives=(self._all_reduce(tokens),),
            world_size=self.ranks,
            dtype=DTYPE,
            compute_us=compute_us,
            communication_us=self.all_reduce_us(tokens),
        )
        return min((simulate(build(problem, name), self.machine) for name in METHODS), key=lambda outcome: outcome.total_us)

    def all_reduce_us(self, tokens: int) -> float:
        """NCCL's all-reduce of [tokens, hidden]."""
        return collective_us(self.machine, "all_reduce", self._all_reduce(tokens).shard_bytes, self.ranks)

    def _all_reduce(self, tokens: int) -> CollectiveProblem:
        return CollectiveProblem(op="all_reduce", m=tokens * self.model.hidden, world_size=self.ranks, dtype=DTYPE)

    def attention_us(self, tokens: int, before: int) -> float:
        """A rank's projections and attention of `tokens` tokens behind `before` earlier ones."""
        model, width = self.model, self.model.heads * self.model.head_dim
        qkv = (model.heads + 2 * (model.kv_heads or model.heads)) * model.head_dim
        projected = self._gemm_us(tokens, qkv // self.ranks, model.hidden)
        projected += self._gemm_us(tokens, model.hidden, width // self.ranks)
        return projected + self.core_us(tokens, before)

    def core_us(self, tokens: int, before: int) -> float:
        """Scores and their product with the values, of a rank's heads: as two GEMMs whose rows are those of all heads, over the
        keys that a causal mask leaves on average."""
        rows, keys = tokens * self.model.heads // self.ranks, before + -(-tokens // 2)
        return self._gemm_us(rows, keys, self.model.head_dim) + self._gemm_us(rows, self.model.head_dim, keys)

    def mlp_us(self, tokens: int) -> float:
        """A rank's part of the MLP, with a gate."""
        width = self.model.intermediate // self.ranks
        return self._gemm_us(tokens, 2 * width, self.model.hidden) + self._gemm_us(tokens, self.model.hidden, width)

    def planned_us(self, tokens: int) -> float:
        """A layer's four matmuls with their collectives by the schedules that weft plans, and attention."""
        problems = (call.problem(tokens, self.ranks, DTYPE) for call in operator_calls(self.model))
        return sum(plan(problem, self.machine).chosen.predicted_us for problem in problems) + self.core_us(tokens, 0)

    def spans(self, tokens: int) -> dict[str, tuple[Span, ...]]:
        """Each phase, by its name."""
        return {name: self.phase(us, rows).spans for name, (us, rows) in self.phases(tokens).items()}

    def _gemm_us(self, m: int, n: int, k: int) -> float:
        return gemm_us(self.machine, m, n, k, DTYPE)
