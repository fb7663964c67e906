"""weft.parallelize on tiny models of transformers, on CPU ranks: as the same model in one process."""

from __future__ import annotations

import copy
import re
from itertools import product
from pathlib import Path
from typing import Any

import model_work
import pytest
import torch
from conftest import RankFixture
from model_work import Adapter, as_alone, assert_close, mesh, sharded, text, tiny, trained, whole, written
from rank_pools import on_ranks
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.checkpoint import checkpoint

import weft
import weft.models.communicating
from weft.report.overlap import IN_BACKWARD

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

ROW = "matmul_reduce_scatter, matmul_all_reduce, matmul_all_reduce_norm"
BLOCKS = ["q_proj, k_proj, v_proj", "o_proj", "gate_proj, up_proj", "down_proj"]


def places(report: str) -> dict[str, str]:
    """What the report says of each place, by name."""
    found = re.findall(r"^ +\d+ x (\S+(?:: \w+_proj(?:, \w+_proj)*)?): (.*)$", report, re.MULTILINE)
    return dict(found)


@pytest.mark.parametrize(
    ("kind", "others"),
    [("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("qwen3", {"vocab_size": 36}), ("mistral", {"pad_token_id": 0})],
)
def test_training_and_generation_are_as_in_one_process(ranks: RankFixture, kind: str, others: dict[str, Any]) -> None:
    report, other = ranks(2).run(as_alone, kind, others)
    assert report == other
    head = f"overlapped 8 of 13 places that communicate, 1 {IN_BACKWARD}"
    assert report.startswith(f"{model_work.KINDS[kind]}ForCausalLM: {head}\n")
    assert re.search(rf" x lm_head: matmul_all_reduce; .*; {IN_BACKWARD}$", report, re.MULTILINE)
    layers = places(report)
    assert {name.partition(": ")[2]: said for name, said in layers.items() if "_proj" in name} == dict(
        zip(BLOCKS, [f"{one}; overlapped" for one in ("all_gather_matmul", ROW)] * 2, strict=True)
    )
    whole_lookup = "whole on every rank: it has padding_idx or max_norm"
    lookup = whole_lookup if kind == "mistral" else "its output is summed: weft has no operator"
    cut = "its input is cut to this rank's tokens: the gradient of that is gathered"
    assert layers["model.layers.*"] == f"not overlapped; {cut}"
    assert layers["model.norm"] == "not overlapped; its input is gathered: no matmul follows in every call"
    assert layers["lm_head"] == "not overlapped; its logits are gathered, so that every rank has all"
    assert layers["model.embed_tokens"].startswith(f"not overlapped; {lookup}")
    assert "all_gather_matmul M=22 shard_p2p not measured (asked for)" in report


def _own_forwards() -> str:
    """Layers, norms, the head and a linear have forwards that were put on themselves; a copy: trained as in one process."""
    alone = tiny("llama")
    model = copy.deepcopy(alone)
    for module in model.modules():
        if hasattr(module, "self_attn") or "Norm" in type(module).__name__ or module is model.lm_head:
            module.forward = module.forward
    linear = model.model.layers[0].mlp.up_proj
    linear.forward = linear.forward
    model = copy.deepcopy(weft.parallelize(model, mesh(), schedule=model_work.SCHEDULE, few_tokens=4))
    assert_close(trained(model, (9, 2)), trained(alone, (9, 2)))
    return str(weft.overlap_report(model))


def test_forwards_that_were_put_on_modules_themselves_run(ranks: RankFixture) -> None:
    layers = places(ranks(2).run(_own_forwards)[0])
    why = "its forward was put on the module itself"
    assert layers["model.layers.*.mlp"] == f"not overlapped; runs whole on every rank: up_proj: {why}"
    assert layers["lm_head"] == f"not overlapped; runs whole on every rank: {why}"


@on_ranks(2)
def test_a_call_of_few_tokens_keeps_them_whole() -> None:
    """Calls on both sides of few_tokens, in training too, give one process' results; so do other ways to generate."""
    alone = tiny("qwen3")
    model = sharded(alone, few_tokens=18)
    assert_close(trained(model, (9, 10, 4)), trained(alone, (9, 10, 4)))
    for options in ({"cache_implementation": "static"}, {"num_beams": 2}):
        assert torch.equal(written(model, text(2, 9), 3, **options), written(alone, text(2, 9), 3, **options))
    ran = str(weft.overlap_report(model))
    assert "matmul_all_reduce M=18" in ran
    assert "matmul_reduce_scatter M=20" in ran
    assert "matmul_reduce_scatter M=18" not in ran


def _whole_blocks() -> list[str]:
    reports = [as_alone("mixtral", {}), as_alone("llama", {"num_key_value_heads": 1})]
    alone = tiny("llama")
    alone.model.layers[1].mlp.up_proj = Adapter(alone.model.layers[1].mlp.up_proj)
    model = sharded(alone, few_tokens=0)
    assert_close(trained(model, (8, 11)), trained(alone, (8, 11)))
    return [*reports, str(weft.overlap_report(model))]


@on_ranks(2)
def test_a_model_may_run_its_first_layers_alone() -> None:
    """Fewer layers run than there are, since the configuration says so, or a draft exits early: the same numbers."""
    alone = tiny("llama", num_hidden_layers=3)
    model = sharded(alone, few_tokens=0)
    for prompt in (text(1, 9), text(1, 12)):
        drafted = [written(each, prompt, 6, assistant_early_exit=1) for each in (model, alone)]
        assert torch.equal(*drafted)
        assert torch.equal(drafted[0], written(alone, prompt, 6))
    for layers in (1, 2):
        for each in (alone, model):
            each.config.num_hidden_layers = layers
        assert_close(trained(model, (8, 11)), trained(alone, (8, 11)))


def _fail(*_: Any) -> None:
    raise KeyError


@on_ranks(2)
def test_the_final_norm_gathers_once_a_forward() -> None:
    """The final norm takes what it is given as whole once a forward has gathered: after a prefill, after a forward without
    layers, after a backward that has recomputed them, and after a call that failed."""
    alone = tiny("llama")
    model = sharded(alone, few_tokens=0)

    def last_token(each: Any) -> torch.Tensor:
        return each.model.norm(each.model(text(2, 9), use_cache=False).last_hidden_state[:, -1:])

    with torch.no_grad():
        assert_close(last_token(model), last_token(alone))
    for each in (alone, model):
        each.config.num_hidden_layers = 0
    with torch.no_grad():
        assert_close(model(text(2, 7)).logits, alone(text(2, 7)).logits)
    for each in (alone, model):
        each.config.num_hidden_layers = 2
        each.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        each(input_ids=text(2, 9), labels=text(2, 9), use_cache=False).loss.backward()
    given = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert_close(model.model.norm(given), alone.model.norm(given))
    broken = model.model.layers[1].register_forward_hook(_fail)
    with pytest.raises(KeyError):
        model(text(2, 9), use_cache=False)
    broken.remove()
    for each in (alone, model):
        each.config.num_hidden_layers = 0
    with torch.no_grad():
        assert_close(model(text(2, 7)).logits, alone(text(2, 7)).logits)


def _adapted() -> list[str]:
    """Adapters that are put in before, around weights that are frozen, into a model inside of another: trained as in one
    process, through the model around. Those that are put in afterwards are refused."""
    alone = tiny("llama").requires_grad_(False)
    for layer in alone.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(layer.self_attn.get_submodule(name)))
    around = Around(copy.deepcopy(alone))
    weft.parallelize(around.inside, mesh(), schedule=model_work.SCHEDULE, few_tokens=0)
    ids, found = text(2, 9), []
    for model in (alone, around.inside):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *[(n, whole(p.grad)) for n, p in model.named_parameters() if p.requires_grad]])
    assert len(found[0]) == 1 + 2 * 2 * 4
    assert_close(dict(found[1][1:]), dict(found[0][1:]))
    assert_close(found[1][0], found[0][0])
    messages = []
    for block, name in (("self_attn", "q_proj"), ("mlp", "down_proj")):
        late = sharded(tiny("llama"), few_tokens=0)
        parent = late.model.layers[0].get_submodule(block)
        parent.register_module(name, Adapter(parent.get_submodule(name)))
        for each in (ids, text(1, 1)):
            try:
                late(input_ids=each)
            except ValueError as error:
                messages.append(str(error))
    return messages


