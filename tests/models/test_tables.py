"""DLRM over ranks, against torch's embedding bags of the whole batch on one rank: losses, steps, what is saved and loaded."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.models.embedding_bags import ShardedEmbeddingBags, even_ranges

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from dlrm_model import DLRM

pytestmark = pytest.mark.ranks

SIZES = [(7, 4), (11, 4), (5, 4), (9, 4), (6, 4)]
POOLING = [1, 6, 2, 1, 3]
BATCH, DENSE = 12, 3


def test_tables_are_laid_evenly_in_their_order() -> None:
    assert even_ranges([3, 1, 1, 4, 2], 3) == [range(3), range(3, 4), range(4, 5)]
    assert even_ranges([1, 1], 3) == [range(1), range(1, 2), range(2, 2)]
    assert even_ranges([], 2) == [range(0), range(0)]
    for loads in ([5, 1, 1, 1, 9, 2, 2], [1] * 8, [10, 1, 1, 1]):
        for ranks in (1, 2, 3, 4):
            found = even_ranges(loads, ranks)
            assert [at for own in found for at in own] == list(range(len(loads)))
            assert max(sum(loads[at] for at in own) for own in found) == _least(loads, ranks)


def _least(loads: list[int], ranks: int) -> int:
    """The same by trying every cut."""
    if ranks == 1:
        return sum(loads)
    return min(max(sum(loads[:cut]), _least(loads[cut:], ranks - 1)) for cut in range(len(loads) + 1))


def _model(optimizer: weft.SGD | weft.RowwiseAdagrad | None, group: dist.ProcessGroup | None = None) -> DLRM:
    torch.manual_seed(0)
    return DLRM(DENSE, SIZES, bottom=[6, 4], top=[8, 1], pooling=POOLING, optimizer=optimizer, group=group)


class Alone:
    """The same model with all tables here, by torch alone; row-wise Adagrad by its definition."""

    def __init__(self, model: DLRM, tables: dict[int, torch.Tensor], adagrad: bool, lr: float) -> None:
        self.bottom, self.top = copy.deepcopy(model.bottom), copy.deepcopy(model.top)
        self.tables = [tables[at].clone().requires_grad_() for at in range(len(SIZES))]
        self.states = [torch.zeros(rows) for rows, _ in SIZES]
        self.adagrad, self.lr = adagrad, lr

    def step(self, dense: torch.Tensor, bags: list[list[torch.Tensor]], clicks: torch.Tensor) -> torch.Tensor:
        pooled = []
        for table, own in zip(self.tables, bags, strict=True):
            ends = torch.tensor([len(bag) for bag in own]).cumsum(0)
            pooled.append(embedding_bag(torch.cat(own), table, ends - ends.diff(prepend=torch.zeros(1).long()), mode="sum"))
        below = self.bottom(dense)
        features = torch.stack([below, *pooled], 1)
        products = [(features[:, i] * features[:, j]).sum(1) for i in range(len(pooled) + 1) for j in range(i)]
        logits = self.top(torch.cat([below, torch.stack(products, 1)], 1)).squeeze(1)
        binary_cross_entropy_with_logits(logits, clicks).backward()
        with torch.no_grad():
            for at, table in enumerate(self.tables):
                self._update(at, table)
            for parameter in (*self.bottom.parameters(), *self.top.parameters()):
                parameter -= self.lr * parameter.grad  # type: ignore[operator]
                parameter.grad = None
        return logits.detach()

    def _update(self, at: int, table: torch.Tensor) -> None:
        assert table.grad is not None
        rate = torch.tensor(self.lr)
        if self.adagrad:
            self.states[at] += table.grad.square().mean(1)
            rate = (self.lr / (self.states[at].sqrt() + 1e-8))[:, None]
        table -= rate * table.grad
        table.grad = None


def _draw(seed: int) -> tuple[torch.Tensor, list[list[torch.Tensor]], torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dense, bags by table and sample, their indices and lengths, clicks), the same on every rank; bags may be empty."""
    draw = torch.Generator().manual_seed(seed)
    bags = []
    for (rows, _), most in zip(SIZES, POOLING, strict=True):
        counts = torch.randint(0, most + 1, (BATCH,), generator=draw).tolist()
        bags.append([torch.randint(0, rows, (count,), generator=draw) for count in counts])
    indices = torch.cat([bag for own in bags for bag in own])
    lengths = torch.tensor([len(bag) for own in bags for bag in own])
    return torch.randn(BATCH, DENSE, generator=draw), bags, indices, lengths, torch.rand(BATCH, generator=draw).round()


