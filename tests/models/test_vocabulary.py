"""The embedding that is sharded by the vocabulary, against torch's on one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import RankFixture
from model_work import assert_close, mesh, sharded, tiny, trained
from rank_pools import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from weft.models.decoder_tokens import shard_embedding, why_not_embedding
from weft.models.linear import Distributor

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
ROWS = (9, 7, 4, 1)
"""Over three ranks: even parts, uneven ones, and empty ones."""


def _pair(rows: int) -> tuple[Any, Any]:
    torch.manual_seed(rows)
    alone = nn.Embedding(rows, 4, dtype=torch.float64)
    embedding = copy.deepcopy(alone)
    shard_embedding(embedding, Distributor(mesh(), 0))
    return alone, embedding


def _by_frequency() -> None:
    alone = tiny("llama")
    alone.model.embed_tokens.scale_grad_by_freq = True
    assert_close(trained(sharded(alone, few_tokens=0), (8,)), trained(alone, (8,)))


@on_ranks(3)
@pytest.mark.parametrize("compiled", [False, True])
def test_lookups_and_gradients_are_as_in_one_process(compiled: bool) -> None:
    torch.compiler.reset()
    for rows in ROWS:
        alone, embedding = _pair(rows)
        assert isinstance(embedding.weight, DTensor)
        assert embedding.weight.placements == (Shard(0),)
        for weight in (alone.weight, embedding.weight):
            weight.requires_grad_(rows != 1)
        look_up = torch.compile(embedding, dynamic=False) if compiled else embedding
        for shape in ((2, 5), (3,)):
            ids = torch.randint(0, rows, shape)
            expected, found = alone(ids), look_up(ids)
            assert found.equal(expected)
            assert found.is_contiguous()
            assert found.requires_grad == expected.requires_grad
            if rows != 1:
                for out in (expected, found):
                    (out**2).sum().backward()
                torch.testing.assert_close(embedding.weight.grad.full_tensor(), alone.weight.grad)


@on_ranks(3)
def test_gradients_of_lookups_have_gradients() -> None:
    for rows in ROWS:
        alone, embedding = _pair(rows)
        ids = torch.arange(12) % rows
        found = []
        for each in (alone, embedding):
            (first,) = torch.autograd.grad((each(ids) ** 3).sum(), each.weight, create_graph=True)
            (second,) = torch.autograd.grad((first**2).sum(), each.weight)
            found.append((first, second))
        for one, parts in zip(*found, strict=True):
            torch.testing.assert_close(parts.full_tensor(), one)


@on_ranks(2)
def test_rows_of_other_ids_are_not_read() -> None:
    """Rows that are infinite or no number do not spread to other ids."""
    alone = nn.Embedding(9, 4)
    with torch.no_grad():
        alone.weight[0], alone.weight[4], alone.weight[8] = torch.nan, torch.inf, torch.nan
    embedding = copy.deepcopy(alone)
    shard_embedding(embedding, Distributor(mesh(), 0))
    ids = torch.arange(9)
    torch.testing.assert_close(embedding(ids), alone(ids), equal_nan=True, rtol=0, atol=0)


def test_an_embedding_that_counts_its_ids_is_whole(ranks: RankFixture) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    ranks(2).run(_by_frequency)


@pytest.mark.parametrize(
    "options", [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_options_that_read_all_rows_keep_it_whole(options: dict[str, Any]) -> None:
    assert next(iter(options)) in why_not_embedding(nn.Embedding(4, 2, **options))
    assert why_not_embedding(nn.Embedding(4, 2)) == ""
