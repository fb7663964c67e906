"""weft's collectives under PyTorch's data parallelism, on CPU ranks: the same training in every way; steps that try them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.beside.steps import StepTrial
from weft.beside.trials import ROUNDS
from weft.hooks.data_parallel import WAYS as DDP_WAYS
from weft.hooks.fully_sharded import WAYS as FSDP_WAYS

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


def _hooked(kind: str, model: nn.Module, **options: Any) -> StepTrial:
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


def _trained(kind: str, ways: list[str]) -> list[list[float]]:
    weft.close()
    found = [_losses(_model(kind), 6)]
    for way in ways:
        model = _model(kind)
        trial = _hooked(kind, model, way=way)
        found.append(_losses(model, 6))
        assert str(trial.way) == way
    weft.close()
    return found


@pytest.mark.parametrize(
    ("kind", "ways", "world_size"),
    [("ddp", ["sequential", "vendor", "copy_engine"], 2), ("fsdp", ["vendor", "copy_engine"], 3)],
)
def test_training_is_as_pytorchs(ranks: RankFixture, kind: str, ways: list[str], world_size: int) -> None:
    for plain, *others in ranks(world_size).run(_trained, kind, ways):
        assert len(set(plain)) == 6
        for mine in others:
            assert mine == pytest.approx(plain, rel=1e-5)


def _first_steps() -> list[list[tuple[str, int]]]:
    """Of each of three steps the ways, and elements, of its buckets."""
    weft.close()
    model = _model("ddp")
    trial = _hooked("ddp", model, way="copy_engine")
    steps: list[list[tuple[str, int]]] = []
    model.register_forward_hook(lambda *_: steps.append([]))
    future = trial.device.future

    def noting(way: Any, collective: Any, result: torch.Tensor) -> Any:
        steps[-1].append((str(way), result.numel()))
        return future(way, collective, result)

    trial.device.future = noting  # type: ignore[method-assign]
    _losses(model, 3)
    weft.close()
    return steps


def test_the_bucket_of_all_gradients_is_the_vendors(ranks: RankFixture) -> None:
    for first, *others in ranks(2).run(_first_steps):
        assert {way for way, _ in first} == {"vendor"}
        for step in others:
            assert {way for way, _ in step} == {"copy_engine"}
            assert sum(elements for _, elements in step) == sum(elements for _, elements in first)


def _tried(slow: str) -> tuple[list[str], list[tuple[str, str, dict[str, float]]]]:
    """The way of every step, and what was chosen, on a clock by which `slow` takes twice as long."""
    weft.close()
    model = _model("ddp")
    trial = _hooked("ddp", model, key="mine")
    now = [0]

    def mark() -> int:
        now[0] += 2_000_000 if str(trial.way) == slow else 1_000_000
        return now[0]

    trial.device.mark = mark  # type: ignore[method-assign]
    taken = []
    model.register_forward_hook(lambda *_: taken.append(str(trial.way)))
    _losses(model, 14)
    found = [(choice.key, choice.way, choice.us) for choice in weft.concurrent_choices()]
    weft.close()
    return taken, found


@pytest.mark.parametrize(("slow", "chosen"), [("sequential", "vendor"), ("vendor", "sequential")])
def test_steps_take_ways_in_turn_and_keep_the_fastest(ranks: RankFixture, slow: str, chosen: str) -> None:
    for taken, found in ranks(2).run(_tried, slow):
        ((key, way, us),) = found
        assert (key, way) == ("mine", chosen)
        assert us == {"sequential": 1000.0, "vendor": 1000.0, slow: 2000.0}
        assert list(us) == [spec for spec in DDP_WAYS if spec in ("sequential", "vendor")]
        turns = taken[3 : 3 + 2 * (1 + ROUNDS)]
        assert turns == ["sequential", "vendor"] * (1 + ROUNDS)
        assert set(taken[len(turns) + 3 :]) == {chosen}


def _tried_over() -> list[tuple[str, ...]]:
    """What is tried of a model that is sharded over all ranks, and of one that is sharded over one half and replicated."""
    from weft.hooks.fully_sharded import _tried as tried

    halves: Any = nn.Linear(8, 8)
    fully_shard(halves, mesh=dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return [tried(_model("fsdp")), tried(halves)]


def test_parts_of_the_ranks_make_no_communicators(ranks: RankFixture) -> None:
    for whole, halves in ranks(2).run(_tried_over):
        assert whole == FSDP_WAYS
        assert halves == tuple(way for way in FSDP_WAYS if way == "vendor" or way.startswith("copy_engine"))


def _refused() -> list[str]:
    weft.close()
    plain, told = nn.Linear(4, 4), []
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    for hook, model, way in (
        (weft.hooks.ddp, plain, "auto"),
        (weft.hooks.ddp, ddp, "vendor+left=8"),
        (weft.hooks.ddp, ddp, "vendor+ctas=8"),
        (weft.hooks.ddp, ddp, "fast"),
        (weft.hooks.fsdp, plain, "auto"),
        (weft.hooks.fsdp, _model("fsdp"), "vendor+priority"),
        (weft.hooks.fsdp, _model("fsdp"), "sequential"),
    ):
        try:
            hook(model, way=way)  # type: ignore[operator]
            told.append("")
        except ValueError as error:
            told.append(str(error))
    weft.close()
    return told


def test_mistakes_name_the_argument(ranks: RankFixture) -> None:
    expected = [
        "model is a Linear; wrap it in torch.nn.parallel.DistributedDataParallel",
        "way is 'vendor+left=8'; left is for weft.concurrent",
        "way is vendor+ctas=8; ctas needs a GPU",
        "way is 'fast'; use auto, sequential",
        "model has no module of fully_shard's",
        "way is 'vendor+priority'; priority is for weft.concurrent",
        "way is 'sequential', but fully_shard overlaps by itself",
    ]
    for told in ranks(2).run(_refused):
        assert [text[: len(start)] for text, start in zip(told, expected, strict=True)] == expected
