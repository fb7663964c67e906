"""Autotuning runs whose clocks show the times that a test sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import weft


@contextmanager
def autotuning_by_a_clock(fast: str = "shard_p2p", rival: str = "shard_p2p") -> Iterator[list[str]]:
    """Autotune sequential and a rival on any device; `fast` takes a quarter of the time. Yields the names of what is bound."""
    with timed_autotuning(("sequential", rival), lambda schedule: 1000 if schedule.name == fast else 4000) as made:
        yield made


@contextmanager
def timed_autotuning(specs: tuple[str, ...], us: Callable[[weft.schedule.Schedule], int]) -> Iterator[list[str]]:
    """Autotune on any device with a fake clock. us: the time of a call by a schedule. Yields the names of what is bound."""
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
            auto_candidates=lambda problem, device: specs,
        ),
    ):
        yield made
