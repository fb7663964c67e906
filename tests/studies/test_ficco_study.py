"""FiCCO's evaluation as a whole, on a part of its scenarios: closed forms, figures, heuristic, command, report, documents."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from pages import charts_of

from weft.cli import main
from weft.core import codec
from weft.core.machine import Machine
from weft.core.machine import load as load_machine
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.perf import engine
from weft.perf.ranking import estimates
from weft.planner.simulated import signature, without_computation
from weft.schedules import build
from weft_studies.ficco import evaluation as studies
from weft_studies.ficco.evaluation import (
    BESPOKE,
    CHOSEN_FROM,
    FiccoStudy,
    Scenario,
    behind_switch,
    correlations,
    estimated,
    load,
    pick,
    scenario,
    spearman,
)
from weft_studies.ficco.gemms import FICCO_GEMMS, ficco_gemm, unseen
from weft_studies.ficco.study import LOSSES, STUDY, choosers, correlations_table, figures, losses_table, topologies
from weft_studies.figures import SweptRow, headline
from weft_studies.page import study_page
from weft_studies.profile import uncertain
from weft_studies.study import Done, record
from weft_studies.workers import results

STORED = Path(__file__).parents[2] / "docs" / "ficco_study.json"
CASES = tuple(map(ficco_gemm, ("g2", "g5", "g6")))
"""Those with the largest gain, the largest K, and the largest loss of peer to peer."""
QUICK = ficco_gemm("g14")
ROW = SweptRow(path="launch_us", factor=0.75, values=dict.fromkeys(STUDY.headlines, 1.5))


@pytest.fixture(scope="module")
def study() -> FiccoStudy:
    return studies.run(load(), CASES, unseen(1))


@pytest.fixture(scope="module")
def stored() -> FiccoStudy:
    """The whole evaluation, as the documents show it."""
    return codec.load(FiccoStudy, json.loads(STORED.read_text(encoding="utf-8"))["result"])  # type: ignore[no-any-return]


# Closed forms


def transfer_us(name: str, machine: Machine) -> float:
    """How long a rank's data is on the way in g14, if nothing is multiplied."""
    schedule = build(QUICK.problem(), name, fan_out=machine.fans_out)
    return max(engine.run(schedule, without_computation(machine)).transfer_us)


@pytest.mark.parametrize("name", BESPOKE)
def test_chunks_for_all_peers_take_a_shard_on_a_link(name: str) -> None:
    """A direct all-gather on a full mesh: every link carries one shard, and all do at once."""
    shard_us = QUICK.problem().shard_bytes / (load().links.gbps * 1e3)
    assert transfer_us(name, load()) == pytest.approx(shard_us, abs=0.01)


def test_peer_to_peer_takes_one_link_of_seven() -> None:
    """Seven shards one after the other; behind a switch the same bytes go at the rate of all links."""
    shard_us = QUICK.problem().shard_bytes / (load().links.gbps * 1e3)
    assert transfer_us("shard_p2p", load()) == pytest.approx(7 * shard_us, abs=0.01)
    assert transfer_us("shard_p2p", behind_switch(load())) == pytest.approx(shard_us, abs=0.01)


def test_sequential_is_the_sum_of_its_halves(study: FiccoStudy) -> None:
    for one in (*study.mesh, *study.switch):
        assert one.us["sequential"] == pytest.approx(one.computation_us + one.communication_us, abs=0.01)
        assert one.ideal == one.us["sequential"] / max(one.computation_us, one.communication_us)
        assert 1 <= one.ideal <= 2


def test_balance_depends_on_n_alone() -> None:
    """With one rate for GEMMs and one for the collective, their ratio goes with N: g2 and g6 differ by what waves cost."""
    ratios = [one.computation_us / one.communication_us / one.case.n for one in map(sequential_alone, CASES)]
    assert max(ratios) < 1.25 * min(ratios)


