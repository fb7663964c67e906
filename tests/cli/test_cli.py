"""The command line: what it prints, its exit status, and one clear line for every mistake. Planner and runner are stand-ins;
tests at the end go through the real ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import Weft
from standard_error import words_without_torchao
from tiny_models import TINY

from weft.cli import choices, output
from weft.cli.profile import unit
from weft.core import codec
from weft.core.errors import RankMismatch, WeftError
from weft.core.machine import load, names
from weft.core.problem import Problem, Scaling
from weft.core.span import Span
from weft.planner.models import Model, OperatorCall, operator_calls, preset_names
from weft.planner.values import Candidate, Plan
from weft.schedules import FAMILIES, parse
from weft.schedules import names as families
from weft.tools.results import LayerRun, Run, Speeds
from weft.tools.run import _choose


def make_plan(problem: Problem, machine: Any, *, only: str | None = None, chunks: int | None = None) -> Plan:
    def candidate(name: str, count: int, time: float) -> Candidate:
        return Candidate(
            schedule=name,
            chunks=count,
            predicted_us=time,
            computation_us=90.0,
            communication_us=60.0,
            over_ideal_us=time - 90.0,
        )

    return Plan(
        problem=problem,
        machine=machine.name,
        candidates=(candidate(only or "hetero_fused_1d", chunks or 8, 100.0), candidate("sequential", 1, 150.0)),
        sequential_us=150.0,
        computation_us=90.0,
        communication_us=60.0,
        why="the chunks hide behind the matmul.",
        spans=(
            Span(rank=0, lane="compute", kind="gemm", name="gemm", start_us=0, end_us=60),
            Span(rank=0, lane="compute", kind="wait", name="wait", start_us=60, end_us=70),
            Span(rank=0, lane="compute", kind="gemm", name="gemm", start_us=70, end_us=100),
            Span(rank=0, lane="copy", kind="copy", name="copy", start_us=10, end_us=70),
        ),
    )


class Runner:
    """Stands in for run_model: remembers what it was asked, and finds what a test sets."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.error = 1e-3
        self.overlapped_us = 2000.0
        self.tried: dict[str, float] = {}
        self.raises: BaseException | None = None

    def __call__(self, model: Model, **asked: Any) -> Run:
        self.asked = asked
        if self.raises:
            raise self.raises
        found = [call for call in operator_calls(model) if asked["op"] in (None, getattr(call, "op", None))]
        for index, call in enumerate(found):
            asked["progress"](str(call), index, len(found))
        return Run(
            model=model.name,
            device=asked["device"],
            world_size=asked["ranks"],
            tokens=asked["tokens"],
            dtype=asked["dtype"],
            seed=asked["seed"],
            machine=asked["machine"].name,
            machine_ranks=asked["machine_ranks"],
            machine_tokens=asked["machine_tokens"],
            machine_words=asked["machine"].description,
            layers=tuple(self.layer(call, asked) for call in found),
        )

    def layer(self, call: OperatorCall, asked: dict[str, Any]) -> LayerRun:
        speeds = Speeds(
            sequential_us=3000.0,
            overlapped_us=self.overlapped_us,
            tried=self.tried,
            computation_us=1500.0,
            communication_us=1000.0,
        )
        return LayerRun(
            name=call.name,
            problem=call.problem(asked["tokens"], asked["ranks"], asked["dtype"]),
            schedule="flag_gated",
            chunks=4,
            max_error=self.error,
            tolerance=1e-2,
            speeds=speeds if asked["device"] == "cuda" else None,
            plan=make_plan(call.problem(asked["machine_tokens"], asked["machine_ranks"], asked["dtype"]), asked["machine"]),
        )


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    found = Runner()
    monkeypatch.setattr("weft.tools.run.run_model", found)
    return found


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.planner.plan", make_plan)


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "count_gpus", lambda: 0)


