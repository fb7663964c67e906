"""weft simulate FILE: a saved schedule on any machine, what it prints and writes, and one line for every mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import Weft

from weft.cli import simulate
from weft.cli.simulate import machine_with
from weft.core import codec
from weft.core.machine import load
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.perf import run
from weft.planner.words import us
from weft.schedules import build

PROBLEM = Problem(op="all_gather_matmul", m=4096, n=4096, k=4096, world_size=8)
SCHEDULE = build(PROBLEM, "flag_gated", 2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "schedule.json"
    path.write_text(codec.dumps(SCHEDULE), encoding="utf-8")
    return path


def test_what_the_plan_saves_is_what_it_chose(weft: Weft, tmp_path: Path) -> None:
    path, trace = tmp_path / "saved.json", tmp_path / "plan.trace"
    words = ("--layer", "MLP down", "--tokens", "4096", "--schedule", "hetero_unfused_1d")
    status, out, _ = weft("plan", "llama3-8b", *words, "--save", path, "--trace", trace)
    assert (status, f"wrote {path}" in out, f"wrote {trace}" in out) == (0, True, True)
    schedule = codec.read(Schedule, path)
    assert f"{schedule.name}:{schedule.chunks}" in out
    spans = [event for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(run(schedule, load("h200x8")).spans)


def test_everything_as_data(weft: Weft, saved: Path) -> None:
    status, out, err = weft("simulate", saved, "--machine", "a100x8", "--json", "-")
    found, expected = json.loads(out), run(SCHEDULE, load("a100x8"))
    assert (status, err) == (0, "")
    assert found["total_us"] == expected.total_us
    assert found["sequential_us"] == run(build(PROBLEM, "sequential"), load("a100x8")).total_us
    assert found["ideal_us"] == max(found["computation_us"], found["communication_us"])
    assert len(found["spans"]) == len(expected.spans) == sum(lane["steps"] for lane in found["lanes"])
    copy = next(lane for lane in found["lanes"] if (lane["rank"], lane["lane"]) == (0, "copy"))
    assert copy["busy_us"] + copy["waiting_us"] <= found["total_us"]
    spans = [span for span in expected.spans if (span.rank, span.lane) == (0, "copy")]
    assert copy["waiting_us"] == sum(span.duration_us for span in spans if span.kind == "wait")


def test_what_is_printed_and_written(weft: Weft, saved: Path, tmp_path: Path) -> None:
    trace, report = tmp_path / "t.json", tmp_path / "report"
    status, out, _ = weft("simulate", saved, "--trace", trace, "--report", report)
    total_us = run(SCHEDULE, load("h200x8")).total_us
    assert status == 0
    assert us(total_us) in out
    for words in ("flag_gated:2", "sequential", str(trace)):
        assert words in out
    page = (report / "index.html").read_text(encoding="utf-8")
    assert "flag_gated:2 simulated" in page
    printed = next(line.split()[4:6] for line in out.splitlines() if " copy " in line and line.endswith("% "))
    (shown,) = re.findall(r"rank 0 copy</th><td[^>]*>[^<]*</td><td[^>]*>([^<]*)</td><td[^>]*>([^<]*)<", page)
    assert tuple(printed) == shown, "busy and waiting time of a lane"
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in events} == set(range(8))


def test_other_links_are_what_if(weft: Weft, saved: Path) -> None:
    def total(*words: str) -> float:
        status, out, _ = weft("simulate", saved, "--json", "-", *words)
        assert status == 0
        return float(json.loads(out)["total_us"])

    slow = total("--set", "links.gbps=50")
    assert slow > 2 * total()
    assert total("--set", "links.gbps=50", "--set", "links.topology=ring") > slow


def test_the_vendors_collective_goes_with_the_links(weft: Weft, saved: Path) -> None:
    """What sequential takes, too. Where its table is set itself, that is what counts."""

    def found(*words: str) -> dict[str, float]:
        status, out, _ = weft("simulate", saved, "--json", "-", *words)
        assert status == 0
        return json.loads(out)  # type: ignore[no-any-return]

    plain, slow, fast = found(), found("--set", "links.gbps=20"), found("--set", "links.gbps=780")
    assert slow["communication_us"] > 7 * PROBLEM.shard_bytes / 20e3
    assert slow["sequential_us"] > 0.99 * (slow["communication_us"] + slow["computation_us"])
    assert fast["communication_us"] < plain["communication_us"] < slow["communication_us"] / 10
    table = "collectives.all_gather.points=[[1024, 5.0], [4194304, 10.0]]"
    assert found("--set", table, "--set", "links.gbps=20")["communication_us"] == pytest.approx(10)
    model = found("--machine", "a100x8", "--set", "links.gbps=135")
    assert model["communication_us"] > 1.8 * found("--machine", "a100x8")["communication_us"]


def test_a_host_that_all_share(weft: Weft, saved: Path) -> None:
    """In any order, since settings are put in place together."""
    words = ["links.topology=pcie", "links.host_gbps=50"]
    for first, second in (words, words[::-1]):
        status, out, _ = weft("simulate", saved, "--json", "-", "--set", first, "--set", second)
        assert status == 0
        for name in ("total_us", "sequential_us", "communication_us"):
            assert json.loads(out)[name] > 8 * 7 * PROBLEM.shard_bytes / 50e3
    machine = machine_with("h200x8", words)
    assert (machine.links.topology, machine.links.host_gbps) == ("pcie", 50.0)
    assert machine.sources["links.host_gbps"] == "set by hand"


def test_what_is_set_says_so() -> None:
    machine = machine_with("h200x8", ["gpu.hbm_gbps=5000", "stores.gbps=[[8, 100.0], [132, 300.0]]"])
    assert (machine.gpu.hbm_gbps, machine.stores.rate(132)) == (5000.0, 300.0)
    assert machine.sources["gpu.hbm_gbps"] == machine.sources["stores.gbps"] == "set by hand"
    assert machine.sources["links.gbps"] == load("h200x8").sources["links.gbps"]
    rescaled = machine_with("h200x8", ["links.gbps=200"]).sources["collectives.all_gather.points"]
    assert "set by hand" in rescaled


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--machine", "mi210x4"], "world_size is 8"),
        (["--set", "links.gbps=0"], "links.gbps is 0.0"),
        (["--set", "links.gbps=1e-10"], "rank 0, lane compute"),
        (["--set", "links.speed=1"], "'links.speed' is no number of machine h200x8"),
        (["--set", "links.gbps"], "--set links.gbps"),
        (["--set", "links.topology=star"], "links.topology is 'star'"),
        (["--set", "links.topology=pcie"], "links.host_gbps is missing"),
        (["--sensitivity"], "No such option: --sensitivity"),
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
        (["simulate", "t3", "--machine", "h200x8"], "--machine"),
        (["plan", "llama3-8b", "--save", "s.json"], "--layer"),
        (["plan", "llama3-8b", "--layer", "none"], "--layer is 'none'"),
    ],
)
def test_options_that_do_not_fit_are_refused(weft: Weft, words: list[str], says: str) -> None:
    status, out, err = weft(*words)
    assert (status, out) == (2, "")
    assert says in err


def test_a_study_that_is_not_installed(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is only the wheel of weft."""
    monkeypatch.setattr(simulate, "entry_points", lambda group: ())
    status, out, err = weft("simulate", "t3")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("weft: error: study is 't3', which is no file.")
    assert "pip install ./studies" in err


def test_a_study_is_named_before_its_options(weft: Weft) -> None:
    status, _, err = weft("simulate", "--set", "hbm.gbps=2000", "t3")
    assert (status, err.count("\n")) == (2, 1)
    assert "names come before all options: dlrm, ficco, iso, t3" in err
