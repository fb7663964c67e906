"""The overlap report as values: what counts as overlapped, its text, its page."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module, style

import weft
from weft.core.problem import Problem
from weft.models.communicating import CommunicatingLayer
from weft.models.embedding_bags import ShardedEmbeddingBags
from weft.models.experts import MoE
from weft.planner import plan_training
from weft.planner.models import Model, operator_calls
from weft.report.overlap import OverlapReport, ReportedCall, ReportedPlace, _is_of


def _called(spec: str, us: float | None, **others: float) -> ReportedCall:
    return ReportedCall(op="all_gather_matmul", rows=8192, spec=spec, why="fastest of 8 <b>", measured_us=us, **others)


def _place(count: int, *calls: ReportedCall, reason: str = "") -> ReportedPlace:
    layer = CommunicatingLayer(
        module="layers.*.mlp", parts=("up",), operators=() if reason else ("all_gather_matmul",), reason=reason, n=8, k=4
    )
    return ReportedPlace(layer=layer, count=count, calls=calls)


@pytest.fixture
def report() -> OverlapReport:
    fast, measured = _called("shard_p2p", 1000.0, sequential_us=1250.0, ideal_us=940.0), _called("flag_gated:1", 42.0)
    slow = _called("sequential", 3000.0, sequential_us=3000.0), _called("sequential_stores", 90.0, sequential_us=99.0)
    places = (_place(2, fast, measured), _place(3, *slow), _place(1, reason="an <i> of the user's"), _place(4))
    return OverlapReport(model="Llama<1>", places=places)


def test_what_only_ran_sequentially_is_not_overlapped(report: OverlapReport) -> None:
    assert (
        report.headline == "Llama<1>: overlapped 6 of 10 places that communicate, 3 faster but not overlapped, 4 not called yet"
    )


def test_a_place_whose_backward_alone_is_overlapped_is_not() -> None:
    backward = ReportedCall(op="matmul_reduce_scatter", rows=8192, spec="shard_p2p", why="predicted")
    assert not _place(1, _called("sequential", 9.0), backward).overlapped
    assert _place(1, backward).verdict == "not overlapped"
    assert _place(1, _called("shard_p2p", 9.0), backward).overlapped


def test_text_has_time_gain_and_share(report: OverlapReport) -> None:
    report_lines = str(report).splitlines()
    assert "shard_p2p 1,000 us, 1.25x sequential, 94% of the predicted ideal (fastest of 8 <b>)" in report_lines[2]
    assert report_lines[3].endswith("flag_gated:1 42.0 us (fastest of 8 <b>)")
    assert report_lines[-2].strip() == "not called yet"
    assert report_lines[-1] == "all calls with 8,192 rows, forward and backward, each once: 11.4 ms measured"
    assert sum(line.strip() == "not called yet" for line in report_lines) == 1


def test_sums_of_predicted_and_measured_times_and_of_memory() -> None:
    first = _called("shard_p2p", 1000.0, predicted_us=900.0, kept_bytes=2**20), _called("flag_gated:1", 42.0, predicted_us=58.0)
    report = OverlapReport(model="Llama", places=(_place(2, *first), _place(3, *first[:1])), machine="h200x8")
    lines = str(report).splitlines()
    assert "shard_p2p 1,000 us (900 us predicted)" in lines[2]
    assert report.step_us(8192) == (2 * 958.0 + 3 * 900.0, 2 * 1042.0 + 3 * 1000.0)
    times = "4.62 ms predicted on h200x8, 5.08 ms measured, 91% of it predicted"
    kept = "gathered inputs kept for the backward pass: 5.0 MiB of memory on a rank"
    assert lines[-2:] == [f"all calls with 8,192 rows, forward and backward, each once: {times}", kept]
    assert kept in report.html()
    unknown = OverlapReport(model="Llama", places=(*report.places, _place(1, _called("sequential", None))))
    assert unknown.step_us(8192) == (None, None)


LAYER = Model(name="tiny", source="", hidden=64, heads=4, kv_heads=4, head_dim=16, intermediate=96)


def _trained_layer() -> OverlapReport:
    """The report of a layer whose calls are the planner's, after a training step on CPUs that are to be predicted as H200s."""
    names = {"qkv": (64, 192), "out": (64, 64), "gate_up": (64, 192), "down": (96, 64)}
    model = nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name, sizes in names.items()})
    columns = weft.ColwiseParallel(input_layouts=Shard(0), schedule="planned")
    rows = weft.RowwiseParallel(output_layouts=Shard(0), schedule="planned")
    plan = {"qkv": columns, "out": rows, "gate_up": columns, "down": rows}
    parallelize_module(model, dist.init_device_mesh("cpu", (2,)), plan)
    x = torch.randn(32, 64, requires_grad=True)
    seen = model["out"](model["qkv"](x)[:, :32].contiguous())
    model["down"](model["gate_up"](seen)[:, :48].contiguous()).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_MACHINE", "h200x8")
        return weft.overlap_report(model)


