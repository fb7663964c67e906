"""What `weft run` finds: values that the command line prints, the report draws, and --json writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.core.problem import CollectiveProblem, LookupProblem, Problem
from weft.core.span import Span
from weft.planner.values import Plan
from weft.schedules import spec


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The times of a communicating layer on GPUs: microseconds of the slowest rank, medians over rounds.

    computation_us: the whole matmul alone. communication_us: the whole collective alone. tried: each candidate's time, where
    the schedule was chosen by measurement.
    """

    sequential_us: float
    overlapped_us: float
    computation_us: float
    communication_us: float
    tried: Mapping[str, float] = field(default_factory=dict)

    @property
    def fastest_first(self) -> list[tuple[str, float]]:
        """What was tried, with its times."""
        return sorted(self.tried.items(), key=lambda item: item[1])

    @property
    def ideal_us(self) -> float:
        return max(self.computation_us, self.communication_us)

    @property
    def share_of_ideal(self) -> float:
        """Over 1 where the halves alone were slower than the overlapped call, of the same rounds: times scatter by as much."""
        return self.ideal_us / self.overlapped_us if self.overlapped_us else 1.0


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """One communicating layer, predicted and run.

    plan: the prediction for the named machine. schedule, chunks: what ran here, after the checker had proved it; the checker
    has also proved what was predicted. max_error: largest difference from the sequential program relative to the largest
    element of the reference; tolerance: what rounding allows. spans: one call. speeds: None on CPU ranks, whose times say
    nothing about GPUs.
    """

    name: str
    problem: Problem | LookupProblem | CollectiveProblem
    schedule: str
    chunks: int
    max_error: float
    tolerance: float
    plan: Plan
    spans: tuple[Span, ...] = ()
    speeds: Speeds | None = None

    @property
    def spec(self) -> str:
        """The schedule that ran, as `--schedule` takes it."""
        return spec(self.schedule, self.chunks)

    @property
    def ok(self) -> bool:
        return self.max_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "right" if self.ok else f"WRONG by {self.max_error:.2g}"
        times = f", {self.speeds.sequential_us:.0f} -> {self.speeds.overlapped_us:.0f} us" if self.speeds else ""
        return f"{self.name}: {self.spec} {verdict}{times}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole `weft run`. device: "cpu" or "cuda". machine: the named machine of the predictions, machine_words what it is,
    machine_ranks its ranks, machine_tokens the tokens that are predicted for. versions: of what took part."""

    model: str
    device: str
    world_size: int
    tokens: int
    dtype: str
    seed: int
    machine: str
    machine_words: str
    machine_ranks: int
    machine_tokens: int
    layers: tuple[LayerRun, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(layer.ok for layer in self.layers)

    @property
    def measured(self) -> list[tuple[LayerRun, Speeds]]:
        """The layers whose speed was measured: all of them on GPUs, none on CPU ranks."""
        return [(layer, layer.speeds) for layer in self.layers if layer.speeds is not None]

    @property
    def other_schedules(self) -> list[LayerRun]:
        """The layers that ran another schedule than the predicted one."""
        return [layer for layer in self.layers if layer.spec != layer.plan.chosen.spec]

    @property
    def over_ideal(self) -> bool:
        """Whether a table shows a share of the ideal over 100 %, which asks for a word about it."""
        return any(round(speeds.share_of_ideal, 2) > 1 for _, speeds in self.measured)

    def __str__(self) -> str:
        right = sum(layer.ok for layer in self.layers)
        return f"{self.model}: {right} of {len(self.layers)} results right on {self.world_size} {self.device} ranks"
