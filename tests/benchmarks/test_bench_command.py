"""benchmarks.run and its loop: options, cases that are there already, and cases that are left out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import weft
from benchmarks import cases, measure, run, runner
from benchmarks.measure import Failed, Times, Work
from benchmarks.nccl import Transport
from benchmarks.rows import read
from benchmarks.runner import Bench, Comparison

OP = "all_gather_matmul"


class Fake:
    """A benchmark of two cases, and what has become of it."""

    def __init__(self) -> None:
        self.specs: dict[str, list[str]] = {}
        self.windows: tuple[str, int, int] | None = None
        self.stopped: list[str] = []
        self.fails: set[str] = set()
        made = [self.case("one", (8, 16)), self.case("two", (32, 8))]
        self.bench = Bench(
            name="fake", question="How?", cases=lambda size, dtype: [replace(case, dtype=dtype) for case in made],
            nccl=("symmetric",), dtypes=("bfloat16", "float8_e4m3fn"), environment={"OF_THE_BENCH": "7"}, alarm_s=33,
        )  # fmt: skip

    def case(self, name: str, windows: tuple[int, int]) -> Comparison:
        return Comparison(
            bench="fake", op=OP, name=name, methods=partial(self.methods, name), specs=("shard_p2p", "flag_gated_2d:4"),
            repeat=1, windows=windows, needed=(), make_check=lambda works: lambda method, result: None,
        )  # fmt: skip

    def methods(self, name: str, found: Sequence[Transport], specs: Sequence[str]) -> Mapping[str, Work]:
        self.specs[name] = list(specs)
        if name in self.fails:
            raise Failed("tensors", "no memory")
        return {f"weft/{spec}": lambda: None for spec in specs}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A world of one rank without a GPU."""
    made = Fake()

    def transports(names: str, shard_bytes: int, whole_bytes: int) -> tuple[list[Transport], dict[str, str]]:
        made.windows = names, shard_bytes, whole_bytes
        return [], {"communication/symmetric": "not here"} if names else {}

    def trial(works: Mapping[str, Work], modes: Sequence[str], **options: Any) -> Any:
        return {mode: {name: Times(us=2.0, host_us=1.0) for name in works} for mode in modes}, {}

    monkeypatch.setattr(runner, "transports", transports)
    monkeypatch.setattr(runner, "trial", trial)
    monkeypatch.setattr(runner, "start", lambda: None)
    monkeypatch.setattr(runner, "stop", made.stopped.extend)
    monkeypatch.setattr(runner, "release", lambda: None)
    monkeypatch.setattr(runner, "find_auto_choice", lambda case: "shard_p2p")
    monkeypatch.setattr(measure, "ALARM_S", 90)
    monkeypatch.setattr(measure, "versions", lambda device: {})
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("OF_THE_BENCH", "")
    monkeypatch.delenv("OF_THE_BENCH")
    return made


