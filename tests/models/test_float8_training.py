"""torchao's FP8 training with weft's styles on CPU ranks, against torchao in one process and with its own styles."""

from __future__ import annotations

import dataclasses
from typing import Any

import inductor_work
import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks
from rank_work import here
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import weft
from weft.models.linear import as_dtensor

pytest.importorskip("torchao")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]
Tensor = torch.Tensor
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
WIDTH, HIDDEN, TOKENS = 64, 96, 32


class Gated(nn.Module):
    """Two linears that share an input, and one behind them, as a decoder's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    """A norm and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x))


def model_of(recipe: str = "", dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """The model, the same on every rank. recipe: of torchao's linears; without one they stay torch's. options: of the config,
    in the place of the recipe's."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    with torch.no_grad():
        model.inner.up.weight *= 5  # another scale than its neighbour's
    return converted(model, recipe, **options) if recipe else model


def converted(model: nn.Module, recipe: str, **options: Any) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), **options)
    return convert_to_float8_training(model, config=config)  # type: ignore[no-any-return]


def mesh() -> Any:
    return dist.init_device_mesh(here().type, (dist.get_world_size(),))


def plan(layout: Any, *, shared: bool, keep: bool) -> dict[str, Any]:
    """weft's styles. layout: of the input, and of the output. shared: one gather for the two columns."""
    column = {"input_layouts": layout, "keep_gathered": keep}
    styles: dict[str, Any] = {"inner.down": weft.RowwiseParallel(output_layouts=layout)}
    if layout.is_shard():
        styles["norm"] = weft.SequenceParallel(sequence_dim=layout.dim)
    if shared:
        return styles | {"inner": weft.SharedInput(["gate", "up"], **column)}
    return styles | {f"inner.{name}": weft.ColwiseParallel(**column) for name in ("gate", "up")}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distance(found: Tensor, wanted: Tensor) -> float:
    """As a fraction of the norm of what is wanted."""
    assert found.shape == wanted.shape
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def as_close(found: Tensor, reference: Tensor, exact: Tensor, what: str) -> None:
    """What was found is as close to the exact values as the reference is, whose FP8 roundings may be others."""
    noise, got = distance(reference, exact), distance(found, exact)
    assert got < 1.2 * noise + 1e-3, (what, got, noise)


def check_step(recipe: str, layout: Any, shared: bool, keep: bool, dtype: torch.dtype = torch.float32) -> str:
    """Output and gradients, against torchao's Float8Linear in one process and the model in high precision."""
    exact, alone = model_of(), model_of(recipe, dtype)
    model = parallelize_module(model_of(recipe, dtype), mesh(), plan(layout, shared=shared, keep=keep))
    x, factors = (torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))

    def mine(tensor: Tensor) -> Tensor:
        return tensor.chunk(dist.get_world_size(), layout.dim)[dist.get_rank()] if layout.is_shard() else tensor

    found = []
    for one, part in ((exact, lambda x: x), (alone, lambda x: x.to(dtype)), (model, lambda x: mine(x).to(dtype))):
        leaf = part(x).clone().requires_grad_()
        # As a DTensor it says how many tokens other ranks have.
        spread = one is model and layout.is_shard()
        out = one(as_dtensor(leaf, mesh(), layout, tuple(x.shape)) if spread else leaf)
        (out * part(factors)).sum().backward()
        own = {"out": out, "input": leaf.grad} if one is model else {"out": mine(out), "input": mine(leaf.grad)}
        found.append(own | {name: whole(parameter.grad) for name, parameter in one.named_parameters()})
    for name, wanted in found[0].items():
        as_close(found[2][name], found[1][name], wanted, name)
        if recipe == "tensorwise" and not shared:
            # The casts are the same, and only products are rounded and summed otherwise.
            assert distance(found[2][name], found[1][name]) < (0.004 if dtype == torch.float32 else 0.02), name
    return str(weft.overlap_report(model))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shared", [False, True])
def test_a_step_is_as_in_one_process(ranks: RankFixture, recipe: str, shared: bool) -> None:
    for text in ranks(2).run(check_step, recipe, Shard(1), shared, True):
        for operator in ("all_gather_matmul", "matmul_reduce_scatter"):
            assert operator in text


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_layouts_and_dtypes(ranks: RankFixture, recipe: str) -> None:
    """What is gathered a second time, what every rank has all of, tokens of other dimensions, and bfloat16."""
    for layout, shared, keep, dtype in (
        (Shard(1), True, False, torch.bfloat16),
        (Replicate(), True, True, torch.float32),
        (Replicate(), False, True, torch.bfloat16),
        (Shard(0), False, False, torch.float32),
    ):
        # Of 3 entries, 2 ranks have 2 and 1.
        ranks(2).run(check_step, recipe, layout, shared, keep, dtype)