def test_adapters_are_put_in_before(ranks: RankFixture) -> None:
    for messages in ranks(2).run(_adapted):
        assert [one.partition(",")[0] for one in messages] == [
            "model.layers.0.self_attn.q_proj is a Adapter",
            "model.layers.0.self_attn.q_proj is a Adapter",
            "model.layers.0.mlp.down_proj is a Adapter",
            "model.layers.0.mlp.down_proj is a Adapter",
        ]


def test_blocks_that_cannot_be_sharded_run_whole_and_say_why(ranks: RankFixture) -> None:
    experts, heads, adapter = (places(report) for report in ranks(2).run(_whole_blocks)[0])
    assert any(
        said.startswith("not overlapped; runs whole on every rank: all experts on all tokens; pass")
        for said in experts.values()
    )
    assert heads["model.layers.*.self_attn"] == (
        "not overlapped; runs whole on every rank: num_key_value_heads is 1, for 2 ranks"
    )
    assert adapter["model.layers.*.mlp"].startswith("not overlapped; runs whole on every rank: up_proj: Adapter is no torch.nn")
    assert adapter["model.layers.*.mlp: down_proj"] == f"{ROW}; overlapped"


class Idle(ParallelStyle):
    """Experts stay where they are; the block takes an equal part of the tokens on each rank, or this shows."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        module.get_submodule("experts").register_forward_pre_hook(self.same)
        return module

    @staticmethod
    def same(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        counts = [0] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(counts, args[0].shape[:-1].numel())
        assert len(set(counts)) == 1, counts


def _equal_parts() -> list[str]:
    """Lengths that ranks divide and do not, sharded and whole; what cannot be right is refused."""
    alone, messages = tiny("mixtral"), []
    with torch.no_grad():
        for few_tokens, ids in product((0, 128), (text(2, 8), text(3, 9), text(1, 1), text(3, 1))):
            model = sharded(alone, few_tokens=few_tokens, experts=Idle())
            assert_close(model(input_ids=ids).logits, alone(input_ids=ids).logits)
        try:
            model(input_ids=ids, output_router_logits=True)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_blocks_of_experts_take_equal_parts_of_the_tokens(ranks: RankFixture) -> None:
    for (messages,) in ranks(2).run(_equal_parts):
        assert messages.startswith("output_router_logits is True; with experts over ranks a router sees its rank's tokens")


def _save_and_load(folder: str) -> None:
    """Weights go to files from two ranks, and into one process' model, and back into one that began on meta."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    alone = tiny("qwen2", tie_word_embeddings=True)
    with torch.device("meta"):
        empty = tiny("qwen2", tie_word_embeddings=True)
    model = weft.parallelize(empty, mesh(), src_data_rank=None, few_tokens=0).to_empty(device="cpu")
    model.model.rotary_emb = alone.model.rotary_emb
    set_model_state_dict(model, sharded(alone).state_dict())
    assert_close(model(text(2, 9)).logits, alone(text(2, 9)).logits)
    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
    again = tiny("qwen2", tie_word_embeddings=True)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    state = get_model_state_dict(again)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(again, state)
    assert_close(dict(again.named_parameters()), dict(alone.named_parameters()))


