"""Does a job that calls operators for days keep its memory, descriptors, threads and pace?

Rank processes make calls in a random order that follows from a seed: operators, schedules, extents, dtypes, layouts, in the
world and in a group of all ranks but the last. A window of kinds is in use at a time. It moves through a catalogue that is
larger than what a group keeps (weft.runtime.programs), so programs are dropped and made again throughout. Before anything is
measured, each kind of the catalogue is called once. Then, at the end of each part, a rank records

    its resident memory, descriptors, threads and names in /dev/shm; on GPUs also the memory that torch holds and that the
    driver has given out. During a part every call is timed by its kind, and every CHECK_EVERYth result is compared with float64

A run is flat if no rank's median figure of the last third of the parts exceeds that of the first third by more than SLACK. The
exit status says whether it was flat and every result right. 100,000 calls by three ranks on two cores take some 7 minutes.

    python tests/campaigns/soak.py --calls 100000 --json out/soak.jsonl
    python tests/campaigns/soak.py --device cuda --calls 1000000 --budget-s 75

On GPUs each kind is captured in a CUDA graph after an eager call. A call is then a replay of one operator, one of BURST in a
row that the host waits for. In one burst of TIMED_EVERY the first TIMED calls are timed by GPU events. The window moves there,
too: graphs are dropped and captured again.

Traps. All calls of one kind have the same tensors, so memory that grows is weft's, not the test's. On a machine with other load
p99 describes the machine. The allocator's first growth is no leak, so thirds are compared, not ends. A timed burst starts
behind a kernel that spins until the host has enqueued the burst, since times would otherwise be the host's. Its first call is
not timed, because ranks meet in it. With NCCL's collectives in a graph the host gets some 17 replays ahead and no further,
whatever spins; the next ones then wait for the host, 100 us and more (torch's all_reduce alone, without weft, on 2 x H200). So
only TIMED calls in a row are timed.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import calls
import numpy as np
import torch
import torch.distributed as dist
from calls import Case, even
from campaign import Call, Options, append, captured, count, on_any_rank

import weft
from weft.comm.shared_memory import PREFIX, SHM
from weft.runtime.ranks import SHARED, Ranks

CHECK_EVERY = 1000
BURST, TIMED, TIMED_EVERY = 50, 12, 4
_AHEAD_CYCLES = 4_000_000
"""Some 2 ms of a spinning kernel: in which what is timed is enqueued."""
SLACK = {"rss_mib": 24.0, "descriptors": 0, "threads": 0, "segments": 0, "torch_mib": 2.0, "driver_mib": 64.0}
"""By figure: how much more the last third of the parts may have than the first."""
LEAST_TIMED = 100
"""Calls of a kind, for its 99th percentile to be reported."""
_MIB = 1 << 20
_ALARM_S = {"cpu": 600, "cuda": 40}
"""A part that takes longer ends the run, with every thread's stack."""


_TYPES, _LAYOUTS = ("bfloat16", "bfloat16", "float32"), ("plain", "transposed")
DRAWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "cpu": {
        "m": (1, 7, 24, 65),
        "n": (3, 18, 64),
        "k": (6, 12, 40),
        "dtype": tuple(calls.DTYPES),
        "a": calls.LAYOUTS,
        "b": calls.LAYOUTS,
    },
    "cuda": {"m": (12, 192, 768), "n": (768,), "k": (768,), "dtype": _TYPES, "a": _LAYOUTS, "b": _LAYOUTS},
}
"""What a kind's case is drawn from. On GPUs few sizes, so that kernels are compiled once for many kinds."""


@dataclass(frozen=True, kw_only=True)
class Soak:
    """catalogue: kinds in all. window: of those, in use at a time. moves: calls, or bursts, until
    one is exchanged."""

    calls: int
    parts: int = 20
    seed: int = 1
    device: str = "cpu"
    catalogue: int = 320
    window: int = 24
    moves: int = 250
    budget_s: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank saw at the end of a part. calls: so far."""

    calls: int
    seconds: float
    figures: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class SoakReport:
    """One rank's story. pace: by kind, calls that were timed, median and 99th percentile in us. steady: of all that were
    timed, each over its kind's median, the number of calls and the 99th percentile."""

    parts: list[Part]
    pace: dict[str, tuple[int, float, float]]
    steady: tuple[int, float] = (0, 1.0)


