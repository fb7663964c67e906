"""The programs of benchmarks/iso.py give one result, on CPU ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_pools import on_ranks

from benchmarks.iso import Prompt
from weft.planner.models import Model

SMALL = Model(name="small", source="a test", hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96)


@on_ranks(2)
@pytest.mark.parametrize("tokens", [16, 64])
def test_all_programs_give_the_same(tokens: int) -> None:
    torch.manual_seed(1 + dist.get_rank())
    prompt = Prompt(tokens, SMALL, torch.device("cpu"))
    world = dist.group.WORLD
    assert world is not None
    works = prompt.works({"peer/iso": world})
    expected = works["sequential/default"]()
    assert isinstance(expected, torch.Tensor)
    assert expected.shape == (tokens, SMALL.hidden)
    check = prompt.check(expected.float())
    for name, work in works.items():
        check(name, work())
    with pytest.raises(AssertionError, match="peer/iso is off"):
        check("peer/iso", expected + expected.abs().max())