def test_weights_go_through_files(ranks: RankFixture, tmp_path: Path) -> None:
    ranks(2).run(_save_and_load, str(tmp_path))


def _reported() -> str:
    weft.close(mesh().get_group())
    model = sharded(tiny("llama"), few_tokens=0)
    weft.models.communicating.record_layer(
        model.model.layers[0], weft.models.communicating.CommunicatingLayer(reason="a <b> of the user's")
    )
    with torch.no_grad():
        model(text(2, 9))
    report = weft.overlap_report(model)
    assert (report.overlapped, report.total) == (8, 14)
    sequential = sharded(tiny("llama"), few_tokens=0, schedule="sequential")
    with torch.no_grad():
        sequential(text(2, 9))
    assert weft.overlap_report(sequential).overlapped == 0, "of what ran, and of what is to run, nothing is overlapped"
    return report.html()


def test_the_report_as_a_page(ranks: RankFixture) -> None:
    for page in ranks(2).run(_reported):
        head = f"overlapped 8 of 14 places that communicate, 1 {IN_BACKWARD}, 1 not called yet"
        assert f"<title>weft: LlamaForCausalLM: {head}</title>" in page
        assert ">model.layers.*.self_attn: q_proj, k_proj, v_proj</th>" in page
        cells = re.findall(r"<td [^>]*>([^<]*)</td>", page)
        calls = [cells[at : at + 4] for at, cell in enumerate(cells) if cell == "all_gather_matmul"]
        assert ["all_gather_matmul", "18", "shard_p2p", "not measured"] in calls
        whole = cells.index("matmul_all_reduce")
        assert cells[whole + 9].startswith("for the gradient of the input")
        assert "a &lt;b&gt; of the user&#x27;s" in page
        assert "<script" not in page


