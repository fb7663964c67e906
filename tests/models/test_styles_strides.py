"""The memory layout of what weft's styles return against torch's styles of the same names, in every combination of layouts.

Results of several sequences come out of the operators with the tokens outermost in memory. Where a linear's style returns a
DTensor, it is contiguous, as torch's. A plain tensor keeps these strides, as the guide says.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks
from test_styles import SCHEDULE, TORCH, Tensor, assert_close, drawn, gradients, mesh, whole
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torchs
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

import weft

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]
LAYOUTS = (Replicate(), Shard(0), Shard(1), Shard(-1))
CASES = [(2, (1, 6, 12)), (2, (4, 6, 12)), (2, (2, 7, 12)), (2, (6, 12)), (3, (2, 6, 4, 12)), (3, (3, 5, 12))]
VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda y: y.view(-1, y.shape[-1]),
    lambda y: y.flatten(0, -2),
    lambda y: y.reshape(-1, y.shape[-1]),
)


def _part(x: Tensor, layout: Any) -> Tensor:
    """This rank's part of x, contiguous, of which there may be none."""
    return distribute_tensor(x, mesh(), [layout]).to_local().clone()


def _local(y: Tensor) -> Tensor:
    return y.to_local() if isinstance(y, DTensor) else y


def _has_true_strides(y: Tensor, what: str) -> None:
    """A DTensor and its part have their dimensions in the same order in memory, so that the same views are possible."""
    if isinstance(y, DTensor) and y.to_local().numel():
        part = y.to_local()
        wide = [dim for dim in range(y.dim()) if part.shape[dim] > 1]
        stated, there = ([one.stride(dim) for dim in wide] for one in (y, part))
        assert sorted(wide, key=lambda dim: -y.stride(dim)) == sorted(wide, key=lambda dim: -part.stride(dim)), what
        assert y.is_contiguous() == part.is_contiguous(), (what, stated, there)


def _module(style: str, shape: tuple[int, ...]) -> Any:
    torch.manual_seed(3)
    if style == "SequenceParallel":
        return nn.LayerNorm(shape[-1])
    return nn.Linear(shape[-1], 10)


def _one(whose: Any, style: str, shape: tuple[int, ...], options: dict[str, Any], given: Any, as_dtensor: bool) -> Any:
    """The result of one style, and what backward leaves at its input."""
    own = {"schedule": SCHEDULE} if whose is weft and style != "SequenceParallel" else {}
    module = parallelize_module(_module(style, shape), mesh(), getattr(whose, style)(**options, **own))
    drawn_x = drawn(*shape, seed=2)
    x = distribute_tensor(drawn_x, mesh(), [given]) if as_dtensor else _part(drawn_x, given)
    x.requires_grad_()
    return module, x, module(x)


def _combinations() -> list[tuple[str, dict[str, Any], Any]]:
    found: list[tuple[str, dict[str, Any], Any]] = []
    for given, wanted, plain in itertools.product(LAYOUTS, LAYOUTS, (True, False)):
        options = {"input_layouts": given, "output_layouts": wanted, "use_local_output": plain}
        # With the other layouts the style is torch's own.
        found += [("ColwiseParallel", options, given)] * (given != Shard(-1))
        found += [("RowwiseParallel", options, given)] * (wanted != Shard(-1))
    found += [("SequenceParallel", {"sequence_dim": 1, "use_local_output": plain}, Shard(1)) for plain in (True, False)]
    return found


