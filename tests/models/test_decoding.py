"""Decoding with weft.parallelize: each row linear, the residual and the norm that follows are one call, where they can be."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import test_families
import torch
from conftest import RankFixture
from model_work import assert_close, sharded, text, tiny, trained, written
from rank_pools import on_ranks
from torch import nn
from torch.nn.modules import module as torch_module

import weft
from weft.models import norms
from weft.models.norms import NormAhead, PartialSum

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::FutureWarning")]

HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}
FUSED = "matmul_reduce_scatter, matmul_all_reduce, matmul_all_reduce_norm; overlapped"
UNFUSED = "matmul_reduce_scatter, matmul_all_reduce; not fused with the norm that follows: "


@contextmanager
def counted() -> Iterator[list[int]]:
    """The numbers of rows of the fused calls within this context."""
    rows: list[int] = []
    own = norms.matmul_all_reduce_norm

    def call(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        rows.append(x[..., 0].numel())
        return own(x, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "matmul_all_reduce_norm", call)
        yield rows


def decoded(model: Any, prompt: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """The logits of a prompt, and of some tokens after it, one at a time, with a cache."""
    found, cache = [], None
    with torch.no_grad():
        for ids in (prompt, *text(prompt.shape[0], steps, seed=5).split(1, 1)):
            out = model(ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
    return found


def rows_of(report: str) -> dict[str, str]:
    """What the report says of row linears."""
    return dict(re.findall(r" x \S+: (o_proj|down_proj): (.*)$", report, re.MULTILINE))


def _steps(kind: str, bias: bool) -> str:
    alone = tiny(kind, **HEADS, **({"attention_bias": True, "mlp_bias": True} if bias else {}))
    model = sharded(alone, few_tokens=6)
    with counted() as rows:
        assert_close(decoded(model, text(2, 9), 3), decoded(alone, text(2, 9), 3))
        assert rows == [2] * 4 * 3  # of 18 tokens, each rank has a part
        assert_close(decoded(model, text(1, 5), 1), decoded(alone, text(1, 5), 1))
        assert rows[12:] == [5] * 4 + [1] * 4
    report = str(weft.overlap_report(model))
    with torch.inference_mode(), counted() as rows:
        assert_close(model(text(2, 1)).logits, alone(text(2, 1)).logits)
        assert len(rows) == 4
    with counted() as rows:
        for options in ({}, {"cache_implementation": "static"}, {"num_beams": 2}):
            assert torch.equal(written(model, text(1, 2), 4, **options), written(alone, text(1, 2), 4, **options))
        assert len(rows) == 3 * 4 * 4
    with counted() as rows:
        assert_close(trained(copy.deepcopy(model), (9, 2)), trained(alone, (9, 2)))
        assert not rows
    return report


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("kind", "bias"), [("llama", True), ("mistral", False), ("qwen2", False), ("qwen3", False)])
def test_a_step_has_two_calls_a_layer(ranks: RankFixture, size: int, kind: str, bias: bool) -> None:
    for report in ranks(size).run(_steps, kind, bias):
        assert rows_of(report) == {"o_proj": FUSED, "down_proj": FUSED}
        assert "matmul_all_reduce_norm M=2 " in report
        assert "matmul_all_reduce_norm M=5 " in report
        assert "matmul_all_reduce M=" not in report
        assert "some calls" not in report


def _families(kind: str, experts: bool) -> tuple[str, int]:
    alone = test_families.tiny(kind)
    model = sharded(alone, few_tokens=6, experts=weft.ExpertParallel() if experts else None)
    with counted() as rows:
        assert_close(decoded(model, text(2, 9), 2), decoded(alone, text(2, 9), 2))
    return str(weft.overlap_report(model)), len(rows) // 2


@pytest.mark.parametrize(
    ("kind", "experts", "calls", "attention"),
    [
        ("gemma3_text", False, 0, "its layer also has pre_feedforward_layernorm, post_feedforward_layernorm"),
        ("phi3", False, 0, "its layer also has resid_attn_dropout, resid_mlp_dropout"),
        ("gpt_oss", False, 2, ""),
        ("qwen3_moe", True, 3, ""),
        ("deepseek_v3", True, 3, ""),
    ],
)
def test_a_family_is_fused_or_says_why_not(ranks: RankFixture, kind: str, experts: bool, calls: int, attention: str) -> None:
    for report, found in ranks(2).run(_families, kind, experts):
        assert found == calls
        assert rows_of(report)["o_proj"] == (f"{UNFUSED}{attention}; overlapped" if attention else FUSED)


def _own_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm = nn.LayerNorm(32)
    model.model.norm = nn.Identity()


def _own_layer(model: Any) -> None:
    class Layer(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, **kwargs: Any) -> Any:
            return super().forward(hidden_states * 2, position_embeddings=position_embeddings, **kwargs)

    for layer in model.model.layers:
        layer.__class__ = Layer


def _own_forward(model: Any) -> None:
    for layer in model.model.layers:
        layer.forward = layer.forward
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.forward = norm.forward


def _shared_norm(model: Any) -> None:
    first, last = model.model.layers
    last.post_attention_layernorm = first.post_attention_layernorm
    last.input_layernorm = first.post_attention_layernorm


CHANGES: dict[str, tuple[Callable[[Any], None], int, list[str]]] = {
    "norm": (_own_norm, 2, ["the LayerNorm that follows is no RMSNorm", "the Identity that follows is no RMSNorm"]),
    "layer": (_own_layer, 0, ["the forward of its Layer is not transformers' own"] * 2),
    "forward": (_own_forward, 0, ["the forward of its LlamaDecoderLayer is not transformers' own"] * 2),
    "shared": (_shared_norm, 1, ["its norm runs in several places"]),
}


def _changed(name: str) -> str:
    change, calls, _ = CHANGES[name]
    alone = tiny("llama")
    change(alone)
    model = sharded(alone, few_tokens=6)
    with counted() as rows:
        assert_close(decoded(model, text(2, 9), 2), decoded(alone, text(2, 9), 2))
        assert len(rows) == 2 * calls, rows
    return str(weft.overlap_report(model))


@pytest.mark.parametrize("name", CHANGES)
def test_another_norm_or_layer_is_not_fused(ranks: RankFixture, name: str) -> None:
    for report in ranks(2).run(_changed, name):
        for reason in CHANGES[name][2]:
            assert f"{UNFUSED}{reason}" in report, report


def _halve(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out / 2


def _halve_first(module: Any, args: Any, out: Any) -> Any:
    return (out[0] / 2, *out[1:])


def _halve_in_place(module: Any, args: Any) -> None:
    args[0].div_(2)


OBSERVED: dict[str, tuple[Callable[[Any], Any], int]] = {
    "a hook of mlp": (lambda layers: layers[0].mlp.register_forward_hook(_halve), 3),
    "a hook of self_attn": (lambda layers: layers[1].self_attn.register_forward_hook(_halve_first), 3),
    "a hook of down_proj": (lambda layers: layers[0].mlp.down_proj.register_forward_hook(_halve), 3),
    "a hook of the layer": (lambda layers: layers[1].register_forward_pre_hook(_halve_in_place), 2),
    "a hook of that norm": (lambda layers: layers[0].post_attention_layernorm.register_forward_pre_hook(_halve_in_place), 3),
    "a hook of all modules": (lambda layers: torch_module.register_module_forward_hook(lambda *_: None), 0),
    "a forward that was put on mlp itself": (lambda layers: _doubled(layers[0].mlp), 3),
}


def _doubled(mlp: Any) -> Any:
    own = mlp.forward
    mlp.forward = lambda x: own(x) * 2
    return None


def _observed() -> list[tuple[str, str]]:
    reports = []
    for name, (put, calls) in OBSERVED.items():
        alone = tiny("llama")
        model = sharded(alone, few_tokens=6)
        expected, fused = decoded(alone, text(2, 2), 2), decoded(model, text(2, 2), 2)
        assert_close(fused, expected)
        handles = [put(each.model.layers) for each in (alone, model)]
        with counted() as rows:
            got = decoded(model, text(2, 2), 2)
        assert len(rows) == 3 * calls, (name, rows)
        assert_close(got, decoded(alone, text(2, 2), 2))
        for handle in filter(None, handles):
            handle.remove()
        reports.append((name, str(weft.overlap_report(model))))
    return reports


def test_hooks_see_what_they_see_without_weft(ranks: RankFixture) -> None:
    """Values that hooks read and change, also in place, are those of one process; the report says which hook it was."""
    for reports in ranks(2).run(_observed):
        for name, report in reports:
            assert f"some calls: not fused with the norm that follows: {name}" in report, (name, report)


def _adapted() -> str:
    peft = pytest.importorskip("peft")
    alone = tiny("llama")
    config = peft.LoraConfig(target_modules=["o_proj"], r=2, init_lora_weights=False)
    torch.manual_seed(1)
    alone = peft.get_peft_model(alone, config).get_base_model()
    model = sharded(alone, few_tokens=6)
    with counted() as rows:
        assert_close(decoded(model, text(2, 9), 2), decoded(alone, text(2, 9), 2))
        assert len(rows) == 2 * 2
    return str(weft.overlap_report(model))


def test_an_adapter_adds_to_the_product(ranks: RankFixture) -> None:
    for report in ranks(2).run(_adapted):
        assert rows_of(report)["o_proj"] == f"{UNFUSED}an adapter (LoRA) adds to its output; overlapped"
        assert rows_of(report)["down_proj"] == FUSED


@on_ranks(2)
def test_parts_of_a_model_run_alone() -> None:
    """Blocks and layers that are called by themselves return tensors; a forward may run the first layers only."""
    alone = tiny("llama", num_hidden_layers=3)
    model = sharded(alone, few_tokens=6)
    x = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), counted() as rows:
        assert_close(model.model.layers[0].mlp(x), alone.model.layers[0].mlp(x))
        assert not rows
        for each in (alone, model):
            each.config.num_hidden_layers = 2
        assert_close(decoded(model, text(2, 2), 2), decoded(alone, text(2, 2), 2))
        assert len(rows) == 3 * 4
        for each in (alone, model):  # the norm of the last call is not one of another tensor
            each.model.norm.weight.mul_(2)
        assert_close(model.model.norm(x), alone.model.norm(x))


def _steered(model: Any, compiled: bool) -> torch.Tensor:
    """Layers one by one, between which the hidden states are changed in place."""
    decoder, x = model.model, torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(3))
    positions = torch.zeros(2, 1, dtype=torch.long)
    how = {"position_embeddings": decoder.rotary_emb(x, positions), "position_ids": positions, "attention_mask": None}

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        for layer in decoder.layers:
            out = layer(hidden, **how)
            hidden = out[0] if isinstance(out, tuple) else out
            hidden += torch.arange(32.0) / 8
        return decoder.norm(hidden)  # type: ignore[no-any-return]

    return torch.compile(forward, backend="aot_eager")(x) if compiled else forward(x)


@on_ranks(2)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_that_are_called_by_hand_may_change_their_results_in_place(mode: str, compiled: bool) -> None:
    alone = tiny("llama")
    model = sharded(alone, few_tokens=6)
    with getattr(torch, mode)(), counted() as rows:
        assert_close(_steered(model, compiled), _steered(alone, compiled))
        assert rows, "the norms within the layers are still fused"


def test_a_norm_that_is_called_with_another_tensor() -> None:
    """It computes as before, and what was computed ahead is dropped. Equal values are another tensor."""
    hidden, normed = torch.ones(2, 4), torch.zeros(2, 4)
    ahead = NormAhead(norm=nn.Identity())
    for given, found in ((hidden.clone(), None), (hidden, normed)):
        ahead.put(hidden, normed)
        assert ahead.take(given) is found
        assert ahead.take(hidden) is None


@on_ranks(2)
def test_a_compiled_model_fuses_the_same() -> None:
    alone = tiny("llama")
    model = sharded(alone, few_tokens=6, schedule="sequential")
    expected = decoded(alone, text(2, 1), 2)
    with counted() as rows:
        whole = copy.deepcopy(model)
        whole.model.forward = torch.compile(whole.model.forward, backend="aot_eager", fullgraph=True)
        assert_close(decoded(whole, text(2, 1), 2), expected)
        assert rows
    for name in ("mlp", "post_attention_layernorm", ""):
        parts = copy.deepcopy(model)
        for layer in parts.model.layers:
            layer.get_submodule(name).compile(backend="aot_eager")
        assert_close(decoded(parts, text(2, 1), 2), expected)


def test_only_a_residual_is_added_to_a_partial_sum() -> None:
    with pytest.raises(TypeError, match="PartialSum"):
        torch.nn.functional.dropout(PartialSum(None, None, None, None, None), 0.5)  # type: ignore[arg-type]


def _errors(dtype: torch.dtype) -> tuple[float, float]:
    """The largest differences from float64 of the last hidden states: with the fused calls, and with separate ones."""
    alone = tiny("llama").to(dtype)
    exact, model = copy.deepcopy(alone).double(), sharded(alone, few_tokens=32)
    with torch.no_grad():
        want = exact.model(text(8, 4), use_cache=False).last_hidden_state
        with counted() as rows:
            fused = model.model(text(8, 4), use_cache=False).last_hidden_state
            assert len(rows) == 4
            hooks = [layer.register_forward_hook(lambda *_: None) for layer in model.model.layers]
            separate = model.model(text(8, 4), use_cache=False).last_hidden_state
            assert len(rows) == 4
        for hook in hooks:
            hook.remove()
    return tuple(float((got.double() - want).square().mean().sqrt()) for got in (fused, separate))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_calls_are_no_less_exact(ranks: RankFixture, dtype: torch.dtype) -> None:
    for fused, separate in ranks(2).run(_errors, dtype):
        assert 0 < fused <= separate * 1.02, (fused, separate)
        print(f"{dtype}: {fused:.3g} fused, {separate:.3g} with separate calls")
