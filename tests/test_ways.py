"""Ways as values: their grammar, what they are predicted to take, which are worth measuring."""

from __future__ import annotations

import pytest

from weft.core import machine
from weft.planner.ways import (
    AT_MOST,
    PLAIN,
    SEQUENTIAL,
    Abilities,
    Load,
    Way,
    candidates,
    parse,
    possible,
    predicted_us,
    share_of_ideal,
    shortlist,
)

H200 = machine.load("h200x8")
ALL = Abilities(priority=True, ctas=True, left=True, copy_engine=True, pull=True, residents=(2, 1))
GEMMS = Load(compute_us=4231.0, communication_us=2645.0, reduces=True)


def test_specs_are_read_as_they_print() -> None:
    ways = candidates(ALL, GEMMS)
    assert len(ways) > 12
    assert [parse(str(way)) for way in ways] == list(ways)
    assert str(SEQUENTIAL) == "sequential"
    assert str(PLAIN) == "vendor"
    assert parse("vendor+ctas=16+late") == Way(late=True, ctas=16)


@pytest.mark.parametrize(
    "spec", ["", "streams", "vendor+late+late", "vendor+ctas", "vendor+ctas=", "vendor+ctas=-1", "vendor+late=1"]
)
def test_mistakes_get_the_grammar(spec: str) -> None:
    with pytest.raises(ValueError, match=r"^way is '.*'; use auto, sequential, or vendor or copy_engine with any of \+late"):
        parse(spec)


def test_sequential_has_nothing_beside_it() -> None:
    with pytest.raises(ValueError, match="sequential has no left=8: nothing runs beside it"):
        parse("sequential+left=8")
    with pytest.raises(ValueError, match="ctas is -1; it must be 0"):
        Way(ctas=-1)
    for spec in ("sequential+pull", "vendor+pull"):
        with pytest.raises(ValueError, match="has pull; only copy_engine pulls"):
            parse(spec)


def test_only_what_the_device_has_is_a_candidate() -> None:
    assert [str(way) for way in candidates(Abilities(), GEMMS)] == ["sequential", "vendor", "vendor+late"]
    for abilities in (Abilities(), Abilities(priority=True, residents=(1,)), Abilities(ctas=True), Abilities(left=True), ALL):
        assert all(possible(way, abilities) for way in candidates(abilities, GEMMS))
    for spec in ("vendor+priority", "vendor+ctas=8", "vendor+left=8", "copy_engine", "vendor+resident=1"):
        assert not possible(parse(spec), Abilities())
    assert possible(parse("copy_engine+ctas=8"), Abilities(copy_engine=True))
    assert not possible(parse("copy_engine+pull"), Abilities(copy_engine=True))
    assert possible(parse("copy_engine+pull"), Abilities(copy_engine=True, pull=True))


def test_predictions_lie_between_ideal_and_sequential() -> None:
    loads = [
        GEMMS,
        Load(compute_us=100.0, communication_us=900.0, reduces=False),
        Load(compute_us=900.0, communication_us=9.0, reduces=True),
    ]
    for load in loads:
        for way in candidates(ALL, load):
            us = predicted_us(way, load, H200)
            assert us >= load.ideal_us
            if not (way.left or way.ctas or way.transport == "copy_engine"):
                assert us <= load.sequential_us
    assert predicted_us(SEQUENTIAL, GEMMS, H200) == GEMMS.sequential_us


def test_what_holds_fewer_sms_is_predicted_nearer_to_the_ideal() -> None:
    us = {
        spec: predicted_us(parse(spec), GEMMS, H200)
        for spec in ("vendor", "vendor+late", "vendor+priority", "vendor+priority+ctas=16")
    }
    assert us["vendor+late"] > us["vendor"] > us["vendor+priority"] > us["vendor+priority+ctas=16"]
    # All GEMMs have fewer SMs, also those beside which nothing runs any more.
    short = Load(compute_us=4000.0, communication_us=100.0, reduces=False)
    assert predicted_us(parse("vendor+left=24"), short, H200) > predicted_us(PLAIN, short, H200)


def test_the_shortlist_begins_with_what_wins_ties() -> None:
    found = shortlist(ALL, GEMMS, H200)
    assert found[:2] == ("sequential", "vendor")
    assert len(found) == len(set(found)) == AT_MOST
    assert any(spec.startswith("copy_engine") for spec in found)
    assert any("left" in spec for spec in found)
    assert shortlist(ALL, GEMMS, H200, 5) == found[:5]
    assert shortlist(Abilities(), GEMMS, H200) == ("sequential", "vendor", "vendor+late")


@pytest.mark.parametrize(("compute_us", "communication_us"), [(0.0, 100.0), (100.0, 0.0)])
def test_nothing_to_hide_leaves_sequential(compute_us: float, communication_us: float) -> None:
    assert shortlist(ALL, Load(compute_us=compute_us, communication_us=communication_us, reduces=True), H200) == ("sequential",)


def test_the_share_is_of_what_hiding_all_would_bring() -> None:
    assert share_of_ideal(100.0, sequential_us=200.0, ideal_us=100.0) == 1.0
    assert share_of_ideal(200.0, sequential_us=200.0, ideal_us=100.0) == 0.0
    assert share_of_ideal(400.0 / 3, sequential_us=200.0, ideal_us=100.0) == pytest.approx(0.5)
    assert share_of_ideal(250.0, sequential_us=200.0, ideal_us=100.0) < 0
    assert share_of_ideal(100.0, sequential_us=100.0, ideal_us=100.0) == 1.0