def _all_tables(model: DLRM) -> dict[int, torch.Tensor]:
    parts: list[dict[int, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, {int(at): table.detach() for at, table in model.bags.tables.items()})
    return {at: table for part in parts for at, table in part.items()}


def _step(model: DLRM, lr: float, drawn: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A step of this rank: mean losses, the MLPs' gradients averaged, as DistributedDataParallel does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dense, indices, lengths, clicks = drawn
    logits = model(dense.chunk(size)[rank], *model.bags.own_bags(indices, lengths))
    binary_cross_entropy_with_logits(logits, clicks.chunk(size)[rank]).backward()
    with torch.no_grad():
        for parameter in (*model.bottom.parameters(), *model.top.parameters()):
            dist.all_reduce(parameter.grad)
            parameter -= lr * parameter.grad / size  # type: ignore[operator]
            parameter.grad = None
    return logits.detach()


def _training(adagrad: bool) -> list[list[int]]:
    rank, size, lr = dist.get_rank(), dist.get_world_size(), 0.3
    model = _model(weft.RowwiseAdagrad(lr=lr) if adagrad else weft.SGD(lr=lr))
    alone = Alone(model, _all_tables(model), adagrad, lr)
    for seed in range(4):
        dense, bags, indices, lengths, clicks = _draw(seed)
        wanted = alone.step(dense, bags, clicks)
        got = _step(model, lr, (dense, indices, lengths, clicks))
        torch.testing.assert_close(got, wanted.chunk(size)[rank])
    for at, table in model.bags.tables.items():
        assert table.grad is None
        torch.testing.assert_close(table.detach(), alone.tables[int(at)].detach())
        if adagrad:
            torch.testing.assert_close(model.bags.states.get_buffer(at), alone.states[int(at)])
    return [list(own) for own in model.bags.ranges]


@pytest.mark.parametrize("adagrad", [False, True], ids=["sgd", "adagrad"])
def test_trains_as_on_one_rank(ranks: RankFixture, adagrad: bool) -> None:
    assert ranks(3).run(_training, adagrad) == [[[0], [1], [2, 3, 4]]] * 3


@on_ranks(2)
def test_data_parallelism_of_the_whole_leaves_tables_alone() -> None:
    """DistributedDataParallel of the whole model averages its MLPs, and leaves each rank its own tables: as by hand."""
    rank, size, lr = dist.get_rank(), dist.get_world_size(), 0.3
    model = _model(weft.RowwiseAdagrad(lr=lr), dist.group.WORLD)
    by_hand = copy.deepcopy(model)
    assert by_hand.bags.group is model.bags.group
    wrapped = DistributedDataParallel(model)
    for seed in range(2):
        dense, _, indices, lengths, clicks = _draw(seed)
        wanted = _step(by_hand, lr, (dense, indices, lengths, clicks))
        got = wrapped(dense.chunk(size)[rank], *model.bags.own_bags(indices, lengths))
        binary_cross_entropy_with_logits(got, clicks.chunk(size)[rank]).backward()
        torch.testing.assert_close(got.detach(), wanted)
        with torch.no_grad():
            for parameter in (*model.bottom.parameters(), *model.top.parameters()):
                parameter -= lr * parameter.grad  # type: ignore[operator]
                parameter.grad = None
    for one, other in zip(model.state_dict().values(), by_hand.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)


@on_ranks(2)
def test_tables_without_an_optimizer_have_gradients() -> None:
    model = _model(None)
    dense, _, indices, lengths, _ = _draw(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    before = model(dense.chunk(size)[rank], *model.bags.own_bags(indices, lengths))
    before.sum().backward()
    assert all(table.grad is not None and table.grad.any() for table in model.bags.tables.values())


def _saved(folder: str) -> None:
    """Saved by two ranks after a step, loaded by two, and by each of them alone."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    model, drawn = _model(weft.RowwiseAdagrad(lr=0.3)), _draw(1)
    dense, _, indices, lengths, clicks = drawn
    _step(model, 0.3, (dense, indices, lengths, clicks))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    again = _model(weft.RowwiseAdagrad(lr=0.3))
    state = again.state_dict()
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state)
    for one, other in ((model, again), (model, _loaded_from_all(model))):
        torch.testing.assert_close(*(dict(m.state_dict()) for m in (one, other)))
    got = [_step(m, 0.3, (dense, indices, lengths, clicks)) for m in (model, again)]
    torch.testing.assert_close(got[0], got[1])


def _loaded_from_all(model: DLRM) -> DLRM:
    """From one state of all tables, as a single process has it."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, dict(model.state_dict()))
    whole = {key: value for part in parts for key, value in part.items()}
    assert sum(key.startswith("bags.tables.") for key in whole) == len(SIZES)
    fresh = _model(weft.RowwiseAdagrad(lr=0.3))
    fresh.load_state_dict(whole)
    return fresh


def test_saved_and_loaded(ranks: RankFixture, tmp_path: Path) -> None:
    ranks(2).run(_saved, str(tmp_path))


def _reported() -> str:
    return weft.overlap_report(ShardedEmbeddingBags([(4, 2)])).headline


def test_a_rank_without_tables_reports_too(ranks: RankFixture) -> None:
    headline = "ShardedEmbeddingBags: overlapped 1 of 1 places that communicate, 1 not called yet"
    assert ranks(2).run(_reported) == [headline] * 2


@on_ranks(2)
def test_mistakes() -> None:
    with pytest.raises(ValueError, match="sizes has 1 tables, pooling 2"):
        ShardedEmbeddingBags([(3, 4)], pooling=[1, 2])
    with pytest.raises(ValueError, match=r"tables have dims \[4\], bottom ends in 5, top in 1"):
        DLRM(3, SIZES, bottom=[5], top=[1])


def _from_meta() -> bool:
    """A model made on meta, and given what another one has: the same logits."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"bottom": [6, 4], "top": [8, 1], "pooling": POOLING}
    plain = DLRM(DENSE, SIZES, **options)
    late = DLRM(DENSE, SIZES, device="meta", **options).to_empty(device="cpu")
    assert not list(late.top.buffers()) + list(late.bottom.buffers())
    late.load_state_dict(plain.state_dict())
    dense, pooled = torch.randn(5, DENSE), torch.randn(5, 4 * len(SIZES))
    same = torch.equal(late.logits(dense, pooled), plain.logits(dense, pooled))
    weft.close()
    return same


@pytest.mark.ranks
def test_a_model_from_meta_has_all_that_it_needs(ranks: RankFixture) -> None:
    assert ranks(2).run(_from_meta) == [True] * 2
