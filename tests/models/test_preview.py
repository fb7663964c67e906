"""The places of `weft plan` are those of a model that weft.parallelize has sharded, for every family that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import model_work
import pytest
import test_families
from conftest import RankFixture
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.cli.choices import choose_layers
from weft.compat.c10d import pretended_ranks
from weft.models.parallelize import FAMILIES
from weft.planner.models import Model, OperatorCall

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

WHOLE_EXPERTS = ("gpt_oss",)


def _tiny(kind: str) -> Any:
    return (test_families if kind in test_families.FAMILIES else model_work).tiny(kind)


def _planned(folder: Path, kind: str, ranks: int = 2) -> tuple[Model, tuple[OperatorCall, ...]]:
    _tiny(kind).config.save_pretrained(folder / kind)
    return choose_layers(str(folder / kind), None, ranks=ranks)


def _reported(kinds: tuple[str, ...]) -> dict[str, list[tuple[Any, ...]]]:
    found = {}
    for kind in kinds:
        experts = None if kind in WHOLE_EXPERTS else weft.ExpertParallel()
        report = weft.overlap_report(weft.parallelize(_tiny(kind), model_work.mesh(), experts=experts))
        layers = ((place.layer, place.count) for place in report.places)
        found[kind] = [(one.name, count, one.operators, one.reason, one.n, one.k) for one, count in layers]
    return found


@pytest.mark.ranks
def test_a_plan_has_the_places_of_the_sharded_model(ranks: RankFixture, tmp_path: Path) -> None:
    reported = ranks(2).run(_reported, FAMILIES)[0]
    for kind in FAMILIES:
        model, calls = _planned(tmp_path, kind)
        places = model.places
        found = [(one.name, one.count, one.operators, one.reason, one.n, one.k) for one in places]
        assert found == reported[kind], kind
        forward = [one for one in places if one.operators and not one.backward_only and one.n]
        planned = [call for call in calls if "expert" not in call.name]
        assert [(call.op, call.n, call.k, call.layers) for call in planned] == [
            (one.operators[0], one.n, one.k, one.count) for one in forward
        ], kind
        assert len({call.name for call in calls}) == len(calls)


def test_what_runs_whole_or_on_gathered_input_is_not_planned(tmp_path: Path) -> None:
    model, calls = _planned(tmp_path, "gpt_oss")
    assert {call.name for call in calls} == {"attention QKV", "attention out"}
    assert any("runs whole on every rank" in place.reason for place in model.places if place.module.endswith(".mlp"))
    model, calls = _planned(tmp_path, "deepseek_v3")
    assert not any("_proj" in call.name or "shared" in call.name for call in calls)
    assert [call.layers for call in calls if "expert" in call.name] == [1, 1]
    assert any("q_b_proj, kv_b_proj is whole" in place.reason for place in model.places)
    assert any("runs no operator for attention q_b_proj" in note for note in model.notes)


def test_the_number_of_ranks_decides_what_runs_whole(tmp_path: Path) -> None:
    _, calls = _planned(tmp_path, "llama", ranks=4)
    assert {call.name for call in calls} == {"MLP gate/up", "MLP down"}, "there are two heads for keys and values"


def test_the_command_lists_the_places(tmp_path: Path) -> None:
    _planned(tmp_path, "gpt_oss")
    options = [str(tmp_path / "gpt_oss"), "--ranks", "2", "--tokens", "64"]
    printed = CliRunner().invoke(app, ["plan", *options]).output
    assert "2 x model.layers.*.mlp: not overlapped; runs whole on every rank" in printed
    data = json.loads(CliRunner().invoke(app, ["plan", *options, "--json", "-"]).stdout)
    assert data["places"][0]["module"] == "model.embed_tokens"
    assert {one["layer"] for one in data["layers"]} == {"attention QKV", "attention out"}


@pytest.mark.parametrize(
    ("config", "says"),
    [({"model_type": "gpt2", "n_layer": 2}, "does not take"), ({"model_type": "gpt_oss", "num_hidden_layers": 2}, "refuses")],
)
def test_a_model_that_parallelize_does_not_take_is_planned_with_a_note(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model, calls = choose_layers(str(path), None, ranks=7)
    assert calls
    assert not model.places
    assert f"weft.parallelize {says} this model" in model.notes[0]


def test_ranks_are_pretended_in_a_process_without_ranks_only() -> None:
    with pretended_ranks(3) as mesh:
        assert mesh.size() == 3
        with pytest.raises(ValueError, match="initialized"), pretended_ranks(2):
            pass
