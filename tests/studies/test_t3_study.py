"""T3's evaluation as a whole, on a part of its sub-layers: figures, record, command, report, and what the documents keep."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from pages import charts_of

from weft.cli import main
from weft.core import codec
from weft_studies.figures import SweptRow, geomean, headline
from weft_studies.page import study_page
from weft_studies.profile import changed, scaled
from weft_studies.study import Done, record
from weft_studies.t3 import evaluation as studies
from weft_studies.t3.configurations import CONFIGURATIONS, other_ns
from weft_studies.t3.evaluation import T3Study, concurrent, run_sublayers
from weft_studies.t3.study import STUDY, figures
from weft_studies.t3.system import SUBLAYERS, T_NLG, load


@pytest.fixture(scope="module")
def study() -> T3Study:
    """The evaluation without the large models: they are simulated like the others."""
    patch = pytest.MonkeyPatch()
    patch.setattr(studies, "LARGE_SUBLAYERS", SUBLAYERS[-4:])
    done = studies.run(load())
    patch.undo()
    return done


def test_published_figures(study: T3Study) -> None:
    """All are within their tolerance."""
    found = {figure.name: figure for figure in figures(study) if not figure.name.startswith("large models")}
    assert len(found) == 29
    assert [name for name, figure in found.items() if not figure.ok] == []
    assert found["T3, speed-up, geomean"].ours < found["T3-MCA, speed-up, geomean"].ours
    assert found["T3-MCA, speed-up, geomean"].ours < found["Ideal-GEMM-RS-Overlap, speed-up, geomean"].ours


def test_times_of_configurations(study: T3Study) -> None:
    """The table in weft_studies.t3.configurations."""
    for run in study.sublayers:
        gemm, scatter, near, gather = run.gemm.ns, run.reduce_scatter.ns, run.reduce_scatter_nmc.ns, run.all_gather.ns
        expected = {
            "sequential": gemm + scatter + gather,
            "t3": run.t3.ns + gather,
            "t3_mca": run.t3_mca.ns + gather,
            "ideal": max(gemm, scatter) + gather,
            "ideal_nmc": max(gemm, near) + gather,
        }
        assert {name: run.ns(name) for name in CONFIGURATIONS} == expected
        assert run.speedup("ideal_nmc") == expected["sequential"] / expected["ideal_nmc"]
    assert any(run.ns("ideal_nmc") < run.ns("ideal") for run in study.sublayers)


def test_no_memory_traffic_appears_from_nowhere(study: T3Study) -> None:
    """T3 saves in every class but the all-gather's, which it does not touch, and reads of inputs that fit the cache anyway."""
    for run in study.sublayers:
        before, after = run.traffic("sequential"), run.traffic("t3_mca")
        assert after["ag_read"] == before["ag_read"]
        assert after["ag_write"] == before["ag_write"]
        for name in ("gemm_write", "rs_read", "rs_write"):
            assert 0 < after[name] < before[name]
        assert 0 < after["gemm_read"] <= before["gemm_read"]
        assert after["tracker"] < 0.01 * sum(after.values())
        assert max(part.peak for part in (run.gemm, run.reduce_scatter, run.all_gather, run.t3, run.t3_mca)) <= 1 + 1e-9


def test_bypassing_outputs_help_the_inputs_of_some(study: T3Study) -> None:
    """T3, section 6.2: small GEMMs keep their inputs either way, the largest keep them neither way."""
    runs = {run.name: run for run in study.sublayers}
    ratios = {name: run.gemm.traffic["gemm_read"] / run.t3_mca.traffic["gemm_read"] for name, run in runs.items()}
    assert ratios["Mega-GPT-2 TP16 OP"] == ratios["T-NLG TP16 OP"] == 1.0
    assert ratios["T-NLG TP8 FC2"] < 1.05
    assert min(ratios["Mega-GPT-2 TP8 FC2"], ratios["T-NLG TP16 FC2"]) > 2.5


def test_large_fully_connected_layers_need_the_arbiter(study: T3Study) -> None:
    """T3, section 6: round-robin leaves TP8's FC layers behind the ideal, OP layers near it or above it."""
    runs = {run.name: run for run in study.sublayers}
    for model in ("Mega-GPT-2", "T-NLG"):
        large, small = runs[f"{model} TP8 FC2"], runs[f"{model} TP16 OP"]
        assert large.speedup("t3") < large.speedup("t3_mca") - 0.08
        assert small.speedup("t3") > small.speedup("ideal")
        assert large.t3_mca.gemm_ns < large.t3.gemm_ns


def test_whole_models(study: T3Study) -> None:
    """The sub-layers take the same share of training as the speed-ups imply, and a prompt gains more than training."""
    for kind in ("training", "prompt"):
        assert len([run for run in study.end_to_end if run.kind == kind]) == 4
    by_kind = {kind: geomean(r.speedup for r in study.end_to_end if r.kind == kind) for kind in ("training", "prompt")}
    assert by_kind["prompt"] > by_kind["training"] > 1
    assert all(0.3 < run.share < 0.6 for run in study.end_to_end)
    assert all(1 < run.speedup_t3 < run.speedup < 1 / (1 - run.share) for run in study.end_to_end)
    known = {(run.name, run.kind): run for run in study.end_to_end}
    assert [known[run.name, run.kind] for run in study.large_end_to_end] == list(study.large_end_to_end)
    forward, backward = (other_ns(load(), T_NLG, 8, phase) for phase in ("forward", "backward"))
    assert backward > 2 * forward


