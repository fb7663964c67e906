"""Is every call right, for random operators, extents, layouts, dtypes, streams and graphs, for as long as one likes?

Trials run one after the other, the same on every rank. A trial follows from the seed and its number, so it can be repeated. It
is one kind of call (calls.py) by a random family and chunk count, in the world or in a second group of the same ranks. It is
called in each of these ways, in a random order:

    eager     twice: the second call finds its tensors at the same addresses, and GPUs replay it
    stream    on a stream of its own; the caller's stream waits for it
    graph     captured, and replayed REPLAYS times

CPUs have the first way only. On GPUs each product runs by an algorithm that torch would not take, however small and slow it is.
Before each call one random rank, or none, is delayed for up to 2 ms (on GPUs: its stream). Also before each call, the operand
in which the result is linear is multiplied in place, by -1, -1/2 and 2 in turn, so a result that an earlier call left is wrong.
Every result is compared with float64. tests/campaigns/test_fuzz.py does the same on CPUs, and shrinks what it finds.

    python tests/campaigns/fuzz.py --minutes 10 --seed 2 --json out/fuzz.jsonl
    python tests/campaigns/fuzz.py --device cpu --ranks 3 --minutes 1
    python tests/campaigns/fuzz.py --seed 2 --first 417 --trials 1       that trial again

Traps: the extents are new in each trial, so kernels are compiled, and programs dropped and made, all the time; calls per second
say nothing. A trial that takes longer than ALARM_S ends the run and prints every thread's stack.
"""

from __future__ import annotations

import faulthandler
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import calls
import torch
import torch.distributed as dist
from calls import DTYPES, EVERY, LAYOUTS, Case, Drawn, Wrong, even
from campaign import Options, append, captured, count, on_any_rank

from weft.core.problem import OPS, RECIPES
from weft.runtime import products
from weft.runtime.ranks import Ranks
from weft.schedules import FAMILIES, spec

Way = Literal["eager", "stream", "graph"]
WAYS: dict[str, tuple[Way, ...]] = {"cpu": ("eager",), "cuda": ("eager", "stream", "graph")}
REPLAYS = 4
FACTORS = (-1.0, -0.5, 2.0)
MOST = {"cpu": 80, "cuda": 2048}
"""By device: the largest extent."""
ALARM_S = {"cpu": 300, "cuda": 45}
_HELD_UP_S, _CYCLES_A_SECOND = 2e-3, 1.98e9
_ASK_EVERY = 8
"""Trials, until all ranks ask each other whether time is up."""


@dataclass(frozen=True, kw_only=True)
class Fuzz:
    """A run. first: number of the first trial. seconds: no trial is begun after so long."""

    seed: int = 1
    first: int = 0
    trials: int = 1 << 30
    seconds: float = float("inf")
    device: str = "cuda"


@dataclass(frozen=True, kw_only=True)
class FuzzTrial:
    """second: in the second group. seed: of the data, and of who is held up."""

    number: int
    case: Case
    ways: tuple[Way, ...]
    second: bool
    seed: int

    def __str__(self) -> str:
        return f"trial {self.number}, {self.case}, {'second group, ' if self.second else ''}by {', '.join(self.ways)}"


@dataclass(frozen=True, kw_only=True)
class FuzzReport:
    """One rank's story. calls: results that were compared. findings: what was wrong, with the trial."""

    trials: int
    calls: int
    seconds: float
    findings: tuple[str, ...]


def drawn(fuzz: Fuzz, number: int, world_size: int) -> FuzzTrial:
    """The trial with this number, the same on every rank."""
    generator = random.Random(f"{fuzz.seed} {number}")
    op, name = generator.choice(EVERY)
    chunked = FAMILIES[name].chunked and generator.random() < 0.5
    schedule = spec(name, generator.choice((1, 2, 3, 8))) if chunked else name
    m, n, k = (_extent(generator, fuzz.device, least) for least in (0, 0, 1))
    dtype, a, b = (generator.choice(some) for some in (sorted(DTYPES), LAYOUTS, LAYOUTS))
    entries, dim = generator.choice((1, 1, 2, 3)), generator.randrange(2)
    case = Case(op=op, schedule=schedule, m=m, n=n, k=k, dtype=dtype, a=a, b=b, entries=entries, dim=dim)
    ways, second, seed = WAYS[fuzz.device], generator.random() < 0.3, generator.randrange(1 << 30)
    order = tuple(generator.sample(ways, len(ways)))
    # Drawn last, so that trials of other dtypes stay as they were.
    if op in OPS and FAMILIES[name].float8 and generator.random() < 0.3:
        case = replace(case, recipe=generator.choice(RECIPES))
    return FuzzTrial(number=number, case=even(case, world_size), ways=order, second=second, seed=seed)


