"""weft.register_tp_plan on tiny models of transformers that CPU ranks load in parts: as the same model in one process."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from model_work import SCHEDULE, assert_close, text, tiny, trained, whole, written
from torch.distributed.tensor import DTensor, Shard

import weft

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytest.importorskip("transformers.distributed.tensor_parallel", reason="this transformers has no styles that weft replaces")
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="transformers loads a model onto the GPUs, not CPU ranks"),
]


def _loaded(folder: str, *, change: dict[str, str] | None = None, model_class: Any = None, **options: Any) -> Any:
    """The model of a folder, in parts. change: rules in the place of the plan's."""
    model_class = model_class or transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(folder)
    asked = {"schedule": SCHEDULE, "few_tokens": 0, **options}
    plan = {**weft.register_tp_plan(config, model_class=model_class, **asked), **(change or {})}
    return model_class.from_pretrained(folder, tp_plan=plan, tp_size=dist.get_world_size())


def _parts(model: Any) -> tuple[set[str], int]:
    """The parameters of which this rank has all rows and columns, and the number of those that it has of any."""
    named = dict(model.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in named.values())
    sharded = {name for name, parameter in named.items() if isinstance(parameter.placements[0], Shard)}
    return named.keys() - sharded, sum(parameter.to_local().numel() for parameter in named.values())