def _strided(style: str, options: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether the guide says that this result's strides are not torch's: tokens that weft gathers or scatters for a plain
    result, if what is before them is more than one."""
    if not options["use_local_output"] or style == "SequenceParallel":
        return False
    tokens, columns = ("input_layouts", "output_layouts") if style == "ColwiseParallel" else ("output_layouts", "input_layouts")
    moved = options[tokens] == Shard(1) and shape[0] > 1
    return moved and (style == "RowwiseParallel" or options[columns] == Shard(-1))


def _compare(shape: tuple[int, ...]) -> int:
    compared = 0
    for (style, options, given), as_dtensor in itertools.product(_combinations(), (True, False)):
        placements = [layout for layout in options.values() if isinstance(layout, Shard)]
        last = len(shape) - 1
        if any(layout.dim == last for layout in placements) or (style == "SequenceParallel" and last < 2):
            continue  # the dimension of tokens is the last one
        even = all(shape[dim] % dist.get_world_size() == 0 for dim in (0, 1)) and 10 % dist.get_world_size() == 0
        if not even and not as_dtensor:
            continue  # torch takes plain parts of other sizes for even ones
        if style == "RowwiseParallel" and given in (Shard(0), Shard(1)) and shape[given.dim] % dist.get_world_size():
            continue  # torch's own style raises: its linear takes a view of strided columns
        what = f"{style} {options} {shape} {as_dtensor}"
        theirs, x, wanted = _one(torchs, style, shape, options, given, as_dtensor)
        ours, z, got = _one(weft, style, shape, options, given, as_dtensor)
        compared += 1
        assert isinstance(got, DTensor) == isinstance(wanted, DTensor), what
        assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
        if isinstance(wanted, DTensor):
            assert got.placements == wanted.placements, what
        assert_close(_local(got), _local(wanted))
        _has_true_strides(got, what)
        if not _strided(style, options, shape) and _local(wanted).numel():
            for one, like in ((got, wanted), (_local(got), _local(wanted))):
                assert one.stride() == like.stride() or one.is_contiguous(), (what, one.stride(), like.stride())
            for number, view in enumerate(VIEWS):
                try:
                    of_torch = view(wanted)
                except RuntimeError:
                    continue  # torch cannot flatten a sharded dimension of some layouts
                viewed = view(got)
                assert viewed.shape == of_torch.shape, (what, number)
                assert_close(_local(viewed), _local(of_torch))
                _has_true_strides(viewed, what)
        else:
            assert_close(_local(got).reshape(-1, 1), _local(wanted).reshape(-1, 1))
        for one in (wanted, got):
            _local(one).square().sum().backward()
        assert_close(whole(z.grad), whole(x.grad))
        _has_true_strides(z.grad, f"gradient of {what}")
        assert_close(gradients(ours), gradients(theirs))
        for parameter in ours.parameters():
            _has_true_strides(parameter.grad, f"gradient in {what}")
    return compared


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11's own styles refuse uneven tokens")
@pytest.mark.parametrize(("world_size", "shape"), CASES, ids=str)
def test_results_have_the_memory_layout_of_torchs(ranks: RankFixture, world_size: int, shape: tuple[int, ...]) -> None:
    compared = ranks(world_size).run(_compare, shape)
    assert all(count >= 20 for count in compared), compared


@on_ranks(2, 3)
def test_a_dtensor_of_strided_tokens_has_their_strides() -> None:
    """A norm whose input has its tokens outermost in memory, as RowwiseParallel returns them: the DTensor has its strides."""
    here, ranks = mesh(), dist.get_world_size()
    for tokens, plain in itertools.product((2 * ranks, 3 * ranks - 1), (True, False)):
        x = _part(drawn(3, tokens, 6, seed=1), Shard(1)).movedim(1, 0).contiguous().movedim(0, 1)
        found = []
        for whose in (torchs, weft):
            norm = parallelize_module(nn.Hardswish(), here, whose.SequenceParallel(use_local_output=plain))
            if tokens % ranks and whose is torchs:
                continue  # torch takes a plain part for an even one
            given = x
            if tokens % ranks:
                given = DTensor.from_local(x, here, [Shard(1)], run_check=False, shape=(3, tokens, 6), stride=(6, 18, 1))
            found.append(norm(given))
            assert _local(found[-1]).stride() == (6, 18, 1)
        for one in found:
            _has_true_strides(one, f"{tokens} {plain}")
            assert one.stride() == found[0].stride()
            assert_close(one.reshape(-1, 6).shape, found[0].reshape(-1, 6).shape)


def _views_of_uneven_tokens(tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strides of results and gradients that are DTensors of this many tokens, which lie outermost in memory."""
    x = _part(drawn(3, tokens, 6, seed=1), Shard(1)).movedim(1, 0).contiguous().movedim(0, 1).requires_grad_()
    given = DTensor.from_local(x, mesh(), [Shard(1)], run_check=False, shape=(3, tokens, 6), stride=(6, 18, 1))
    norm = parallelize_module(nn.Hardswish(), mesh(), weft.SequenceParallel())
    out = norm(given)
    _local(out.view(-1, 6)).sum().backward()
    assert_close(whole(out), nn.functional.hardswish(drawn(3, tokens, 6, seed=1)))
    head = parallelize_module(nn.Linear(6, tokens), mesh(), weft.ColwiseParallel(schedule=SCHEDULE))
    head(drawn(2, 6, seed=2)).square().sum().backward()
    return out.stride(), head.weight.grad.stride()


def test_ranks_with_uneven_parts_agree_on_strides(ranks: RankFixture) -> None:
    """A part of one token, or of none, is contiguous in memory whatever the order of its dimensions."""
    for world_size, tokens in ((2, 3), (3, 4), (3, 5)):
        first, *others = ranks(world_size).run(_views_of_uneven_tokens, tokens)
        assert all(other == first for other in others), (world_size, tokens)


@on_ranks(2, 3)
def test_loss_parallel_of_several_sequences() -> None:
    here = mesh()
    for compiled, vocabulary, given in itertools.product((False, True), (12, 13), (Shard(1), Replicate())):
        torch.manual_seed(0)
        alone = nn.Linear(8, vocabulary)
        x, labels = drawn(2, 12, 8, seed=1), torch.randint(vocabulary, (24,))
        labels[:5] = -100
        whole_x, part = x.clone().requires_grad_(), _part(x, given).requires_grad_()
        expected = nn.functional.cross_entropy(alone(whole_x).view(-1, vocabulary), labels)
        expected.backward()
        style = weft.ColwiseParallel(input_layouts=given, output_layouts=Shard(-1), use_local_output=False, schedule=SCHEDULE)
        head = parallelize_module(copy.deepcopy(alone), here, style)
        call = torch.compile(head, backend="aot_eager") if compiled else head
        for flat in VIEWS:
            head.zero_grad()
            part.grad = None
            with loss_parallel():
                logits = call(part)
                assert logits.placements == (Shard(2),)
                assert logits.shape == (2, 12, vocabulary)
                loss = nn.functional.cross_entropy(flat(logits), labels)
                loss.backward()
            assert_close(whole(loss), expected)
            assert_close(gradients(head), {name: p.grad for name, p in alone.named_parameters()})
            assert_close(part.grad, _part(whole_x.grad, given))
