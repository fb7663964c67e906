"""weft's styles for parallelize_module against torch's of the same names, on CPU ranks: results, gradients, checkpoints."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import weft

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]
Tensor = torch.Tensor
SCHEDULE = "shard_p2p"
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


class Block(nn.Module):
    """A norm, two linears that share its output, and one behind them: attention's and MLP's shape. 10 columns on 3 ranks are
    4, 4 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 10), nn.Linear(6, 10, bias=False), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[:2] == (3, 12), "a module sees the gathered shape"
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def block() -> Block:
    torch.manual_seed(0)
    made = Block()
    nn.init.normal_(made.norm.weight)
    return made


def mesh() -> Any:
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def torchs() -> dict[str, Any]:
    return {
        "norm": SequenceParallel(),
        "inner": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "inner.gate": ColwiseParallel(),
        "inner.up": ColwiseParallel(),
        "inner.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def wefts() -> dict[str, Any]:
    return {
        "norm": weft.SequenceParallel(),
        "inner": weft.SharedInput(["gate", "up"], schedule=SCHEDULE),
        "inner.down": weft.RowwiseParallel(output_layouts=Shard(1), schedule=SCHEDULE),
    }


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mine(x: Tensor, dim: int = 1) -> Tensor:
    """This rank's part, a leaf."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone().requires_grad_()


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def _a_block() -> str:
    """A step of the block in one process, by torch's styles and by weft's: all must be the same. Columns that ranks do not
    divide are weft's alone."""
    alone, x = block(), drawn(3, 12, 6, seed=1)
    leaf = x.clone().requires_grad_()
    out = alone(leaf)
    out.square().sum().backward()
    for plan in (torchs(), wefts())[dist.get_world_size() == 3 :]:
        model, part = parallelize_module(block(), mesh(), plan), mine(x)
        got = model(part)
        got.square().sum().backward()
        assert_close(got, mine(out))
        assert_close(part.grad, mine(leaf.grad))
        assert_close(gradients(model), {name: p.grad for name, p in alone.named_parameters()})
        assert all(isinstance(p, DTensor) for p in model.parameters())
    return str(weft.overlap_report(model))


def test_a_block_is_as_torchs_and_as_one_process(ranks: RankFixture) -> None:
    for world_size in (2, 3):
        for text in ranks(world_size).run(_a_block):
            head, *lines = text.splitlines()
            assert head == "Block: overlapped 2 of 2 places that communicate"
            assert [line.split(maxsplit=2)[2] for line in lines if " x " in line[:9]] == [
                "inner: gate, up: all_gather_matmul; overlapped",
                "inner.down: matmul_reduce_scatter; overlapped",
            ]
            # Forward and backward of each: one gather for two linears, and nothing for a gathered tensor that is not used.
            ran = [line.split()[0] for line in lines if "M=36" in line]
            assert ran == ["all_gather_matmul", "matmul_reduce_scatter", "matmul_reduce_scatter", "all_gather_matmul"]


LAYOUTS = [Replicate(), Shard(0), Shard(1), Shard(-1)]


def _every_layout() -> list[str]:
    """Both styles in all pairs of layouts, with plain tensors and DTensors in and out. The names of operators that ran."""
    ran, here = [], mesh()
    for (style, theirs), given, wanted, plain in itertools.product(
        ((weft.ColwiseParallel, ColwiseParallel), (weft.RowwiseParallel, RowwiseParallel)), LAYOUTS, LAYOUTS, (True, False)
    ):
        found = []
        for kind in (theirs, style):
            torch.manual_seed(3)
            linear: Any = nn.Linear(12, 8)
            options = {"schedule": SCHEDULE} if kind is style else {}
            parallelize_module(
                linear, here, kind(input_layouts=given, output_layouts=wanted, use_local_output=plain, **options)
            )
            x = drawn(4, 6, 12, seed=2)
            part = x.clone().requires_grad_() if given.is_replicate() else mine(x, given.dim)
            out = linear(part if plain else DTensor.from_local(part, here, [given], run_check=False))
            assert isinstance(out, DTensor) is not plain
            local = out if plain else out.to_local()
            local.square().sum().backward()
            found.append((local.detach(), part.grad, gradients(linear)))
        if found[0][0].numel():
            assert_close(found[1], found[0])
        place, *others = weft.overlap_report(linear).places
        more_reasons = "".join(f" and {other.layer.reason}" for other in others)
        ran.append(f"{style.__name__} {given} {wanted}: {', '.join(place.layer.operators) or place.layer.reason}{more_reasons}")
    return ran


def test_every_layout_is_as_torchs(ranks: RankFixture) -> None:
    lines = ranks(2).run(_every_layout)[0]
    assert len(lines) == 2 * 4 * 4 * 2
    for start, wanted in (
        ("ColwiseParallel S(0) S(-1)", "all_gather_matmul"),
        ("ColwiseParallel S(1) R", "all_gather_matmul and torch brings the output to Replicate() after the matmul"),
        ("ColwiseParallel R S(-1)", "matmul_all_reduce"),
        ("RowwiseParallel S(-1) R", "matmul_all_reduce"),
        ("RowwiseParallel R S(1)", "matmul_reduce_scatter and torch brings the input from Replicate() before the matmul"),
        ("RowwiseParallel S(0) R", "matmul_all_reduce and torch brings the input from Shard(dim=0) before the matmul"),
    ):
        assert {line.split(": ", 1)[1] for line in lines if line.startswith(f"{start}:")} == {wanted}
    odd = "RowwiseParallel S(0) S(-1): torch's RowwiseParallel: output_layouts is Shard(dim=-1)"
    assert any(line.startswith(odd) for line in lines)


@on_ranks(3)
@pytest.mark.skipif(
    TORCH < (2, 13), reason="torch 2.11's own styles refuse such tokens on CPUs: their linear takes a view of them"
)
def test_tokens_that_ranks_do_not_divide() -> None:
    """DTensors whose tokens ranks do not divide, or of which some ranks have none, through both styles: as torch's."""
    here = mesh()
    for tokens in (5, 1):
        found = []
        for column, row in ((ColwiseParallel, RowwiseParallel), (weft.ColwiseParallel, weft.RowwiseParallel)):
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6))
            last = row(output_layouts=Shard(1), use_local_output=False)
            parallelize_module(model, here, {"0": column(input_layouts=Shard(1)), "1": last})
            x = distribute_tensor(drawn(2, tokens, 6, seed=3), here, [Shard(1)]).requires_grad_()
            out = model(x)
            assert out.shape == (2, tokens, 6)
            out.full_tensor().square().sum().backward()
            found.append((out.full_tensor().detach(), x.grad.full_tensor(), gradients(model)))
        assert_close(found[1], found[0])