@on_ranks(2)
@pytest.mark.slow
def test_checkpointed_and_compiled() -> None:
    """Activation checkpoints recompute after a call of another length, and a whole decoder; torch.compile sees whole layers."""
    alone = tiny("llama").train()
    model = sharded(alone, few_tokens=0)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    losses = [[m(input_ids=ids, labels=ids, use_cache=False).loss for ids in (text(2, 8), text(2, 11))] for m in (model, alone)]
    for each in losses:
        sum(each).backward()
    assert_close({n: whole(p.grad) for n, p in model.named_parameters()}, {n: p.grad for n, p in alone.named_parameters()})
    for each in (model, alone):
        each.gradient_checkpointing_disable()
        each.zero_grad()
        hidden = checkpoint(each.model, text(2, 9), use_cache=False, use_reentrant=False).last_hidden_state
        hidden.square().sum().backward()
    assert_close(whole(model.model.norm.weight.grad), alone.model.norm.weight.grad)
    assert_close(whole(model.model.layers[0].mlp.up_proj.weight.grad), alone.model.layers[0].mlp.up_proj.weight.grad)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_close(model(input_ids=text(2, 9)).logits, alone(input_ids=text(2, 9)).logits)


@on_ranks(2)
def test_with_fsdp_of_layers_alone() -> None:
    """fully_shard was not applied to the model itself: a step's gradients are as one process has them."""
    from torch.distributed.fsdp import fully_shard

    grid = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    alone = tiny("llama")
    model = weft.parallelize(tiny("llama"), grid["tp"], few_tokens=0, schedule=model_work.SCHEDULE)
    for layer in model.model.layers:
        fully_shard(layer, mesh=grid["dp"])
    ids = text(2, 9)
    for each in (alone, model):
        each(input_ids=ids, labels=ids).loss.backward()
    assert_close({n: whole(p.grad) for n, p in model.named_parameters()}, {n: p.grad for n, p in alone.named_parameters()})


@on_ranks(4)
@pytest.mark.slow
def test_with_fsdp_on_a_mesh_of_two_dimensions() -> None:
    """FSDP2 over two replicas of a model over two ranks: two steps, as one process has them."""
    from torch.distributed.fsdp import fully_shard

    grid = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = tiny("llama")
    model = weft.parallelize(tiny("llama"), grid["tp"], few_tokens=0, schedule=model_work.SCHEDULE)
    for layer in model.model.layers:
        fully_shard(layer, mesh=grid["dp"])
    fully_shard(model, mesh=grid["dp"])
    steps = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3, foreach=True) for m in (alone, model)]
    for seed in range(2):
        ids = text(4, 9, seed=seed)
        alone(input_ids=ids, labels=ids).loss.backward()
        own = ids.chunk(2)[grid["dp"].get_local_rank()]
        model(input_ids=own, labels=own).loss.backward()
        for each, step in zip((alone, model), steps, strict=True):
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            step.step()
            step.zero_grad()
    assert_close({n: whole(p) for n, p in model.named_parameters()}, dict(alone.named_parameters()))


class Around(nn.Module):
    """A model inside of another one that goes by its configuration, as adapters' are."""

    base_model_prefix = "inside"

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside, self.config = inside, inside.config


def _layout(model: nn.Module) -> dict[str, Any]:
    """What parallelize changes of a model's modules."""
    return {
        name: (type(each), {*each.__dict__}, len(each._forward_hooks), len(each._forward_pre_hooks), {**each._parameters})
        for name, each in model.named_modules()
    }