def is_one_error(result: tuple[int, str, str], *says: str) -> None:
    status, _, err = result
    assert status == 2
    assert err.startswith("weft: error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    for text in says:
        assert text in err


# --- weft run --------------------------------------------------------------------------------------------------------


def test_run_defaults_on_a_machine_without_gpu(weft: Weft, runner: Runner, without_gpus: None) -> None:
    status, out, err = weft("run", "llama3-8b")
    assert (status, err) == (0, "")
    expected = {"ranks": 4, "device": "cpu", "tokens": 256, "op": None, "schedule": "auto", "machine_ranks": 8}
    assert {key: runner.asked[key] for key in expected} == expected
    assert (runner.asked["machine"].name, runner.asked["machine_tokens"], runner.asked["seed"]) == ("h200x8", 8192, 0)
    head, _, _ = out.partition("\n\n")
    words = " ".join(head.split())
    for said in ("llama3-8b", "8 x NVIDIA H200", "4 CPU ranks"):
        assert said in words


def test_run_takes_every_gpu_by_default(weft: Weft, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "count_gpus", lambda: 8)
    assert weft("run", "llama3-8b")[0] == 0
    assert (runner.asked["device"], runner.asked["ranks"], runner.asked["tokens"]) == ("cuda", 8, 8192)


def test_cpu_ranks_are_not_compared_in_speed(weft: Weft, runner: Runner, without_gpus: None) -> None:
    out = weft("run", "llama3-8b")[1]
    ran = out[out.index("Run here on") :]
    assert not any(word in ran for word in ("sequential", "ideal", "speed-up", " ms", " us"))


def test_gpus_are_compared_in_speed(weft: Weft, runner: Runner, two_gpus: None) -> None:
    out = weft("run", "llama3-8b")[1]
    assert any(found.endswith("1.50x 3,000 2,000 1,500 75% 100") for found in _rows(out[out.index("Run here on") :]))


def _rows(out: str) -> list[str]:
    return [" ".join(line.split()) for line in out.splitlines()]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "count_gpus", lambda: 2)


def test_run_passes_the_choices_on(weft: Weft, runner: Runner, without_gpus: None) -> None:
    weft("run", "llama3-8b", "--ranks", "2", "--op", "all_gather_matmul", "--schedule", "flag_gated:4", "--seed", "7")
    assert [runner.asked[key] for key in ("ranks", "op", "schedule", "seed")] == [2, "all_gather_matmul", "flag_gated:4", 7]


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_wrong_results_end_in_status_1(weft: Weft, runner: Runner, without_gpus: None, error: float) -> None:
    runner.error = error
    status, out, _ = weft("run", "llama3-8b", "--op", "matmul_reduce_scatter")
    assert status == 1
    assert "attention out, MLP down" in out


def test_a_failed_rank_ends_in_status_3_without_traceback(weft: Weft, runner: Runner, without_gpus: None) -> None:
    runner.raises = WeftError("rank 1, lane copy: waited 30 s for arrived[3]@1")
    status, _, err = weft("run", "llama3-8b")
    assert (status, err) == (3, "weft: error: rank 1, lane copy: waited 30 s for arrived[3]@1\n")


def test_ranks_that_disagree_are_no_mistake_of_the_user(weft: Weft, runner: Runner, without_gpus: None) -> None:
    runner.raises = RankMismatch("rank 1 has dtype float16, rank 0 bfloat16")
    assert weft("run", "llama3-8b")[0] == 3


def test_a_name_from_a_file_is_not_taken_for_markup(weft: Weft, runner: Runner, without_gpus: None, tmp_path: Path) -> None:
    path = tmp_path / "[bold]x.json"
    path.write_text(json.dumps({"n_embd": 64, "n_head": 4, "model_type": "gpt2"}))
    status, out, _ = weft("run", path)
    assert status == 0
    assert "[bold]x" in out


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, typer.Abort])  # the latter is what some versions of typer make of it
def test_an_interrupt_ends_in_status_130(
    weft: Weft, runner: Runner, without_gpus: None, interrupt: type[BaseException]
) -> None:
    runner.raises = interrupt()
    assert weft("run", "llama3-8b")[0] == 130