def _extent(generator: random.Random, device: str, least: int) -> int:
    """A small one, one that tiles fit or that TMA can load, or any."""
    kind, most = generator.random(), MOST[device]
    if kind < 0.3:
        return generator.randint(least, 40)
    return 8 * generator.randint(1, most // 8) if kind < 0.8 else generator.randint(least, most)


class Called:
    """A trial's call on this rank, with operands that change from call to call."""

    def __init__(self, trial: FuzzTrial, on: torch.device, group: dist.ProcessGroup | None) -> None:
        self.trial, self.on = trial, on
        data = Drawn(trial.case, trial.seed, on, group)
        self.call, self._expected = data.work()
        self._operands, self._factor = data.linear, 1.0
        self._holds = random.Random(trial.seed)
        self.compared, self.findings = 0, list[str]()

    def run(self) -> None:
        """Every way, in the trial's order. What is wrong is noted and no more: other ranks may be right, and go on."""
        for way in self.trial.ways:
            for call in getattr(self, f"_{way}")():
                self._compare(way, call)

    def _eager(self) -> Iterator[Callable[[], torch.Tensor]]:
        return iter((self.call, self.call))

    def _stream(self) -> Iterator[Callable[[], torch.Tensor]]:
        def call() -> torch.Tensor:
            caller, own = torch.cuda.current_stream(), torch.cuda.Stream()
            own.wait_stream(caller)
            with torch.cuda.stream(own):
                out = self.call()
            caller.wait_stream(own)
            out.record_stream(caller)
            return out

        return iter((call,))

    def _graph(self) -> Iterator[Callable[[], torch.Tensor]]:
        """An eager call comes first: a graph can capture a call after one of the same sizes."""
        yield self.call
        replay = captured(self.call)
        for _ in range(REPLAYS):
            yield replay
        torch.cuda.synchronize()

    def _compare(self, way: Way, call: Callable[[], torch.Tensor]) -> None:
        factor = FACTORS[self.compared % len(FACTORS)]
        for operand in self._operands:
            operand.mul_(factor)
        self._factor *= factor
        self._hold_up()
        out = call()
        self.compared += 1
        try:
            calls.check(self.trial.case, out, self._expected * self._factor, dist.get_world_size())
        except Wrong as wrong:
            self.findings.append(_said(f"{self.trial}: call {self.compared}, {way}: {wrong}"))

    def _hold_up(self) -> None:
        """The same is drawn on every rank, and one of them waits."""
        rank, seconds = self._holds.randint(-1, dist.get_world_size() - 1), self._holds.random() * _HELD_UP_S
        if rank != dist.get_rank():
            return
        if self.on.type == "cuda":
            torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))  # type: ignore[no-untyped-call]
        else:
            time.sleep(seconds)


def rank_work(fuzz: Fuzz) -> FuzzReport:
    """One rank of a run. What is wrong or refused is noted, and the next trial begun; other errors end the run."""
    on = torch.device(fuzz.device, dist.get_rank()) if fuzz.device == "cuda" else torch.device("cpu")
    second = dist.new_group()
    products.FEWEST_FLOPS, products.GAIN = 0.0, math.inf
    begun, made, compared, findings = time.monotonic(), 0, 0, list[str]()
    while made < fuzz.trials and not (made % _ASK_EVERY == 0 and on_any_rank(time.monotonic() - begun > fuzz.seconds)):
        faulthandler.dump_traceback_later(ALARM_S[fuzz.device], exit=True)
        trial = drawn(fuzz, fuzz.first + made, dist.get_world_size())
        called = Called(trial, on, second if trial.second else None)
        try:
            called.run()
        except ValueError as refused:
            findings.append(_said(f"{trial}: {type(refused).__name__}: {refused}"))
        except Exception as error:
            error.add_note(str(trial))
            raise
        made, compared = made + 1, compared + called.compared
        findings += called.findings
    faulthandler.cancel_dump_traceback_later()
    return FuzzReport(trials=made, calls=compared, seconds=time.monotonic() - begun, findings=tuple(findings))


def _said(finding: str) -> str:
    """A finding, said at once, too: what ends a run takes with it what the run was to tell at its end."""
    print(f"rank {dist.get_rank()}: {finding}", file=sys.stderr, flush=True)
    return finding


def line(fuzz: Fuzz, reports: Sequence[FuzzReport]) -> dict[str, Any]:
    """A run's."""
    return {
        "bench": "fuzz",
        "ranks": len(reports),
        **{name: getattr(fuzz, name) for name in ("seed", "first", "device")},
        "trials": reports[0].trials,
        "calls": reports[0].calls,
        "minutes": round(max(one.seconds for one in reports) / 60, 2),
        "findings": [f"rank {rank}: {what}" for rank, one in enumerate(reports) for what in one.findings],
    }


def main() -> None:
    options = Options(__doc__, device="cuda")
    options.add_argument("--minutes", type=float, default=float("inf"))
    options.add_argument("--trials", type=count, default=1 << 30)
    options.add_argument("--first", type=int, default=0, help="the first trial's number")
    given = options.parse_args()
    if given.minutes == float("inf") and given.trials == 1 << 30:
        options.error("say --minutes or --trials")
    ranks = options.ranks(given)
    fuzz = Fuzz(seed=given.seed, first=given.first, trials=given.trials, seconds=60 * given.minutes, device=given.device)
    with Ranks(ranks, device=given.device, environment={"WEFT_CACHE_DIR": "", "WEFT_TIMEOUT_S": "20"}) as pool:
        reports = pool.run(rank_work, fuzz, timeout_s=86_400)
    found = line(fuzz, reports)
    append(given, [found])
    cases = (drawn(fuzz, fuzz.first + at, ranks).case for at in range(found["trials"]))
    seen = {(case.op, case.schedule.partition(":")[0]) for case in cases}
    print(*found["findings"][:20], sep="\n", end="\n" if found["findings"] else "")
    print(*(f"{name} {found[name]}" for name in ("trials", "calls", "minutes")), end=", ")
    print(f"{len(found['findings'])} findings, {len(seen)} of {len(EVERY)} operators by family")
    raise SystemExit(bool(found["findings"]))


if __name__ == "__main__":
    main()
