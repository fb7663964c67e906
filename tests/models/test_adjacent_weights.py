"""Weights side by side: one matmul where few tokens are decoded, the same results, and nothing else that could be told."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft.models.adjacent import Adjacent, fits
from weft.ops.tensor_parallel import _stacked


def _laid() -> tuple[Adjacent, list[torch.Tensor]]:
    adjacent = Adjacent()
    return adjacent, adjacent.lay([torch.ones(2, 4), torch.full((3, 4), 2.0)])


def test_parts_have_storages_of_their_own() -> None:
    adjacent, parts = _laid()
    whole = adjacent.whole_of(parts)
    assert whole is not None
    assert whole.equal(torch.cat(parts))
    parts[1].zero_()
    assert not whole[2:].any()
    storages = [part.untyped_storage() for part in parts]
    assert len({storage.data_ptr() for storage in storages}) == 2
    assert [storage.nbytes() for storage in storages] == [32, 48]
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)
    assert torch.load(file)[0].equal(parts[0])


@pytest.mark.parametrize("change", ["other memory", "swapped", "fewer", "a copy", "pickled"])
def test_other_memory_ends_it(change: str) -> None:
    adjacent, parts = _laid()
    if change in ("a copy", "pickled"):
        other = copy.deepcopy(adjacent) if change == "a copy" else copy.copy(adjacent)
        assert other.whole_of(parts) is None
        assert adjacent.whole_of(parts) is not None
        return
    given = {"other memory": [parts[0], parts[1].clone()], "swapped": parts[::-1], "fewer": parts[:1]}[change]
    assert adjacent.whole_of(given) is None
    assert adjacent.whole_of(parts) is None


@pytest.mark.parametrize("lost", [0, 1])
def test_the_whole_goes_with_the_first_of_its_parts(lost: int) -> None:
    adjacent, parts = _laid()
    adjacent.live_with(parts)
    assert adjacent.whole_of(parts) is not None
    del parts[lost]
    assert adjacent._whole is None


def test_what_does_not_fit() -> None:
    one = torch.ones(2, 4)
    assert fits([one, torch.ones(3, 4)])
    for other in (one.double(), torch.ones(2, 5), torch.ones(0, 4)):
        assert not fits([one, other])
    assert not fits([one])
    assert not fits([one.to("meta"), one.to("meta")])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 12), nn.Linear(8, 4, bias=False), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def _decoded() -> tuple[list[int], list[int]]:
    """(columns of each matmul of a step of decoding, of one with gradients), after a step of training."""
    torch.manual_seed(0)
    alone = Attention()
    model: Any = copy.deepcopy(alone)
    mesh = dist.init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"": weft.SharedInput(["q", "k", "v"], input_layouts=Replicate(), argument="x")})
    for each in (alone, model):
        each(torch.ones(2, 3, 8)).square().sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    x = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(1))
    seen: list[list[int]] = []
    linear = torch.nn.functional.linear
    torch.nn.functional.linear = lambda x, w, b=None: (seen[-1].append(len(w)), linear(x, w, b))[1]  # type: ignore[assignment]
    try:
        for grad in (False, True):
            seen.append([])
            with torch.set_grad_enabled(grad):
                out = model(x.clone().requires_grad_(grad))
    finally:
        torch.nn.functional.linear = linear
    with torch.no_grad():
        columns = [part.chunk(2, -1)[dist.get_rank()] for part in alone(x).split([12, 4, 4], -1)]
        torch.testing.assert_close(model(x), torch.cat(columns, -1))
        torch.testing.assert_close(out.detach(), torch.cat(columns, -1))
    return seen[0], seen[1]


@pytest.mark.ranks
def test_a_step_of_decoding_reads_weights_by_one_matmul(ranks: RankFixture) -> None:
    assert ranks(2).run(_decoded) == [([10], [6, 2, 2])] * 2


def _kept() -> list[bool]:
    """Whether memory of weights is kept that lay side by side: while they do, and once they lie elsewhere, before any call."""
    mesh, found = dist.init_device_mesh("cpu", (2,)), []
    for change in (None, torch.nn.Module.bfloat16, _assigned):
        model: Any = parallelize_module(Attention(), mesh, {"": weft.SharedInput(["q", "k", "v"], argument="x")})
        if change is not None:
            change(model)
        found.append(model.q._weft_shared.adjacent._whole is not None)
    return found


def _assigned(model: Any) -> None:
    model.load_state_dict({name: parameter.detach().clone() for name, parameter in model.state_dict().items()}, assign=True)


@pytest.mark.ranks
def test_weights_that_lie_elsewhere_leave_no_copy(ranks: RankFixture) -> None:
    assert ranks(2).run(_kept) == [[True, False, False]] * 2


def _trained() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """(shapes of what two steps of training lay side by side, the same for a copy of the model, whose weights lie apart)."""
    torch.manual_seed(0)
    alone = Attention()
    mesh = dist.init_device_mesh("cpu", (2,))
    model: Any = copy.deepcopy(alone)
    parallelize_module(model, mesh, {"": weft.SharedInput(["q", "k", "v"], argument="x", schedule="shard_p2p")})
    seen: list[list[tuple[int, ...]]] = []
    cat = torch.cat
    for each in (model, copy.deepcopy(model)):
        seen.append([])
        torch.cat = lambda parts, *rest, cat=cat: (seen[-1].append(tuple(parts[0].shape)), cat(parts, *rest))[1]  # type: ignore[assignment]
        try:
            _two_steps(each, copy.deepcopy(alone))
        finally:
            torch.cat = cat
    return [shape for shape in seen[0] if shape == (6, 8)], [shape for shape in seen[1] if shape == (6, 8)]


def _two_steps(model: Any, alone: Attention) -> None:
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for seed in range(2):
        x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        mine = x.detach().chunk(2, 1)[dist.get_rank()].clone().requires_grad_()
        for each, given in ((model, mine), (alone, x)):
            each(given).square().sum().backward()
        torch.testing.assert_close(mine.grad, x.grad.chunk(2, 1)[dist.get_rank()])  # type: ignore[union-attr]
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks
def test_a_backward_copies_no_weights(ranks: RankFixture) -> None:
    """One copy for each step where weights lie apart, none where they lie side by side."""
    assert ranks(2).run(_trained) == [([], [(6, 8)] * 2)] * 2


@pytest.mark.parametrize("rows", [(0, 2), (0, 3), (2, 0)], ids=["adjacent", "gap", "swapped"])
def test_rows_of_one_storage_are_stacked_in_their_order(rows: tuple[int, int]) -> None:
    whole = torch.arange(24.0).view(6, 4)
    parts = [whole[low : low + 2] for low in rows]
    assert torch.equal(_stacked(parts), torch.cat(parts))