def kinds(soak: Soak, ranks: int) -> list[tuple[Case, bool]]:
    """The catalogue: cases, and whether they are the world's or the smaller group's. Every operator and family comes first."""
    generator, found = random.Random(soak.seed), []
    for number in range(soak.catalogue):
        op, name = calls.EVERY[number % len(calls.EVERY)]
        case = Case(op=op, schedule=name, **{key: generator.choice(some) for key, some in DRAWN[soak.device].items()})
        whole = ranks < 3 or generator.random() < 0.7
        found.append((even(case, ranks if whole else ranks - 1), whole))
    return found


def sequence(soak: Soak, catalogue: int) -> Iterator[int]:
    """Which kind comes next, the same on every rank; no end."""
    generator = random.Random(soak.seed + 1)
    order = list(range(catalogue))
    generator.shuffle(order)
    window, following = order[: soak.window], soak.window
    for number in range(1 << 62):
        if number and number % soak.moves == 0 and catalogue > soak.window:
            window[generator.randrange(len(window))] = order[following % catalogue]
            following += 1
        yield generator.choice(window)


class Kind:
    """One kind's call on this rank; without a part in its group, nothing."""

    def __init__(self, case: Case, seed: int, on: torch.device, group: dist.ProcessGroup | None, member: bool) -> None:
        self.case, self.member = case, member
        self.ranks = dist.get_world_size(group) if member else 0
        self.replay: Call | None = None
        if member:
            self._call, self._expected = calls.work(case, seed, on, group)

    def eager(self) -> torch.Tensor:
        return self._call()

    def forget(self) -> None:
        """Give the graph back."""
        if self.replay is not None:
            torch.cuda.synchronize()
            self.replay = None

    def check(self, out: torch.Tensor) -> None:
        calls.check(self.case, out, self._expected, self.ranks)


class Paces:
    """Times of calls by kind, in memory that is taken at the beginning. The newest of each kind are kept."""

    _KEPT = 2048

    def __init__(self, catalogue: int) -> None:
        self._us = np.ones((catalogue, self._KEPT), dtype=np.float32)
        self._timed = np.zeros(catalogue, dtype=np.int64)

    def add(self, kind: int, us: float) -> None:
        self._us[kind, self._timed[kind] % self._KEPT] = us
        self._timed[kind] += 1

    def figures(self, names: Sequence[str]) -> dict[str, tuple[int, float, float]]:
        return {
            f"{kind} {names[kind]}": (int(self._timed[kind]), float(np.median(us)), float(np.percentile(us, 99)))
            for kind, us in self._known()
        }

    def steady(self) -> tuple[int, float]:
        """As SoakReport has it."""
        ratios = [us / np.median(us) for _, us in self._known()]
        return sum(map(len, ratios)), float(np.percentile(np.concatenate(ratios), 99)) if ratios else 1.0

    def _known(self) -> Iterator[tuple[int, Any]]:
        """Each kind that was timed, with what is kept of its times."""
        for kind, timed in enumerate(self._timed):
            if timed:
                yield kind, self._us[kind, : min(timed, self._KEPT)]