def test_units_that_are_shared(study: T3Study) -> None:
    """More units for the all-reduce: it gets faster, the GEMM slower. All for both gains most."""
    everything, few, more = study.concurrent
    assert (everything.units, few.units, more.units) == (None, 8, 16)
    assert set(everything.gemm_slowdowns + everything.all_reduce_slowdowns) == {1.0}
    assert geomean(few.all_reduce_slowdowns) == pytest.approx(1.41, abs=0.005)
    assert geomean(more.all_reduce_slowdowns) < geomean(few.all_reduce_slowdowns)
    assert geomean(more.gemm_slowdowns) > geomean(few.gemm_slowdowns) > 1
    assert geomean(few.speedups) < geomean(more.speedups) < geomean(everything.speedups)
    with pytest.raises(ValueError, match="units is 80"):
        concurrent(load(), 80)


def test_other_mappings_hide(study: T3Study) -> None:
    """Their transfers are shorter than the GEMM, so a fused one ends near the longer half, and never before it."""
    assert [m.collective for m in study.mapped] == ["direct_reduce_scatter", "all_to_all", "all_gather"]
    for mapped in study.mapped:
        longer = max(mapped.communication_ns, mapped.fused.gemm_ns)
        assert longer <= mapped.fused.ns < 1.03 * max(longer, mapped.gemm_ns)


def test_equal_gemms_are_simulated_once() -> None:
    first, second = (s for s in SUBLAYERS if s.name in ("T-NLG TP16 FC2", "T-NLG TP16 FC1"))
    runs = list(run_sublayers(load(), (first, second)))
    assert [run.name for run in runs] == [first.name, second.name]
    assert runs[0].t3 is runs[1].t3


def test_record_has_everything(study: T3Study) -> None:
    done = Done(study=STUDY, system=study.system, result=study, swept=(SweptRow(path="hbm.gbps", factor=0.75),))
    data = json.loads(json.dumps(record(done), allow_nan=False))
    assert [s["name"] for s in data["result"]["sublayers"]] == [s.name for s in SUBLAYERS]
    for sublayer, run in zip(data["result"]["sublayers"], study.sublayers, strict=True):
        assert (sublayer["t3"]["ns"], sublayer["gemm"]["traffic"]) == (run.t3.ns, run.gemm.traffic)
    assert len(data["tables"]["sublayers"]) == 1 + len(study.sublayers) + len(study.large)
    assert len(data["figures"]) == len(figures(study))
    assert data["sensitivity"][0]["path"] == "hbm.gbps"
    assert codec.load(type(study.system), data["system"]) == study.system


def test_report_redraws_the_figures(study: T3Study) -> None:
    rows = (SweptRow(values=dict.fromkeys(STUDY.headlines, 0.1)), SweptRow(path="tile.rows", factor=0.75, refused="<no>"))
    text = study_page(Done(study=STUDY, system=study.system, result=study, swept=rows))
    assert "&lt;no&gt;" in text
    for figure in figures(study):
        assert figure.name in text
        assert figure.text(figure.ours) in text
    charts = charts_of(text)
    assert set(charts) == {"published", "ratios", "speedups", "traffic", "large"}
    for chart in charts.values():
        assert all(len(trace["x"]) == len(trace["y"]) for trace in chart["data"])
    ratios = {trace["name"]: trace["y"] for trace in charts["ratios"]["data"]}
    assert ratios["published"] == [f.published for f in figures(study) if f.unit == "ratio"]
    t3 = next(trace for trace in charts["speedups"]["data"] if trace["name"] == "T3-MCA")
    assert t3["y"][0] == round(study.sublayers[0].speedup("t3_mca"), 4)
    assert "hbm.queue_entries" in text


def test_scaled_rounds_whole_numbers() -> None:
    system = load()
    assert scaled(system, "hbm.channels", 0.72).hbm.channels == 46
    assert scaled(system, "hbm.gbps", 0.75).hbm.gbps == 750.0
    assert scaled(system, "arbiter.thresholds", 0.5).arbiter.thresholds == (15, 5, 2)


# The command


@pytest.fixture
def short(study: T3Study, monkeypatch: pytest.MonkeyPatch) -> T3Study:
    """`weft simulate t3` with a study that is there already, on the system that was asked for."""
    monkeypatch.setattr(studies, "run", lambda system, progress: dataclasses.replace(study, system=system))
    return study


def test_command_prints_figures(short: T3Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "t3"]) == 0
    out = capsys.readouterr().out
    assert all(run.name in out for run in short.sublayers)
    found = figures(short)
    assert all(figure.name in out for figure in found)
    assert headline(found) in " ".join(out.split())


def test_command_sets_numbers_and_writes(short: T3Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "t3", "--json", "-", "--set", "hbm.gbps=2000", "--set", "arbiter.thresholds=[20, 8, 4]"]
    assert main([*words, "--report", str(tmp_path / "out")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["system"]["hbm"]["gbps"] == 2000.0
    assert data["system"]["arbiter"]["thresholds"] == [20, 8, 4]
    assert "2000 GB/s" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


def test_progress_is_told(study: T3Study) -> None:
    """In order, up to the whole."""
    progress: list[tuple[str, int, int]] = []
    names = SUBLAYERS[:2]
    list(run_sublayers(changed(load(), "tile.group_rows", 4), names, lambda text, done: progress.append((text, done, 2))))
    assert progress == [(names[0].name, 0, 2), (names[1].name, 1, 2)]
