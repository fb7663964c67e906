"""What all studies share: labels of figures, the two sweeps, the headline, and what the documents store."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from weft.core import codec
from weft.core.span import Span
from weft_studies import command
from weft_studies.figures import (
    REACH,
    Evidence,
    Figure,
    JointSweep,
    SweptRow,
    headline,
    joint,
    joint_table,
    joint_words,
    one_at_a_time,
    swept_table,
    unmoved,
)
from weft_studies.page import study_page
from weft_studies.profile import StudyProfile, moved, uncertain
from weft_studies.study import CHANGED, STUDIES, Done, Study, load_study, record, tables, words
from weft_studies.t3.system import T3System, load

DOCS = Path(__file__).parents[2] / "docs"
GUESS = Evidence(label="predicted", because="Nothing was chosen with it in view.")
KNOWN = Evidence(label="calibrated", because="The rate was chosen by it.")
PREDICTED = {"t3": 2, "ficco": 3, "dlrm": 0, "iso": 1}


def silent(text: str, done: int, total: int) -> None:
    """No progress is shown."""


def no_figure(system: StudyProfile) -> tuple[Figure, ...]:
    return ()


def rate_and_stages(system: T3System) -> tuple[Figure, ...]:
    """Two figures that are numbers of the system; no system with more than 130 columns a tile is accepted."""
    if system.tile.cols > 130:
        raise ValueError("tile.cols is too large; use 130")
    return (
        GUESS.ratio("rate", 37.1, system.unit_gbps, 1.0),
        KNOWN.ratio("stages", 2.0, system.tile.stages, 0.0),
    )


# Labels and headlines


@pytest.mark.parametrize("name", STUDIES)
def test_every_figure_has_a_label_and_a_reason(name: str) -> None:
    found = load_study(name).sample(load_study(name).load())
    assert sum(figure.label == "predicted" for figure in found) == PREDICTED[name]
    assert all(figure.because.endswith(".") for figure in found)
    assert len({figure.name for figure in found}) == len(found)
    assert set(load_study(name).headlines) <= {figure.name for figure in found}


def test_the_headline_counts_predicted_figures_alone() -> None:
    missed, right = GUESS.percent("a", 0.2, 0.3, 0.05), GUESS.percent("b", 0.2, 0.21, 0.05)
    seen = KNOWN.percent("c", 0.2, 0.2, 0.05)
    assert headline([missed, right, seen]).startswith("1 of 2 predicted figures are")
    assert headline([seen, seen]).startswith("No figure is predicted")


def test_figures_are_accepted_at_their_bounds() -> None:
    figure = GUESS.figure("a", 2.0, 2.0, (1.5, 2.25), "ratio")
    ours = (1.49, 1.5, 2.25, 2.26)
    assert [dataclasses.replace(figure, ours=value).ok for value in ours] == [False, True, True, False]


def test_a_study_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match="t4"):
        load_study("t4")


# One number at a time


@pytest.mark.parametrize("name", STUDIES)
def test_a_factor_changes_every_number(name: str) -> None:
    """Lower and higher are different systems, whatever is rounded; or the system says why there is none."""
    system = load_study(name).load()
    for path in uncertain(system):
        found = []
        for factor in (0.75, 1.25):
            with suppress(ValueError):
                found.append(moved(system, {path: factor}))
        assert system not in found
        assert len(set(map(codec.dumps, found))) == len(found)


def test_whole_numbers_move_by_one_at_least() -> None:
    system = load()
    assert moved(system, {"tile.stages": 1.25}).tile.stages == 3
    assert moved(system, {"dma_tiles": 0.99}).dma_tiles == 7
    assert moved(system, {"arbiter.thresholds": 0.9}).arbiter.thresholds == (27, 9, 4)
    with pytest.raises(ValueError, match="stages"):
        moved(system, {"tile.stages": 0.75})


def test_a_sweep_says_what_is_refused_and_why() -> None:
    rows = list(one_at_a_time(load(), rate_and_stages, silent))
    assert [row.path for row in rows] == [None, *(path for path in uncertain(load()) for _ in range(2))]
    found = {(row.path, row.factor): row for row in rows}
    assert found["unit_gbps", 1.25].values == {"rate": 1.25 * 37.1, "stages": 2}
    assert "stages" in found["tile.stages", 0.75].refused
    assert found["tile.cols", 1.25].refused.startswith("tile.cols")
    shown = swept_table(rows, {"rate": "ratio"})
    assert ("unit_gbps", "1.25", "46.38x", "") in shown
    assert "dma_tiles" in unmoved(rows)
    assert "dma_tiles" not in [row[0] for row in shown]
    assert [row[2] for row in shown if row[0] == "tile.stages"] == ["-", "37.10x"]


# All numbers together


def test_a_joint_sweep_moves_every_number_that_no_source_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[T3System] = []

    def sample(system: T3System) -> tuple[Figure, ...]:
        drawn.append(system)
        return no_figure(system)

    found = joint(load(), sample, 60, silent)
    assert found.paths == uncertain(load())
    assert {"unit_gbps", "hbm.channels", "link.gbps", "tile.stages", "arbiter.intensities"} <= set(found.paths)
    before = codec.dump(load())
    for path in uncertain(load()):
        values = {json.dumps(value_at(codec.dump(system), path)) for system in drawn}
        assert len(values) > 1, path
    for path, value in before.items():
        if path not in ("tile", "llc", "hbm", "arbiter", "link", "tracker", *found.paths):
            assert all(codec.dump(system)[path] == value for system in drawn)


def value_at(data: object, path: str) -> object:
    for key in path.split("."):
        data = data[key]  # type: ignore[index]
    return data


def test_draws_stay_within_reach_and_are_the_same_again() -> None:
    found = joint(load(), rate_and_stages, 200, silent)
    assert found == joint(load(), rate_and_stages, 200, silent)
    assert found != joint(load(), rate_and_stages, 200, silent, seed=1)
    rate, stages = found.spreads
    assert (1 - REACH) * 37.1 <= rate.low < rate.median < rate.high <= (1 + REACH) * 37.1
    assert (stages.low, stages.high) == (2.0, 3.0)
    assert found.draws == 200
    assert found.refused > 40
    assert 0 < found.within < found.predicted < 200  # type: ignore[operator]
    assert f"in {found.within} of 200 draws, and all predicted ones in {found.predicted}" in joint_words(found)
    assert joint_table(found)[1][-1] == f"{rate.within} of 200"


def test_a_system_of_which_no_draw_can_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_studies.figures.MOST_REFUSED", 3)

    def never(system: T3System) -> tuple[Figure, ...]:
        raise ValueError("units is 80")

    with pytest.raises(ValueError, match="units is 80"):
        joint(load(), never, 1, silent)


# What is stored and shown


@pytest.mark.parametrize("name", STUDIES)
def test_stored_sweeps_are_up_to_date(name: str) -> None:
    """`python docs/generate.py studies` writes them."""
    study = load_study(name)
    system, data = study.load(), json.loads((DOCS / f"{name}_study.json").read_text(encoding="utf-8"))
    rows = codec.load(tuple[SweptRow, ...], data["sensitivity"])
    drawn = codec.load(JointSweep, data["joint"])
    assert [row.path for row in rows] == [None, *(path for path in uncertain(system) for _ in range(2))]
    assert drawn.paths == uncertain(system)
    assert drawn.draws >= 200
    fresh = {figure.name: figure.ours for figure in study.sample(system)}
    # The last digits of a sum depend on Python: from 3.12 on it keeps what rounding takes away.
    assert rows[0].values == pytest.approx(fresh, rel=1e-9)
    assert [spread.figure.name for spread in drawn.spreads] == list(fresh)


def test_sweeps_are_in_the_record_and_on_the_page() -> None:
    """Of a study that is quick to simulate, with few draws."""
    study = load_study("dlrm")
    system = study.apply_settings(study.load(), {"nodes": "8", "topologies": "fat_tree"})
    result = study.run(system, silent)
    rows = (SweptRow(values=dict.fromkeys(study.headlines, 0.25)), SweptRow(path="batch", factor=0.75, refused="<no>"))
    done = Done(study=study, system=system, result=result, swept=rows, joint=joint(system, study.sample, 3, silent))
    data = json.loads(json.dumps(record(done), allow_nan=False))
    assert [figure["label"] for figure in data["figures"]] == ["calibrated"] * 3
    assert (data["joint"]["draws"], len(data["joint"]["spreads"]), data["headline"]) == (3, 3, CHANGED)
    assert {"figures", "labels", "sensitivity", "joint", "system"} <= {table.name for table in tables(done)}
    page = study_page(done)
    assert all(text in page for text in ("&lt;no&gt;", "95th percentile", CHANGED, "collectives.share"))
    assert all(figure.because in page for figure in done.figures)


def test_figures_of_another_system_are_not_counted() -> None:
    study = load_study("iso")
    published = study.load()
    headlines = {}
    for name, system in (("published", published), ("changed", study.apply_settings(published, {"links.gbps": "270"}))):
        headlines[name] = next(words(Done(study=study, system=system, result=study.run(system, silent))))
    assert "1 predicted figures" in headlines["published"]
    assert headlines["changed"] == CHANGED


@pytest.mark.parametrize("as_json", [False, True])
def test_a_study_is_written_though_nobody_reads_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    def unread(done: Done) -> Any:
        raise BrokenPipeError

    spans = {"one": (Span(rank=0, lane="compute", kind="gemm", name="g", start_us=0.0, end_us=1.0),)}

    def simulated(which: Study, system: Any, *_: Any, **__: Any) -> Done:
        return Done(study=dataclasses.replace(which, spans=lambda result: spans), system=system, result=None)

    monkeypatch.setattr(command, "simulate", simulated)
    monkeypatch.setattr("weft_studies.page.study_page", lambda done: "whole")
    for name in ("print_results", "record"):
        monkeypatch.setattr(command, name, unread)
    report, trace = tmp_path / "out", tmp_path / "trace.json"
    to = Path("-") if as_json else None
    with pytest.raises(BrokenPipeError):
        command.command("t3", json=to, report=report, trace=trace)
    assert (report / "index.html").read_text() == "whole"
    assert trace.stat().st_size