def sequential_alone(case: studies.GemmCase) -> Scenario:
    return scenario(load(), case, ("sequential",))


# The evaluation


def test_published_figures(study: FiccoStudy, stored: FiccoStudy) -> None:
    """The ideal and what is reached of it are above what was published; studies/README.md says why."""
    found = {figure.name: figure for figure in figures(stored)}
    assert len(found) == 5
    assert {name for name, figure in found.items() if not figure.ok} == {
        "ideal, speed-up, max",
        "best of FiCCO's four, speed-up, max",
    }
    most = found["peer to peer, slower than sequential, max"].ours
    assert 0.9 * most < study.mesh[2].p2p_loss <= most
    assert found["best of FiCCO's four, speed-up, max"].ours == study.mesh[0].speedup("hetero_fused_1d")


def test_a_switch_takes_peer_to_peers_loss_away(study: FiccoStudy) -> None:
    mesh, switch = topologies(study)
    assert mesh.p2p_loss[0] > 3
    assert switch.p2p_loss[1] < 1
    assert mesh.bespoke[0] == pytest.approx(switch.bespoke[0], rel=0.05)
    assert 1 < switch.over_p2p[1] < 1.5 < mesh.over_p2p[0]


def test_which_way_to_cut_follows_m_and_k(study: FiccoStudy) -> None:
    """Where K is far larger than M, cutting columns costs little, and much where M is."""
    for one in study.mesh:
        over = one.us["uniform_fused_2d"] / one.us[one.bespoke]
        assert over < 1.2 if one.case.k > one.case.m else over > 1.1


def test_losses_have_signatures(study: FiccoStudy) -> None:
    """Rows that are cut lose most in one GEMM a chunk, and most where M is small."""
    by_case = {
        case.name: {found.spec.partition(":")[0]: found for found in study.signatures if found.problem == case.problem()}
        for case in CASES
    }
    for losses in by_case.values():
        assert set(losses) == set(BESPOKE)
        assert losses["hetero_unfused_1d"].gemm_dil > losses["hetero_fused_1d"].gemm_dil
    assert by_case["g5"]["hetero_unfused_1d"].gemm_dil > 2 > by_case["g6"]["hetero_unfused_1d"].gemm_dil
    assert by_case["g5"]["uniform_fused_2d"].gemm_dil < by_case["g6"]["uniform_fused_2d"].gemm_dil
    (_, g2, *_) = losses_table(study)
    assert g2[4].split() == [f"{LOSSES[loss](by_case['g2']['uniform_fused_1d']):.2f}" for loss in ("GEMM DIL", "GEMM CIL")]
    assert len(correlations_table(study)) == 1 + len(BESPOKE) * len(LOSSES)


def test_contention_is_a_variant() -> None:
    """By default kernels and copies share the memory's rate alone, which does not bind here; ConCCL's shares slow both."""
    problem = CASES[0].problem()
    schedule = build(problem, "hetero_fused_1d", 8, fan_out=True)
    for machine, slowed in ((load(), False), (studies.contended(load(), 1.2), True)):
        found = signature(schedule, machine)
        assert (LOSSES["GEMM CIL"](found) > 1.01, LOSSES["comm. CIL"](found) > 1.01) == (slowed, slowed)


# The heuristic


def test_the_ranking_is_near_the_simulation(study: FiccoStudy) -> None:
    for one in (*study.mesh, *study.unseen):
        found = estimates(one.case.problem(), study.machine, CHOSEN_FROM)
        assert set(found) == set(CHOSEN_FROM)
        assert found == pytest.approx({name: one.us[name] for name in found}, rel=0.03)
        assert one.scored == pick(one.case.problem(), study.machine) == min(found, key=lambda name: found[name])
        assert one.exact == (min(CHOSEN_FROM, key=lambda name: one.us[name]) == one.scored)


