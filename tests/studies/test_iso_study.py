"""ISO's study: its phases add up, what it can save is bounded, and its prediction follows the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.core.machine import load as load_machine
from weft.planner.models import load_model
from weft_studies.iso import study
from weft_studies.iso.study import STUDY, LayerModel, prompt

TOKENS = 4096
A800 = LayerModel(study.load(), 8)
H200 = LayerModel(load_machine("h200x8"), 8)


def test_phases_compute_all_of_the_layer_and_reduce_all_of_it() -> None:
    found = A800.phases(TOKENS)
    assert sum(rows for _, rows in found.values()) == 2 * TOKENS
    whole = A800.attention_us(TOKENS, 0) + A800.mlp_us(TOKENS)
    assert sum(us for us, _ in found.values()) == pytest.approx(whole, rel=0.05)


def test_the_second_half_attends_to_the_first() -> None:
    """Its queries see three times as many keys on average."""
    half = TOKENS // 2
    first, second = A800.core_us(half, 0), A800.core_us(half, half)
    assert 2 < second / first < 4


@pytest.mark.parametrize("layer", [A800, H200], ids=["A800", "H200"])
@pytest.mark.parametrize("tokens", [2048, 16384])
def test_no_program_saves_more_than_the_shorter_half(layer: LayerModel, tokens: int) -> None:
    run = prompt(layer, tokens, overlapped=False)
    assert run.sequential_us == pytest.approx(run.compute_us + run.all_reduce_us)
    assert 0 < run.iso_saved <= run.bound


def test_a_phase_takes_at_least_the_longer_of_its_two_parts() -> None:
    for us, rows in A800.phases(TOKENS).values():
        assert A800.phase(us, rows).total_us >= max(us, A800.all_reduce_us(rows)) * 0.999


def test_faster_links_leave_less_to_save() -> None:
    slow, fast = ([prompt(LayerModel(one, 8), TOKENS, overlapped=False)] for one in (study.load(), load_machine("a100x8")))
    assert fast[0].all_reduce_us < slow[0].all_reduce_us
    assert fast[0].iso_saved < slow[0].iso_saved


def test_weft_is_planned_over_the_four_matmuls_of_a_layer() -> None:
    run = prompt(A800, TOKENS)
    assert run.weft_us is not None
    assert run.compute_us < run.weft_us < run.sequential_us
    with pytest.raises(ValueError, match="weft_us is None"):
        _ = prompt(A800, TOKENS, overlapped=False).weft_saved
    assert len(load_model(study.MODEL).read) in (0, 4)


def test_the_study_has_one_predicted_figure() -> None:
    done = study.run(study.load(), (TOKENS,))
    (figure,) = STUDY.figures(done)
    assert (figure.label, figure.ours) == ("predicted", pytest.approx(done.runs[0].iso_saved))
    machine = replace(study.load(), launch_us=50.0)
    assert STUDY.sample(machine)[0].ours != STUDY.sample(study.load())[0].ours
