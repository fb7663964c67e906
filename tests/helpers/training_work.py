"""What ranks of the tests of benchmarks.training do."""

from __future__ import annotations

import argparse
import faulthandler
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import by_hand, training
from benchmarks.measure import Failed, WrongResult
from benchmarks.rows import Row


def given(**changes: object) -> argparse.Namespace:
    options = training.make_parser().parse_args(["--tokens", "16", "--capacity", "2", "--rounds", "1", "--device", "cpu"])
    return argparse.Namespace(**{**vars(options), "modes": "eager", **changes})


def measure(modes: str, model: str) -> list[Row]:
    """The rows of a model, without and with checkpointing."""
    arguments = given(modes=modes, models=[model], checkpointing=["off", "on"])
    rows = []
    try:
        for case in training.cases(arguments):
            rows += list(training.measured(case, arguments))
            training.after()
    finally:
        faulthandler.cancel_dump_traceback_later()  # the ranks go on to other tests
    return rows


def measure_without_sum(model: str) -> str:
    """What is said where the hand-written backward leaves out a rank's part of the input's gradient."""
    arguments = given(models=[model], checkpointing=["off"])

    def own(link: by_hand.Link, x: torch.Tensor) -> tuple[torch.Tensor, by_hand.Wait]:
        return x.chunk(link.ranks, 1)[dist.get_rank()].contiguous(), lambda: None

    try:
        with mock.patch.object(by_hand.Link, "start_scatter", own):
            list(training.measured(training.cases(arguments)[0], arguments))
    except (WrongResult, Failed) as error:
        return str(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
        training.after()
    return ""


def collectives(model: str) -> dict[str, int]:
    """How often a step by hand calls each collective, and whether the computation alone calls none."""
    case = training.cases(given(models=[model], checkpointing=["off"]))[0]
    bench = training.Bench(case, "cpu", 2.0)
    step = bench.by_hand(bench.link, fused=False)
    bench.link.made = []
    step()
    found: dict[str, int] = {}
    for collective, *_ in bench.link.made:
        found[collective.__name__] = found.get(collective.__name__, 0) + 1
    alone = bench.by_hand(bench.alone(), fused=False)
    with mock.patch.object(by_hand.Link, "_call", side_effect=AssertionError("a collective")):
        alone()
    assert alone.out is not None
    assert alone.out.shape == step().out.shape  # type: ignore[union-attr]
    training.after()
    return found