def test_ways_to_choose_are_held_to_the_same(stored: FiccoStudy) -> None:
    """The ranking before always the same schedule."""
    ranking, always = choosers(stored)
    assert ranking.exact == studies.chosen_exactly(stored.unseen) >= 0.81
    assert ranking.near > 0.9
    assert always.exact < ranking.exact
    assert always.most > ranking.most >= ranking.costs >= 0


# What the assumed numbers do


def test_estimates_stand_for_simulations_in_sweeps(study: FiccoStudy) -> None:
    for one in study.mesh:
        found = estimated(study.machine, one.case)
        assert found.us == pytest.approx({name: one.us[name] for name in found.us}, rel=0.03)
        assert found.ideal == pytest.approx(one.ideal, rel=0.01)


# What is kept, told and refused


def test_record_has_everything(study: FiccoStudy) -> None:
    done = Done(study=STUDY, system=study.machine, result=study, swept=(ROW,))
    data = json.loads(json.dumps(record(done), allow_nan=False))
    assert [one["case"]["name"] for one in data["result"]["mesh"]] == [case.name for case in CASES]
    assert [one["us"] for one in data["result"]["mesh"]] == [one.us for one in study.mesh]
    assert len(data["result"]["signatures"]) == len(CASES) * len(BESPOKE)
    assert data["sensitivity"][0]["path"] == "launch_us"
    assert codec.loads(FiccoStudy, codec.dumps(study)) == study


def test_report_redraws_the_figures(study: FiccoStudy) -> None:
    text = study_page(Done(study=STUDY, system=study.machine, result=study, swept=(ROW,)))
    for figure in figures(study):
        assert figure.text(figure.ours) in text
    charts = charts_of(text)
    assert set(charts) == {"published", "mesh", "switch", "loss0", "loss1", "loss2", "loss3"}
    for name in set(charts) - {"published"}:
        assert all(len(trace["x"]) == len(trace["y"]) == len(CASES) for trace in charts[name]["data"])
    first = charts["loss0"]["data"][0]
    assert first["y"][0] == round(study.signatures[0].gemm_dil, 4)
    assert "contention.copy during gemm" in text


@pytest.fixture
def short(study: FiccoStudy, monkeypatch: pytest.MonkeyPatch) -> FiccoStudy:
    """`weft simulate ficco` with a study that is there already, on the machine and the scenarios that were asked for."""

    def run(machine: Machine, cases: Sequence[studies.GemmCase] = FICCO_GEMMS, **options: object) -> FiccoStudy:
        chosen = {case.problem() for case in cases}
        mesh, switch = (tuple(one for one in part if one.case in cases) for part in (study.mesh, study.switch))
        losses = tuple(found for found in study.signatures if found.problem in chosen)
        return dataclasses.replace(study, machine=machine, mesh=mesh, switch=switch, signatures=losses)

    monkeypatch.setattr(studies, "run", run)
    return study