class Peeking(Inner):
    """It computes with what only its linears may read."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) + x.mean()


class Twice(Inner):
    """It calls one of its linears twice with one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) + self.gate(x)


class Wrapped(nn.Linear):
    """What a library for adapters or quantised weights makes of a linear."""


def _left_alone() -> list[str]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"wrapped": Wrapped(4, 4), "wide": nn.Linear(4, 4).double(), "lookup": nn.Embedding(8, 4)})
    before = copy.deepcopy(model)
    plan = {"wrapped": weft.ColwiseParallel(output_layouts=Replicate()), "wide": weft.RowwiseParallel()}
    parallelize_module(model, mesh(), {**plan, "lookup": weft.RowwiseParallel(input_layouts=Replicate())})
    x = drawn(2, 3, 4, seed=1)
    assert_close(model["wrapped"](x), before["wrapped"](x))
    assert_close(model["wide"](mine(x.double(), -1)), before["wide"](x.double()))
    assert_close(model["lookup"](torch.tensor([1, 7])), before["lookup"](torch.tensor([1, 7])))
    return str(weft.overlap_report(model)).splitlines()


def test_what_is_left_to_torch_says_why(ranks: RankFixture) -> None:
    for head, *lines in ranks(2).run(_left_alone):
        assert head == "ModuleDict: overlapped 0 of 3 places that communicate"
        assert "wrapped: not overlapped; torch's ColwiseParallel: Wrapped is no torch.nn.Linear" in lines[0]
        assert "wide: not overlapped; torch's RowwiseParallel: its weight is a Parameter of torch.float64" in lines[1]
        assert "lookup: not overlapped; torch's RowwiseParallel: Embedding is no torch.nn.Linear" in lines[2]


