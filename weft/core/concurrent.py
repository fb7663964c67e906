"""ConcurrentProblem: collectives, and a computation of the user's own that does not depend on them.

The collectives run one after the other, in this order; the computation may run before, after or concurrently with them. weft
knows only the computation's time without collectives, if it was measured or passed.

A schedule for such a problem joins a schedule for each collective (`weft.core.schedule.Schedule.parts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.core.problem import CollectiveProblem, Op, Ops, Problem


@dataclass(frozen=True, kw_only=True)
class OpaqueCollective:
    """Communication whose tensors are not described to weft.

    Examples are the sends and receives of pipeline stages, a collective of other ranks, and one of a dtype that weft does not
    add. weft orders it among the other collectives, but proves nothing about its data.

    name: its label in timelines.
    """

    TAGGED: ClassVar[bool] = True
    name: str


@dataclass(frozen=True, kw_only=True)
class ConcurrentProblem(Problem):
    """Collectives and a concurrent computation, of which only the time is known.

    collectives: the collectives of these ranks, in the order in which they run.
    compute_us: the time of the computation alone on the slowest rank. None if it was not measured; then nothing is predicted.
    communication_us: the time of all collectives with NCCL, alone, on the slowest rank. None if it was not measured; then it
        is predicted from the machine.

    Raises ValueError for no collective, for one of another world_size or other nodes, and for times below zero.
    """

    TAGGED: ClassVar[bool] = True
    KNOWN: ClassVar[Ops] = ("concurrent",)

    op: Op = "concurrent"
    m: int = 1
    n: int = 1
    k: int = 1
    collectives: tuple[CollectiveProblem | OpaqueCollective, ...]
    compute_us: float | None = None
    communication_us: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.collectives:
            raise ValueError("collectives is empty; give at least one weft.CollectiveProblem")
        for i, one in enumerate(self.collectives):
            if isinstance(one, CollectiveProblem) and (one.world_size, one.nodes) != (self.world_size, self.nodes):
                raise ValueError(
                    f"collectives[{i}] is {one}; world_size is {self.world_size} and nodes {self.nodes}: they must agree"
                )
        for name in ("compute_us", "communication_us"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} is {value!r}; it must be at least 0, or None where it was not measured")

    @property
    def known(self) -> tuple[tuple[int, CollectiveProblem], ...]:
        """The collectives whose tensors are described, each with its number."""
        return tuple((i, one) for i, one in enumerate(self.collectives) if isinstance(one, CollectiveProblem))

    @property
    def reduces(self) -> bool:
        """True if a collective adds."""
        return any(one.sums for _, one in self.known)

    @property
    def flops(self) -> int:
        """Always 0, because weft does not know the operations of the computation."""
        return 0

    def __str__(self) -> str:
        names = ", ".join(one.name if isinstance(one, OpaqueCollective) else str(one) for one in self.collectives)
        took = "" if self.compute_us is None else f" of {self.compute_us:.0f} us"
        return f"a computation{took} and {names}"
