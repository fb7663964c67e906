"""The results of `weft run`, which the command line prints, the report draws, and --json writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.core.problem import CollectiveProblem, LookupProblem, Problem
from weft.core.span import Span
from weft.planner.values import Plan
from weft.schedules import spec


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Speeds has the times of a communicating layer on GPUs. They are medians over rounds of the slowest rank's time."""

    sequential_us: float
    overlapped_us: float
    computation_us: float
    """The time of the whole matmul alone."""
    communication_us: float
    """The time of the whole collective alone."""
    tried: Mapping[str, float] = field(default_factory=dict)
    """The time of each candidate, in microseconds, if the schedule was chosen by measurement."""

    @property
    def candidates_us(self) -> list[tuple[str, float]]:
        """The candidates with their times, fastest first."""
        return sorted(self.tried.items(), key=lambda item: item[1])

    @property
    def ideal_us(self) -> float:
        return max(self.computation_us, self.communication_us)

    @property
    def share_of_ideal(self) -> float:
        """The ideal time divided by the measured time. It may exceed 1 by as much as times vary within the same rounds."""
        return self.ideal_us / self.overlapped_us if self.overlapped_us else 1.0


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """LayerRun has the results of one communicating layer. The checker has proved the predicted and the run schedule."""

    name: str
    problem: Problem | LookupProblem | CollectiveProblem
    schedule: str
    """The name of the schedule that ran here."""
    chunks: int
    """The number of chunks of the schedule that ran here."""
    max_error: float
    """The largest difference from the sequential program, relative to the largest element of the reference."""
    tolerance: float
    """The largest `max_error` that rounding allows."""
    plan: Plan
    """The prediction for the named machine."""
    spans: tuple[Span, ...] = ()
    """The spans of one call."""
    speeds: Speeds | None = None
    """The measured times. None on CPU ranks, because their times say nothing about GPUs."""

    @property
    def spec(self) -> str:
        """The schedule that ran, in the form that `--schedule` accepts."""
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
    """Run has the results of one `weft run`."""

    model: str
    device: str
    """The kind of device that ran: cpu or cuda."""
    world_size: int
    tokens: int
    dtype: str
    seed: int
    machine: str
    """The name of the machine that the predictions are for."""
    machine_words: str
    """The description of that machine."""
    machine_ranks: int
    """The number of ranks that the predictions are for."""
    machine_tokens: int
    """The number of tokens that the predictions are for."""
    layers: tuple[LayerRun, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of the software that ran."""
    accuracy: tuple[str, ...] = ()
    """Sentences on how far such predictions are from what was measured (weft.planner.accuracy)."""

    @property
    def ok(self) -> bool:
        return all(layer.ok for layer in self.layers)

    @property
    def measured_layers(self) -> list[tuple[LayerRun, Speeds]]:
        """The layers whose speed was measured: all of them on GPUs, none on CPU ranks."""
        return [(layer, layer.speeds) for layer in self.layers if layer.speeds is not None]

    @property
    def unpredicted_layers(self) -> list[LayerRun]:
        """The layers that ran a different schedule from the predicted one."""
        return [layer for layer in self.layers if layer.spec != layer.plan.chosen.spec]

    @property
    def exceeds_ideal(self) -> bool:
        """True if a table shows a share of the ideal over 100%, which a note must explain."""
        return any(round(speeds.share_of_ideal, 2) > 1 for _, speeds in self.measured_layers)

    def __str__(self) -> str:
        right = sum(layer.ok for layer in self.layers)
        return f"{self.model}: {right} of {len(self.layers)} results right on {self.world_size} {self.device} ranks"
