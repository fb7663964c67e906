"""Trials of schedules by clocks that show what a test tells them to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import weft


@contextmanager
def trials_by_a_clock(fast: str = "shard_p2p", rival: str = "shard_p2p") -> Iterator[list[str]]:
    """Trials on any device, of sequential and a rival, one of which is four times as fast; what is bound meanwhile."""
    with timed_trials(("sequential", rival), lambda schedule: 1000 if schedule.name == fast else 4000) as made:
        yield made


@contextmanager
def timed_trials(specs: tuple[str, ...], us: Callable[[weft.schedule.Schedule], int]) -> Iterator[list[str]]:
    """Trials on any device, by a clock that shows what it is told to; what is bound meanwhile. us: of a call by a schedule."""
    from weft.runtime import tuner
    from weft.runtime.programs import Programs

    bind = Programs._bind
    made: list[str] = []

    def noted(self: Programs, schedule: weft.schedule.Schedule, device: torch.device) -> object:
        made.append(schedule.name)
        return bind(self, schedule, device)

    def clock(call: Any, calls: int) -> int:
        call()
        (program,) = call.args
        return 1000 * us(program.schedule)

    with (
        mock.patch.object(Programs, "_bind", noted),
        mock.patch.multiple(
            tuner,
            timer_for=lambda device: clock,
            queued_timer_for=lambda device: None,  # a GPU's own, which goes by the load
            contenders=lambda problem, device: specs,
        ),
    ):
        yield made