class Rank:
    """One rank's part of a soak."""

    def __init__(self, soak: Soak) -> None:
        self.soak = soak
        self.on = torch.device("cuda", torch.cuda.current_device()) if soak.device == "cuda" else torch.device("cpu")
        size = dist.get_world_size()
        some = dist.new_group(list(range(size - 1))) if size > 2 else None
        member = dist.get_rank() < size - 1
        self.kinds = [
            Kind(case, soak.seed + number, self.on, None if whole else some, whole or member)
            for number, (case, whole) in enumerate(kinds(soak, size))
        ]
        self.paces = Paces(len(self.kinds))
        self._graphs: dict[int, None] = {}
        timed = TIMED if self.on.type == "cuda" else 0
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(timed)]

    def run(self) -> SoakReport:
        self._through_the_catalogue()
        parts = []
        begun, made, per = time.monotonic(), 0, -(-self.soak.calls // self.soak.parts)
        order = sequence(self.soak, len(self.kinds))
        while made < self.soak.calls and not on_any_rank(time.monotonic() - begun > self.soak.budget_s):
            faulthandler.dump_traceback_later(_ALARM_S[self.soak.device], exit=True)
            until = min(made + per, self.soak.calls)
            while made < until:
                made += self._on_gpu(next(order), made) if self.on.type == "cuda" else self._on_cpu(next(order), made)
            parts.append(Part(calls=made, seconds=time.monotonic() - begun, figures=self.figures()))
        faulthandler.cancel_dump_traceback_later()
        for kind in self.kinds:
            kind.forget()
        weft.close()
        names = [str(kind.case) for kind in self.kinds]
        return SoakReport(parts=parts, pace=self.paces.figures(names), steady=self.paces.steady())

    def _through_the_catalogue(self) -> None:
        for number, kind in enumerate(self.kinds):
            faulthandler.dump_traceback_later(_ALARM_S[self.soak.device], exit=True)
            if number % 20 == 0:
                dist.barrier()
            if kind.member:
                kind.check(kind.eager())

    def _on_cpu(self, number: int, made: int) -> int:
        kind = self.kinds[number]
        if kind.member:
            begun = time.perf_counter_ns()
            out = kind.eager()
            self.paces.add(number, (time.perf_counter_ns() - begun) / 1e3)
            if made % CHECK_EVERY == 0:
                kind.check(out)
        return 1

    def _on_gpu(self, number: int, made: int) -> int:
        """A burst of replays; the calls that it stands for, the same number on ranks without a part in it."""
        kind = self.kinds[number]
        if kind.member:
            replay = kind.replay or self._capture(number)
            timed = made // BURST % TIMED_EVERY == 0
            if timed:
                self._timed(number, replay)
            for _ in range(BURST - timed * TIMED):
                out = replay()
            torch.cuda.current_stream().synchronize()
            if made // CHECK_EVERY != (made + BURST) // CHECK_EVERY:
                kind.check(out)
        return BURST

    def _timed(self, number: int, replay: Call) -> None:
        """The first calls of a burst: each is timed, but the very first."""
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        for mark in self._marks:
            replay()
            mark.record()
        self._marks[-1].synchronize()
        for before, after in pairwise(self._marks):
            self.paces.add(number, before.elapsed_time(after) * 1e3)

    def _capture(self, number: int) -> Call:
        """No more graphs than the window has kinds: the oldest goes. An eager call comes first, and is checked."""
        if len(self._graphs) >= self.soak.window:
            oldest = next(iter(self._graphs))
            self.kinds[oldest].forget()
            del self._graphs[oldest]
        kind = self.kinds[number]
        kind.check(kind.eager())
        kind.replay, self._graphs[number] = captured(kind.eager), None
        return kind.replay

    def figures(self) -> dict[str, float]:
        """What this process holds now."""
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        found: dict[str, float] = {
            "rss_mib": round(resident / _MIB, 2),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "segments": sum(1 for _ in SHM.glob(f"{PREFIX}*-{os.getpid()}-*")),
        }
        if self.on.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.on)
            found |= {"torch_mib": torch.cuda.memory_allocated(self.on) / _MIB, "driver_mib": (total - free) / _MIB}
        return found


def rank_work(soak: Soak) -> SoakReport:
    """One rank of a soak."""
    return Rank(soak).run()


