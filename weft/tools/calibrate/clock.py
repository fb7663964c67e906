"""Measures work on all ranks. The result is the slowest rank's time in each round.

On a GPU the calls are captured in a CUDA graph, which is replayed between two events, so the time does not include Python or
launches by the host. On a CPU they are called between two readings of the clock. A barrier precedes each round. On GPUs a
replay that is not timed follows the barrier.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist

from weft.compat.comm_streams import comm_stream, give_back
from weft.runtime.replay import Captures
from weft.tools.calibrate.samples import ProbeSample

ROUNDS = 7
Work = Callable[[], object]


class Clock:
    """Clock measures work on this rank's device. device: "cpu", or "cuda" for the current CUDA device."""

    def __init__(self, device: str, rounds: int = ROUNDS) -> None:
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self._rounds = rounds

    def sample(self, what: str, key: tuple[int, ...], work: Work, *, repeat: int = 1, per: int = 1) -> ProbeSample:
        """Measure a work of `per` equal parts, and return the time of one part. Collective. repeat: the calls per round."""
        work()
        run = self._capture(work, repeat) if self.device.type == "cuda" else _repeat(work, repeat)
        run()
        times = [self._time_round(run) for _ in range(self._rounds)]
        return self.slowest(what, key, [us / repeat / per for us in times])

    def sample_concurrent(self, what: str, work: Work, other: Work, *, others: int, repeat: int = 1) -> ProbeSample:
        """Return the time of `work` while `other` runs on another stream, where it is enqueued `others` times. Collective.

        Works on GPUs only. `work` must be enqueued and must end before the calls of `other` end.
        """
        assert self.device.type == "cuda", "on a CPU there is no stream"
        side = comm_stream(priority="normal", device=self.device)
        work()
        other()
        times: list[float] = []
        for _ in range(self._rounds):
            self.barrier()
            with torch.cuda.stream(side):
                for _ in range(others):
                    other()
            times.append(self._events(lambda: [work() for _ in range(repeat)]) / repeat)
            torch.cuda.synchronize(self.device)
        give_back(side)
        return self.slowest(what, (), times)

    def slowest(self, what: str, key: tuple[int, ...], mine_us: list[float]) -> ProbeSample:
        """Return a sample of the slowest rank's times. mine_us: the times of this rank. Collective."""
        times = torch.tensor(mine_us, dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return ProbeSample(what=what, key=key, us=tuple(times.tolist()))

    def barrier(self) -> None:
        """Wait until all ranks have called this and their devices are idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()

    def _time_round(self, run: Work) -> float:
        self.barrier()
        if self.device.type == "cuda":
            run()  # hosts leave the barrier at different times; if the work is an exchange, this brings the GPUs together
            return self._events(run)
        begun_ns = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - begun_ns) / 1e3

    def _events(self, run: Work) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def _capture(self, work: Work, repeat: int) -> Work:
        torch.cuda.synchronize(self.device)
        return _captures(self.device).record(_repeat(work, repeat)).replay


@cache
def _captures(device: torch.device) -> Captures:
    """Return the captures that all measurements on a device share, because they run one after the other."""
    return Captures(device)


def _repeat(work: Work, repeat: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(repeat):
            work()

    return run
