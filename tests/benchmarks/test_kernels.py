"""benchmarks.kernels without a GPU: cases, options, operands, and what a part writes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pools import on_ranks

from benchmarks import rows
from benchmarks.kernels import fp8, grouped, one_row, operands, products, single_gpu
from benchmarks.kernels.__main__ import PARTS, options
from benchmarks.kernels.single_gpu import Case, Part


@pytest.mark.parametrize(("name", "count"), [("gemm", 14), ("fp8", 20), ("one_row", 5), ("grouped", 6), ("products", 414)])
def test_cases_of_a_part(name: str, count: int) -> None:
    found = PARTS[name].cases(options().parse_args([name]))
    assert len(found) == count
    assert name == "fp8" or len({(case.op, case.name) for case in found}) == count


def test_options_of_parts() -> None:
    given = options().parse_args(["fp8", "--only", "dense", "--shapes", "64,128,128,4,3,8,pairs,twice"])
    (one,) = given.shapes
    assert (one.blocks.n, one.blocks.pairs, one.blocks.halves, one.exact, one.per_sm) == (128, True, False, True, 2)
    assert {case.op for case in PARTS["fp8"].cases(given)} == {"dense"}
    assert options().parse_args(["gemm", "--shapes"]).shapes is True
    assert one_row.tiling("64,256,8,6").k == 256


@pytest.mark.parametrize("text", ["1,2,3,4,5", "1,2,3,4,5,six", "1,2,3,4,5,6,thrice"])
def test_what_is_no_tile_shape(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        fp8.candidate(text)
    with pytest.raises(argparse.ArgumentTypeError, match="64,256"):
        one_row.tiling("64,256")


def test_a_step_in_parts() -> None:
    whole, parts = operands.step(64, 32, 512), operands.step(64, 32, 512, parts=8, gates=True, counts=True, slices=4)
    assert [(len(one.gates), one.inner) for one in whole.parts] == [(0, ())]
    assert [one.a.rows for one in parts.parts] == [(8 * i, 8 * i + 8) for i in range(8)]
    assert all(len(one.gates) == 1 and one.count is not None for one in parts.parts)
    assert [len(one.inner) for one in parts.parts] == [0] + [3] * 7


def test_a_graph_takes_about_a_millisecond() -> None:
    assert [products.calls_of(flops) for flops in (0, 60_000_000_000, 2 * 8192**3)] == [10, 8, 2]


def test_what_a_part_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each case; ratios over the fastest baseline; means by group."""

    def medians(calls: Mapping[str, Any], **given: int) -> dict[str, float]:
        assert given == {"rounds": 3, "warm_up": 4}
        return {name: us for name, (us,) in calls.items()}

    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(f"faulthandler.{name}", lambda *given, **options: None)
    monkeypatch.setattr(single_gpu, "medians", medians)
    monkeypatch.setattr(single_gpu, "versions", lambda device: {"torch": "2"})
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    times = {"computation/cublas a": [8.0], "computation/cublas b": [4.0], "weft/auto": [2.0]}
    given = argparse.Namespace(json=tmp_path / "rows.jsonl", commit="abc")
    made = [Case(op="dense", name="one", shape=(1, 2, 3), groups=("rows", "all"), calls=lambda: times)]  # type: ignore
    about: dict[str, Any] = {"bench": "gemm", "about": "", "dtype": "bfloat16", "rounds": 3}
    single_gpu.run(Part(**about, baseline="computation/cublas", cases=lambda given: made), given)
    (row,) = rows.read(given.json)
    assert (row.us["weft/auto"], row.extra, row.samples, row.machine) == (2.0, {"shape": [1, 2, 3]}, 3, "1 x GPU")
    output = capsys.readouterr().out
    assert "rows weft/auto: 2.000 of computation/cublas" in output
    assert "all computation/cublas a: 0.500" in output


@on_ranks(1)
def test_experts_rows_by_weft_are_the_same_both_ways() -> None:
    torch.manual_seed(0)
    found = grouped.methods(16, 16, 32, 2, torch.device("cpu"))
    grouped.check(32, found)
    assert set(found) == {"dispatch", "combine"}
    with pytest.raises(AssertionError, match="combine"):
        grouped.check(32, {**found, "combine": lambda: found["dispatch"]() + 100})
