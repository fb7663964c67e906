"""What the command line prints fits the terminal, and cuts nothing off."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from standard_error import words_without_torchao
from tiny_models import TINY

from weft.cli import choices, machine, main, output, plan, run
from weft.core import codec
from weft.core.machine import load
from weft.core.problem import Problem
from weft.planner import plan_training
from weft.planner.models import load_model
from weft.planner.words import percent, us
from weft.report.page import write_page
from weft.report.tables import Column, ReportTable
from weft.schedules import build

DOCTOR = ("importing PyTorch and other packages", "environment variables", "memory and processes of the host", "GPUs and links")
LAYER = ["plan", "llama3-8b", "--ranks", "2", "--layer", "MLP down"]


def test_a_long_command_shows_what_it_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: also while the config is read, PyTorch imported, and the machine examined."""
    shown: list[str] = []

    @contextmanager
    def recorded(first: str = "starting") -> Iterator[output.Progress]:
        shown.append(first)
        yield lambda text, done, total: shown.append(f"{text} {done}/{total}")

    for module in (choices, plan, run, machine):
        monkeypatch.setattr(module, "progress_bar", recorded)
    assert main(["doctor", "--quick"]) in (0, 1)
    assert shown == ["starting", *(f"{what} {at}/4" for at, what in enumerate(DOCTOR))]
    shown.clear()
    assert main(LAYER) == 0
    assert shown == ["reading llama3-8b", "starting", "planning MLP down 0/1"]
    assert choices.choose_device("auto", 2)[0] in ("cpu", "cuda")
    assert shown[-1] == "importing PyTorch"


def test_warnings_of_imports_are_left_out_and_errors_are_not(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torchao")
    with choices._quiet_imports():
        logger.warning("Failed to load a library of mine")
        logger.error("what is wrong")
    logger.warning("later")
    assert [record.message for record in caplog.records] == ["what is wrong", "later"]


def test_a_command_collects_garbage_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    before, during = gc.get_threshold(), list[tuple[int, ...]]()
    monkeypatch.setattr("weft.cli.app", lambda **options: during.append(gc.get_threshold()))
    assert main([]) == 0
    assert during[0][0] >= 100 * before[0]
    assert gc.get_threshold() == before


def test_plan_predicts_a_training_step(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "llama3-8b", "--ranks", "2", "--tokens", "8192", "--training"]
    assert main(options) == 0
    printed = capsys.readouterr().out
    plan = plan_training(load_model("llama3-8b"), "h200x8", tokens=8192, ranks=2)
    for name, step in plan.steps().items():
        (line,) = (line for line in printed.splitlines() if line.startswith(f"{name}  "))
        cells = (step.computation_us, step.sequential_us, step.weft_us, *step.exposed_us)
        assert line.split()[-6:] == [*map(us, cells), percent(step.hidden)]
    assert len(plan.steps()) == 4
    assert "keeps for the backward pass: 128.0 MiB on a rank" in printed
    assert main([*options, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["training"]
    assert found == {"kept_bytes": plan.kept_bytes, "steps": codec.dump(plan.steps())}
    assert main([*options, "--op", "matmul_reduce_scatter"]) == 2
    assert "leave --op out" in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 80])
def test_a_table_that_is_too_wide_comes_in_parts_and_cuts_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(output, "PIPE_WIDTH", width)
    columns = [Column("schedule", words=True), *(Column(f"us of layer {i}") for i in range(12))]
    rows = [["shard_p2p", *(f"{1000 * row + i}.5" for i in range(12))] for row in (1, 2)]
    output.print_table(output.console(), ReportTable(title="", columns=columns, rows=rows))
    narrow = capsys.readouterr().out.splitlines()
    assert max(map(len, narrow)) <= width
    parts = [line.split()[1:] for line in narrow if line.startswith("shard_p2p")]
    assert len(parts) > 2
    for number, row in enumerate(rows):
        assert [cell for part in parts[number::2] for cell in part] == row[1:]


def test_machines_are_named_in_every_part_of_a_narrow_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "PIPE_WIDTH", 45)
    assert main(["machines"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 45
    assert sum(line.split()[:1] == ["h200x8"] for line in lines) == 2


def test_plan_has_every_candidate_with_all_and_losses_with_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LAYER) == 0
    short = capsys.readouterr().out
    assert "direct_store" not in short
    assert main([*LAYER, "--all"]) == 0
    listed = capsys.readouterr().out
    assert sum(line.startswith("direct_store:") for line in listed.splitlines()) > 1
    assert "DIL" not in listed
    assert main([*LAYER, "--why"]) == 0
    explained = capsys.readouterr().out
    assert explained.startswith(short.split("More:")[0])
    assert explained.count("as fast. The matmul alone takes") == 1
    assert "DIL" not in explained
    assert main([*LAYER, "--details"]) == 0
    detailed = capsys.readouterr().out
    assert detailed.startswith(explained)
    assert detailed.count("-bound: the GEMM alone takes") == 1
    assert "DIL: the pieces alone over the whole alone" in detailed
    assert sum("matmul DIL" in line and "us exposed" in line for line in detailed.splitlines()) > 2


@pytest.mark.parametrize("width", [80, 120])
def test_plan_answers_within_a_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """What is gained in all comes first, then a verdict for each layer."""
    monkeypatch.setattr(output, "PIPE_WIDTH", width)
    assert main(["plan", "mixtral-8x7b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= width
    total = next(at for at, line in enumerate(lines) if "x as fast" in line)
    for layer, verdict in (("attention QKV", "overlapped"), ("expert down + combine", "no clear gain")):
        at = next(at for at, line in enumerate(lines) if line.startswith(layer))
        assert at > total
        assert verdict in lines[at]
    assert main(["plan", "llama3-8b", "--ranks", "1"]) == 0
    assert any(line.startswith("MLP down") and "sequential" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["run", "llama3-8b", "--device", "cpu", "--ranks", "100000"], "ranks is 100000"),
        (["run", "llama3-8b", "--tokens", "100000000000"], "'--tokens'"),
        (["plan", "llama3-8b", "--schedule", "flag_gated:100000000"], "chunks is 100000000"),
        (["plan", "llama3-8b", "--schedule", "flag_gated:\u00b2"], "a chunk count is a whole number"),
        ([*LAYER, "--save", "/dev/full"], "--save /dev/full: No space left"),
        ([*LAYER, "--json", "/dev/full"], "--json /dev/full: No space left"),
    ],
)
def test_what_would_never_end_or_not_fit_is_one_line(capsys: pytest.CaptureFixture[str], command: list[str], says: str) -> None:
    assert main(command) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


PLAN = ["plan", "MODEL.json", "--ranks", "2", "--tokens", "64", "--layer", "MLP down"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([*PLAN, "--save", "one.json", "--trace", "./one.json"], "--save and --trace are both one.json"),
        ([*PLAN, "--save", "MODEL.json"], "MODEL and --save are both MODEL.json"),
        ([*PLAN, "--report", "out", "--save", "out/index.html"], "--report and --save are both out/index.html"),
        (["plan", ".", *PLAN[2:], "--save", "config.json"], "MODEL and --save are both config.json"),
        ([*PLAN, "--machine", "machine.json", "--trace", "machine.json"], "--machine and --trace are both machine.json"),
        (["run", "MODEL.json", "--report", "out", "--trace", "out/index.html"], "--report and --trace are both out/index.html"),
        (["simulate", "schedule.json", "--trace", "link.json"], "FILE and --trace are both link.json"),
    ],
)
def test_nothing_is_written_over_what_was_read_or_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "MODEL.json": json.dumps(TINY),
        "config.json": json.dumps(TINY),
        "machine.json": codec.dumps(load("h200x8")),
        "schedule.json": codec.dumps(build(Problem(op="all_gather_matmul", m=64, n=64, k=64, world_size=2), "shard_p2p")),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.json").symlink_to("schedule.json")
    assert main(command) == 2
    assert f"{says}; name two files\n" in capsys.readouterr().err
    assert {name: (tmp_path / name).read_text() for name in files} == files
    assert {path.name for path in tmp_path.iterdir()} == {*files, "link.json"}


