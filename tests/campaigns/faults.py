"""When a rank fails, does every other rank end soon, with an error that names it or with the right result?

A seed gives each trial its operator, schedule, fault and victim. New rank processes (three on CPUs) make one right call.
Then the victim's next call is struck by one fault before a random step. The operators are all of weft's, lookups included; on
CPUs also calls with `splits`, `weft.concurrent` and a backward pass under `weft.hooks.ddp`. Every third trial on CPUs calls on
a second group of the same ranks. The faults:

    kill     the victim is killed
    stop     it is stopped (SIGSTOP), and continues when the others have ended
    late     it sleeps longer than the timeout
    slow     it sleeps, but not as long as the timeout
    raise    it raises
    differ   it calls the operator with other sizes, or with another schedule
    leave    it closes its group instead of calling

Every other rank must end its calls within the timeout and 5 s: with an error that names the victim, or with the right result
where the victim is merely slow or this rank needed nothing more from it. If the victim is late, a rank that waits for a rank
which itself waits for the victim may time out first. Then its error names that rank, whose own error names the victim.

Then all live ranks call `weft.close()`, make a new process group where one rank was killed (on GPUs also where NCCL's
communicator may have been aborted), and make two right calls. At the end no process and no segment of shared memory may be
left. Each rank looks for its own segments while it lives, and the campaign looks for those of dead ranks, so campaigns with
different seeds can run at the same time.

    python tests/campaigns/faults.py --trials 1000 --json out/faults.jsonl      (see `summary` for what is written)
    python tests/campaigns/faults.py --device cuda --trials 100
    python tests/campaigns/faults.py --only 'direct_store kill' --seed 7

On GPUs a step is one that the victim's host enqueues. Traps: a stopped rank holds its CPU lock, if any, so results are compared
after it continues. A kill after the victim's last step does not affect this call; the next call gets the error. What a dead
rank left is removed by the next group that starts, which may be another campaign's. The timeout is real time: on a machine with
other load, ranks are late.
"""

from __future__ import annotations

import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import calls
import torch
import torch.distributed as dist
from calls import Case, Work
from campaign import Options, append, count
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.comm.shared_memory import PREFIX, SHM
from weft.core.errors import WeftError
from weft.core.schedule import Collective
from weft.runtime.groups import GROUPS
from weft.runtime.launches import Launch
from weft.runtime.ranks import RankFailed, Ranks

BOUND_S, GRACE_S = 1.0, 5.0
FAULTS = ("kill", "stop", "late", "slow", "raise", "differ", "leave")
CALLS = 3
"""After the fault: a rank that needs nothing of the victim in one call does in a later one."""
M, N, K = 24, 18, 12
_SLOW_S = 0.2


@dataclass(frozen=True, kw_only=True)
class FaultTrial:
    """One fault. step: of the victim's call, counted from 0."""

    op: str
    schedule: str
    fault: str
    victim: int
    step: int
    seed: int
    ranks: int = 3
    device: str = "cpu"
    subgroup: bool = False

    def __str__(self) -> str:
        where = " in a group" if self.subgroup else ""
        return f"{self.op} {self.schedule} {self.fault} rank {self.victim} step {self.step} seed {self.seed}{where}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank saw: the error, or nothing where all its calls were right; seconds from the fault on; whether it could go
    on afterwards; its segments of shared memory after that."""

    error: str
    seconds: float
    again: bool
    left: tuple[str, ...] = ()


class Planted(MemoryError):
    """The error of `raise`."""


def drawn(trials: int, seed: int, device: str, only: Sequence[str], ranks: int = 3) -> Iterator[FaultTrial]:
    """Random trials, the same for the same seed; each has every word of `only`."""
    composed = [(op, method) for op, (_, methods) in COMPOSED.items() for method in methods]
    every = [*calls.EVERY, *(composed if device == "cpu" else ())]
    generator, made = random.Random(seed), 0
    for number in range(1_000_000):
        op, name = generator.choice(every)
        trial = FaultTrial(
            op=op,
            schedule=name,
            fault=generator.choice(FAULTS),
            victim=generator.randrange(ranks),
            step=generator.randrange(6),
            seed=seed * 1_000_000 + number,
            ranks=ranks,
            device=device,
            subgroup=device == "cpu" and number % 3 == 2,
        )
        if trial.op == "hooks" and trial.fault == "differ":
            continue  # ranks' gradients have one size, however many rows each has
        if set(only) <= {trial.op, trial.schedule, trial.fault}:
            yield trial
            made += 1
        if made == trials:
            return
    raise ValueError(f"--only {' '.join(only)!r}: no trial is like that")


def work(trial: FaultTrial, seed: int, on: torch.device, *, m: int = M) -> Work:
    """This rank's call, and its result."""
    group = _group(trial)
    if trial.op in COMPOSED:
        return COMPOSED[trial.op][0](trial.schedule, seed, m, group)
    case = Case(op=trial.op, schedule=trial.schedule, m=m, n=N, k=K)
    return calls.work(calls.even(case, dist.get_world_size()), seed, on, group)


