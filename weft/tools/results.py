"""What `weft run` finds: values that the command line prints, the report draws, and --json writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.core.problem import CollectiveProblem, LookupProblem, Problem
from weft.core.span import Span
from weft.planner.values import Plan


@dataclass(frozen=True, kw_only=True)
class SiteRun:
    """One distributed site: checked, timed, and predicted.

    Times are of the slowest rank, medians, in microseconds. computation_us: the whole matmul alone; communication_us: the
    whole collective alone. max_error: largest difference from the sequential program relative to the largest element of
    the reference; tolerance: what rounding allows. plan: the prediction for the named machine. spans: one measured call.
    tried: where the schedule was chosen by measurement, each candidate's time.
    """

    site: str
    problem: Problem | LookupProblem | CollectiveProblem
    schedule: str
    chunks: int
    max_error: float
    tolerance: float
    sequential_us: float
    overlapped_us: float
    computation_us: float
    communication_us: float
    plan: Plan
    spans: tuple[Span, ...] = ()
    tried: Mapping[str, float] = field(default_factory=dict)

    @property
    def fastest_first(self) -> list[tuple[str, float]]:
        """What was tried, with its times."""
        return sorted(self.tried.items(), key=lambda item: item[1])

    @property
    def ok(self) -> bool:
        return self.max_error <= self.tolerance

    @property
    def ideal_us(self) -> float:
        return max(self.computation_us, self.communication_us)

    @property
    def share_of_ideal(self) -> float:
        """Over 1 where the halves alone were slower than the overlapped call, of the same rounds: times scatter by as much."""
        return self.ideal_us / self.overlapped_us if self.overlapped_us else 1.0

    def __str__(self) -> str:
        verdict = "right" if self.ok else f"WRONG by {self.max_error:.2g}"
        return f"{self.site}: {self.schedule} {verdict}, {self.sequential_us:.0f} -> {self.overlapped_us:.0f} us"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole `weft run`. device: "cpu" or "cuda". machine: the named machine of the predictions, machine_ranks its ranks,
    machine_tokens the tokens that are predicted for. versions: of what took part."""

    model: str
    device: str
    world_size: int
    tokens: int
    dtype: str
    seed: int
    machine: str
    machine_ranks: int
    machine_tokens: int
    sites: tuple[SiteRun, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(site.ok for site in self.sites)

    @property
    def over_ideal(self) -> bool:
        """Whether a table shows a share of the ideal over 100 %, which asks for a word about it."""
        return any(round(site.share_of_ideal, 2) > 1 for site in self.sites)

    def __str__(self) -> str:
        right = sum(site.ok for site in self.sites)
        return f"{self.model}: {right} of {len(self.sites)} sites right on {self.world_size} {self.device} ranks"