def test_run_writes_json_that_reads_back(weft: Weft, runner: Runner, without_gpus: None, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    _, out, _ = weft("run", "llama3-8b", "--json", path)
    assert codec.read(Run, path).model == "llama3-8b"
    assert f"wrote {path}" in out


def test_run_writes_report_and_trace(weft: Weft, runner: Runner, without_gpus: None, tmp_path: Path) -> None:
    _, out, _ = weft("run", "llama3-8b", "--report", tmp_path / "deep" / "report", "--trace", tmp_path / "trace.json")
    assert (tmp_path / "deep" / "report" / "index.html").stat().st_size > 1000
    assert json.loads((tmp_path / "trace.json").read_text())
    assert out.count("wrote ") == 2


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "llama3-9b"], ["llama3-8b?", *preset_names()]),
        (["run", "llama3-8b", "--machine", "nope"], ["'nope'", *names()]),
        (["run", "llama3-8b", "--schedule", "flag_gated:0"], ["'flag_gated:0'", "at least 1"]),
        (["run", "llama3-8b", "--op", "nope"], ["'nope'", "all_gather_matmul"]),
        (["run", "llama3-8b", "--device", "tpu"], ["'tpu'", "auto, cpu, cuda"]),
        (["run", "llama3-8b", "--tokens", "many"], ["--tokens"]),
        (["run", "llama3-8b", "--seed", "-1"], ["--seed"]),
        (["plan", "llama3-8b", "--ranks", "17"], ["ranks is 17", "h200x8 of 8 GPUs", "3 nodes", "use 15 or 18"]),
        (["plan", "llama3-8b", "--ranks", "16", "--machine", "a100x8"], ["a100x8 has no network", "network.gbps"]),
        (["plan", "llama3-8b", "--ranks", "16", "--schedule", "flag_gated"], ["'flag_gated'", "sequential or node_slices"]),
        (["plan", "llama3-8b", "--schedule", "two_shot"], ["'two_shot'", "--op matmul_all_reduce"]),
        (["run", "llama3-8b", "--device", "cuda", "--ranks", "4"], ["ranks is 4", "--device cpu"]),
        (["run", "llama3-8b", "--report", "/dev/null"], ["--report /dev/null"]),
        (["run", "llama3-8b", "--json", "/nowhere/x.json"], ["--json /nowhere/x.json", "No such file"]),
        (["run", "llama3-8b", "--json", "/tmp/weft_same", "--trace", "/tmp/weft_same"], ["--json and --trace"]),
        (["run", "dlrm-mlperf", "--op", "all_gather_matmul"], ["dlrm-mlperf", "no layer of it"]),
        (["run"], ["MODEL", "weft run --help"]),
        (
            ["plan", "meta-llama/Llama-3-8B"],
            ["hf download meta-llama/Llama-3-8B config.json", "Llama-3-8B/config.json"],
        ),
        (["run", "./nowhere/at/all"], ["nowhere/at/all"]),
        (["calibrate", "--from", "h200x8"], ["--from needs --ranks"]),
        (["nope"], ["nope", "weft --help"]),
        (["plan", "llama3-8b", "--ranks", "7"], ["--ranks is 7", "32 heads", "1, 2, 4, 8, 16, 32"]),
        (["plan", "llama3-8b", "--json", "--why"], ["--json is '--why'", "- for standard output"]),
        (["run", "llama3-8b", "--schedule", "flag_gated_2d:4"], ["'flag_gated_2d'", "--op all_gather_matmul"]),
        (["plan", "llama3-8b", "--schedule", "flag_gated_2d"], ["'flag_gated_2d'", "matmul_reduce_scatter has sequential"]),
        (["plan", "llama3-8b", "--dtype", "float8"], ["dtype is 'float8'", "float8_e4m3fn"]),
        (["plan", "llama3-8b", "--recipe", "rowwise"], ["--recipe is 'rowwise'", "--dtype float8_e4m3fn"]),
        (["plan", "llama3-8b", "--out-dtype", "float16"], ["--out-dtype is 'float16'"]),
        (["plan", "llama3-8b", "--dtype", "float8_e4m3fn", "--recipe", "no"], ["'no'", "tensorwise, rowwise, blockwise"]),
        (["plan", "llama3-8b", "--dtype", "float8_e4m3fn", "--machine", "a100x8"], ["a100x8", "gpu.tflops.float8"]),
        (["plan", "t-nlg", "--dtype", "float8_e4m3fn"], ["a multiple of 16", "attention QKV"]),
        (["plan", "dlrm-mlperf", "--dtype", "float8_e4m3fn"], ["'float8_e4m3fn'", "embedding tables"]),
        (["run", "llama3-8b", "--dtype", "float8"], ["dtype is 'float8'", "float8_e4m3fn"]),
        (["schedules", "nope"], ["'nope'", *FAMILIES]),
        (["schedules", "flag_gated_2d", "--op", "matmul_reduce_scatter"], ["all_gather_matmul"]),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    weft: Weft, runner: Runner, without_gpus: None, arguments: Sequence[str], says: Sequence[str]
) -> None:
    is_one_error(weft(*arguments), *says)
    assert runner.asked == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "is not JSON"), ("[]", "holds list data"), ('{"hidden_size": 64}', "model_type is None")],
)
def test_a_bad_config_is_one_line(weft: Weft, runner: Runner, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    is_one_error(weft("run", path), str(path), says)


def test_too_few_gpus_names_how_many_there_are(weft: Weft, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "count_gpus", lambda: 2)
    is_one_error(weft("run", "llama3-8b", "--device", "cuda", "--ranks", "4"), "--ranks 2", "--device cpu")


def test_auto_falls_back_to_the_cpu_for_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "count_gpus", lambda: 2)
    assert choices.choose_device("auto", 4) == ("cpu", 4)
    assert choices.choose_device("auto", None) == ("cuda", 2)