def _group(trial: FaultTrial) -> dist.ProcessGroup:
    """The world, or a group of the same ranks. Collective at its first use in a world."""
    world = dist.group.WORLD
    assert world is not None
    if not trial.subgroup:
        return world
    if world not in _GROUPS:
        _GROUPS.clear()
        _GROUPS[world] = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=20))
    return _GROUPS[world]


_GROUPS: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
_MODELS: dict[dist.ProcessGroup, tuple[torch.nn.Linear, DistributedDataParallel]] = {}


def _with_splits(_: str, seed: int, m: int, group: dist.ProcessGroup) -> Work:
    """Rows to one expert of each rank, in numbers that ranks draw."""
    rank, size, draw = group.rank(), group.size(), torch.Generator().manual_seed(seed)
    counts = torch.randint(0, m // size + 1, (size, size), generator=draw)
    rows = [torch.randn(m, K, generator=draw) for _ in range(size)]
    b = [torch.randn(1, K, N, generator=draw) for _ in range(size)]
    parts = [rows[src].split([*counts[src].tolist(), m - int(counts[src].sum())])[rank] for src in range(size)]
    expected = torch.cat(parts).double() @ b[rank][0].double()

    def call() -> torch.Tensor:
        out, _ = weft.all_to_all_matmul(rows[rank], b[rank], group, splits=counts[rank][:, None], max_rows=m * size)
        return out[: expected.shape[0]]

    return call, expected


def _concurrent(method: str, seed: int, m: int, group: dist.ProcessGroup) -> Work:
    """An all_reduce and a matmul at the same time."""
    rank, size, draw = group.rank(), group.size(), torch.Generator().manual_seed(seed)
    given = [torch.randn(m, K, generator=draw) for _ in range(size)]
    b, summed = torch.randn(K, N, generator=draw), given[rank].clone()

    def call() -> torch.Tensor:
        product = weft.concurrent(lambda *_: given[rank] @ b, weft.AllReduce(summed, group), method=method)
        return torch.cat([product, summed], 1)

    total = torch.stack([each.double() for each in given]).sum(0)
    return call, torch.cat([given[rank].double() @ b.double(), total], 1)


def _hooked(method: str, seed: int, m: int, group: dist.ProcessGroup) -> Work:
    """A gradient that weft averages. A model stays for the calls of its group, as in training."""
    rank, size, draw = group.rank(), group.size(), torch.Generator().manual_seed(seed)
    if group not in _MODELS:
        _MODELS.clear()
        linear = torch.nn.Linear(K, N, bias=False)
        model = DistributedDataParallel(linear, process_group=group)
        weft.hooks.ddp(model, method=method)
        _MODELS[group] = linear, model
    linear, model = _MODELS[group]
    given = [torch.randn(m, K, generator=draw) for _ in range(size)]
    weight = torch.randn(m, N, generator=draw)

    def call() -> torch.Tensor:
        linear.weight.grad = None
        (model(given[rank]) * weight).sum().backward()
        assert linear.weight.grad is not None
        return linear.weight.grad.clone()

    return call, torch.stack([weight.double().T @ each.double() for each in given]).mean(0)


COMPOSED: dict[str, tuple[Callable[[str, int, int, dist.ProcessGroup], Work], tuple[str, ...]]] = {
    "splits": (_with_splits, ("fused",)),
    "concurrent": (_concurrent, ("sequential", "nccl", "copy_engine")),
    "hooks": (_hooked, ("nccl", "copy_engine")),
}
"""What is more than one operator, with its methods."""


def suffer(trial: FaultTrial, folder: str) -> Outcome:
    """One rank's part of a trial."""
    rank = dist.get_rank()
    on = torch.device(trial.device, rank) if trial.device == "cuda" else torch.device("cpu")
    _right(work(trial, trial.seed, on), on)
    takes_the_group = on.type == "cuda" and _has_collectives()
    dist.barrier()
    victim, begun = rank == trial.victim, time.monotonic()
    error = ""
    try:
        for call in range(CALLS):
            with _fault(trial) if victim and call == 0 else nullcontext():
                _right(_next(trial, victim and call == 0, call, on), on)
    except (WeftError, Planted) as failed:
        error = f"{type(failed).__name__}: {failed}"
    seconds = time.monotonic() - begun
    again = _again(trial, folder, on, takes_the_group)
    return Outcome(error=error, seconds=seconds, again=again, left=_segments(os.getpid()))


def _next(trial: FaultTrial, now: bool, call: int, on: torch.device) -> Work:
    """The call after the fault with this number; of a victim that differs, another one."""
    seed = trial.seed + 1 + call
    if now and trial.fault == "differ":
        return work(trial, seed, on, m=2 * M)
    return work(trial, seed, on)


def _right(given: Work, on: torch.device) -> None:
    call, expected = given
    out = call()
    weft.synchronize()
    if on.type == "cuda":
        torch.cuda.synchronize()
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@contextmanager
def _fault(trial: FaultTrial) -> Iterator[None]:
    """The victim's fault, before a step of the call within."""
    if trial.fault == "leave":
        weft.close(_group(trial))
        raise Planted("left")
    if trial.fault == "differ":
        yield
        return
    seen = [0]

    def stepping(issue: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            seen[0] += 1
            if seen[0] == 1 + trial.step:
                _strike(trial.fault)
            return issue(*arguments, **options)

        return step

    with ExitStack() as stack:
        stack.callback(lambda: seen[0] <= trial.step and _strike(trial.fault))
        for kind in Launch.__subclasses__():  # every step of a call passes through one
            stack.enter_context(mock.patch.object(kind, "issue", stepping(kind.issue)))
        yield


def _strike(fault: str) -> None:
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    elif fault == "raise":
        raise Planted("planted")
    else:
        time.sleep(BOUND_S * 2.5 if fault == "late" else _SLOW_S)


def _again(trial: FaultTrial, folder: str, on: torch.device, takes_the_group: bool) -> bool:
    """After an error, ranks that live close, meet, and call rightly again; in a new process group, if the old one is lost."""
    size, rank = dist.get_world_size(), dist.get_rank()
    weft.close(_group(trial))
    _MODELS.clear()  # what a backward pass that raised leaves of a model is nobody's business
    living = [other for other in range(size) if not (trial.fault == "kill" and other == trial.victim)]
    if len(living) < size or takes_the_group:
        _new_group(folder, on, living.index(rank), len(living))
    dist.barrier()
    for call in range(2):
        _right(work(trial, trial.seed + 50 + call, on), on)
    weft.close(_group(trial))
    return True


def _has_collectives() -> bool:
    """Whether NCCL's collectives take part, in one of which a stuck call ends by the abort of its communicator."""
    schedules = GROUPS.state(dist.group.WORLD.group_name).schedules()  # type: ignore[union-attr]
    return any(isinstance(step, Collective) for schedule in schedules for *_, step in schedule)


def _new_group(folder: str, on: torch.device, rank: int, size: int) -> None:
    dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder) / "again"), size)  # type: ignore[attr-defined]
    backend, options = ("cpu:gloo,cuda:nccl", {"device_id": on}) if on.type == "cuda" else ("gloo", {})
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20), **options)