def test_each_case_is_measured_in_each_mode(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    runner.run(fake.bench, ["--json", str(path), "--commit", "abc"])
    found = read(path)
    assert [(row.case, row.mode) for row in found] == [("one", "graph"), ("one", "eager"), ("two", "graph"), ("two", "eager")]
    assert fake.specs["one"] == ["shard_p2p", "flag_gated_2d:4", "auto"]
    assert fake.windows == ("symmetric", 32, 16)
    assert (found[0].commit, found[0].chosen, found[0].samples) == ("abc", "shard_p2p", 9)
    assert found[0].missing == {"communication/symmetric": "not here"}
    assert measure.ALARM_S == 33
    assert (fake.stopped, "fake:\n" in capsys.readouterr().out) == ([], True)


def test_options_choose_cases_schedules_and_types(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    words = ["--cases", "matmul two", "--specs", "auto,one_shot,flag_gated:2,flag_gated_2d:4", "--dtype", "float8_e4m3fn"]
    runner.run(fake.bench, [*words, "--json", str(path), "--nccl", "", "--modes", "graph", "--rounds", "3"])
    (row,) = read(path)
    assert (row.case, row.dtype, row.samples, row.missing) == ("two", "float8_e4m3fn", 3, {})
    # one_shot is of other operators, and no schedule of FP8 cuts columns
    assert fake.specs == {"two": ["flag_gated:2", "auto"]}
    assert fake.windows == ("", 32, 8)


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--specs", "flag_gate:1"], "--specs: "), (["--dtype", "int8"], "--dtype: "), (["--modes", "both"], "--modes: ")],
)
def test_options_that_will_not_do(fake: Fake, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runner.run(fake.bench, words)
    assert (ended.value.code, says in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize("words", [["--cases", "three"], ["--ops", "matmul_all_reduce"]])
def test_no_such_case_is_said_before_anything_runs(fake: Fake, words: list[str]) -> None:
    with pytest.raises(ValueError, match="all_gather_matmul one, all_gather_matmul two"):
        runner.run(fake.bench, words)
    assert fake.windows is None


def test_a_run_that_was_cut_off_goes_on(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    again: Callable[..., None] = partial(runner.run, fake.bench)
    again(["--json", str(path), "--cases", "one", "--commit", "abc"])
    fake.specs.clear()
    again(["--json", str(path), "--commit", "abc"])
    assert list(fake.specs) == ["two"]
    assert "1 of 2 cases are in" in capsys.readouterr().out
    fake.specs.clear()
    again(["--json", str(path), "--commit", "abc"])
    assert (fake.specs, fake.windows, len(read(path))) == ({}, ("", 0, 0), 4)
    for other in (["--commit", "def"], ["--commit", "abc", "--dtype", "float8_e4m3fn"]):
        fake.specs.clear()
        again(["--json", str(path), "--modes", "graph", *other])
        assert list(fake.specs) == ["one", "two"]


def test_a_mode_that_is_not_there_is_measured(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    runner.run(fake.bench, ["--json", str(path), "--modes", "graph"])
    fake.specs.clear()
    runner.run(fake.bench, ["--json", str(path)])
    assert list(fake.specs) == ["one", "two"]


def test_a_case_that_fails_is_left_out_and_tried_again(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    fake.fails = {"one"}
    runner.run(fake.bench, ["--json", str(path)])
    assert (fake.stopped, {row.case for row in read(path)}) == ([f"{OP} one"], {"two"})
    fake.fails.clear()
    runner.run(fake.bench, ["--json", str(path)])
    assert {row.case for row in read(path)} == {"one", "two"}


def test_the_users_environment_counts(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.run(fake.bench, [])
    assert os.environ["OF_THE_BENCH"] == "7"
    monkeypatch.setenv("OF_THE_BENCH", "4")
    runner.run(fake.bench, [])
    assert os.environ["OF_THE_BENCH"] == "4"


def test_the_command_knows_its_benchmarks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(run, "run", lambda bench, words: asked.append((bench.name, words)))
    run.main(["tp", "--rounds", "3"])
    assert asked == [("tp", ["--rounds", "3"])]
    run.main(["--list"])
    questions = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in questions] == list(cases.BENCHES)
    assert all(line.endswith("?") for line in questions)
    for words in ([], ["tq"]):
        with pytest.raises(SystemExit):
            run.main(words)
    assert "there is no benchmark 'tq'" in capsys.readouterr().err


def test_chosen_is_of_operands_like_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest choice of plain operands, or of FP8 that the caller quantised."""

    scalings = {
        "old": None,
        "plain": None,
        "scaled": SimpleNamespace(quantises=False),
        "on its way": SimpleNamespace(quantises=True),
    }
    choices = [SimpleNamespace(spec=name, problem=SimpleNamespace(scaling=scaling)) for name, scaling in scalings.items()]
    monkeypatch.setattr(weft, "choices", lambda: choices)
    case = Fake().case("one", (0, 0))
    assert runner.find_auto_choice(case) == "plain"
    assert runner.find_auto_choice(replace(case, dtype="float8_e4m3fn")) == "scaled"
    monkeypatch.setattr(weft, "choices", list)
    assert runner.find_auto_choice(case) is None