def test_outputs_are_tried_before_the_work_and_left_as_they_were(weft: Weft, runner: Runner, tmp_path: Path) -> None:
    existing, new = tmp_path / "kept.json", tmp_path / "new.json"
    existing.write_text("mine")
    is_one_error(weft("run", "llama3-8b", "--json", existing, "--trace", tmp_path / "no" / "trace.json"), "--trace")
    is_one_error(weft("run", "llama3-8b", "--json", new, "--trace", tmp_path / "no" / "trace.json"), "--trace")
    assert existing.read_text() == "mine"
    assert not new.exists()


def test_a_narrow_terminal_loses_nothing(weft: Weft, runner: Runner, two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PIPE_WIDTH", 80)
    out = weft("run", "llama3-405b")[1]
    assert max(map(len, out.splitlines())) <= 80
    measured = out[out.index("Run here on") :]
    for cell in ("attention QKV", "flag_gated:4", "106,496 x 16,384", "3,000", "2,000", "1,500", "75%"):
        assert cell in measured


# --- weft plan, machines, doctor, schedules ------------------------------------------------------------------------------


def test_plan_shows_verdict_gain_and_why_and_with_all_candidates(weft: Weft, planner: None, tmp_path: Path) -> None:
    command = ("plan", "llama3-8b", "--ranks", "4", "--tokens", "2048")
    status, out, err = weft(*command, "--report", tmp_path)
    assert (status, err) == (0, "")
    assert "4 ranks, 2,048 tokens, bfloat16" in out
    assert "1.50x as fast" in out
    assert "4 overlapped" in out
    row = next(line for line in out.splitlines() if line.startswith("attention QKV"))
    assert " ".join(row.split()) == ("attention QKV hetero_fused_1d:8 overlapped 1.50x 150 100 90.0")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "attention QKV: hetero_fused_1d:8" in page
    assert f"wrote {tmp_path / 'index.html'}" in out
    out = weft(*command, "--all")[1]
    row = next(line for line in out.splitlines() if line.split()[:1] == ["hetero_fused_1d:8"])
    assert row.split()[1:] == ["100*"] * 4
    assert any(line.endswith("150 100 90.0 90% 2,048 x 6,144 x 4,096") for line in _rows(out))
    assert "28 attention heads" in weft("plan", "t-nlg")[1], "which 8 ranks do not divide"


def test_plan_json_is_parseable_and_complete(weft: Weft, planner: None) -> None:
    status, out, _ = weft("plan", "mixtral-8x7b", "--machine", "h200x8", "--json", "-")
    data = json.loads(out)
    assert status == 0
    assert [one["layer"] for one in data["layers"][:3]] == ["attention QKV", "attention out", "expert dispatch + gate/up"]
    plan = codec.load(Plan, data["layers"][0]["plan"])
    assert (plan.problem.world_size, plan.problem.m, plan.chosen.spec) == (8, 8192, data["layers"][0]["schedule"])


def test_more_ranks_than_gpus_are_planned_on_several_nodes(weft: Weft) -> None:
    wide = ("plan", "mixtral-8x7b", "--ranks", "16")
    status, out, _ = weft(*wide, "--tokens", "65536", "--op", "all_gather_matmul", "--json", "-")
    (layer,) = json.loads(out)["layers"]
    assert (status, layer["plan"]["problem"]["nodes"]) == (0, [8, 8])
    assert {one["schedule"] for one in layer["plan"]["candidates"]} == {"sequential", "node_slices"}
    _, out, _ = weft(*wide, "--tokens", "512")
    assert "2 nodes of 8 x NVIDIA H200 SXM on NVSwitch: 16 ranks" in out
    assert "weft.ExpertParallel needs one node" in " ".join(out.split())
    assert "sequential and node_slices" in " ".join(out.split())


def test_experts_are_planned_with_splits_unless_a_schedule_is_named(weft: Weft, tmp_path: Path) -> None:
    command = ("plan", "mixtral-8x7b", "--ranks", "2", "--tokens", "512", "--layer", "expert down + combine")
    file = tmp_path / "combine.json"
    status, out, _ = weft(*command, "--save", str(file))
    assert status == 0
    row = next(line for line in out.splitlines() if line.startswith("expert down"))
    assert row.split()[4:6] == ["fused", "overlapped"]
    assert "note: experts are calls with splits, as weft.ExpertParallel makes them" in out
    assert weft("simulate", str(file))[0] == 0
    named = weft(*command, "--schedule", "shard_p2p")[1]
    assert "note: experts are all-to-alls of even shares: calls with splits have no schedule shard_p2p" in named


def test_a_model_is_planned_in_fp8(weft: Weft, planner: None) -> None:
    """Scales of whole operands are those of rows where rows travel."""
    options = ("--dtype", "float8_e5m2", "--recipe", "tensorwise", "--out-dtype", "float16")
    status, out, _ = weft("plan", "llama3-8b", *options, "--json", "-")
    problems = [codec.load(Plan, one["plan"]).problem for one in json.loads(out)["layers"]]
    assert status == 0
    assert {problem.dtype for problem in problems} == {"float16"}
    recipes = {"all_gather_matmul": "rowwise", "matmul_reduce_scatter": "tensorwise"}
    assert [problem.scaling for problem in problems] == [Scaling(a="float8_e5m2", recipe=recipes[p.op]) for p in problems]
    out = weft("plan", "llama3-8b", "--dtype", "float8_e4m3fn")[1]
    assert "8,192 tokens, float8_e4m3fn by float8_e4m3fn, rowwise, to bfloat16" in out


@pytest.mark.parametrize(
    "command",
    [
        ["run", "llama3-8b"],
        ["plan", "llama3-8b"],
        ["machines"],
        ["machines", "h200x8"],
    ],
    ids=" ".join,
)
def test_json_has_one_meaning(
    weft: Weft, runner: Runner, planner: None, without_gpus: None, tmp_path: Path, command: list[str]
) -> None:
    """A file gets it in addition to the tables; - is standard output, and nothing else is printed there."""
    file = tmp_path / "out.json"
    _, printed, _ = weft(*command, "--json", "-")
    status, shown, _ = weft(*command, "--json", file)
    assert status == 0
    assert file.read_text(encoding="utf-8") == printed
    assert json.loads(printed)
    assert shown.splitlines()[-1] == f"wrote {file}"


@pytest.mark.parametrize("name", ["h200x8", "mi300x8", "t3_ring8"])
def test_one_machine_is_shown_number_by_number(weft: Weft, tmp_path: Path, name: str) -> None:
    """Each with its unit and its source, from the shipped name or from a file, which --json writes."""
    status, out, _ = weft("machines", name)
    machine = load(name)
    assert status == 0
    assert out.startswith(str(machine))
    for path, source in machine.sources.items():
        row = next(line for line in out.splitlines() if line.split()[: len(path.split())] == path.split())
        assert unit(path)
        assert unit(path).split()[0] in row
        assert source.split()[0] in row
    file = tmp_path / "mine.json"
    file.write_text(weft("machines", name, "--json", "-")[1])
    assert load(file) == machine
    assert weft("machines", str(file))[1].split("What each")[0] == out.split("What each")[0]


def test_one_machine_and_what_does_not_go_with_it(weft: Weft) -> None:
    assert "52,428,800" in weft("machines", "h200x8")[1]
    is_one_error(weft("machines", "h100"), "'h100'", *names())
    for other in (["h200x8"], ["--json", "-"]):
        status, _, error = weft("machines", *other, "--diff", "h200x8", "a100x8")
        assert status == 2
        assert f"leave {other[0]} out" in error


@pytest.mark.parametrize("arguments", [[], ["plan", "-h"]])
def test_help_ends_well(weft: Weft, arguments: Sequence[str]) -> None:
    status, out, err = weft(*arguments)
    assert (status, err) == (0, "")
    assert "Usage: weft" in out


# --- the real thing, in processes of its own ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["--help"], ["schedules"], ["plan", "t-nlg", "--op", "all_gather_matmul"], ["plan", "gpt-oss-20b"]]
)
def test_commands_that_do_not_run_never_import_torch(command: list[str]) -> None:
    code = "import sys; from weft.cli import main; s = main(sys.argv[1:]); sys.exit(s or ('torch' in sys.modules) * 77)"
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, words_without_torchao(done.stderr)) == (0, [])