def _checkpoints(folder: str) -> None:
    """Weights go from torch's plan to weft's and back, by state_dict and by files; a model that began on meta is the same."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    old, x = parallelize_module(block(), mesh(), torchs()), mine(drawn(3, 12, 6, seed=1))
    with torch.device("meta"):
        empty = Block()
    new = parallelize_module(empty, mesh(), wefts()).to_empty(device="cpu")
    new.load_state_dict(old.state_dict())
    assert_close(new(x), old(x))
    assert {n: (p.placements, p.shape) for n, p in new.state_dict().items()} == {
        n: (p.placements, p.shape) for n, p in old.state_dict().items()
    }
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.5)
    checkpoint.save(get_model_state_dict(new), checkpoint_id=folder)
    state = get_model_state_dict(old)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(old, state)
    assert_close(new(x), old(x))


def test_checkpoints_are_torchs(ranks: RankFixture, tmp_path: Path) -> None:
    ranks(2).run(_checkpoints, str(tmp_path))


def _in_other_ways() -> list[float]:
    """A step under torch.compile, activation checkpoints, autocast, and of a copy: the eager one's gradients."""
    from torch.utils.checkpoint import checkpoint

    model, x = parallelize_module(block(), mesh(), wefts()), drawn(3, 12, 6, seed=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for call in (model, compiled, copy.deepcopy(model), lambda part: checkpoint(model, part, use_reentrant=False)):
        owner = call if isinstance(call, nn.Module) and call is not compiled else model
        owner.zero_grad()
        part = mine(x)
        call(part).square().sum().backward()
        found.append({**gradients(owner), "x": part.grad})
        assert_close(found[-1], found[0])
    with torch.autocast("cpu", torch.bfloat16):
        out = model(mine(x))
    return [float((out - model(mine(x))).abs().max())]


def test_compiled_checkpointed_copied_and_under_autocast(ranks: RankFixture) -> None:
    for (difference,) in ranks(2).run(_in_other_ways):
        assert 0 < difference < 0.05


def _twice(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients of the model's first gradients, squared."""
    loss = model(x).square().sum() / 100
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in first]
    torch.stack([part.square().sum() for part in parts]).sum().backward()
    return gradients(model)


@on_ranks(2)
@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11's DTensor drops gradients of gradients, of its own styles, too")
def test_gradients_have_gradients() -> None:
    """Gradients of a loss of all first gradients are as in one process, where tokens are sharded and where they are whole."""
    alone, x = block(), drawn(3, 12, 6, seed=1)
    expected = _twice(alone, x.clone())
    column, row = weft.ColwiseParallel(schedule=SCHEDULE), weft.RowwiseParallel(schedule=SCHEDULE)
    for plan, part in ((wefts(), mine(x)), ({"inner.gate": column, "inner.up": column, "inner.down": row}, x.clone())):
        assert_close(_twice(parallelize_module(block(), mesh(), plan), part), expected)


@on_ranks(1)
def test_on_one_rank() -> None:
    """Nothing is gathered: what a module is given is what its linears take, as often as they like."""
    for make in (Inner, Twice):
        torch.manual_seed(0)
        alone: Any = make()
        model = parallelize_module(copy.deepcopy(alone), mesh(), {"": weft.SharedInput(["gate", "up"])})
        assert_close(model(drawn(3, 12, 6, seed=1)), alone(drawn(3, 12, 6, seed=1)))


def _accumulated() -> list[bool]:
    """Two batches into the same gradients, of inputs without gradients, with weights that are frozen, with and without
    autocast, and a pass without gradients between: as one process has them. Which parameters have gradients."""
    found = []
    for autocast in (False, True):
        alone = block().inner
        for parameter in (alone.up.weight, alone.gate.bias):
            parameter.requires_grad_(False)
        model = parallelize_module(
            copy.deepcopy(alone), mesh(), {k.partition(".")[2]: s for k, s in wefts().items() if "." in k}
        )
        parallelize_module(model, mesh(), {"": wefts()["inner"]})
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for seed in (1, 2):
                x = drawn(3, 12, 6, seed=seed)
                outs = model(mine(x).detach()), alone(x)
                assert outs[0].dtype == outs[1].dtype == (torch.bfloat16 if autocast else torch.float32)
                outs[0].float().square().sum().backward()
                outs[1].float().square().sum().backward()
                with torch.no_grad():
                    torch.testing.assert_close(model(mine(x)), mine(outs[1]), rtol=3e-2, atol=3e-2)
        wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        tolerance = 2e-2 if autocast else 1e-5
        for name, grad in gradients(model).items():
            assert float((grad - wanted[name]).norm() / wanted[name].norm()) < tolerance, name
            assert grad.dtype == torch.float32
        found += [p.grad is not None for p in model.parameters()]
        assert found[-5:] == [p.grad is not None for p in alone.parameters()]
    return found


def test_gradients_accumulate_and_frozen_weights_have_none(ranks: RankFixture) -> None:
    assert ranks(2).run(_accumulated) == [[True, False, False, True, True] * 2] * 2


def _misuse() -> list[str]:
    messages = []
    here = mesh()
    for attempt in (
        lambda: weft.SharedInput("gate"),
        lambda: weft.SharedInput(["gate"], input_layouts=Shard(-1)),
        lambda: parallelize_module(block(), here, {"inner": weft.SharedInput(["gate", "side"])}),
        lambda: weft.ColwiseParallel(schedule="fast"),
        lambda: weft.RowwiseParallel(schedule=3),  # type: ignore[arg-type]
        lambda: parallelize_module(nn.Linear(4, 4), here, weft.ColwiseParallel(input_layouts=Shard(2)))(torch.ones(1, 2, 4)),
        lambda: weft.overlap_report(block()),
        lambda: parallelize_module(Inner(), here, {"": weft.SharedInput(["gate"])})(states=torch.ones(1, 2, 6)),
        lambda: parallelize_module(Twice(), here, {"": weft.SharedInput(["gate"])})(torch.ones(1, 2, 6)),
        lambda: parallelize_module(
            parallelize_module(block(), here, wefts()), here, {"inner.gate": weft.ColwiseParallel(input_layouts=Shard(1))}
        ),
    ):
        try:
            attempt()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    outside = parallelize_module(Peeking(), here, {"": weft.SharedInput(["gate"])})
    x = mine(drawn(3, 12, 6, seed=1)).detach()
    assert outside.gate(x).isfinite().all(), "called directly, it has its own gather"
    assert outside(x).isnan().all(), "what is computed from the stand-in shows"
    assert outside.gate(input=x).equal(outside.gate(x)), "the argument has the name that nn.Linear gives it"
    return messages


def test_mistakes_name_the_argument(ranks: RankFixture) -> None:
    expected = [
        "linears is 'gate'; name the children",
        "input_layouts is Shard(dim=-1); weft overlaps",
        "linears names 'side', but Inner has no child",
        "schedule is 'fast'; use",
        "schedule is a int; a module's calls differ in size",
        "the layout Shard(dim=2) shards the last of a tensor's 3 dimensions",
        "model is a Block in which weft runs nothing",
        "Inner is called with states; weft changes its first positional argument, or 'hidden_states' by name",
        "a linear that shares a gathered input is called with all 4 tokens of it, not as the module was given them, or",
        "a linear is sharded by weft already",
    ]
    for messages in ranks(2).run(_misuse):
        assert [text[: len(start)] for text, start in zip(messages, expected, strict=True)] == expected, messages


@on_ranks(4)
@pytest.mark.slow
def test_with_fsdp_on_a_mesh_of_two_dimensions() -> None:
    """FSDP2 over two replicas of a block over two ranks: three steps of AdamW with clipping, as one process has them."""
    from torch.distributed.fsdp import fully_shard

    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone, model = block(), parallelize_module(block(), grid["tp"], wefts())
    fully_shard(model, mesh=grid["dp"])
    steps = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3, foreach=True) for m in (alone, model)]
    for seed in range(3):
        x = drawn(6, 12, 6, seed=seed)
        own = x.chunk(2)[grid["dp"].get_local_rank()].chunk(2, 1)[grid["tp"].get_local_rank()]
        for part in x.chunk(2):
            (alone(part).square().mean() / 2).backward()
        # Each rank's loss is the mean of its tokens: gradients are summed over tp, and averaged over dp.
        (model(own).square().mean() / 2).backward()
        for each, step in zip((alone, model), steps, strict=True):
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            step.step()
            step.zero_grad()
    assert_close({n: whole(p) for n, p in model.named_parameters()}, dict(alone.named_parameters()))