def _gather_bytes(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """torchao's all-gather of FP8, by bytes: gloo has no FP8."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    one = args[0]
    found = operator(one._data.contiguous().view(torch.uint8), *args[1:], **(kwargs or {})).view(one._data.dtype)
    return Float8TrainingTensor(found, one._scale, one._orig_dtype, one._linear_mm_config, one._gemm_input_role)


def _torchaos() -> dict[str, Any]:
    from torch.distributed.tensor.parallel import SequenceParallel
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput

    return {
        "norm": SequenceParallel(),
        "inner": PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "inner.gate": Float8ColwiseParallel(),
        "inner.up": Float8ColwiseParallel(),
        "inner.down": Float8RowwiseParallel(output_layouts=Shard(1)),
    }


def _trained(styles: dict[str, Any], steps: int, recipe: str) -> list[float]:
    """The losses of so many steps, in which the model learns to give what another one gives."""
    torch.manual_seed(1)
    teacher = Model().to(here())
    model = parallelize_module(model_of(recipe).to(here()), mesh(), styles)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    draw, losses = torch.Generator().manual_seed(2), []
    for _ in range(steps):
        x = torch.randn(2, TOKENS, WIDTH, generator=draw).to(here())
        part, wanted = (one.chunk(dist.get_world_size(), 1)[dist.get_rank()] for one in (x, teacher(x).detach()))
        loss = (model(part) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()  # type: ignore[no-any-return]


def both_trainings(steps: int, recipe: str = "tensorwise") -> tuple[list[float], list[float]]:
    """The losses with weft's styles, and with torchao's."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    by_itself, FLOAT8_OPS_TABLE[gather] = FLOAT8_OPS_TABLE[gather], _gather_bytes
    try:
        return _trained(plan(Shard(1), shared=True, keep=True), steps, recipe), _trained(_torchaos(), steps, recipe)
    finally:
        FLOAT8_OPS_TABLE[gather] = by_itself


def test_training_is_as_with_torchaos_styles(ranks: RankFixture) -> None:
    found, wanted = map(torch.tensor, ranks(2).run(both_trainings, 200)[0])
    assert wanted[-20:].mean() < 0.5 * wanted[0]
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=0)