LONG = "x" * 300
"""No file has such a name: to look at it is an error, as it is in a folder that may not be searched."""


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["plan", f"{LONG}/config.json"], f"cannot read {LONG}/config.json: "),
        (["plan", "llama3-8b", "--machine", LONG], f"machine is '{LONG}'"),
        (["simulate", LONG], f"study is '{LONG}'"),
        ([*LAYER, "--json", LONG], f"--json {LONG}: "),
        (["calibrate", "--ranks", "2", "--device", "cpu", "--out", LONG], f"--out {LONG}: "),
    ],
)
def test_an_error_about_a_path_names_its_argument(capsys: pytest.CaptureFixture[str], command: list[str], says: str) -> None:
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"weft: error: {says}")
    assert error.count("\n") == 1


def test_a_file_without_end_is_not_read_to_its_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("w") as file:
        file.truncate(codec.MAX_FILE_BYTES + 1)
    for command in (["plan"], ["machines", "--diff", "h200x8"], ["simulate"]):
        assert main([*command, str(tmp_path / "large.json")]) == 2
        assert "large.json: it has more than 32 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "files"),
    [
        (
            ["plan", "model.json", "--ranks", "2", "--layer", "MLP down", "--save", "saved.json", "--report", "out"],
            ("saved.json", "out/index.html"),
        ),
        (["simulate", "one.json", "--report", "out", "--trace", "trace.json"], ("out/index.html", "trace.json")),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.slow
def test_files_are_written_though_nobody_reads_the_output(
    tmp_path: Path, command: list[str], files: tuple[str, ...], as_json: bool
) -> None:
    (tmp_path / "model.json").write_text(json.dumps(TINY))
    one = build(Problem(op="all_gather_matmul", m=64, n=64, k=64, world_size=2), "shard_p2p")
    (tmp_path / "one.json").write_text(codec.dumps(one))
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        words = [sys.executable, "-m", "weft", *command, *["--json", "-"] * as_json]
        done = subprocess.run(words, cwd=tmp_path, stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, words_without_torchao(done.stderr.decode())) == (141, [])
    assert all((tmp_path / name).stat().st_size for name in files)


@pytest.mark.parametrize(("redirect", "status"), [(">/dev/full", 2), (">&- 2>&-", 0)])
def test_an_output_that_takes_nothing_is_no_traceback(redirect: str, status: int) -> None:
    command = f"{shlex.quote(sys.executable)} -m weft schedules flag_gated {redirect}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", bool(status))


@pytest.mark.slow
def test_names_in_letters_that_the_output_lacks(tmp_path: Path) -> None:
    (tmp_path / "Zw\u00f6lf.json").write_text(json.dumps(TINY))
    command = [sys.executable, "-m", "weft", "plan", str(tmp_path / "Zw\u00f6lf.json"), "--ranks", "2", "--layer", "MLP down"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), "what torchao warns of is left out"
    assert done.stdout.startswith("Zw\\xf6lf: ")


def test_a_report_that_does_not_fit_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:3].encode(encoding))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_page("whole", tmp_path)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ValueError, match=r"No space left on device$"):
        write_page("another", tmp_path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("index.html", b"whole")]
