"""Tools for gradients with models that weft has sharded: GradScaler, clip_grad_norm_, DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from model_work import assert_close, mesh, text, tiny, whole
from rank_pools import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torchs
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import weft

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]


def _norm_first() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8))


def _by_styles(styles: Any, model: Any, over: Any) -> Any:
    plan = {
        "0": styles.SequenceParallel(use_local_output=True),
        "1": styles.ColwiseParallel(input_layouts=Shard(1)),
        "2": styles.RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(model, over, plan)


def _skips(model: Any, loss: Callable[[], torch.Tensor], parameters: list[Any], at: Any) -> list[bool]:
    """Whether each rank skips a step after the last rank alone has found an inf in its part of the gradient of `at`."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(loss()).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        at.grad.to_local().view(-1)[0] = torch.inf
    before = [each.to_local().clone() for each in parameters]
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(one, each.to_local()) for one, each in zip(before, parameters, strict=True))
    assert (scaler.get_scale() == 8.0) == same, "a rank that skips also lowers its scale"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, same)
    optimizer.zero_grad()
    return found


def _overflows() -> list[list[bool]]:
    """One overflow for each parameter that is the first of the optimizer, and each that has the inf."""
    found = []
    model = _by_styles(weft, _norm_first(), mesh())
    for first in range(6):
        for at in range(6):
            parameters = [*model.parameters()]
            inf = parameters[at]
            parameters.insert(0, parameters.pop(first))
            x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(at))
            found.append(_skips(model, lambda x=x: model(x).square().sum(), parameters, inf))
    return found


def test_no_rank_skips_a_step_alone_with_styles(ranks: RankFixture) -> None:
    for world_size in (2, 3):
        assert all(map(all, ranks(world_size).run(_overflows)[0]))


def _overflows_of_a_model() -> list[list[bool]]:
    model = weft.parallelize(tiny("llama", pad_token_id=0), mesh(), few_tokens=4)  # its embedding is whole, and comes first
    ids, places = text(2, 9), ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight")
    first = next(model.parameters())
    assert first.placements == (Replicate(),)
    parameters = [*model.parameters()]
    return [_skips(model, lambda: model(input_ids=ids, labels=ids).loss, parameters, model.get_parameter(at)) for at in places]


def test_no_rank_skips_a_step_alone_with_a_model(ranks: RankFixture) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    assert all(map(all, ranks(2).run(_overflows_of_a_model)[0]))


def _overflows_in_two_dimensions() -> list[list[bool]]:
    """FSDP2 over replicas of a model by styles: an inf is on one of four ranks."""
    from torch.distributed.fsdp import fully_shard

    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(_by_styles(weft, _norm_first(), grid["tp"]), mesh=grid["dp"])
    parameters, x = [*model.parameters()], torch.randn(2, 4, 8)
    return [_skips(model, lambda: model(x).square().sum(), parameters, at) for at in parameters[::3]]


def test_no_rank_skips_a_step_alone_on_a_mesh_of_two_dimensions(ranks: RankFixture) -> None:
    assert all(map(all, ranks(4).run(_overflows_in_two_dimensions)[0]))


@on_ranks(2, 3)
def test_gradients_are_clipped_as_in_one_process() -> None:
    """Clipped gradients and their norm are those of one process, and of torch's styles."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(2, 2 * size, 8, generator=torch.Generator().manual_seed(1))
    for foreach in (True, False):
        found = []
        for which in (None, torchs, weft):
            model = _norm_first() if which is None else _by_styles(which, _norm_first(), mesh())
            part = x if which is None else x.chunk(size, 1)[rank]
            model(part).square().sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
            found.append((whole(norm), [whole(each.grad) for each in model.parameters()]))
        assert_close(found[2], found[0])
        assert_close(found[1], found[0])


def _linears() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


def _sharded_linears(styles: Any, over: Any) -> Any:
    return parallelize_module(_linears(), over, {"1": styles.ColwiseParallel(), "3": styles.RowwiseParallel()})


def _ddp(model: Any, over: Any) -> Any:
    return DistributedDataParallel(model, device_mesh=over)


def _ddp_with_weft(model: Any, over: Any) -> Any:
    wrapped = DistributedDataParallel(model, device_mesh=over)
    weft.hooks.ddp(wrapped)
    return wrapped


def _replicate(model: Any, over: Any) -> Any:
    return weft.hooks.replicate(model, device_mesh=over)


WRAPPERS = {"DistributedDataParallel": _ddp, "weft.hooks.ddp": _ddp_with_weft, "weft.hooks.replicate": _replicate}


def _steps(one: Any, many: Any, wrapped: Any, loss: Callable[[Any, torch.Tensor], Any], batch: torch.Tensor, own: Any) -> None:
    """Three steps of SGD, on the whole batch in one process, and on parts of it: all parameters are the same afterwards."""
    mine = dict(many.named_parameters())
    steps = [torch.optim.SGD([*each], lr=0.1) for each in (one.parameters(), mine.values())]
    for _ in range(3):
        for model, x, step in ((one, batch, steps[0]), (wrapped, own, steps[1])):
            step.zero_grad()
            loss(model, x).backward()
            step.step()
    for name, expected in one.named_parameters():
        got = whole(mine[name])  # DistributedDataParallel has made this rank's parts the parameters
        for dim, size in enumerate(expected.shape):
            if got.shape[dim] != size:
                expected = expected.chunk(2, dim)[dist.get_rank() % 2]
        assert_close(got, expected)


def _replicas(how: str, kind: str) -> None:
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = grid["dp"].get_local_rank()
    if kind == "styles":
        one, many, batch = _linears(), _sharded_linears(weft, grid["tp"]), torch.randn(6, 8)
        wrapped = WRAPPERS[how](many, grid["dp"])
        _steps(one, many, wrapped, lambda model, x: model(x).square().mean(), batch, batch.chunk(2)[dp])
        return
    one = tiny("llama", tie_word_embeddings=kind == "tied")
    many = weft.parallelize(copy.deepcopy(one), grid["tp"], few_tokens=4)
    wrapped, ids = WRAPPERS[how](many, grid["dp"]), text(2, 9)
    _steps(one, many, wrapped, lambda model, x: model(input_ids=x).logits.square().mean(), ids, ids.chunk(2)[dp])


@pytest.mark.parametrize("kind", ["styles", "model"])
@pytest.mark.parametrize("how", WRAPPERS)
def test_replicas_of_a_sharded_model_train_as_one_process(ranks: RankFixture, how: str, kind: str) -> None:
    if kind != "styles":
        pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    ranks(4).run(_replicas, how, kind)


def _without_a_mesh() -> list[str]:
    messages = []
    for options in ({}, {"device_mesh": mesh()}):
        model = _sharded_linears(weft, mesh())
        try:
            weft.hooks.replicate(model, **options)
        except ValueError as error:
            messages.append(str(error))
        assert all(isinstance(each, DTensor) for each in model[1].parameters())
    return messages


def test_replicas_of_a_sharded_model_need_the_other_dimension(ranks: RankFixture) -> None:
    for messages in ranks(2).run(_without_a_mesh):
        assert len(messages) == 2
        for message in messages:
            assert message.startswith("module has DTensors (1.weight); ")
            assert "device_mesh=mesh['dp']" in message
