"""What one rank does in calls, as it is seen from below the schedule: by what is waited for, signalled, copied, multiplied and
sent, lane by lane; and, where kernels are interpreted, by every access to a flag or a buffer."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from weft.core.fused_collective import spelled_out
from weft.core.schedule import (
    Copy,
    Flag,
    Gemm,
    GroupedGemm,
    Push,
    Reduce,
    Schedule,
    SegmentCopies,
    Step,
    Wait,
    signalled_flags,
    waits,
)
from weft.overlap.concurrent.collectives import ConcurrentCollective
from weft.overlap.concurrent.executor import Executor
from weft.runtime import launch_plan
from weft.runtime.bindings import Bindings
from weft.runtime.host import HostProgram
from weft.runtime.host_resources import HostWire, RowsOfCall
from weft.runtime.launches import CopyLaunch, FlagOperations, IssuedCall, KernelLaunch, Launch, TorchLaunch
from weft.runtime.ragged_kernels import _words

Events = dict[str, list[str]]
"""By lane and the thread that runs it, what happens there, in order."""
CALLERS_THREAD = "the thread of the caller"
USES = "uses"
"""In place of a lane: what runs beside what in weft.concurrent."""


class Trace:
    """What has happened so far on this rank, in order."""

    def __init__(self) -> None:
        self.events: defaultdict[str, list[str]] = defaultdict(list)
        self._now = threading.local()
        self.program: HostProgram | None = None
        """What runs."""

    def note(self, what: str, lane: str = "") -> None:
        found = self.events[lane or getattr(self._now, "lane", "no lane")]
        found.append(what)

    def at(self, region: str) -> None:
        """A region is found; by a view of it, which asks for its pieces, once."""
        found = self.events[getattr(self._now, "lane", "no lane")]
        if not found or found[-1] != f"at {region}":
            found.append(f"at {region}")

    def signal(self, flag: str) -> None:
        """A flag is signalled: at each of its waiters, which is one event."""
        found = self.events[self._now.lane]
        if not found or found[-1] != f"signal {flag}":
            found.append(f"signal {flag}")

    @contextmanager
    def on(self, lane: str) -> Iterator[None]:
        thread = threading.current_thread().name
        self._now.lane = f"{lane} on {CALLERS_THREAD if thread == 'MainThread' else thread}"
        yield

    @contextmanager
    def kernel(self, bindings: Bindings) -> Iterator[None]:
        """A kernel runs: what its addresses stand for."""
        assert self.program is not None
        self._now.places = _Places(self.program, bindings)
        try:
            yield
        finally:
            self._now.places = None

    def access(self, what: str, pointers: Any, mask: Any) -> None:
        """An access of a kernel, where it is to a flag or to a buffer. Looks at one flag are one."""
        places: _Places | None = getattr(self._now, "places", None)
        given = pointers[np.broadcast_to(mask, pointers.shape)] if places else np.empty(0)
        if places and given.size and (name := places.name(int(given.min()), int(given.max()))):
            found = self.events[self._now.lane]
            if not found or found[-1] != f"{what} {name}":
                found.append(f"{what} {name}")


class _Places:
    """Where flags and buffers lie in a call."""

    def __init__(self, program: HostProgram, bindings: Bindings) -> None:
        self._found: list[tuple[int, int, Callable[[int, int], str]]] = []
        names = flag_names(program)
        for rank, base in program._addresses.items():
            self._add(base, 8 * program.flags.words, lambda low, high, r=rank: names[r, low // 8])  # type: ignore[misc]
        for (buffer, rank), matrices in bindings.tensors.items():
            for matrix, _ in matrices:
                pitch = matrix.stride(0) * matrix.element_size() if matrix.shape[0] > 1 else 1 << 40
                extent = max(0, (matrix.shape[0] - 1) * pitch) if matrix.shape[0] > 1 else 0
                nbytes = extent + matrix.shape[1] * matrix.stride(1) * matrix.element_size() if matrix.numel() else 0
                self._add(
                    matrix.data_ptr(),
                    nbytes,
                    lambda low, high, b=buffer, r=rank, p=pitch: f"{b}@{r}[{low // p}..{high // p}]",  # type: ignore[misc]
                )
        if program.ragged is not None:
            flags = {(flag.rank, word): str(flag) for flag, word in _words(program.schedule).items()}
            for rank, base in enumerate(program.ragged.exchange.arrived.peers.tolist()):
                count = program.ragged.exchange.arrived.local.numel()
                self._add(base, 4 * count, lambda low, high, r=rank: flags.get((r, low // 4), "no flag"))  # type: ignore[misc]
            for rank, base in enumerate(program.ragged.exchange.notified.peers.tolist()):
                count = program.ragged.exchange.notified.local.numel()
                self._add(base, 4 * count, lambda low, high, r=rank: f"told[{low // 4}]@{r}")  # type: ignore[misc]

    def _add(self, base: int, nbytes: int, name: Callable[[int, int], str]) -> None:
        self._found.append((base, nbytes, name))

    def name(self, low: int, high: int) -> str:
        for base, nbytes, name in self._found:
            if base <= low < base + nbytes:
                return name(low - base, min(high - base, nbytes - 1))
        return ""


@contextmanager
def traced(*, kernels: bool = False) -> Iterator[Trace]:
    """Notes what weft does in this process meanwhile. kernels: by Triton's interpreter, too."""
    trace = Trace()
    with pytest.MonkeyPatch.context() as patch:

        def before(owner: Any, name: str, note: Callable[..., object]) -> None:
            old = getattr(owner, name)

            def new(*args: Any, **options: Any) -> Any:
                note(*args, **options)
                return old(*args, **options)

            patch.setattr(owner, name, new)

        for kind in (FlagOperations, CopyLaunch, KernelLaunch, TorchLaunch):
            patch.setattr(kind, "issue", _placed(trace, kind.issue))
        play = HostProgram.play

        def played(self: HostProgram, *args: Any) -> None:
            trace.program = self
            play(self, *args)

        patch.setattr(HostProgram, "play", played)
        before(HostProgram, "wait", lambda self, slot, value: trace.note(f"wait {flag_names(self)[self.rank, slot]}"))
        before(HostProgram, "signal", lambda self, rank, slot, value: trace.signal(flag_names(self)[rank, slot]))
        before(HostProgram, "_collect", lambda self, step, *rest: trace.note(f"{step.op} / {step.divide_by}"))
        before(HostWire, "exchange", lambda self, sends, receives, what: trace.note(f"messages {[rank for _, rank in sends]}"))
        before(HostProgram, "multiply", lambda self, a, b, out, **_: trace.note(f"multiply {[*a.shape]} {[*b.shape]}"))
        before(launch_plan, "look_up", lambda bindings, bags, out, problem: trace.note(f"look up {bags} -> {out}"))
        before(RowsOfCall, "moved", lambda self, segment: trace.note(f"rows {segment}"))
        before(Bindings, "view", lambda self, region: trace.at(str(region)))
        before(Bindings, "pieces", lambda self, region: trace.at(str(region)))
        patch.setattr(Executor, "_start_collective", _noted(trace, Executor._start_collective))
        before(
            Executor,
            "enqueue",
            lambda self, part, collective: trace.note(f"{part.number} by {'its steps' if part.steps else 'gloo'}", USES),
        )
        if kernels:
            from triton.runtime.interpreter import InterpreterBuilder

            before(
                InterpreterBuilder, "create_atomic_rmw", lambda _, op, p, v, mask, *rest: trace.access("add", p.data, mask.data)
            )
            before(
                InterpreterBuilder,
                "create_masked_load",
                lambda _, p, mask, *rest, **more: trace.access("load", p.data, mask.data),
            )
            before(
                InterpreterBuilder, "create_masked_store", lambda _, p, v, mask, *rest: trace.access("store", p.data, mask.data)
            )
        yield trace