def _as_alone(folder: str, experts: bool) -> tuple[str, set[str], int]:
    """Training, generation and saving; the report, and the parts that this rank has."""
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = _loaded(folder, experts=weft.ExpertParallel() if experts else None)
    parts = _parts(model)
    for prompt in (text(1, 9), text(3, 2)):
        assert torch.equal(written(model, prompt, 5), written(alone, prompt, 5))
        assert torch.equal(*[written(each, prompt, 5, cache_implementation="static") for each in (model, alone)])
    untrained = {name: parameter.detach().clone() for name, parameter in alone.named_parameters()}
    model.save_pretrained(f"{folder}/again")
    assert_close(dict(transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/again").named_parameters()), untrained)
    assert_close(trained(model.train(), (8, 11)), trained(alone.train(), (8, 11)))
    return str(weft.overlap_report(model)), *parts


@pytest.mark.parametrize(
    ("kind", "others", "whole_head"),
    [
        ("llama", {}, False),
        ("llama", {"tie_word_embeddings": True}, False),
        ("mistral", {"tie_word_embeddings": True, "pad_token_id": 0}, True),
        ("qwen3", {"vocab_size": 36}, False),
        ("mixtral", {}, False),
    ],
)
def test_a_model_loaded_in_parts_is_as_in_one_process(
    ranks: RankFixture, tmp_path: Path, kind: str, others: dict[str, Any], whole_head: bool
) -> None:
    alone = tiny(kind, **others)
    alone.save_pretrained(tmp_path)
    numbers = sum(parameter.numel() for parameter in alone.parameters())
    for report, unsharded, has in ranks(2).run(_as_alone, str(tmp_path), kind == "mixtral"):
        pairs = [("q_proj, k_proj, v_proj", "o_proj"), ("gate_proj, up_proj", "down_proj")]
        for columns, row in pairs[: 1 if kind == "mixtral" else 2]:
            assert f": {columns}: all_gather_matmul; overlapped" in report
            assert f": {row}: matmul_reduce_scatter, matmul_all_reduce, matmul_all_reduce_norm; overlapped" in report
        assert "matmul_reduce_scatter M=22" in report
        whole_names = {name for name in unsharded if not name.endswith(("norm.weight", "mlp.gate.weight"))}
        assert whole_names == ({"model.embed_tokens.weight"} if whole_head else set())
        assert has < (0.7 if whole_head else 0.6) * numbers


def _has_the_layout_of_parallelize(folder: str) -> None:
    """Gradients, and the layout of each parameter, are bit for bit those of weft.parallelize on the whole model."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    other = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weft.parallelize(other, mesh, schedule=SCHEDULE, few_tokens=0)
    model = _loaded(folder)
    for each in (model, other):
        each(input_ids=text(2, 9), labels=text(2, 9)).loss.backward()
    named = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.placements == named[name].placements, name
        assert torch.equal(parameter.grad.to_local(), named[name].grad.to_local()), name


def test_the_layout_is_that_of_parallelize(ranks: RankFixture, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    ranks(2).run(_has_the_layout_of_parallelize, str(tmp_path))


def _classifies_as_alone(folder: str) -> None:
    """A head that classifies is whole on every rank, and a DTensor like all other parameters."""
    kind = transformers.AutoModelForSequenceClassification
    model, alone = _loaded(folder, model_class=kind), kind.from_pretrained(folder)
    for each in (model, alone):
        each.config.pad_token_id = 36
        each(input_ids=text(2, 9), labels=torch.tensor([0, 1])).loss.backward()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    assert_close({name: whole(parameter.grad) for name, parameter in model.named_parameters()}, expected)


def test_a_head_that_classifies_is_whole(ranks: RankFixture, tmp_path: Path) -> None:
    transformers.LlamaForSequenceClassification(tiny("llama").config).save_pretrained(tmp_path)
    ranks(2).run(_classifies_as_alone, str(tmp_path))


def _with_fsdp(folder: str) -> None:
    """DistributedConfig takes the plan, and applies FSDP over the other ranks."""
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder)
    plan = weft.register_tp_plan(alone.config, schedule=SCHEDULE, few_tokens=0)
    asked = transformers.distributed.DistributedConfig(tp_plan=plan, tp_size=2, fsdp_size=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=asked)
    assert_close(trained(model.train(), (8, 11)), trained(alone.train(), (8, 11)))


def test_a_distributed_config_may_have_fsdp(ranks: RankFixture, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    ranks(4).run(_with_fsdp, str(tmp_path))


def _prefills_in_chunks(folder: str) -> None:
    """A static cache that is allocated in advance has this rank's heads after init_parallel_plans, as the guide says."""
    alone, model = transformers.AutoModelForCausalLM.from_pretrained(folder), _loaded(folder)
    model.init_parallel_plans()
    asked = {"cache_implementation": "static", "prefill_chunk_size": 4}
    assert torch.equal(*[written(each, text(1, 9), 5, **asked) for each in (model, alone)])


def test_a_prompt_may_be_read_in_chunks_into_a_static_cache(ranks: RankFixture, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    ranks(2).run(_prefills_in_chunks, str(tmp_path))


def _rules_of_others(folder: str) -> None:
    """In a changed plan, rules of transformers inside of the decoder are refused, and those outside work."""
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = _loaded(folder, change={"lm_head": "colwise_gather_output"})
    assert_close(model(text(2, 9)).logits.detach(), alone(text(2, 9)).logits.detach())
    with pytest.raises(ValueError, match="distribute a DTensor"):  # transformers' own error
        _loaded(folder, change={"model.layers.*.mlp.down_proj": "rowwise"})
    model = _loaded(folder, change={"model.embed_tokens": "embedding_rowwise"})
    with pytest.raises(ValueError, match="tp_plan has a rule of transformers for embed_tokens"):
        model(text(2, 9))


def test_rules_of_transformers_are_refused_inside_of_the_decoder(ranks: RankFixture, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    ranks(2).run(_rules_of_others, str(tmp_path))


def _heads_that_ranks_do_not_divide(folder: str) -> str:
    with pytest.raises(ValueError, match="no block can be sharded over 2 ranks") as refused:
        _loaded(folder)
    return str(refused.value)


def test_what_parallelize_refuses_is_refused_while_loading(ranks: RankFixture, tmp_path: Path) -> None:
    tiny("mixtral", num_key_value_heads=1).save_pretrained(tmp_path)
    assert "num_key_value_heads is 1, for 2 ranks" in ranks(2).run(_heads_that_ranks_do_not_divide, str(tmp_path))[0]


def test_registering_adds_styles_and_leaves_those_of_transformers() -> None:
    styles = importlib.import_module("transformers.distributed.tensor_parallel").ALL_PARALLEL_STYLES
    own = {name: style for name, style in styles.items() if not name.startswith("weft")}
    config = tiny("qwen3").config
    untouched = copy.deepcopy(config.to_dict())
    plans = [weft.register_tp_plan(config, few_tokens=few) for few in (128, 128, 7)]
    assert plans[0] == plans[1]
    assert set(plans[0].values()) == {"weft", "weft:head", "weft:inside"}
    assert not set(plans[0].values()) & set(plans[2].values())
    first = {name: styles[name] for name in plans[0].values()}
    weft.register_tp_plan(config)
    assert {name: styles[name] for name in first} == first
    assert {name: style for name, style in styles.items() if not name.startswith("weft")} == own
    assert config.to_dict() == untouched


@pytest.mark.parametrize(
    ("others", "options", "match"),
    [
        ({"model_type": "t5"}, {}, r"config is a LlamaConfig \(t5\); weft knows deepseek_v3"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "config has a quantization_config"),
        ({}, {"few_tokens": -1}, "few_tokens is -1"),
        ({}, {"schedule": "nothing"}, "nothing"),
        ({}, {"schedule": "two_shot"}, "schedule is 'two_shot', which is for matmul_all_reduce, all_reduce alone"),
        ({}, {"experts": "ep"}, "experts"),
        ({}, {"model_class": 3}, "model_class is 3"),
        ({}, {"model_class": "AutoModel"}, "LlamaModel, which is a decoder without a head"),
    ],
)
def test_bad_input_is_refused(others: dict[str, Any], options: dict[str, Any], match: str) -> None:
    config = tiny("llama").config
    for name, value in others.items():
        setattr(config, name, value)
    if isinstance(options.get("model_class"), str):
        options = {"model_class": getattr(transformers, options["model_class"])}
    with pytest.raises(ValueError, match=match):
        weft.register_tp_plan(config, **options)


def test_a_config_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="config is a str"):
        weft.register_tp_plan("some/path")


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("llama").config
    monkeypatch.setattr("transformers.__version__", "5.18.0")
    with pytest.raises(ValueError, match=r"transformers 5\.18\.0 .* use transformers 5\.19 or later"):
        weft.register_tp_plan(config)
    monkeypatch.setattr("transformers.__version__", "6.0.0.dev0")
    assert weft.register_tp_plan(config)
    monkeypatch.setattr("transformers.distributed.tensor_parallel.TensorParallelLayer", SimpleNamespace())
    with pytest.raises(ValueError, match=r"use transformers 5\.19 or later"):
        weft.register_tp_plan(config)
