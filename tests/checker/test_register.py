"""Families that users register are families like weft's own: names, plans, the ranking, operators, styles, the command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import inductor_work
import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture, Weft
from own_family import NAME, backwards, forwards, registered, without_free
from rank_work import check_gather
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module, style

import weft as library
from weft.core.machine import load
from weft.core.problem import COLLECTIVE_OPS, CollectiveProblem, ColumnProblem, LookupProblem, Op, Problem, Scaling
from weft.core.schedule import Schedule
from weft.perf import run
from weft.perf.ranking import estimates, ranked
from weft.runtime.choose import auto_candidates
from weft.runtime.groups import GROUPS
from weft.runtime.plan_cache import digest_of_families
from weft.schedules import FAMILIES, build, names, specs

H200 = load("h200x8")
PROBLEM = Problem(op="all_gather_matmul", m=8192, n=8192, k=4096, world_size=4)


def test_a_family_is_known_by_its_name() -> None:
    with registered():
        schedule = build(PROBLEM, NAME, 2)
        assert (schedule.name, schedule.chunks) == (NAME, 2)
        assert NAME in names("all_gather_matmul")
        assert NAME not in names("matmul_reduce_scatter")
        assert library.CompilePass(schedule={"all_gather_matmul": f"{NAME}:2"}).schedules["all_gather_matmul"] == f"{NAME}:2"
        assert str(FAMILIES[NAME]) == f"{NAME}: Multiply the parts in reverse order [own_family]"
        with pytest.raises(ValueError, match=f"{NAME}.* for all_gather_matmul alone"):
            build(replace(PROBLEM, op="matmul_reduce_scatter"), NAME)
        with pytest.raises(ValueError, match=f"{NAME}.*nodes"):
            build(replace(PROBLEM, nodes=(2, 2)), NAME)
        scaled = replace(PROBLEM, scaling=Scaling(recipe="rowwise"))
        with pytest.raises(ValueError, match=f"{NAME}.*FP8"):
            build(scaled, NAME)
        assert NAME not in {spec.partition(":")[0] for spec in specs(scaled)}


def test_it_is_ranked_by_the_engine_and_planned_where_it_is_asked_for() -> None:
    with registered():
        simulated_us = run(build(PROBLEM, NAME, 2), H200).total_us
        assert estimates(PROBLEM, H200, [f"{NAME}:2"]) == {f"{NAME}:2": simulated_us}
        plan = library.plan(PROBLEM, H200, only=NAME)
        assert {candidate.schedule for candidate in plan.candidates} == {NAME}
        assert library.plan(PROBLEM, H200, only=NAME, chunks=2).chosen.predicted_us == simulated_us
        assert not any(spec.startswith(NAME) for spec in ranked(PROBLEM, H200))


def test_it_is_a_candidate_of_auto_where_that_is_asked_for() -> None:
    cpu = torch.device("cpu")
    usual, digest = auto_candidates(PROBLEM, cpu), digest_of_families(PROBLEM)
    with registered():
        assert digest_of_families(PROBLEM) == digest, "what auto has measured stays valid"
    with registered(forwards, "ahead", candidate=True):
        assert any(spec.startswith("ahead") for spec in ranked(PROBLEM, H200))
        first = digest_of_families(PROBLEM)
    with registered(backwards, "ahead", candidate=True):
        assert digest not in (first, digest_of_families(PROBLEM))
        assert first != digest_of_families(PROBLEM), "a changed builder is measured anew"
    assert auto_candidates(PROBLEM, cpu) == usual


def test_builders_of_weft_can_be_registered_for_every_operator() -> None:
    problems: list[Problem] = [LookupProblem.of(batch=12, dims=((4,),) * 2)]
    problems += [CollectiveProblem(op=op, m=48, world_size=2) for op in COLLECTIVE_OPS]
    columns: tuple[Op, Op] = ("matmul_all_to_all_columns", "all_to_all_columns_matmul")
    problems += [ColumnProblem(op=op, m=12, n=12, k=12, world_size=2) for op in columns]
    tp: tuple[Op, ...] = ("matmul_reduce_scatter", "matmul_all_to_all", "all_to_all_matmul", "matmul_all_reduce")
    problems += [Problem(op=op, m=12, n=12, k=12, world_size=2) for op in tp]
    for problem in problems:
        builder = FAMILIES["sequential"].builders[problem.op]
        with registered(builder, f"own_{problem.op}", ops=(problem.op,), chunked=False, overlaps=False):
            assert build(problem, f"own_{problem.op}").name == f"own_{problem.op}"
            assert f"own_{problem.op}" in ranked(problem, H200, f"own_{problem.op}")


def _without_free_where_three(request: Any) -> Any:
    return (without_free if request.problem.world_size == 3 else backwards)(request)


def _raises(request: Any) -> Any:
    return {}[request.name]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"name": "flag_gated"}, "name is 'flag_gated', which is taken"),
        ({"name": "auto"}, "name is 'auto'"),
        ({"name": "mine:2"}, "name is 'mine:2'"),
        ({"name": 3}, "name is a int"),
        ({"builder": "flag_gated"}, "builder is a str"),
        ({"ops": "all_gather_matmuls"}, "ops has 'all_gather_matmuls'"),
        ({"ops": ("all_gather_matmul", "ragged_all_to_all_matmul")}, "ops has 'ragged_all_to_all_matmul'"),
        ({"ops": ()}, "ops is empty"),
        ({"builder": lambda request: None}, r"returned a NoneType; it must return a weft.schedule.Schedule"),
        ({"builder": lambda request: build(request.problem, "sequential")}, r"returned sequential .*name='mine' and chunks=1"),
        ({"builder": _raises}, "the builder of schedule 'mine' raised KeyError: 'mine' for all_gather_matmul"),
        ({"ops": "reduce_scatter"}, "ops has 'reduce_scatter', the collective without a matmul; .* matmul_reduce_scatter"),
        (
            {"builder": _without_free_where_three},
            "name is 'mine': for .*world_size=3.* the checker refuses its schedule: rank 2, lane copy, step 0",
        ),
        ({"unfit": lambda problem: "it is never right"}, "fits no problem of all_gather_matmul.*it is never right"),
    ],
)
def test_mistakes_name_the_argument(options: dict[str, Any], match: str) -> None:
    before = dict(FAMILIES)
    given = {"name": "mine", "builder": backwards, "ops": "all_gather_matmul"} | options
    with pytest.raises(ValueError, match=match):
        library.schedule.register(given.pop("name"), given.pop("builder"), **given)
    assert before == FAMILIES


def test_build_says_how_it_takes_chunks() -> None:
    with pytest.raises(ValueError, match=r"schedule is 'flag_gated:4'; .*build\(problem, 'flag_gated', 4\)"):
        build(PROBLEM, "flag_gated:4")


LARGE_K = 1024


def _raises_for_large_k(request: Any) -> Any:
    """A builder that all proofs of the registration accept."""
    return {}[request.problem.k] if request.problem.k > LARGE_K else backwards(request)


def test_a_builder_that_raises_is_no_candidate(caplog: pytest.LogCaptureFixture) -> None:
    usual = ranked(PROBLEM, H200)
    with registered(_raises_for_large_k, candidate=True):
        raised = f"the builder of schedule '{NAME}' raised KeyError: 4096 for {re.escape(str(PROBLEM))}"
        for asked in (lambda: build(PROBLEM, NAME), lambda: library.plan(PROBLEM, H200, only=NAME)):
            with pytest.raises(ValueError, match=raised):
                asked()
        assert ranked(PROBLEM, H200) == usual
        assert NAME not in {candidate.schedule for candidate in library.plan(PROBLEM, H200).candidates}
        digest_of_families(replace(PROBLEM, dtype="float32"))
        assert sum(f"schedule {NAME} is not a candidate" in record.message for record in caplog.records) == 2, "one a problem"
        assert any(spec.startswith(NAME) for spec in specs(replace(PROBLEM, k=LARGE_K)))


def _call_whose_builder_raises() -> list[str]:
    """What calls raise, all with one group, the last of which nothing is wrong with."""
    found = []
    with registered(_raises_for_large_k, candidate=True):
        x, w = torch.ones(2, 2 * LARGE_K), torch.ones(2 * LARGE_K, 4)
        for schedule in (NAME, "auto", "planned"):
            try:
                assert (library.all_gather_matmul(x, w, schedule=schedule) == 2 * LARGE_K).all()
                found.append("right")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        assert (library.all_gather_matmul(x[:, :16], w[:16], schedule=NAME) == 16).all()
        library.close()
    return found


@pytest.mark.ranks
def test_a_builder_that_raises_leaves_the_group_usable(ranks: RankFixture) -> None:
    for named, *chosen in ranks(2).run(_call_whose_builder_raises):
        assert named.startswith("BuilderError"), named
        assert "raised KeyError: 2048" in named
        assert chosen == ["right", "right"]


def test_styles_do_not_replace_a_schedule_that_their_operator_lacks() -> None:
    row = partial(library.RowwiseParallel, output_layouts=Shard(0))
    column = partial(library.ColwiseParallel, input_layouts=Shard(0))
    shared = partial(library.SharedInput, ["up"])
    plan = partial(library.CompilePass, operators=("all_gather_matmul", "matmul_reduce_scatter"))
    with registered(), registered(counted_copies, "scatters", ops="matmul_reduce_scatter"):
        for style_of, wrong in ((column, "scatters"), (shared, "scatters"), (row, NAME), (library.RowwiseParallel, NAME)):
            with pytest.raises(ValueError, match=f"schedule is '{wrong}', which is for .* alone"):
                style_of(schedule=f"{wrong}:2")
        for style_of, right in ((column, NAME), (shared, NAME), (row, "scatters"), (library.ColwiseParallel, "scatters")):
            style_of(schedule=f"{right}:2")
        for wrong in (NAME, {"matmul_reduce_scatter": NAME}):
            with pytest.raises(ValueError, match=f"schedule is '{NAME}', which is for all_gather_matmul alone"):
                plan(schedule=wrong)
        assert plan(schedule={"all_gather_matmul": NAME}).schedules["matmul_reduce_scatter"] == "auto"


def counted_copies(request: Any) -> Any:
    """The same program as track_and_trigger."""
    built = build(request.problem, "track_and_trigger", request.chunks, fan_out=request.fan_out)
    return replace(built, name=request.name)


def test_a_family_may_refuse_problems() -> None:
    def unfit(problem: Problem) -> str:
        return "" if problem.world_size == 3 else f"it is for 3 ranks, not {problem.world_size}"

    with registered(_without_free_unless_three, unfit=unfit, candidate=True):
        build(replace(PROBLEM, world_size=3), NAME)
        with pytest.raises(ValueError, match=f"schedule is '{NAME}': it is for 3 ranks, not 4"):
            build(PROBLEM, NAME)
        assert not any(spec.startswith(NAME) for spec in specs(PROBLEM))


def _without_free_unless_three(request: Any) -> Any:
    return (backwards if request.problem.world_size == 3 else without_free)(request)


def _bound() -> list[Schedule]:
    """The schedules that the group has run."""
    state = GROUPS.state(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    return state.schedules()


def _call() -> None:
    with registered(candidate=True):
        check_gather(37, 23, 19, torch.float32, f"{NAME}:2", 1)
        (ran,) = _bound()
        assert (ran.name, ran.chunks) == (NAME, 2)
        library.close()


def _style() -> list[str]:
    with registered():
        mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(16, 32)), torch.randn(6, 16)
        expected = net(x).chunk(2, -1)[rank].detach()
        net = parallelize_module(net, mesh, {"0": library.ColwiseParallel(input_layouts=Shard(0), schedule=f"{NAME}:2")})
        out = net(x.chunk(2)[rank])
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        found = [schedule.name for schedule in _bound()]
        library.close()
        return found


class _Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


def _compiled() -> tuple[list[str], str]:
    """A model that torch has parallelized, with the family in what torch.compile makes of it."""
    library.close()  # earlier tests have bound programs
    with registered():
        mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
        torch.manual_seed(0)
        net, x = _Up(), torch.randn(6, 8)
        expected = net(x).chunk(2, -1)[rank].detach()
        parallelize_module(net, mesh, {"up": style.ColwiseParallel(input_layouts=Shard(0))})
        overlap = library.CompilePass(schedule={"all_gather_matmul": f"{NAME}:2"})
        torch._dynamo.reset()
        mine = x.chunk(2)[rank].clone().requires_grad_()
        out = torch.compile(net, backend=inductor_work.eager(overlap))(mine)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        assert mine.grad is not None
        weight = net.up.weight.full_tensor()
        torch.testing.assert_close(mine.grad, weight.sum(0).expand(3, 8))
        found = [schedule.name for schedule in _bound() if schedule.problem.op == "all_gather_matmul"]
        library.close()
        return found, overlap.report()


@pytest.mark.ranks
def test_compiled_models_run_it(ranks: RankFixture) -> None:
    for found, report in ranks(2).run(_compiled):
        assert found == [NAME]
        assert "overlapped 2 of 2 places" in report


@pytest.mark.ranks
def test_operators_and_styles_run_it(ranks: RankFixture) -> None:
    ranks(2).run(_call)
    assert all(NAME in found for found in ranks(2).run(_style))


def _differ(case: str) -> str:
    """What a call raises on this rank. The ranks have registered other families, unless `case` is 0."""
    rank = dist.get_rank()
    x, w = torch.ones(2, 4), torch.ones(4, 4)

    def raised(call: Callable[[], object]) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    try:
        if case == "builder":
            with registered((backwards, forwards)[rank]):
                return raised(lambda: library.all_gather_matmul(x, w, schedule=NAME))
        if case == "missing" and rank == 1:
            return raised(lambda: library.all_gather_matmul(x, w, schedule="of_rank_0"))
        with registered(name="of_rank_0" if case == "missing" else ("mine", "yours")[rank]):
            return raised(lambda: library.all_gather_matmul(x, w, schedule="of_rank_0" if case == "missing" else "auto"))
    finally:
        library.close()


@pytest.mark.ranks
def test_ranks_with_other_families_are_told(ranks: RankFixture) -> None:
    for found in ranks(2).run(_differ, "builder"):
        assert found.startswith("RankMismatch"), found
        assert NAME in found
    found, missing = ranks(2).run(_differ, "missing")
    assert missing.startswith("ValueError"), missing
    assert "weft.schedule.register" in missing
    assert found.startswith("PeerLost"), found
    for found in ranks(2).run(_differ, "other names"):
        assert found.startswith("RankMismatch"), found
        assert "mine" in found
        assert "yours" in found


MODULE = """
import weft
from own_family import backwards
weft.schedule.register("of_a_module", backwards, ops="all_gather_matmul", candidate=True)
"""


@pytest.mark.ranks
def test_commands_import_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODULE, encoding="utf-8")
    helpers = Path(__file__).parents[1] / "helpers"
    path = os.pathsep.join([str(helpers), str(Path(library.__file__).parents[1])])

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "from weft.cli import main; raise SystemExit(main())", *words, "--import", "own"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
        )

    drawn = command("schedules", "of_a_module")
    assert "of_a_module, chunks=2: all_gather_matmul" in drawn.stdout, drawn.stderr
    listed = command("schedules")
    assert "Registered by own: of_a_module: weft schedules of_a_module --import own shows of_a_module alone" in listed.stdout
    for words in (("schedules", "another"), ("plan", "llama3-8b", "--schedule", "another:2")):
        unknown = command(*words)
        assert unknown.returncode == 2
        assert "schedule is 'another" in unknown.stderr
        assert "weft.schedule.register adds others, in a module that --import names" in unknown.stderr
    planned = command("plan", "llama3-8b", "--op", "all_gather_matmul", "--schedule", "of_a_module:2", "--tokens", "512")
    assert "of_a_module:2" in planned.stdout, planned.stderr
    small = ("--ranks", "2", "--device", "cpu", "--tokens", "8", "--machine-tokens", "64", "--schedule", "of_a_module:2")
    ran = command("run", "llama3-8b", "--op", "all_gather_matmul", *small)
    assert ran.returncode == 0, ran.stderr
    assert "of_a_module:2" in ran.stdout
    assert "All results are right" in ran.stdout


def test_a_module_that_cannot_be_imported(weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "taken.py").write_text(MODULE.replace("of_a_module", "sequential"), encoding="utf-8")
    for module, said in (
        ("not_there", "ModuleNotFoundError"),
        ("taken", "'sequential', which is taken"),
        ("a.py", "without .py"),
    ):
        status, _, error = weft("schedules", "--import", module)
        assert status == 2
        assert f"--import is {module!r}" in error
        assert said in error