def judged(trial: FaultTrial, suffers: Callable[[FaultTrial, str], Outcome] = suffer) -> dict[str, Any]:
    """Run a trial: its line. verdict: "right", or what went wrong. suffers: a rank's part."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pool = Ranks(trial.ranks, device=trial.device, environment={"WEFT_TIMEOUT_S": str(BOUND_S), "WEFT_CACHE_DIR": ""})
        try:
            pool.start(suffers, trial, folder)
            if trial.fault == "stop":
                _let_go_on(pool, trial)
            outcomes, broken = _collected(pool, trial)
        finally:
            pool.close(grace_s=3)
    wrong = broken or _wrong(trial, outcomes)
    alive = [process.pid for process in pool.processes if process.is_alive()]
    left = [name for process in pool.processes if process.pid for name in _segments(process.pid)]
    if not wrong and (left or alive):
        wrong = f"left: segments {left}, processes {alive}"
    # Of what is right, a line keeps the errors' names alone.
    errors = {rank: answer.error if wrong else answer.error.partition(":")[0] for rank, answer in enumerate(outcomes) if answer}
    return {
        "bench": "faults",
        **asdict(trial),
        "verdict": wrong or "right",
        "errors": errors,
        "slowest_s": round(max((answer.seconds for answer in outcomes if answer), default=0.0), 3),
        "trial_s": round(time.monotonic() - began, 2),
    }


def _segments(pid: int) -> tuple[str, ...]:
    """Of a process, those that have a name now."""
    return tuple(path.name for path in SHM.glob(f"{PREFIX}*-{pid}-*"))


def _let_go_on(pool: Ranks, trial: FaultTrial) -> None:
    """Wake the victim once the others must have given up: on GPUs, by turns while they give it time to learn of that, and once
    they have let go of what waits for it there."""
    process = pool.processes[trial.victim]
    deadline = time.monotonic() + 30
    while _state(process.pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(BOUND_S + (2.5 if trial.device == "cuda" and trial.seed % 2 else 0.5))
    if process.pid:
        os.kill(process.pid, signal.SIGCONT)


def _state(pid: int | None) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _collected(pool: Ranks, trial: FaultTrial) -> tuple[list[Outcome | None], str]:
    """Each rank's outcome, and what went wrong on the way."""
    try:
        return pool.finish(timeout_s=60), ""
    except RankFailed as failed:
        if trial.fault == "kill" and [rank for rank, _ in failed.failures] == [trial.victim]:
            return failed.results, ""
        return failed.results, f"ranks failed: {failed}"