def test_command_prints_figures(
    stored: FiccoStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(studies, "run", lambda machine, **options: stored)
    assert main(["simulate", "ficco"]) == 0
    out = capsys.readouterr().out
    assert all(figure.name in out for figure in figures(stored))
    assert headline(figures(stored)) in " ".join(out.split())
    assert "1 of 3 predicted" in headline(figures(stored))


def test_a_part_of_the_scenarios_has_no_maxima(short: FiccoStudy, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor are figures of it compared; the sweeps are of the same scenarios."""
    assert main(["simulate", "ficco", "--scenario", "g5", "--draws", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "maxima are over all 16 scenarios" in out
    assert [figure.unit for figure in figures(short)] == ["percent", "percent"]
    assert re.search(r"in \d of 2 draws", out)


def test_command_sets_numbers_and_writes(short: FiccoStudy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "ficco", "--json", "-", "--set", "links.gbps=64", "--set", "copies.gbps = 64", "--scenario", "g5"]
    assert main([*words, "--report", str(tmp_path / "out")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["system"]["links"]["gbps"], data["system"]["copies"]["gbps"]) == (64.0, 64.0)
    assert [one["case"]["name"] for one in data["result"]["mesh"]] == ["g5"]
    assert "7 of 64 GB/s each way" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


def test_collectives_go_with_links_that_are_set(short: FiccoStudy, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless they are set themselves; and what was assumed of them still is."""
    for more, gbps in (([], 158.0), (["--set", "collectives.all_gather.gbps=300"], 300.0)):
        assert main(["simulate", "ficco", "--json", "-", "--set", "links.gbps=24", *more]) == 0
        machine = codec.load(Machine, json.loads(capsys.readouterr().out)["system"])
        assert machine.collectives["all_gather"].gbps == pytest.approx(gbps)  # type: ignore[union-attr]
        assert ("collectives.all_gather.gbps" in uncertain(machine)) is (not more)


def test_a_switch_is_no_mesh() -> None:
    with pytest.raises(ValueError, match="mesh"):
        studies.run(load_machine("h200x8"))


def test_processes_share_the_scenarios_and_change_nothing() -> None:
    case = (QUICK,)
    assert studies.run(load(), case, case, workers=2) == studies.run(load(), case, case)


def test_a_process_passes_its_error_on() -> None:
    with pytest.raises(ZeroDivisionError):
        list(results([("a", partial(divmod, 1, 0)), ("b", partial(divmod, 1, 1))], lambda *_: None, workers=2))


def test_each_schedule_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the mesh seven schedules, and both halves alone of FiCCO's four; behind a switch seven; for the heuristic five."""
    simulated: list[str] = []

    def counted(schedule: Schedule, machine: Machine) -> engine.Outcome:
        simulated.append(schedule.name)
        return run(schedule, machine)

    run = engine.run
    monkeypatch.setattr(engine, "run", counted)
    monkeypatch.setattr("weft.planner.simulated.run", counted)
    studies.run(load(), (QUICK,), (QUICK,))
    assert len(simulated) == 7 + 2 * 4 + 7 + 5


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch, study: FiccoStudy) -> None:
    monkeypatch.setattr(studies, "simulated", lambda machine, case, names=(): {})
    monkeypatch.setattr(studies, "_scenario", lambda machine, case, outcomes: study.mesh[0])
    monkeypatch.setattr(studies, "signatures", lambda machine, outcomes: ())
    progress: list[tuple[str, int, int]] = []
    studies.run(load(), (QUICK,), unseen(1), lambda *news: progress.append(news))
    names = ["mesh g14", "switch g14", "heuristic u1", "done"]
    assert progress == [(name, done, 3) for done, name in enumerate(names)]


def test_stored_study_is_up_to_date(study: FiccoStudy, stored: FiccoStudy) -> None:
    """The machine, these scenarios and the headline as they are; `python docs/generate.py ficco` writes the file."""
    assert stored.machine == load()
    assert [one.case for one in stored.mesh] == list(FICCO_GEMMS)
    assert [one.case for one in stored.unseen] == list(unseen())
    for fresh in study.mesh:
        assert next(one for one in stored.mesh if one.case == fresh.case) == fresh
    assert stored.unseen[: len(study.unseen)] == study.unseen


def test_correlations() -> None:
    assert spearman([1, 2, 3, 10], [5, 6, 7, 8]) == pytest.approx(1)
    assert spearman([1, 2, 3, 3], [4, 3, 2, 2]) == pytest.approx(-1)
    assert spearman([1, 2, 3], [2, 2, 2]) == 0
    machine = load_machine("h200x8")
    problems = [Problem(op="all_gather_matmul", m=m, n=28672, k=8192, world_size=8) for m in (1024, 4096, 16384, 65536)]
    schedules = [build(problem, "hetero_unfused_1d", 8, fan_out=machine.fans_out) for problem in problems]
    found = correlations([signature(schedule, machine) for schedule in schedules], machine)
    assert found["shard_rows"] == pytest.approx(-1), "the larger the pieces, the less is lost"