def flag_names(program: HostProgram) -> dict[tuple[int, int], str]:
    """By rank and word, the flag."""
    return {(flag.rank, slot): str(flag) for flag, slots in program.flags.slots.items() for slot in slots}


def _placed(trace: Trace, issue: Callable[..., None]) -> Callable[..., None]:
    """What happens in a launch happens on its lane, and a kernel's accesses are to the tensors of its call."""

    def issued(self: Launch, call: IssuedCall, stream: int) -> None:
        with trace.on(self.where.lane), trace.kernel(call.bindings) if isinstance(self, KernelLaunch) else nullcontext():
            issue(self, call, stream)

    return issued


def _noted(trace: Trace, begin: Callable[..., Callable[[], None]]) -> Callable[..., Callable[[], None]]:
    """The begin of a collective of gloo's, which returns a wait for its end; both are noted."""

    def started(self: Executor, collective: ConcurrentCollective) -> Callable[[], None]:
        trace.note(f"begin {collective.describe()}", USES)
        wait = begin(self, collective)

        def waited() -> None:
            trace.note(f"join {collective.describe()}", USES)
            wait()

        return waited

    return started


def flags_of(step: Step) -> Iterator[str]:
    """What a step waits for and signals in a call on CPUs without kernels, in this order: each flag once."""
    if isinstance(step, (Gemm, Reduce, GroupedGemm, SegmentCopies)):
        passed: set[Flag] = set()
        for part in step.parts:
            for wait in part.waits if isinstance(step, (Gemm, Reduce)) else part.gates:
                if wait.flag not in passed:
                    yield f"wait {wait.flag}"
                passed.add(wait.flag)
            if part.count is not None:
                yield f"signal {part.count}"
        return
    if isinstance(step, Wait):
        yield f"wait {step.flag}"
    yield from (f"signal {flag}" for flag in signalled_flags(step))
    for wait in getattr(step, "gates", ()):
        yield f"wait {wait.flag}"