@on_ranks(2)
def test_checkpoints_go_both_ways() -> None:
    """Checkpoints are those of the model in high precision: they load into it, and back."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    options = StateDictOptions(full_state_dict=True)
    model = parallelize_module(model_of("rowwise"), mesh(), plan(Shard(1), shared=True, keep=True))
    saved, first = get_model_state_dict(model, options=options), model_of()
    if dist.get_rank() == 0:
        first.load_state_dict(saved)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, {name: value * 2 for name, value in model_of().state_dict().items()}, options=options)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), 2 * model_of().get_parameter(name)), name


@on_ranks(4)
@pytest.mark.parametrize("precomputed", [False, True])
def test_fsdp_gathers_weights_in_fp8(precomputed: bool) -> None:
    """FSDP gathers the weights in FP8 over one dimension of a mesh, and weft's operators use them over the other one."""
    from torch.distributed.fsdp import fully_shard
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    both = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = model_of("tensorwise", enable_fsdp_float8_all_gather=True)
    parallelize_module(model, both["tp"], plan(Shard(1), shared=True, keep=True))
    for one in (model.inner, model):
        fully_shard(one, mesh=both["dp"])
    seen = []
    model.inner.down.register_forward_hook(lambda module, *_: seen.append(type(module.weight.to_local()).__name__))
    alone, exact = model_of("tensorwise"), model_of()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone, exact)]
    draw, (dp, tp) = torch.Generator().manual_seed(1), both.get_coordinate()
    for _ in range(3):
        if precomputed:
            precompute_float8_dynamic_scale_for_fsdp(model)
        x = torch.randn(4, TOKENS, WIDTH, generator=draw)
        outs = [one(x).chunk(2)[dp].chunk(2, 1)[tp] for one in (alone, exact)]
        got = model(x.chunk(2)[dp].chunk(2, 1)[tp])
        as_close(got, *outs, "out")
        got.square().mean().backward()
        for one in (alone, exact):
            (2 * one(x).square().mean()).backward()  # each of two ranks of tp has half of the tokens
        for name, parameter in model.named_parameters():
            as_close(whole(parameter.grad), *(one.get_parameter(name).grad for one in (alone, exact)), name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert seen == ["Float8TrainingTensor"] * 3


@on_ranks(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_compile(recipe: str) -> None:
    model = parallelize_module(model_of(recipe), mesh(), plan(Shard(1), shared=True, keep=True))
    x = torch.randn(3, TOKENS // 2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    wanted = model(x)
    wanted.square().sum().backward()
    grads = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    got.square().sum().backward()
    assert distance(got, wanted) < 0.01
    for name, parameter in model.named_parameters():
        assert distance(whole(parameter.grad), grads[name]) < 0.06, name


@on_ranks(2)
def test_autocast_and_checkpoints() -> None:
    """Under autocast, and recomputed in the backward."""
    model, exact = parallelize_module(model_of("rowwise"), mesh(), plan(Shard(1), shared=True, keep=True)), model_of()
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    part = x.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = checkpoint(model.inner, part, use_reentrant=False)
    got.float().square().sum().backward()
    exact.inner(x).square().sum().backward()
    assert got.dtype == torch.bfloat16
    for name, parameter in model.inner.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert distance(whole(parameter.grad), exact.inner.get_parameter(name).grad) < 0.1, name


@on_ranks(2)
def test_a_decoder() -> None:
    """weft.parallelize shards converted linears as it does others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2}
    losses, grads = [], []
    for kind in ("exact", "alone", "sharded"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
        if kind != "exact":
            model.model = converted(model.model, "tensorwise")
        if kind == "sharded":
            model = weft.parallelize(model, mesh(), few_tokens=0)
        tokens = torch.randint(0, 64, (2, TOKENS), generator=torch.Generator().manual_seed(1))
        losses.append(model(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
        grads.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
    torch.testing.assert_close(losses[2], losses[1], rtol=1e-3, atol=0)
    for name, exact in grads[0].items():
        as_close(grads[2][name], grads[1][name], exact, name)


@on_ranks(2)
def test_mistakes_are_named() -> None:
    from torchao.float8 import CastConfig, ScalingType

    e4, e5 = (CastConfig(target_dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
    off4, off5 = (dataclasses.replace(one, scaling_type=ScalingType.DISABLED) for one in (e4, e5))
    no_input = {"cast_config_input": off4, "cast_config_weight": off4, "cast_config_weight_for_grad_input": e4}
    no_grads = {"cast_config_grad_output": off5, "cast_config_weight_for_grad_input": off4}
    for options, words in (
        ({"pad_inner_dim": True}, "pad_inner_dim=True"),
        (no_input | {"cast_config_input_for_grad_weight": e4}, "cast_config_input is disabled"),
        (no_grads | {"cast_config_grad_output_for_grad_weight": e5}, "cast_config_grad_output is disabled"),
    ):
        with pytest.raises(ValueError, match=words):
            parallelize_module(model_of("tensorwise", **options), mesh(), plan(Shard(1), shared=True, keep=True))
    for inputs, outputs in ((40, 32), (32, 40)):
        narrow = converted(nn.Sequential(nn.Linear(inputs, outputs)), "tensorwise")
        with pytest.raises(ValueError, match=f"of {inputs} inputs and {outputs} outputs is cut into"):
            parallelize_module(narrow, mesh(), {"0": weft.ColwiseParallel()})
    mixed = model_of("tensorwise")
    mixed.inner.up = nn.Linear(WIDTH, HIDDEN)
    with pytest.raises(ValueError, match="only some of the linears"):
        parallelize_module(mixed, mesh(), plan(Shard(1), shared=True, keep=True))
    model = parallelize_module(model_of("rowwise"), mesh(), plan(Shard(1), shared=True, keep=True))
    with pytest.raises(ValueError, match="is called with 18 tokens"):
        model(torch.randn(1, 9, WIDTH))
    with torch.no_grad():
        assert model(torch.randn(1, 9, WIDTH)).shape == (1, 9, WIDTH)


def _compiled_torchaos() -> tuple[list[str], list[str]]:
    """torchao's styles, compiled: weft's pass finds their gathers and reductions of FP8."""
    model, alone = model_of("tensorwise"), model_of("tensorwise")
    for one in (model, alone):
        one.inner.down.register_parameter("bias", None)
    parallelize_module(model, mesh(), _torchaos())
    x = torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    overlap = weft.CompilePass()
    torch._dynamo.reset()
    got = torch.compile(model, backend=inductor_work.eager(overlap))(x.chunk(dist.get_world_size(), 1)[dist.get_rank()])
    wanted = alone(x)
    got.square().sum().backward()
    wanted.square().sum().backward()
    assert distance(got, wanted.chunk(dist.get_world_size(), 1)[dist.get_rank()]) < 0.01
    for name, parameter in model.named_parameters():
        # torchao sums what it has cast to FP8 for the gradient of a bias.
        bound = 0.06 if name.endswith("bias") else 0.01
        assert distance(whole(parameter.grad), alone.get_parameter(name).grad) < bound, name
    found = [layer.operators[0] for layer in overlap.layers if layer.operators]
    return found, [layer.reason for layer in overlap.layers if not layer.operators and "'max'" not in layer.reason]


def test_the_compile_pass_finds_torchaos_gathers(ranks: RankFixture) -> None:
    for found, reasons in ranks(2).run(_compiled_torchaos):
        assert found == ["all_gather_matmul", "matmul_reduce_scatter", "all_gather_matmul"]
        # The gradient of what gate and up share.
        assert reasons == [
            "reduce_scatter_tensor: the input of the reduction is a sum of FP8 products, each with its own scales"
        ]