def _wrong(trial: FaultTrial, outcomes: Sequence[Outcome | None]) -> str:
    """Why the answers of a trial are not what they must be; nothing if they are."""
    for rank, answer in enumerate(outcomes):
        if answer is None:
            if not (trial.fault == "kill" and rank == trial.victim):
                return f"rank {rank} did not answer"
            continue
        if rank != trial.victim and answer.seconds > BOUND_S + GRACE_S:
            return f"rank {rank} took {answer.seconds:.1f} s"
        if not answer.again:
            return f"rank {rank} could not go on"
        if answer.left:
            return f"rank {rank} left {', '.join(answer.left)}"
    others = {rank: answer.error for rank, answer in enumerate(outcomes) if answer and rank != trial.victim}
    for rank, error in others.items():
        if not (_explains(trial, error) or _passed_on(trial, rank, others)):
            return f"rank {rank} got {error!r}"
    if trial.fault in ("kill", "raise", "differ", "leave") and not any(others.values()):
        return "nobody noticed"
    return ""


def _explains(trial: FaultTrial, error: str) -> bool:
    """Whether a rank that is not the victim may get this error; no error where its calls were right."""
    if trial.fault == "slow":
        return not error
    if not error:
        return trial.fault in ("stop", "late")
    if trial.fault == "differ":
        return error.startswith(("RankMismatch", "PeerLost")) and "disagree" in error
    named = rf"rank {trial.victim}\b"
    return bool(re.search(named, error))


def _passed_on(trial: FaultTrial, rank: int, others: Mapping[int, str]) -> bool:
    """Whether a rank waited in vain for one that itself waited, and said so, for the victim."""
    between = [other for other, error in others.items() if other != rank and _explains(trial, error)]
    waited = trial.fault in ("stop", "late") and others[rank].startswith("WaitTimeout")
    return waited and any(re.search(rf"rank {other}\b", others[rank]) for other in between)


def summary(lines: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What is written of trials: a line for each fault of those that were right, and each trial that was not as it is.

    ops: how many trials each operator had. errors_seen: how many ranks got each error, "" where all their calls were right.
    """
    right: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["verdict"] == "right":
            right.setdefault((line["fault"], line["ranks"], line["device"]), []).append(line)
        else:
            yield dict(line)
    for (fault, ranks, device), some in sorted(right.items()):
        yield {
            "bench": "faults",
            "fault": fault,
            "ranks": ranks,
            "device": device,
            "verdict": "right",
            "trials": len(some),
            "ops": dict(sorted(Counter(line["op"] for line in some).items())),
            "programs": len({(line["op"], line["schedule"]) for line in some}),
            "errors_seen": dict(sorted(Counter(error for line in some for error in line["errors"].values()).items())),
            "slowest_s": max(line["slowest_s"] for line in some),
        }


def main() -> None:
    options = Options(__doc__, device="cpu")
    options.add_argument("--trials", type=count, default=100)
    options.add_argument("--only", default="", help="words of operator, schedule and fault that a trial must have")
    options.add_argument("--budget-s", type=float, default=float("inf"), help="no trial is begun after so long")
    given = options.parse_args()
    ranks, began, lines = options.ranks(given), time.monotonic(), list[dict[str, Any]]()
    try:
        for trial in drawn(given.trials, given.seed, given.device, given.only.split(), ranks):
            if time.monotonic() - began > given.budget_s:
                break
            lines.append(judged(trial))
            if lines[-1]["verdict"] != "right":
                print(f"{trial}: {lines[-1]['verdict']}", flush=True)
    finally:  # also where the campaign is interrupted
        append(given, summary(lines))
    verdicts = Counter(f"{line['fault']}: {'right' if line['verdict'] == 'right' else 'WRONG'}" for line in lines)
    print(f"{len(lines)} trials in {time.monotonic() - began:.0f} s: {dict(sorted(verdicts.items()))}")
    raise SystemExit(any(line["verdict"] != "right" for line in lines))


if __name__ == "__main__":
    main()