def growth(parts: Sequence[Part]) -> dict[str, float]:
    """By figure: the median of the last third of the parts less that of the first. Raises ValueError for fewer than three."""
    if len(parts) < 3:
        raise ValueError(f"parts is {len(parts)}; flatness needs at least 3")
    third = len(parts) // 3
    first, last = parts[:third], parts[-third:]
    return {
        name: median(part.figures[name] for part in last) - median(part.figures[name] for part in first)
        for name in parts[0].figures
    }


def leaks(reports: Sequence[SoakReport]) -> list[str]:
    """Figures that are not flat, by rank."""
    return [
        f"rank {rank}: {name} grew by {more:g}"
        for rank, one in enumerate(reports)
        for name, more in growth(one.parts).items()
        if more > SLACK[name]
    ]


def slowest(reports: Sequence[SoakReport]) -> tuple[str, float, float, float]:
    """The kind whose 99th percentile is the most times its median, of those timed as often: (kind, times, median, p99)."""
    paces = [(kind, *pace) for one in reports for kind, pace in one.pace.items() if pace[0] >= LEAST_TIMED]
    return max(paces, key=lambda pace: pace[3] / pace[2], default=("none", 0, 1.0, 1.0))


def line(soak: Soak, reports: Sequence[SoakReport]) -> dict[str, Any]:
    """A run's. figures: of the worst rank, the median of the first third of the parts, and by how much the last third has more.
    over_median: of rank 0's timed calls, each over its kind's median, the 99th percentile; slowest: as `slowest` has it."""
    settings = {name: value for name, value in asdict(soak).items() if name not in ("budget_s", "calls")}
    grown = [growth(one.parts) for one in reports]
    third = len(reports[0].parts) // 3
    timed, high = reports[0].steady
    kind, often, middle, worst = slowest(reports)
    return {
        "bench": "soak",
        "ranks": len(reports),
        **settings,
        "calls": reports[0].parts[-1].calls,
        "seconds": round(reports[0].parts[-1].seconds, 2),
        "figures": {
            name: (
                max(median(part.figures[name] for part in one.parts[:third]) for one in reports),
                round(max(one[name] for one in grown), 3),
            )
            for name in grown[0]
        },
        "over_median": {"timed": timed, "p99": round(high, 3)},
        "slowest": {"kind": kind, "timed": often, "median_us": round(middle, 1), "p99_us": round(worst, 1)},
    }


def main() -> None:
    options = Options(__doc__, device="cpu")
    options.add_argument("--calls", type=count, default=10_000)
    options.add_argument("--budget-s", type=float, default=float("inf"), help="no part is begun after so long")
    given = options.parse_args()
    ranks, on_gpu = options.ranks(given, may_share=True), given.device == "cuda"
    place = SHARED if on_gpu and ranks > torch.cuda.device_count() else given.device
    size = {"catalogue": 64, "window": 16, "moves": 400} if on_gpu else {}
    soak = Soak(calls=given.calls, seed=given.seed, device=given.device, budget_s=given.budget_s, **size)
    with Ranks(ranks, device=place, environment={"WEFT_CACHE_DIR": "", "WEFT_TIMEOUT_S": "30"}) as pool:
        reports = pool.run(rank_work, soak, timeout_s=86_400)
    for part in reports[0].parts:
        figures = " ".join(f"{name} {value:g}" for name, value in part.figures.items())
        print(f"rank 0, calls {part.calls} seconds {part.seconds:.2f} {figures}")
    append(given, [line(soak, reports)])
    print(
        "p99 of all calls, each over its kind's median: " + ", ".join(f"{one.steady[1]:.2f}" for one in reports) + ", by rank"
    )
    kind, timed, middle, high = slowest(reports)
    print(f"p99 over median at most {high / middle:.2f}: {kind}, {timed} timed, median {middle:.0f} us, p99 {high:.0f} us")
    ratios = [pace[2] / pace[1] for one in reports for pace in one.pace.values() if pace[0] >= LEAST_TIMED]
    print(f"p99 within 1.5 of the median for {sum(ratio <= 1.5 for ratio in ratios)} of {len(ratios)} kinds on a rank")
    found = leaks(reports)
    print("flat" if not found else "\n".join(found))
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
