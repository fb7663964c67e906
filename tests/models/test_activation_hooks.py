"""Hooks on blocks and linears of models that weft has sharded see values, not placeholders."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from conftest import RankFixture
from model_work import SCHEDULE, assert_close, mesh, sharded, text, tiny, trained
from rank_pools import on_ranks
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.modules import module as torch_module

import weft

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::FutureWarning")]


def _inputs(model: Any, names: tuple[str, ...], ids: torch.Tensor, *, after: bool) -> dict[str, torch.Tensor]:
    """What modules of these names are called with. after: as a forward hook sees it."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def note(module: Any, args: Any, kwargs: Any, *out: Any) -> None:
            found[name] = (args[0] if args else kwargs["hidden_states"]).detach().clone()

        return note

    handles = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names:
            register = module.register_forward_hook if after else module.register_forward_pre_hook
            handles.append(register(keep(name), with_kwargs=True))
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return found


def _collected() -> list[str]:
    """Inputs of columns and of their blocks, while hooks are there, before and after; of all modules, too. Then as before."""
    alone = tiny("qwen2")
    model, ids = sharded(alone, few_tokens=0), text(2, 11)
    columns = ("k_proj", "up_proj")
    for names in (columns, ("mlp", "self_attn"), ("v_proj",)):
        for after in (False, True):
            got, want = _inputs(model, names, ids, after=after), _inputs(alone, names, ids, after=after)
            assert len(want) == 2 * len(names)
            assert_close(got, want)
    rows, whole_rows = (_inputs(each, ("down_proj",), ids, after=False) for each in (model, alone))
    own = {name: x.chunk(2, -1)[torch.distributed.get_rank()] for name, x in whole_rows.items()}
    assert_close(rows, own)
    seen: list[torch.Tensor] = []
    everywhere = torch_module.register_module_forward_pre_hook(lambda module, args: seen.extend(args))
    with torch.no_grad():
        assert_close(model(ids).logits, alone(ids).logits)
    everywhere.remove()
    assert not any(each.isnan().any() for each in seen if each.is_floating_point())
    model = sharded(alone, few_tokens=0)
    with torch.no_grad():
        model(ids)
    plain = str(weft.overlap_report(model))
    hook = model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda module, args, out: out * 2)
    alone.model.layers[0].mlp.gate_proj.register_forward_hook(lambda module, args, out: out * 2)
    assert_close(trained(model, (8, 11)), trained(alone, (8, 11)))
    hook.remove()
    return [plain]


def test_hooks_see_what_modules_are_called_with(ranks: RankFixture) -> None:
    for (report,) in ranks(2).run(_collected):
        assert "all_gather_matmul M=22" in report


@on_ranks(2)
def test_hooks_may_change_what_a_linear_is_called_with() -> None:
    """A hook that changes the input of one linear, and a forward that is put on a block afterwards, train as in one process."""
    alone = tiny("llama")
    model = sharded(alone, few_tokens=0)
    for each in (model, alone):
        attention, mlp = each.model.layers[0].self_attn, each.model.layers[1].mlp
        attention.v_proj.register_forward_pre_hook(lambda module, args: (args[0] * 0.5 + args[0].mean(1, keepdim=True),))
        forward = mlp.forward
        mlp.forward = lambda x, forward=forward: forward(x.tanh())
    assert_close(trained(model, (9, 8)), trained(alone, (9, 8)))


def _warned() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft").addHandler(handler)
    model = sharded(tiny("mistral", num_hidden_layers=3), few_tokens=0)
    with torch.no_grad():
        model(text(2, 9))
        assert messages == []
        model.model.layers[2].mlp.up_proj.register_forward_pre_hook(lambda module, args: None)
        model(text(2, 9))
    logging.getLogger("weft").removeHandler(handler)
    return messages


def test_a_block_that_is_not_overlapped_because_of_a_hook_says_so(ranks: RankFixture) -> None:
    for messages in ranks(2).run(_warned):
        assert len(messages) == 1
        assert messages[0].startswith("model.layers.2.mlp: a hook of up_proj")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 8), nn.Linear(12, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a(x), self.b(x)], -1)


@on_ranks(2)
def test_hooks_on_linears_of_shared_input_see_all_rows() -> None:
    """Linears of weft.SharedInput, sharded along the first dimension."""
    torch.manual_seed(0)
    alone = Pair()
    model, x = copy.deepcopy(alone), torch.randn(10, 3, 12)
    shared = weft.SharedInput(["a", "b"], input_layouts=Shard(0), argument="x", schedule=SCHEDULE)
    parallelize_module(model, mesh(), shared)
    seen: list[torch.Tensor] = []
    model.b.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    rank = torch.distributed.get_rank()
    out = model(x.chunk(2)[rank])
    assert_close(seen[0], x)
    whole = alone.a(x), alone.b(x)
    assert_close(out, torch.cat([each.chunk(2, -1)[rank] for each in whole], -1))