def test_reader_that_goes_away_is_no_traceback() -> None:
    code = "import sys; from weft.cli import main; sys.exit(main(['machines', '--json', '-']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141


@pytest.mark.ranks
@pytest.mark.slow
def test_a_small_model_runs_for_real(tmp_path: Path) -> None:
    config, found = tmp_path / "tiny.json", tmp_path / "run.json"
    config.write_text(json.dumps(TINY))
    command = [sys.executable, "-c", "import sys; from weft.cli import main; sys.exit(main())", "run", str(config)]
    command += ["--ranks", "2", "--device", "cpu", "--tokens", "24", "--machine-tokens", "512", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, words_without_torchao(done.stderr)) == (0, [])
    run = codec.read(Run, found)
    assert [layer.name for layer in run.layers] == ["attention QKV", "attention out", "MLP gate/up", "MLP down"]
    assert run.ok
    assert "All results are right." in done.stdout


def test_every_family_is_shown_with_its_timeline(weft: Weft) -> None:
    status, out, _ = weft("schedules", "--op", "matmul_reduce_scatter")
    assert status == 0
    assert all(f"\n{name}\n" in f"\n{out}" for name in families("matmul_reduce_scatter"))
    (others,) = re.findall(r"Not for matmul_reduce_scatter: (.*)\.", out)
    assert set(others.split(", ")) == set(FAMILIES) - set(families("matmul_reduce_scatter"))
    assert "matmul_all_reduce M=12" in weft("schedules", "two_shot")[1]
    assert len(weft("schedules", "flag_gated")[1]) < len(out) / 3


