"""weft simulate FILE: a saved schedule on any machine, what it prints and writes, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Weft

from weft import codec, settings
from weft.cli.simulate_schedule import machine_with
from weft.machine import load
from weft.problem import Problem
from weft.schedule import Schedule
from weft.schedules import build
from weft.sim import run

PROBLEM = Problem(op="all_gather_matmul", m=4096, n=4096, k=4096, world_size=8)
SCHEDULE = build(PROBLEM, "flag_gated", 2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "schedule.json"
    path.write_text(codec.dumps(SCHEDULE), encoding="utf-8")
    return path


def test_what_the_plan_saves_is_what_it_chose(weft: Weft, tmp_path: Path) -> None:
    path, trace = tmp_path / "saved.json", tmp_path / "plan.trace"
    words = ("--site", "MLP down", "--tokens", "4096", "--schedule", "hetero_unfused_1d")
    status, out, _ = weft("plan", "llama3-8b", *words, "--save", path, "--trace", trace)
    assert (status, f"wrote {path}" in out, f"wrote {trace}" in out) == (0, True, True)
    schedule = codec.read(Schedule, path)
    assert f"{schedule.name}:{schedule.chunks}" in out
    spans = [event for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(run(schedule, load("h200x8")).spans)


def test_everything_as_data(weft: Weft, saved: Path) -> None:
    status, out, err = weft("simulate", saved, "--machine", "a100x8", "--json")
    found, expected = json.loads(out), run(SCHEDULE, load("a100x8"))
    assert (status, err) == (0, "")
    assert found["total_us"] == expected.total_us
    assert found["sequential_us"] == run(build(PROBLEM, "sequential"), load("a100x8")).total_us
    assert found["ideal_us"] == max(found["computation_us"], found["communication_us"])
    assert len(found["spans"]) == len(expected.spans) == sum(lane["steps"] for lane in found["lanes"])
    copy = next(lane for lane in found["lanes"] if (lane["rank"], lane["lane"]) == (0, "copy"))
    assert copy["busy_us"] + copy["waiting_us"] <= found["total_us"]


def test_what_is_printed_and_written(weft: Weft, saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf", reason="protobuf is not installed; it comes with weft[chakra]")
    trace, report, traces = tmp_path / "t.json", tmp_path / "report", tmp_path / "et"
    status, out, _ = weft("simulate", saved, "--trace", trace, "--report", report, "--chakra", traces)
    total_us = run(SCHEDULE, load("h200x8")).total_us
    assert status == 0
    assert f"{total_us:,.0f}" in out
    for words in ("flag_gated:2", "sequential", "GEMM DIL", "lanes of rank", "# gemm", f"wrote {trace}"):
        assert words in out
    assert "flag_gated:2 simulated" in (report / "index.html").read_text(encoding="utf-8")
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in events} == set(range(8))
    assert len(sorted(traces.glob("rank.*.et"))) == 8


def test_other_links_are_what_if(weft: Weft, saved: Path) -> None:
    def total(*words: str) -> float:
        status, out, _ = weft("simulate", saved, "--json", *words)
        assert status == 0
        return float(json.loads(out)["total_us"])

    slow = total("--set", "links.gbps=50")
    assert slow > 2 * total()
    assert total("--set", "links.gbps=50", "--set", "links.topology=ring") > slow


def test_what_is_set_says_so() -> None:
    machine = machine_with("h200x8", ["gpu.hbm_gbps=5000", "stores.gbps=[[8, 100.0], [132, 300.0]]"])
    assert (machine.gpu.hbm_gbps, machine.stores.rate(132)) == (5000.0, 300.0)
    assert machine.sources["gpu.hbm_gbps"] == machine.sources["stores.gbps"] == "set by hand"
    assert machine.sources["links.gbps"] == load("h200x8").sources["links.gbps"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--machine", "mi210x4"], "world_size is 8; machine mi210x4 has 4 GPUs"),
        (["--machine", "none"], "machine is 'none'"),
        (["--set", "links.gbps=0"], "links.gbps is 0.0; it must be above zero"),
        (["--set", "launch_us=1e100"], "launch_us is 1e+100; it must be from 1e-12 to 1e+15"),
        (["--set", "links.gbps=1e-10"], "flag_gated takes more than 104 days on h200x8: rank 0, lane compute is in gemm"),
        (["--set", "links.latency_us=1e15"], "flag_gated takes more than 104 days on h200x8: rank 0, lane compute is in"),
        (["--set", "gpu.hbm_gbps=1e-12"], "flag_gated takes more than 104 days on h200x8: rank 0, lane compute is in"),
        (["--set", "links.speed=1"], "'links.speed' is no number of machine h200x8; it has world_size, gpu.sms"),
        (["--set", "links.gbps"], "--set links.gbps: it must be KEY=VALUE, such as links.gbps=200"),
        (["--set", "links.gbps=fast"], "links.gbps is 'fast'; it must be a number"),
        (["--set", "links.topology=star"], "links.topology is 'star'; it must be one of 'switch'"),
        (["--sensitivity"], "--sensitivity is for studies"),
        (["--trace", "/none/t.json"], "--trace /none/t.json: No such file"),
    ],
)
def test_mistakes_are_one_line(weft: Weft, saved: Path, words: list[str], says: str) -> None:
    status, out, err = weft("simulate", saved, *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "problem is missing from Schedule"),
        ("nonsense", "is not JSON"),
        (codec.dumps(SCHEDULE).replace('"name": "flag_gated"', '"nom": "flag_gated"'), "nom is not a field of Schedule"),
    ],
)
def test_files_that_hold_no_schedule_are_refused(weft: Weft, saved: Path, text: str, says: str) -> None:
    saved.write_text(text, encoding="utf-8")
    status, out, err = weft("simulate", saved)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_a_schedule_that_could_go_wrong_is_refused(weft: Weft, saved: Path) -> None:
    """Without its first wait a rank would overwrite what its peer still reads."""
    data = json.loads(saved.read_text(encoding="utf-8"))
    lane = next(lane for lane in data["ranks"][0] if lane["name"] == "copy")
    lane["steps"] = [step for step in lane["steps"] if step["type"] != "Wait"]
    saved.write_text(json.dumps(data), encoding="utf-8")
    status, _, err = weft("simulate", saved)
    assert status == 2
    assert "rank" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["simulate", "t3", "--machine", "h200x8"], "--machine is for a schedule in a JSON file, not for t3"),
        (["simulate", "t3", "--chakra", "out"], "--chakra is for a schedule in a JSON file, not for t3"),
        (["plan", "llama3-8b", "--save", "s.json"], "--save takes one schedule; name its site by --site, of"),
        (["plan", "llama3-8b", "--site", "none"], "site is 'none'; model llama3-8b has"),
    ],
)
def test_options_that_do_not_fit_are_refused(weft: Weft, words: list[str], says: str) -> None:
    status, out, err = weft(*words)
    assert (status, out) == (2, "")
    assert says in err


def test_a_setting_is_put_in_its_place() -> None:
    machine = settings.changed(load("h200x8"), "copies.strided", "engine", known=["copies.strided"], what="it")
    assert machine.copies.strided == "engine"
