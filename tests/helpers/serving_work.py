"""What ranks of the tests of benchmarks.serving do."""

from __future__ import annotations

import argparse
import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from unittest import mock

import torch
import torch.distributed as dist

import weft
from benchmarks import serving, serving_chains
from benchmarks.measure import Failed
from benchmarks.rows import Row

Tensor = torch.Tensor


class OnGloo(serving_chains.Symmetric):
    """The same sums, by gloo in plain memory: a one-shot sum leaves what it reads as it is."""

    def __init__(self, kind: str, device: str) -> None:
        super().__init__(kind, device)
        self.kind = kind

    def memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self.made.setdefault((shape, dtype), torch.empty(*shape, dtype=dtype))

    def all_reduce(self, x: Tensor) -> Tensor:
        found = x.clone() if self.kind == "one_shot" else x
        dist.all_reduce(found)
        return found


def given(*words: str) -> argparse.Namespace:
    found = serving.make_parser().parse_args(
        ["--device", "cpu", "--rounds", "2", "--commit", "abc", "--modes", "eager", *words]
    )
    return argparse.Namespace(**vars(found))


@contextmanager
def _begun() -> Iterator[None]:
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()  # the ranks go on to other tests
        serving_chains.unavailable.cache_clear()
        weft.close()


def measure(*parts: str) -> list[Row]:
    """The rows of --quick, with gloo in place of PyTorch's symmetric-memory sums, which CPUs do not have."""
    with mock.patch.object(serving_chains, "Symmetric", OnGloo):
        return measure_without_peers(*parts)


def measure_without_peers(*parts: str) -> list[Row]:
    """As measure, by default of few rows, as it is on CPUs."""
    arguments, cases = given(), serving.cases(parts or ("few",), "cpu", quick=True)
    with _begun():
        return [row for case in cases for row in serving.measured(case, arguments)]


def measure_wrong_norm() -> list[Row]:
    """Of few rows, where rank 1 gets a wrong norm from the fused call."""
    right = weft.matmul_all_reduce_norm

    def wrong(*operands: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        normed, whole = right(*operands, **options)  # type: ignore[arg-type]
        return normed + 0.2 * dist.get_rank(), whole

    with mock.patch.object(weft, "matmul_all_reduce_norm", wrong):
        return measure("few")


def measure_late() -> tuple[list[Row], str]:
    """A case whose turn comes when the budget is over, on rank 1: its rows, and what is raised."""
    case = serving.cases(["few"], "cpu", quick=True)[0]
    rows = []
    begun_s = time.monotonic() - 9 * dist.get_rank()
    with _begun():
        try:
            for row in serving.measured_in_time(begun_s, case, given("--budget-s", "8")):
                rows.append(row)
        except Failed as failed:
            return rows, str(failed)
    return rows, ""


def errors_of_known_results() -> tuple[dict[str, float], dict[str, float]]:
    """Of a whole sum, and of one of which each rank has 2 of 4 rows: 1 row in 4 is off by 30%, and the norm is right."""
    expected = torch.ones(4, 3, dtype=torch.float64)
    bench = serving.Bench(works={}, expected=(expected, expected), sampled=torch.arange(4), rows=4)
    whole = torch.ones(4, 3)
    whole[1] = 1.3
    own = whole.chunk(2)[dist.get_rank()]
    return bench.errors(torch.ones(4, 3), whole), bench.errors(torch.ones(4, 3), own)


def compare_products_twice() -> tuple[dict[str, float], dict[str, float]]:
    """The largest error of each method of a finished product, in two comparisons after each other; and the errors of a call of
    NCCL's after them, which sums the zeros that are timed."""
    case = serving.cases(["product"], "cpu", quick=True)[0]
    found: dict[str, dict[str, float]] = {}
    largest: dict[str, float] = {}
    with _begun(), torch.no_grad(), mock.patch.object(serving_chains, "Symmetric", OnGloo):
        bench = serving.make_product(case, "cpu")
        for _ in range(2):
            for name, work in bench.works.items():
                bench.check(found)(name, work())
                largest[name] = max(largest.get(name, 0.0), *found[name].values())
        normed, whole = cast(serving_chains.Pair, bench.works["sequential/default"]())
        return largest, bench.errors(normed, whole)
