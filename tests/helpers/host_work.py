"""What ranks of the tests of benchmarks.host do."""

from __future__ import annotations

import argparse
import faulthandler
from unittest import mock

import torch
import torch.distributed as dist

import weft
from benchmarks.host import calls
from benchmarks.host.__main__ import PartCase, list_cases
from benchmarks.host.clock import Spread, host_times, measure_methods, wall_times
from benchmarks.rows import AUTO, Row

SLOWER_NS = 1000


def measure_part(part: str, rounds: int = 2) -> list[Row]:
    """The rows of all cases of a part."""
    given = argparse.Namespace(part=part, cases="", device="cpu", rounds=rounds, commit="abc", json=None)
    try:
        return [row for case in list_cases(given) for row in PartCase.measure(case, given)]
    finally:
        faulthandler.cancel_dump_traceback_later()  # the ranks go on to other tests


def measure_with_wrong_auto() -> list[Row]:
    """As measure_part of calls, where rank 1 gets a wrong result from `auto`."""
    right = calls.OPERATORS["matmul_all_reduce"]

    def wrong(a: torch.Tensor, b: torch.Tensor, **options: str) -> torch.Tensor:
        return right(a, b, **options) + (0.2 if not options and dist.get_rank() == 1 else 0.0)

    with mock.patch.dict(calls.OPERATORS, matmul_all_reduce=wrong):
        return [row for row in measure_part("calls", 1) if row.op == "matmul_all_reduce"]


def measure_with_lost_method() -> tuple[dict[str, Spread], dict[str, str], list[str], int]:
    """What is left of four methods, where rank 1 cannot make one, and gets a wrong result from another."""
    log: list[str] = []
    recovered = []

    def lose() -> str:
        if dist.get_rank() == 1:
            raise RuntimeError("no memory")
        return "lost"

    def check(name: str, method: str) -> None:
        log.append(f"check {method}")
        if name == "wrong" and dist.get_rank() == 1:
            raise ArithmeticError("wrong result")

    try:
        found, missing = measure_methods(
            {"first": lambda: "first", "lost": lose, "wrong": lambda: "wrong", "last": lambda: "last"},
            check,
            lambda name, method: log.append(f"warm up {method}"),
            lambda made: host_times({name: lambda: 5 * SLOWER_NS for name in made}, 1, 1),
            lambda: recovered.append(1),
        )
    finally:
        faulthandler.cancel_dump_traceback_later()
    return found, missing, log, len(recovered)


def time_two_ranks() -> tuple[Spread, float, int]:
    """Host time of calls that take rank 1 twice as long, the wall time of calls that do nothing, and how many ran."""
    counted: list[int] = []
    try:
        host = host_times({AUTO: lambda: (dist.get_rank() + 1) * SLOWER_NS}, 3, 4)
        wall = wall_times({AUTO: lambda: counted.append(1)}, 3, 5)
    finally:
        faulthandler.cancel_dump_traceback_later()
        weft.close()
    return host[AUTO], wall[AUTO], len(counted)