def test_the_report_and_the_plan_of_a_training_step_agree(ranks: RankFixture) -> None:
    calls = [replace(call, weights=1) for call in operator_calls(LAYER)]
    plan = plan_training(replace(LAYER, read=tuple(calls)), "h200x8", tokens=64, ranks=2, dtype="float32")
    planned = sum(one.forward.chosen.predicted_us + one.backward.chosen.predicted_us for one in plan.calls)
    for report in ranks(2).run(_trained_layer):
        assert report.step_us(64) == (pytest.approx(planned), None)
        assert report.kept_bytes == plan.kept_bytes == 2 * 64 * 64 * 4
        assert "predicted on h200x8" in str(report)


def test_page_has_the_same_and_no_markup_of_names(report: OverlapReport) -> None:
    page = report.html()
    assert f"<title>weft: {html.escape(report.headline)}</title>" in page
    states = ["overlapped", "faster but not overlapped", "not overlapped", "overlapped"]
    assert re.findall(r'<span class="(?:right|wrong)">([^<]*)<', page) == states
    assert page.count(">not called yet<") == 1
    cells = re.findall(r"<td [^>]*>([^<]*)</td>", page)
    assert [cell for cell in cells if cell in ("1,000", "1,250", "1.25x", "42.0")] == ["1,000", "1,250", "1.25x", "42.0"]
    assert "94%" in page
    assert "an &lt;i&gt; of the user" in page
    assert not re.search(r"<b>|<script|https?://|src=", page)


def test_a_model_without_weft_is_refused() -> None:
    with pytest.raises(ValueError, match="model is a Linear in which weft runs nothing"):
        weft.overlap_report(torch.nn.Linear(2, 2))


def test_what_is_to_run_sequentially_is_not_overlapped() -> None:
    layer = CommunicatingLayer(module="up", operators=("all_gather_matmul",), n=8, k=4, schedule="sequential")
    assert not ReportedPlace(layer=layer, count=1, calls=()).overlapped
    assert ReportedPlace(layer=layer, count=1, calls=(_called("shard_p2p", None),)).overlapped


def _get_report_lines(model: nn.Module) -> list[str]:
    """The report's lines without their columns of spaces."""
    return [" ".join(line.split()) for line in str(weft.overlap_report(model)).splitlines()]


def _pair(first: str, second: str) -> nn.Module:
    """Two columns of equal sizes, by these schedules."""
    model = nn.ModuleDict({"one": nn.Linear(8, 8, bias=False), "two": nn.Linear(8, 8, bias=False)})
    column = {"input_layouts": Shard(0)}
    plan = {"one": weft.ColwiseParallel(**column, schedule=first), "two": weft.ColwiseParallel(**column, schedule=second)}
    return parallelize_module(model, dist.init_device_mesh("cpu", (2,)), plan)