def test_a_family_for_nodes_is_shown_on_nodes_and_one_of_collectives_with_what_takes_it(weft: Weft) -> None:
    _, out, _ = weft("schedules", "node_slices")
    assert "on nodes of 2, 2" in out
    assert "rank 0, network" in out
    assert "rank 0, network" in weft("schedules")[1]
    _, out, _ = weft("schedules", "copy_engine")
    assert "weft run" not in out
    assert "schedule=NAME or NAME:CHUNKS in a call of weft.collectives." in out
    is_one_error(weft("run", "llama3-8b", "--schedule", "copy_engine"), "all_to_all alone")
    assert "--op" not in weft("run", "llama3-8b", "--schedule", "copy_engine")[2]


def test_embedding_tables_run(weft: Weft) -> None:
    status, out, _ = weft(
        "run", "dlrm-mlperf", "--ranks", "2", "--tokens", "64", "--device", "cpu", "--schedule", "direct_store:1"
    )
    assert status == 0
    assert "embedding tables" in out
    assert "All results are right." in out
    status, out, _ = weft("schedules", "direct_store", "--op", "embedding_bag_all_to_all")
    assert status == 0
    assert "lookup 12x4" in out
    status, _, says = weft("schedules", "flag_gated", "--op", "embedding_bag_all_to_all")
    assert status == 2
    assert "embedding_bag_all_to_all has sequential" in says


@pytest.mark.slow
def test_a_link_to_what_is_not_there_yet_stays_one(weft: Weft, tmp_path: Path) -> None:
    (tmp_path / "latest.json").symlink_to("target.json")
    words = ("plan", "llama3-8b", "--op", "matmul_reduce_scatter", "--trace", str(tmp_path / "latest.json"))
    assert weft(*words)[0] == 0
    assert (tmp_path / "latest.json").is_symlink()
    assert json.loads((tmp_path / "target.json").read_text(encoding="utf-8"))


def test_a_pipe_is_not_opened_before_there_is_something_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    output.require_file(tmp_path / "pipe", "--trace")  # would wait for a reader, and end what it reads


def test_more_cpu_ranks_than_the_machine_has_gpus() -> None:
    problem = Problem(op="all_gather_matmul", m=36, n=16, k=8, world_size=9, nodes=(5, 4))
    there = make_plan(replace(problem, world_size=8, nodes=()), load("h200x8"))
    assert parse(_choose(problem, "auto", there, load("h200x8"), "cpu"))[0] in families("all_gather_matmul")
