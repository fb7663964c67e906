"""DLRM's evaluation as a whole, on few fabrics: figures, record, command, report, and what the documents keep."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from pages import charts_of

from weft.cli import main
from weft.core import codec
from weft_studies.dlrm import study as studies
from weft_studies.dlrm.study import PARTS, STUDY, DlrmStudy, cases_table, figures, parts
from weft_studies.dlrm.system import load
from weft_studies.figures import SweptRow, headline
from weft_studies.page import study_page
from weft_studies.profile import changed, scaled
from weft_studies.study import Done, record

NODES = (8, 128)


@pytest.fixture(scope="module")
def study() -> DlrmStudy:
    """The evaluation on fewer nodes, and with fewer slices."""
    patch = pytest.MonkeyPatch()
    patch.setattr(studies, "SLICES", (1, 32))
    done = studies.run(changed(load(), "nodes", NODES))
    patch.undo()
    return done


def test_published_figures_are_missed_with_one_network_for_both(study: DlrmStudy) -> None:
    """studies/README.md says so: less is saved than was published, unless the unfused exchange is slower."""
    found = figures(study)
    assert len(found) == 3
    assert all(figure.ours < figure.low for figure in found)
    slow = changed(load(), "collectives.share", 0.6)
    assert all(figure.ours > before.ours for figure, before in zip(STUDY.sample(slow), found, strict=True))


def test_the_gain_is_overlap(study: DlrmStudy) -> None:
    """Storing rows in place saves a pass over them; the rest is saved by overlap."""
    assert study.fused.ns < study.in_place.ns < study.unfused.ns
    assert study.unfused.ns - study.in_place.ns < 0.1 * (study.in_place.ns - study.fused.ns)
    before, after = parts(study.unfused), parts(study.in_place)
    assert after["repack"] == pytest.approx(before["repack"] / 2)
    assert after["lookup"] == before["lookup"]


def test_cases_are_all_there(study: DlrmStudy) -> None:
    assert [(each.topology, each.nodes) for each in study.cases] == [
        (topology, nodes) for topology in study.system.topologies for nodes in NODES
    ]
    published = next(each for each in study.cases if (each.topology, each.nodes) == studies.PUBLISHED)
    assert (published.unfused_ns, published.fused_ns) == (study.unfused.ns, study.fused.ns)
    assert published.saved == study.saved
    assert all(each.fused_ns < each.unfused_ns for each in study.cases)
    assert all(each.fused_waits_ns <= each.unfused_waits_ns for each in study.cases)


def test_parts_are_the_iteration(study: DlrmStudy) -> None:
    for run in (study.unfused, study.in_place, study.fused):
        assert sum(parts(run).values()) == pytest.approx(run.ns / 1e6, rel=1e-6)
    before, after = parts(study.unfused), parts(study.fused)
    assert after["lookup"] == pytest.approx(before["lookup"] / 0.875, rel=1e-3)
    assert after["wait for pooled rows"] < 0.3 * before["wait for pooled rows"]
    same = set(PARTS) - {"lookup", "wait for pooled rows", "repack"}
    assert {name: after[name] for name in same} == pytest.approx({name: before[name] for name in same}, rel=1e-2, abs=0.01)


def test_slices_help(study: DlrmStudy) -> None:
    one, many = study.sliced
    assert (one.slices, many.slices) == (1, 32)
    # With one slice nothing overlaps, and the fused kernel's lower occupancy is left.
    assert many.ns == study.fused.ns < study.unfused.ns < one.ns


def test_record_has_everything(study: DlrmStudy) -> None:
    swept = (SweptRow(path="batch", factor=0.75, values={"time saved": 0.2}),)
    done = Done(study=STUDY, system=study.system, result=study, swept=swept)
    data = json.loads(json.dumps(record(done), allow_nan=False))
    assert [row["fused_ns"] for row in data["result"]["cases"]] == [each.fused_ns for each in study.cases]
    assert data["result"]["fused"]["log"] == list(study.fused.log)
    assert data["tables"]["nodes"] == [list(row) for row in cases_table(study.cases)]
    assert len(data["figures"]) == 3
    assert data["sensitivity"] == [{"path": "batch", "factor": 0.75, "values": {"time saved": 0.2}}]
    assert codec.load(type(study.system), data["system"]) == study.system


def test_report_redraws_the_figure(study: DlrmStudy) -> None:
    text = study_page(Done(study=STUDY, system=study.system, result=study))
    for figure in figures(study):
        assert figure.name in text
        assert figure.text(figure.ours) in text
    charts = charts_of(text)
    assert set(charts) == {"published", "iteration", "cases", "timeline-unfused", "timeline-fused"}
    assert charts["cases"]["data"][0]["x"] == ["8 nodes", "128 nodes"]
    fused = sum(trace["y"][1] for trace in charts["iteration"]["data"])
    assert fused == pytest.approx(100 * (1 - study.saved), abs=0.01)
    assert len(charts["iteration"]["data"]) == len(PARTS)
    assert "collectives.share" in text


def test_scaled_tiles_keep_their_shape() -> None:
    system = load()
    slower = scaled(system, "gpu.tiles", 0.5).gpu.tiles
    assert [(tile.rows, tile.cols) for tile in slower] == [(tile.rows, tile.cols) for tile in system.gpu.tiles]
    assert [tile.efficiency for tile in slower] == [tile.efficiency / 2 for tile in system.gpu.tiles]


# The command


@pytest.fixture
def short(study: DlrmStudy, monkeypatch: pytest.MonkeyPatch) -> DlrmStudy:
    """`weft simulate dlrm` with a study that is there already, on the system that was asked for."""
    monkeypatch.setattr(studies, "run", lambda system, progress: dataclasses.replace(study, system=system))
    return study


def test_command_prints_tables(short: DlrmStudy, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "dlrm"]) == 0
    out = capsys.readouterr().out
    assert all(row[2] in out and row[-1] in out for row in cases_table(short.cases))
    assert headline(figures(short)) in " ".join(out.split())


def test_command_sets_numbers_and_writes(short: DlrmStudy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ("link.gbps=50", "nodes=64", "topologies=torus_2d, fat_tree", "gpu.hbm_gbps=2000")
    words = [word for number in numbers for word in ("--set", number)]
    assert main(["simulate", "dlrm", "--json", "-", *words, "--report", str(tmp_path / "out")]) == 0
    system = json.loads(capsys.readouterr().out)["system"]
    assert (system["link"]["gbps"], system["nodes"], system["gpu"]["hbm_gbps"]) == (50.0, [64], 2000.0)
    assert system["topologies"] == ["torus_2d", "fat_tree"]
    assert "50 GB/s, 700 ns" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, up to the whole."""
    monkeypatch.setattr(studies, "SLICES", ())
    progress: list[tuple[str, int, int]] = []
    system = changed(changed(load(), "nodes", 8), "topologies", "fat_tree,torus_2d")
    studies.run(system, lambda *news: progress.append(news))
    steps = ["fat_tree of 8", "torus_2d of 8", "the published case", "two nodes", "slices", "done"]
    assert progress == [(step, done, 5) for done, step in enumerate(steps)]
