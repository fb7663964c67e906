"""Options of PyTorch's data parallelism that go on working under weft's hooks, and what the hooks refuse of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.overlap.hooks import GatherOrder
from weft.schedules.concurrent import parse

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]


class Sides(nn.Module):
    """Two paths, of which a call takes one, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.side = nn.Linear(33, 130), nn.Linear(33, 33)
        self.outer, self.never = nn.Linear(130, 33), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        out: torch.Tensor = self.outer(nn.functional.gelu(self.inner(x)))
        return out + self.side(x) if both else out


def _accumulated(method: str | None, *, both: str = "never", accumulate: bool = False, **options: Any) -> list[float]:
    """Losses under DistributedDataParallel's options. both: whether calls take both paths: never, or each rank in turn."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Sides(), bucket_cap_mb=0.02, **options)
    if method:
        weft.hooks.ddp(model, method=method)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(3 if accumulate else 1):
            x = torch.randn(8, 33, generator=draw)
            with model.no_sync() if accumulate and micro < 2 else nullcontext():
                loss = (model(x, both == "turns" and (step + dist.get_rank()) % 2 == 0) - x).square().mean()
                loss.backward()
        optimizer.step()
        seen.append(float(loss))
    return seen


OPTIONS: list[dict[str, Any]] = [
    {"find_unused_parameters": True, "accumulate": True},
    {"find_unused_parameters": True, "both": "turns"},
    {"static_graph": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
]


def _with_options() -> list[list[list[float]]]:
    weft.close()
    found = [[_accumulated(method, **options) for method in (None, "nccl", "copy_engine")] for options in OPTIONS]
    weft.close()
    return found


@pytest.mark.ranks
def test_options_of_pytorchs_are_kept(ranks: RankFixture) -> None:
    """Accumulated gradients, parameters that are not used on one rank or on any, static graphs, gradients in buckets."""
    for found in ranks(2).run(_with_options):
        for plain, *others in found:
            assert len(set(plain)) == 4
            for mine in others:
                assert mine == pytest.approx(plain, rel=1e-5)


def _sharded_losses(method: str | None, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(33, 130), nn.GELU(), nn.Linear(130, 33))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, **options)
    if method:
        weft.hooks.fsdp(model, method=method)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.randn(8, 33, generator=draw)
            model.set_requires_gradient_sync(micro == 1)
            loss = (model(x).float() - x.float()).square().mean()
            loss.backward()
        optimizer.step()
        seen.append(float(loss))
    return seen


def _of_two_meshes() -> list[dict[str, Any]]:
    """Weights sharded over a mesh of their own, as experts' are; torch 2.11 has one mesh for a module."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    if not hasattr(common, "ShardPlacementResult"):
        return []
    again = common.FSDPMeshInfo(dist.DeviceMesh.from_group(dist.new_group(), "cpu"), shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        return common.ShardPlacementResult(Shard(0), again) if parameter.dim() == 2 else None

    return [{"shard_placement_fn": place}]


def _with_policies() -> list[list[list[float]]]:
    """Losses by policy and method."""
    weft.close()
    policies: list[dict[str, Any]] = [
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        *_of_two_meshes(),
    ]
    methods = (None, "nccl+ahead=1", "nccl+unsharded")
    found = [[_sharded_losses(method, **policy) for method in methods] for policy in policies]
    weft.close()
    return found


@pytest.mark.ranks
def test_policies_of_fully_shard_are_kept(ranks: RankFixture) -> None:
    """Gradients accumulated, unsharded parameters, other precision, parameters on CPUs, or of two meshes."""
    for found in ranks(2).run(_with_policies):
        for plain, *others in found:
            assert len(set(plain)) == 3
            for mine in others:
                assert mine == pytest.approx(plain, rel=1e-5)


def _of_doubles() -> tuple[str, str, str]:
    """What a model whose gradients copy engines cannot sum takes by itself, and why; and the error for a named method."""
    weft.close()
    model = DistributedDataParallel(nn.Linear(4, 4).double())
    try:
        weft.hooks.ddp(model, method="copy_engine")
        messages = ""
    except ValueError as error:
        messages = str(error)
    choice = weft.hooks.ddp(model).choice
    weft.close()
    return choice.method, choice.why, messages


@pytest.mark.ranks
def test_nccl_sums_what_copy_engines_cannot(ranks: RankFixture) -> None:
    for method, why, messages in ranks(2).run(_of_doubles):
        assert (method, why[:30]) == ("nccl", "nothing can be predicted here:")
        assert messages == (
            "method is 'copy_engine', but gradients are torch.float64; copy engines sum bfloat16, float16, float32; use nccl"
        )


class Encoder(nn.Module):
    """Entered by a method of its own, which does not call a module's hooks; so is its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.scale = nn.Linear(33, 130), Last(), nn.Parameter(torch.ones(33))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer.last(nn.functional.gelu(self.inner(x * self.scale)))


class Last(nn.Linear):
    def __init__(self) -> None:
        super().__init__(130, 33)

    def last(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def _entered(method: str) -> tuple[list[float], list[str]]:
    """Losses of four steps through registered methods, and of a pass without gradients; gathers in the last step
    and in that pass."""
    weft.close()
    torch.manual_seed(0)
    model: Any = Encoder()
    for module in (model.inner, model.outer, model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(model.outer, "last")
    events: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if method:
            stock = type(model._get_fsdp_state()._fsdp_param_group._all_gather_comm)
            patch.setattr(stock, "__call__", _noting(stock.__call__, events, "gather"))
            weft.hooks.fsdp(model, method=method)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        x = torch.randn(8, 33, generator=torch.Generator().manual_seed(dist.get_rank()))
        for _ in range(4):
            events.clear()
            optimizer.zero_grad()
            loss = (model.encode(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            events.append("without")
            losses.append(float((model.encode(x) - x).square().mean()))
    weft.close()
    return losses, events


def _noting(call: Callable[..., Any], events: list[str], event: str) -> Callable[..., Any]:
    def noted(*args: Any, **options: Any) -> Any:
        events.append(event)
        return call(*args, **options)

    return noted


@pytest.mark.ranks
def test_steps_through_registered_methods_gather_as_the_method_says(ranks: RankFixture) -> None:
    """fully_shard keeps the root's parameters by itself."""
    plain, _ = ranks(2).run(_entered, "")[0]
    for method, again in (("nccl", 2), ("nccl+unsharded+ahead=1", 0), ("auto", 2)):
        losses, events = ranks(2).run(_entered, method)[0]
        assert losses == pytest.approx(plain, rel=1e-5)
        assert events == [*["gather"] * (3 + again), "without", *["gather"] * 3]


def _sparse(method: str | None) -> list[float]:
    """What is learned by rows of a table, others on each rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)))
    if method:
        weft.hooks.ddp(model, method=method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([step, 5 + dist.get_rank()])).square().sum().backward()
        optimizer.step()
    table, *_ = model.parameters()
    return table.flatten().tolist()


def _with_sparse_gradients() -> list[list[float]]:
    weft.close()
    found = [_sparse(method) for method in (None, "nccl", "copy_engine")]
    weft.close()
    return found


@pytest.mark.ranks
def test_sparse_gradients_are_averaged_as_without_weft(ranks: RankFixture) -> None:
    for plain, *others in ranks(2).run(_with_sparse_gradients):
        for mine in others:
            assert mine == pytest.approx(plain)


def _refused() -> list[str]:
    found = []
    model = DistributedDataParallel(nn.Linear(3, 3))
    weft.hooks.ddp(model, method="nccl")
    mixed = DistributedDataParallel(nn.Linear(3, 3))
    mixed.mixed_precision = object()
    for one in (model, mixed):
        try:
            weft.hooks.ddp(one, method="nccl")
        except ValueError as error:
            found.append(str(error))
    weft.close()
    return found


@pytest.mark.ranks
def test_models_that_average_by_a_hook_of_their_own_are_refused(ranks: RankFixture) -> None:
    for twice, mixed in ranks(2).run(_refused):
        assert twice == "model has a communication hook; register one a model"
        assert mixed.startswith("model has mixed_precision, which averages gradients by a hook of its own")


def _gathered_ahead() -> list[list[list[int]]]:
    """Which groups each gathers ahead, by their numbers: as the caller has it, with 1 and 2 ahead, and by itself again."""
    layers = [nn.Linear(8, 8) for _ in range(6)]
    units = [layers[:2], layers[2:4], layers[4:]]
    for unit in units:
        fully_shard(unit)  # type: ignore[call-overload]
    root: Any = fully_shard(nn.Sequential(*layers))
    firsts: list[Any] = [unit[0] for unit in units]
    firsts[0].set_modules_to_forward_prefetch([firsts[2]])
    gathered, found = GatherOrder(layers), []
    root(torch.randn(4, 8)).sum().backward()
    states = [first._get_fsdp_state() for first in firsts]
    for method in ("nccl", "nccl+ahead=1", "nccl+ahead=2", "nccl"):
        gathered.use_method(parse(method))
        found.append([[states.index(ahead) for ahead in state._states_to_forward_prefetch] for state in states])
    return found


@pytest.mark.ranks
def test_units_are_gathered_ahead_and_the_callers_order_comes_back(ranks: RankFixture) -> None:
    callers: list[list[int]] = [[2], [], []]
    assert ranks(2).run(_gathered_ahead) == [[callers, [[1], [2], []], [[1, 2], [2], []], callers]] * 2
