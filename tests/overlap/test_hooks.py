"""weft's collectives under PyTorch's data parallelism, on CPU ranks: the same training in every method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.core.concurrent import ConcurrentProblem
from weft.core.problem import CollectiveProblem
from weft.overlap import hooks
from weft.overlap.concurrent import ConcurrentChoice
from weft.overlap.concurrent.executor import Program, program_of

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(33, 130), nn.GELU(), nn.Linear(130, 33))
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.02)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model  # type: ignore[no-any-return]


def _hooked(kind: str, model: nn.Module, **options: Any) -> Any:
    return weft.hooks.ddp(model, **options) if kind == "ddp" else weft.hooks.fsdp(model, **options)  # type: ignore[arg-type]


def _losses(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(steps):
        x = torch.randn(8, 33, generator=draw)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(float(loss))
    return seen


def _trained(kind: str, methods: list[str]) -> list[list[float]]:
    weft.close()
    found = [_losses(_model(kind), 6)]
    for method in methods:
        model = _model(kind)
        hook = _hooked(kind, model, method=method)
        found.append(_losses(model, 6))
        assert str(hook.method) == method
    weft.close()
    return found


@pytest.mark.parametrize(
    ("kind", "methods", "world_size"),
    [("ddp", ["sequential", "nccl", "copy_engine"], 2), ("fsdp", ["nccl", "nccl+ahead=2", "nccl+unsharded"], 3)],
)
def test_training_is_as_pytorchs(ranks: RankFixture, kind: str, methods: list[str], world_size: int) -> None:
    for plain, *others in ranks(world_size).run(_trained, kind, methods):
        assert len(set(plain)) == 6
        for mine in others:
            assert mine == pytest.approx(plain, rel=1e-5)


def _first_steps() -> list[list[tuple[str, int]]]:
    """Of each of three steps the methods, and elements, of its buckets."""
    weft.close()
    model = _model("ddp")
    hook = _hooked("ddp", model, method="copy_engine")
    steps: list[list[tuple[str, int]]] = []
    model.register_forward_hook(lambda *_: steps.append([]))
    executor = hook._executor
    future = executor.future

    def noting(program: Program, collective: Any, result: torch.Tensor) -> Any:
        steps[-1].append((program.name, result.numel()))
        return future(program, collective, result)

    executor.future = noting
    _losses(model, 3)
    weft.close()
    return steps


def test_the_bucket_of_all_gradients_is_averaged_by_nccl(ranks: RankFixture) -> None:
    for first, *others in ranks(2).run(_first_steps):
        assert {method for method, _ in first} == {"nccl"}
        for step in others:
            assert {method for method, _ in step} == {"copy_engine"}
            assert sum(elements for _, elements in step) == sum(elements for _, elements in first)


def _program(spec: str, collectives: Any) -> Program:
    one = CollectiveProblem(op="all_reduce", m=64, world_size=2, dtype="float32")
    return program_of(weft.schedule.build(ConcurrentProblem(collectives=(one,), world_size=2), spec), 0)


def _left_free(ends: tuple[bool, ...]) -> list[str]:
    """What buckets ask the device for, in steps of two buckets; of one where a pass ends early."""
    events: list[str] = []

    @contextmanager
    def limit_computation(program: Program) -> Iterator[None]:
        events.append(f"leave {program.computation.left}")
        yield
        events.append("take back")

    executor = SimpleNamespace(
        device=torch.device("cpu"),
        prepare=lambda *_: None,
        limit_computation=limit_computation,
        future=lambda program, *_: events.append(f"bucket, ctas={program.parts[0].ctas}"),
    )
    calls: Any = SimpleNamespace(find_program=_program, get_executor=lambda device: executor)
    choice = ConcurrentChoice(key="k", method="nccl+ctas=3+left=4")
    steps = hooks.Averaging(calls, choice, torch.device("cpu"), cast(dist.ProcessGroup, dist.group.WORLD))
    steps.use_method(choice.method)
    for whole in ends:
        for at in range(1 + whole):
            bucket = SimpleNamespace(index=lambda at=at: at, is_last=lambda at=at: at == 1, buffer=lambda: torch.zeros(2))  # type: ignore[misc]
            steps.average(cast(Any, bucket))
    return events


@pytest.mark.parametrize("ends", [(True, True, True), (True, False, True)])
def test_sms_are_left_free_from_the_first_bucket_to_the_last(ranks: RankFixture, ends: tuple[bool, ...]) -> None:
    expected = []
    for step, whole in enumerate(ends):
        if step > 1 and not ends[step - 1]:
            expected.append("take back")
        left, ctas = (4, 3) if step else (0, 0)
        expected += [f"leave {left}"] * bool(step) + [f"bucket, ctas={ctas}"]
        expected += ["take back"] * bool(step and whole) + ["bucket, ctas=0"] * whole
    assert ranks(2).run(_left_free, ends) == [expected] * 2


def _shown() -> tuple[list[str], list[str]]:
    """What a hook prints, and what is listed of it: of a method that was given, and of auto."""
    weft.close()
    printed, listed = [], []
    for method in ("copy_engine", "auto"):
        model = _model("ddp")
        hook = _hooked("ddp", model, method=method, key=method)
        _losses(model, 3)
        printed.append(str(hook))
        listed.append(str(weft.concurrent_choices()[-1]))
    weft.close()
    return printed, listed


def test_a_hook_says_what_it_does_and_is_listed(ranks: RankFixture) -> None:
    for printed, listed in ranks(2).run(_shown):
        title = "weft.hooks.ddp averages gradients bucket by bucket among 2 ranks. "
        given, planned = printed
        head, *buckets = given.splitlines()
        assert head == f"{title}copy_engine uses copy_engine, because the caller chose it. Nothing was measured."
        assert buckets
        assert all(line.startswith(f"  bucket {i}: all_reduce of [") for i, line in enumerate(buckets))
        assert all(line.endswith(" float32 among 2, copy_engine") for line in buckets)
        assert planned.startswith(f"{title}auto uses nccl, because the planner chose it: nccl ")
        assert f"{title}{listed[0]}" == head
        assert planned.startswith(f"{title}{listed[1]}")


def _gathers(method: str) -> tuple[list[str], list[str], list[str]]:
    """What happens, in order, in the third step, and in two passes without gradients: gathers, and passes of the two layers."""
    weft.close()
    model: Any = _model("fsdp")
    _hooked("fsdp", model, method=method)
    events: list[str] = []
    stock = type(model[0]._get_fsdp_state()._fsdp_param_group._all_gather_comm)
    gather = stock.__call__

    def noting(*args: Any, **options: Any) -> Any:
        events.append("gather")
        return gather(*args, **options)

    for at in (0, 2):
        model[at].register_forward_pre_hook(lambda *_, at=at: events.append(f"layer {at}"))  # type: ignore[misc]
    stock.__call__ = noting
    found = []
    try:
        _losses(model, 2)
        for run in (lambda: _losses(model, 1), *[torch.no_grad()(lambda: model(torch.ones(8, 33)))] * 2):
            events.clear()
            run()
            found.append(list(events))
    finally:
        stock.__call__ = gather
    weft.close()
    return tuple(found)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("method", "events"),
    [
        ("nccl", ["gather", "layer 0", "gather", "layer 2", "gather", "gather"]),
        ("nccl+ahead=1", ["gather", "gather", "layer 0", "layer 2", "gather", "gather"]),
        ("nccl+unsharded", ["gather", "layer 0", "gather", "layer 2"]),
    ],
)
def test_parameters_are_gathered_as_the_method_says(ranks: RankFixture, method: str, events: list[str]) -> None:
    plain = ["gather", "layer 0", "gather", "layer 2"]
    assert ranks(2).run(_gathers, method) == [(events, plain, plain)] * 2


def _replicated(options: dict[str, Any]) -> tuple[list[float], bool, int]:
    """Losses; whether gradients are views of buckets; the bytes of one."""
    weft.close()
    torch.manual_seed(0)
    made = weft.hooks.replicate(nn.Sequential(nn.Linear(33, 130), nn.GELU(), nn.Linear(130, 33)), method="nccl", **options)
    found = _losses(made, 6)
    views = made.gradient_as_bucket_view
    weft.close()
    return found, views, made.bucket_bytes_cap


def test_replicated_models_train_as_pytorchs(ranks: RankFixture) -> None:
    plain = ranks(2).run(_trained, "ddp", [])
    for options, views, mib in (({}, True, 25), ({"bucket_cap_mb": 3, "gradient_as_bucket_view": False}, False, 3)):
        for rank, (losses, has_views, bucket) in enumerate(ranks(2).run(_replicated, options)):
            assert losses == plain[rank][0]
            assert (has_views, bucket) == (views, mib << 20)


def _with_room() -> list[str]:
    """What auto takes of a sharded model without and with room for its parameters."""
    weft.close()
    nbytes = 4 * (33 * 130 + 130 + 130 * 33 + 33)
    found = [_hooked("fsdp", _model("fsdp"), method="auto", spare_bytes=room).method for room in (nbytes - 1, nbytes)]
    weft.close()
    return found


def test_parameters_are_kept_where_there_is_room(ranks: RankFixture) -> None:
    assert ranks(2).run(_with_room) == [["nccl", "nccl+unsharded"]] * 2


def _other_methods() -> str:
    weft.close()
    try:
        _hooked("fsdp", _model("fsdp"), method="nccl+unsharded" if dist.get_rank() else "nccl")
    except weft.RankMismatch as error:
        return str(error)
    finally:
        dist.barrier()
        weft.close()
    return ""


def test_ranks_hook_alike(ranks: RankFixture) -> None:
    for messages in ranks(2).run(_other_methods):
        assert "method: rank " in messages
        assert "nccl+unsharded" in messages


def _concurrent(model: nn.Module, *, method: str) -> None:
    weft.concurrent(lambda: None, weft.AllReduce(torch.zeros(4)), method=method)


def _refused() -> list[str]:
    weft.close()
    plain, messages = nn.Linear(4, 4), []
    ddp, sharded = DistributedDataParallel(nn.Linear(4, 4)), _model("fsdp")
    weft.hooks.fsdp(sharded, method="nccl+unsharded")
    for hook, model, method in (
        (weft.hooks.ddp, plain, "auto"),
        (weft.hooks.ddp, ddp, "nccl+left=8"),
        (weft.hooks.ddp, ddp, "nccl+late"),
        (weft.hooks.ddp, ddp, "nccl+unsharded"),
        (weft.hooks.ddp, ddp, "nccl+ctas=8"),
        (weft.hooks.ddp, ddp, "fast"),
        (weft.hooks.replicate, ddp, "auto"),
        (weft.hooks.replicate, _model("fsdp"), "auto"),
        (weft.hooks.fsdp, plain, "auto"),
        (weft.hooks.fsdp, _model("fsdp"), "nccl+priority"),
        (weft.hooks.fsdp, _model("fsdp"), "sequential"),
        (weft.hooks.fsdp, _model("fsdp"), "copy_engine+ahead=1"),
        (weft.hooks.fsdp, _model("fsdp"), "nccl+ctas=8"),
        (_concurrent, plain, "nccl+ahead=1"),
        (weft.hooks.fsdp, sharded, "nccl"),
        (weft.hooks.ddp, ddp, None),
    ):
        try:
            hook(model, method=method)  # type: ignore[operator]
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    weft.close()
    return messages


def test_mistakes_name_the_argument(ranks: RankFixture) -> None:
    expected = [
        "model is a Linear; wrap it in torch.nn.parallel.DistributedDataParallel",
        "method is nccl+left=8; left needs a GPU",
        "method is 'nccl+late'; late is not supported here",
        "method is 'nccl+unsharded'; unsharded is not supported here",
        "method is nccl+ctas=8; ctas needs a GPU",
        "method is 'fast'; use auto, sequential",
        "module is a DistributedDataParallel already",
        "module has DTensors (0.weight); for tensor and data parallelism pass device_mesh=mesh['dp']",
        "model has no module of fully_shard's",
        "method is 'nccl+priority'; priority is not supported here",
        "method is 'sequential', but fully_shard overlaps by itself, by NCCL; use auto",
        "method is 'copy_engine+ahead=1', but fully_shard overlaps by itself, by NCCL",
        "method is 'nccl+ctas=8'; ctas is not supported here",
        "method is 'nccl+ahead=1'; ahead is for weft.hooks.fsdp",
        "model has this hook already; call weft.hooks.fsdp once a model",
        "method is a NoneType; use auto, or a method such as",
    ]
    for messages in ranks(2).run(_refused):
        assert [text[: len(start)] for text, start in zip(messages, expected, strict=True)] == expected