def _alike_in_size() -> list[list[str]]:
    """What is told of two linears of equal sizes: one was called; both were; of equal schedules; in compiled code."""
    x, report_lines = torch.randn(4, 8), []
    with torch.no_grad():
        model = _pair("sequential", "shard_p2p")
        for name in ("two", "one"):
            model[name](x)
            report_lines.append(_get_report_lines(model))
        model = _pair("shard_p2p", "shard_p2p")
        model["two"](x)
        model["two"](torch.randn(2, 8))
        report_lines.append(_get_report_lines(model))
        model = _pair("sequential", "shard_p2p")
        torch.compile(model["two"], backend="aot_eager", fullgraph=True)(x)
        report_lines.append(_get_report_lines(model))
    return report_lines


def test_places_of_equal_sizes_have_their_own_calls(ranks: RankFixture) -> None:
    def ran(spec: str, rows: int = 8) -> str:
        return f"all_gather_matmul M={rows} {spec} not measured (asked for)"

    one, two = (f"1 x {name}: all_gather_matmul; overlapped" for name in ("one", "two"))
    slow, waits = "1 x one: all_gather_matmul; not overlapped", "not called yet"
    head = "ModuleDict: overlapped {} of 2 places that communicate"
    for first, both, same, compiled in ranks(2).run(_alike_in_size):
        assert first == [f"{head.format(1)}, 1 not called yet", slow, waits, two, ran("shard_p2p")]
        assert both == [head.format(1), slow, ran("sequential"), two, ran("shard_p2p")]
        assert same == [f"{head.format(2)}, 1 not called yet", one, waits, two, ran("shard_p2p"), ran("shard_p2p", 4)]
        assert compiled[1:4] == [slow, waits, two]
        assert ran("shard_p2p") in compiled