def _refused_late() -> list[str]:
    """What is wrong with the last layer, or with an option, is found before the first layer is changed."""
    messages = []
    for break_it, options in (
        (lambda last: last.mlp.experts.register_parameter("bias", nn.Parameter(torch.ones(1))), {}),
        (lambda last: setattr(last.mlp, "experts", nn.Linear(2, 2)), {}),
        (lambda last: setattr(last, "__class__", type("Layer", (type(last),), {"forward": lambda self, x: x})), {}),
        (lambda last: None, {"experts": weft.ExpertParallel}),
        (lambda last: None, {"src_data_rank": 2}),
    ):
        model = tiny("mixtral")
        break_it(model.model.layers[1])
        before, style = _layout(model), weft.ExpertParallel()
        try:
            weft.parallelize(model, mesh(), **{"experts": style, "src_data_rank": None, **options})
        except ValueError as error:
            messages.append(str(error))
        assert _layout(model) == before
        assert style.src_data_rank == 0
    return messages


def test_a_model_that_is_refused_stays_as_it_was(ranks: RankFixture) -> None:
    expected = [
        "experts refuses model.layers.1.mlp: MixtralExperts has parameters bias, down_proj, gate_up_proj",
        "experts refuses model.layers.1.mlp: Linear has parameters bias, weight; ExpertParallel takes",
        "model has a layer that is a Layer, whose forward takes no position_embeddings; pass",
        "experts is a ABCMeta; use an instance of a style, weft.ExpertParallel()",
        "src_data_rank is 2; use a rank of the mesh, 0 to 1, or None",
    ]
    for messages in ranks(2).run(_refused_late):
        assert [text[: len(start)] for text, start in zip(messages, expected, strict=True)] == expected, messages


def _without_norm() -> Any:
    model = tiny("llama")
    del model.model.norm
    return model


def _with_a_layers_norm() -> Any:
    model = tiny("llama")
    model.model.norm = model.model.layers[-1].input_layernorm
    return model


def _refused() -> list[str]:
    import transformers

    grid = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    bert = transformers.BertModel(transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    uneven = tiny("mixtral", num_key_value_heads=1)
    messages = []
    for attempt in (
        lambda: weft.parallelize(nn.Linear(4, 4), mesh()),
        lambda: weft.parallelize(bert, mesh()),
        lambda: weft.parallelize(tiny("llama"), grid),
        lambda: weft.parallelize(sharded(tiny("llama")), mesh()),
        lambda: weft.parallelize(uneven, mesh()),
        lambda: weft.parallelize(tiny("llama"), mesh(), few_tokens=-1),
        lambda: weft.parallelize(tiny("llama"), mesh(), few_tokens=None),
        lambda: weft.parallelize(tiny("llama"), mesh(), schedule="flag_gated_2d"),
        lambda: sharded(tiny("llama"), few_tokens=0).to("meta")(text(2, 9).to("meta")),
        lambda: weft.parallelize(Around(tiny("llama")), mesh()),
        lambda: weft.parallelize(_without_norm(), mesh()),
        lambda: weft.parallelize(_with_a_layers_norm(), mesh()),
        lambda: weft.parallelize(tiny("mixtral"), mesh(), experts=weft.ExpertParallel(gradients="mean")),
    ):
        try:
            attempt()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_mistakes_name_the_argument(ranks: RankFixture) -> None:
    expected = [
        "model is a Linear; weft.parallelize knows transformers' deepseek_v3, gemma3_text",
        "model is a BertModel (bert); weft.parallelize knows",
        "mesh is DeviceMesh(",
        "model has DTensors already; call weft.parallelize once",
        "model: no block can be sharded over 2 ranks; model.layers.0.self_attn runs whole on every rank: num_key_value",
        "few_tokens is -1; use 0 or more",
        "few_tokens is None; use 0 or more",
        "schedule is 'flag_gated_2d', which is for all_gather_matmul alone; matmul_reduce_scatter has sequential",
        "a is on meta; weft runs on cpu and cuda",
        "model is Around around LlamaForCausalLM, which has no layers of its own; pass the model of transformers",
        "model has a LlamaModel without a norm after its layers, before which tokens become whole again; put an nn.Identity",
        "model has a LlamaModel whose norm is also one of its layers'; give it one of its own: copy.deepcopy(model.norm)",
        "experts has gradients='mean', but all ranks of the mesh have one loss",
    ]
    for messages in ranks(2).run(_refused):
        assert [text[: len(start)] for text, start in zip(messages, expected, strict=True)] == expected, messages
