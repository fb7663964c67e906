"""GpuMemory simulates one GPU's HBM as a fluid that two streams share, compute and communication, and its arbiter.

Every activity of the GPU is a MemoryActivity. It has a number of units (slices of a wave, or bytes of a transfer), each of
which takes memory time. Something else limits its pace: multipliers, a link, or the requests in flight. If the activities
demand more than all of the memory's time, the arbiter decides:

    round_robin      both streams get the same share; a stream can use the time that the other leaves     (T3)
    compute_first    compute gets all that it demands, and communication the rest, but at least one request
                     in `starvation` + 1                                                                  (T3-MCA)

The activities of a stream share its time in proportion to their demands.

The arbiter also determines how long a read waits. While communication is active, it keeps its part of every channel's queue
full. Under round_robin this is the whole queue. Under compute_first it is `threshold` entries, which depends on the memory
intensity of the GEMM's first stage. A later read is served after these entries:

    latency = unloaded latency + entries of communication * time of an entry * mean cost of a communication access

A near-memory update takes `update_cost` times the memory time of a write. The paper doubles the column delay of back-to-back
updates. That delay applies within one bank group. A stream that is interleaved over four groups hides some or all of it, so the
cost is between 1 and 2, and 1.25 is assumed. Three results argue against 2:

- an update would take as long as the read and the write that it replaces, so near-memory compute would save no time;
- T3-MCA would be 8 % slower than T3 in OP layers before the all-gather, while both are near or above the ideal in the paper;
- the largest speed-ups of T3 and T3-MCA would be 28 % and 41 %, compared with 39 % and 47 % in the paper.

One result argues for 2: the geometric means, 19 % and 28 %, are nearer to the paper's 20 % and 30 % than the 22 % and 32 % at
1.25. `weft_studies.t3.evaluation.update_costs` returns the headline at 1, 1.25 and 2.

Source: T3, arXiv 2401.16677, section 4.5 (memory-controller arbitration). Time is in whole nanoseconds. An activity ends in the
first nanosecond in which its last unit is done. Rates are set once per nanosecond, for all activities that start or end in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import simpy

from weft.perf.fluid import DONE, Settled
from weft_studies.t3.system import T3System

Stream = Literal["compute", "communication"]
Policy = Literal["round_robin", "compute_first"]


@dataclass(eq=False, slots=True)
class MemoryActivity:
    """MemoryActivity is an activity in progress.

    left: the units left.
    pace: returns the units per nanosecond if memory is not the limit.
    cost: the memory time of a unit in nanoseconds.
    weight: the mean cost of its accesses, relative to a read.
    posted: whether it consists of posted stores. The stream's other activities come first.
    """

    stream: Stream
    left: float
    pace: Callable[[], float]
    cost: float
    weight: float
    posted: bool
    done: simpy.Event
    rate: float = 0.0


@dataclass
class GpuMemory(Settled):
    """GpuMemory is the memory of one simulated GPU.

    threshold: the number of queue entries that communication may hold. None if there is no limit.
    traffic: the bytes moved so far, by class.
    peak: the highest share of the memory's rate in use so far.
    """

    system: T3System
    policy: Policy = "round_robin"
    threshold: int | None = None
    traffic: Counter[str] = field(default_factory=Counter)
    peak: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._flows: list[MemoryActivity] = []

    def flow(
        self,
        stream: Stream,
        units: float,
        pace: Callable[[], float],
        traffic: Mapping[str, int],
        *,
        update: frozenset[str] = frozenset(),
        posted: bool = False,
    ) -> simpy.Event:
        """Start an activity that moves `traffic` bytes by class over its units. Returns the event of its end.

        update: the classes that are near-memory updates. Without near-memory compute the memory controller reads the old value
            and writes the sum, while the update keeps its queue entry. This costs a write, and a read of class update_read.
        posted: see MemoryActivity.
        """
        done = self.env.event()
        updated = sum(part for name, part in traffic.items() if name in update)
        size = sum(traffic.values())
        hbm = self.system.hbm
        self.traffic.update(traffic)
        if self.system.mechanisms.near_memory_compute:
            charged = size + updated * (hbm.update_cost - 1)
        else:
            charged = size + updated
            self.traffic.update({"update_read": updated} if updated else {})
        if units <= 0:
            return done.succeed()
        self.advance()
        weight = charged / size if size else 1.0
        self._flows.append(MemoryActivity(stream, float(units), pace, charged / hbm.gbps / units, weight, posted, done))
        self.touch()
        return done

    def latency_ns(self) -> float:
        """Return the current latency of a read."""
        sharing = [flow for flow in self._flows if flow.stream == "communication" and flow.cost]
        if not sharing:
            return self.system.hbm.latency_ns
        queue = self.system.hbm.queue_entries
        entries = queue if self.policy == "round_robin" or self.threshold is None else min(queue, self.threshold)
        weight = sum(flow.weight for flow in sharing) / len(sharing)
        return self.system.hbm.latency_ns + entries * self.system.entry_ns * weight

    def observe(self, moved: int, ns: int) -> None:
        """Set the threshold by the memory intensity of a stage that moved `moved` bytes in `ns` nanoseconds."""
        intensity = moved / self.system.hbm.gbps / max(1, ns)
        limits = zip(self.system.arbiter.intensities, self.system.arbiter.thresholds, strict=True)
        passed = [threshold for least, threshold in limits if intensity >= least]
        self.threshold = passed[-1] if passed else None

    def move(self, elapsed: int) -> None:
        """See Settled."""
        for flow in self._flows:
            flow.left -= flow.rate * elapsed

    def next_end(self) -> float | None:
        """See Settled."""
        return min(((flow.left - DONE) / flow.rate for flow in self._flows if flow.rate), default=None)

    def finish(self) -> None:
        """See Settled."""
        for flow in self._flows:
            if flow.left <= DONE:
                flow.done.succeed()
        self._flows = [flow for flow in self._flows if flow.left > DONE]

    def settle(self) -> None:
        """Divide the memory's time between the streams. Within a stream, posted stores get what other activities leave."""
        asked: dict[Stream, float] = {"compute": 0.0, "communication": 0.0}
        paces = [flow.pace() for flow in self._flows]
        asks = [pace * flow.cost for pace, flow in zip(paces, self._flows, strict=True)]
        for flow, share in zip(self._flows, asks, strict=True):
            asked[flow.stream] += share
        given = self._given(asked["compute"], asked["communication"])
        for posted in (False, True):
            for stream, left in given.items():
                at = [i for i, flow in enumerate(self._flows) if flow.stream == stream and flow.posted == posted]
                wanted = sum(asks[i] for i in at)
                part = min(1.0, left / wanted) if wanted else 1.0
                given[stream] = max(0.0, left - part * wanted)
                for i in at:
                    self._flows[i].rate = paces[i] * (part if self._flows[i].cost else 1.0)
        self.peak = max(self.peak, sum(flow.rate * flow.cost for flow in self._flows))

    def _given(self, compute: float, communication: float) -> dict[Stream, float]:
        """Return the share of the memory's time that each stream gets, by the shares that they demand."""
        if compute + communication <= 1:
            return {"compute": compute, "communication": communication}
        if self.policy == "round_robin":
            least = min(communication, 0.5)
        else:
            least = min(communication, 1 / (self.system.arbiter.starvation + 1))
        first = min(compute, 1 - least)
        return {"compute": first, "communication": min(communication, 1 - first)}