def _on_equal_meshes() -> list[str]:
    """What is told of a model on the second of two meshes of the same ranks, each with a group of its own."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        model = nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)})
        plan = {"up": weft.ColwiseParallel(input_layouts=Shard(0)), "down": weft.RowwiseParallel(output_layouts=Shard(0))}
        parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)
        with torch.no_grad():
            model["down"](model["up"](torch.randn(4, 8)))
    return _get_report_lines(model)


def test_places_on_a_mesh_like_another_have_their_calls(ranks: RankFixture) -> None:
    for report_lines in ranks(2).run(_on_equal_meshes):
        assert "not called yet" not in report_lines[0]
        called = [line.split()[:2] for line in report_lines]
        assert [call for call in called if "M=8" in call] == [["all_gather_matmul", "M=8"], ["matmul_reduce_scatter", "M=8"]]


def _chosen_by_sizes() -> list[list[str]]:
    """What is told of two linears that ask for other schedules of one problem; and of other rows by one schedule."""
    report_lines = []
    with torch.no_grad():
        for asked in ("auto", "planned"):
            weft.close(dist.group.WORLD)
            model = _pair(asked, "flag_gated:2")
            model["one"](torch.randn(4, 8))
            model["two"](torch.randn(4, 8))
            report_lines.append(_get_report_lines(model))
        model = _pair("sequential", "sequential")
        model["one"](torch.randn(500, 8))
        model["two"](torch.randn(512, 8))
    return [*report_lines, _get_report_lines(model)]


def test_a_call_is_of_the_place_that_asked_so(ranks: RankFixture) -> None:
    def ran(spec: str, rows: int) -> str:
        return f"all_gather_matmul M={rows} {spec} not measured (asked for)"

    for *others, rows in ranks(2).run(_chosen_by_sizes):
        for report_lines in others:
            one, two = (
                next(at for at, line in enumerate(report_lines) if line.startswith(f"1 x {name}: all_gather_matmul"))
                for name in ("one", "two")
            )
            assert len(report_lines[one + 1 : two]) == 1
            assert "flag_gated" not in report_lines[one + 1]
            assert report_lines[two + 1 :] == [ran("flag_gated:2", 8)]
        assert [line for line in rows if "M=" in line] == [ran("sequential", 1000), ran("sequential", 1024)]


def test_linears_that_are_multiplied_alone_have_a_problem_each() -> None:
    layer = CommunicatingLayer(operators=("matmul_all_reduce",), n=64, k=64, other_sizes=((64, 32),))
    problems = [Problem(op="matmul_all_reduce", m=8, n=64, k=k, world_size=2) for k in (64, 32, 96)]
    assert [_is_of(problem, "auto", layer) for problem in problems] == [True, True, False]


def _up_and_down() -> list[list[str]]:
    """One of two linears is called, then both, then their backward: up's forward has the sizes of down's backward."""
    model = nn.ModuleDict({"up": nn.Linear(8, 12, bias=False), "down": nn.Linear(12, 8, bias=False)})
    plan = {
        "up": weft.ColwiseParallel(input_layouts=Shard(0), schedule="shard_p2p"),
        "down": weft.RowwiseParallel(output_layouts=Shard(0), schedule="shard_p2p"),
    }
    parallelize_module(model, dist.init_device_mesh("cpu", (2,)), plan)
    x, report_lines = torch.randn(4, 8), []
    with torch.no_grad():
        model["up"](x)
        report_lines.append(_get_report_lines(model))
        model["down"](model["up"](x))
        report_lines.append(_get_report_lines(model))
    model["down"](model["up"](x.requires_grad_())).sum().backward()
    return [*report_lines, _get_report_lines(model)]


def test_a_forward_is_no_others_backward(ranks: RankFixture) -> None:
    for up, both, back in ranks(2).run(_up_and_down):
        assert up[-2:] == ["1 x down: matmul_reduce_scatter; overlapped", "not called yet"]
        assert [line.split()[0] for line in both] == ["ModuleDict:", "1", "all_gather_matmul", "1", "matmul_reduce_scatter"]
        assert sorted(line.split()[0] for line in back[2:4]) == ["all_gather_matmul", "matmul_reduce_scatter"]
        assert back[4] == "keeps its gathered input for the backward pass: 1 x 0.00024 MiB of memory on a rank", (
            "8 x 8 x 4 bytes"
        )
        assert sorted(line.split()[0] for line in back[6:8]) == ["all_gather_matmul", "matmul_reduce_scatter"]
        assert back[8:] == ["gathered inputs kept for the backward pass: 0.00024 MiB of memory on a rank"]


def _one_that_keeps_and_one_that_does_not() -> tuple[list[str], list[str]]:
    """Two models of the same sizes, one of which keeps its gathered input."""
    torch.manual_seed(0)
    models = []
    for keep in (True, False):
        model = nn.ModuleDict({"up": nn.Linear(8, 12, bias=False)})
        style = weft.ColwiseParallel(input_layouts=Shard(0), schedule="shard_p2p", keep_gathered=keep)
        parallelize_module(model, dist.init_device_mesh("cpu", (2,)), {"up": style})
        model["up"](torch.randn(4, 8, requires_grad=True)).sum().backward()
        models.append(model)
    first, second = map(_get_report_lines, models)
    return first, second


def test_a_report_has_no_call_of_another_model(ranks: RankFixture) -> None:
    for keeps, gathers_again in ranks(2).run(_one_that_keeps_and_one_that_does_not):
        assert any("kept for the backward pass" in line for line in keeps)
        assert not any("kept" in line for line in gathers_again)
        for lines in (keeps, gathers_again):
            ran = sorted(line.split()[0] for line in lines if "M=8" in line)
            assert ran == ["all_gather_matmul", "matmul_reduce_scatter"]


def _training() -> list[list[str]]:
    """A forward pass that records gradients, another one, and then the backward pass of the second."""
    model = nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8), "head": nn.Linear(8, 6)})
    plan = {
        "up": weft.ColwiseParallel(input_layouts=Shard(0), schedule="shard_p2p"),
        "down": weft.RowwiseParallel(output_layouts=Shard(0), schedule="shard_p2p"),
        "head": weft.ColwiseParallel(schedule="shard_p2p"),
    }
    parallelize_module(model, dist.init_device_mesh("cpu", (2,)), plan)
    x, report_lines = torch.randn(4, 8, requires_grad=True), []
    for _ in range(2):
        outs = model["down"](model["up"](x)), model["head"](x)
        report_lines.append(_get_report_lines(model))
    sum(out.sum() for out in outs).backward()
    return [*report_lines, _get_report_lines(model)]


def test_calls_of_a_backward_pass_are_reported_when_it_has_run(ranks: RankFixture) -> None:
    """The backward pass of one of two linears has the sizes of the forward pass of the other."""
    for first, second, back in ranks(2).run(_training):
        assert first == second
        assert [line.split()[0] for line in first if "M=" in line] == ["all_gather_matmul", "matmul_reduce_scatter"]
        assert first[-2] == "not called yet"
        assert sorted(line.split()[0] for line in back if "M=" in line) == [
            *["all_gather_matmul"] * 2,
            "matmul_all_reduce",
            *["matmul_reduce_scatter"] * 2,
        ]
        assert back[-2].startswith("matmul_all_reduce M=4")


def _mixed_styles() -> list[str]:
    names = ("embedding", "up", "ours", "norm", "block")
    parts = (nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8)))
    model = nn.ModuleDict(dict(zip(names, parts, strict=True)))
    plan = {
        "embedding": style.RowwiseParallel(input_layouts=Replicate()),
        "up": style.ColwiseParallel(),
        "ours": weft.RowwiseParallel(),
        "norm": style.SequenceParallel(),
        "block": style.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "block.0": weft.ColwiseParallel(output_layouts=Replicate()),
    }
    return _get_report_lines(parallelize_module(model, dist.init_device_mesh("cpu", (2,)), plan))


def test_places_of_styles_of_torch_are_left_to_torch(ranks: RankFixture) -> None:
    for head, *report_lines in ranks(2).run(_mixed_styles):
        left = [line for line in report_lines if "left to torch" in line]
        assert left == [
            "1 x embedding: not overlapped; torch's RowwiseParallel: left to torch, as it has no matmul of its own",
            "1 x up: not overlapped; torch's ColwiseParallel: left to torch; weft.ColwiseParallel takes its place",
            "1 x norm: not overlapped; torch's SequenceParallel: left to torch, as it has no matmul of its own",
            "1 x block: not overlapped; torch's PrepareModuleInput: left to torch; weft.SharedInput takes its place",
        ]
        assert head.startswith("ModuleDict: overlapped 1 of 7 places")


def _tables_and_experts() -> list[list[str]]:
    report_lines = []
    for schedule in ("sequential", "direct_store"):
        bags = ShardedEmbeddingBags([(10, 4)] * 4, schedule=schedule)
        report_lines.append(_get_report_lines(bags))
        with torch.no_grad():
            bags(torch.randint(10, (24,)), torch.full((12,), 2))
        report_lines.append(_get_report_lines(bags))
    experts = parallelize_module(MoE(8, 4, 2), dist.init_device_mesh("cpu", (2,)), weft.ExpertParallel())
    report_lines.append(_get_report_lines(experts))
    with torch.no_grad():
        experts(torch.randn(6, 8))
    return [*report_lines, _get_report_lines(experts)]


def test_tables_and_experts_count_by_what_they_run(ranks: RankFixture) -> None:
    for sequential, ran, stores, stored, experts, moved in ranks(2).run(_tables_and_experts):
        bags = "ShardedEmbeddingBags: overlapped {} of 1 places that communicate"
        assert sequential[0] == f"{bags.format(0)}, 1 not called yet"
        assert ran[0] == bags.format(0)
        assert ran[2] == "embedding_bag_all_to_all M=6 sequential not measured (asked for)"
        assert stores[0] == f"{bags.format(1)}, 1 not called yet"
        assert stored[0] == bags.format(1)
        assert stored[2].startswith("embedding_bag_all_to_all M=6 direct_store")
        assert experts[0] == "MoE: overlapped 1 of 1 places that communicate, 1 not called yet"
        assert moved[0] == "MoE: overlapped 0 of 1 places that communicate", "CPUs move rows before and after products"
        assert moved[2:] == [
            "all_to_all_matmul M=12 sequential not measured (no other for rows by splits)",
            "matmul_all_to_all M=12 sequential not measured (no other for rows by splits)",
        ]