def promised(schedule: Schedule, rank: int, calls: int) -> Events:
    """By lane, what a rank waits for and signals, and where it copies, in so many calls on CPUs without kernels."""
    found: Events = {}
    spelled = spelled_out(schedule).schedule
    awaited = {wait.flag for _, _, _, step in spelled for wait in waits(step)}
    silent = {f"signal {flag}" for flag in spelled.flags if flag not in awaited}
    silent |= {f"wait {flag}" for flag in awaited if not spelled.signals_per_call[flag]}
    for _ in range(calls):
        for lane in spelled.ranks[rank]:
            events = found.setdefault(lane.name, [])
            for step in lane.steps:
                copies = step.parts if isinstance(step, Push) else [step] if isinstance(step, Copy) else []
                if isinstance(step, Push):
                    for part in step.parts:
                        events += [f"at {part.dst}", f"at {part.src}", f"signal {part.count}"]
                    continue
                for one in copies:
                    events += [f"at {one.dst}", f"at {one.src}"]
                events += flags_of(step)
    visible = {lane: [one for one in events if one not in silent] for lane, events in found.items()}
    return {lane: events for lane, events in visible.items() if events}


def done(events: Events, promised_events: Events) -> Events:
    """Of what has happened, by lane, what the schedule promises in these words: flags, and places of copies."""
    found: Events = {}
    for lane, all_of_it in events.items():
        name = lane.partition(" on ")[0]
        places = {one for one in promised_events.get(name, ()) if one.startswith("at ")}
        found[name] = [one for one in all_of_it if one.startswith(("wait ", "signal ")) or one in places]
    return {lane: some for lane, some in found.items() if some}


def bits(out: torch.Tensor) -> bytes:
    """The bits of a result."""
    return out.detach().contiguous().view(torch.uint8).numpy().tobytes()
