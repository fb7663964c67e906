"""What ranks do in tests of the pass for torch.compile: functions with functional collectives, traced, rewritten, run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rank_work import whole
from torch.distributed import _functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx

from weft.models.inductor import CompilePass

c10d = torch.ops._c10d_functional
Work = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]
"""Of x [4, 6, 8], w [8, 5] and bias [5], drawn on each rank."""


@dataclass(frozen=True)
class Case:
    """work: what is traced. expected: the operators that the pass puts in; or, of a place left alone, what the listing says."""

    name: str
    work: Work
    expected: tuple[str, ...] = ()
    reason: str = ""


def gather(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return funcol.all_gather_tensor(x, dim, dist.group.WORLD)


def scatter(x: torch.Tensor, dim: int = 0, op: str = "sum") -> torch.Tensor:
    return funcol.reduce_scatter_tensor(x, op, dim, dist.group.WORLD)


def reduced(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    return funcol.all_reduce(x, op, dist.group.WORLD)


def _group() -> str:
    return dist.group.WORLD.group_name


def _started(x: torch.Tensor) -> torch.Tensor:
    """A gather before its wait."""
    return c10d.all_gather_into_tensor(x, dist.get_world_size(), _group())


def sliced(x: torch.Tensor) -> torch.Tensor:
    """gather(x, 1) by slices."""
    parts = gather(x)
    return torch.cat([parts[i * x.shape[0] : (i + 1) * x.shape[0]] for i in range(dist.get_world_size())], 1)


def _several(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The second factor of the last is made after the gather: it has to come before."""
    whole_x = gather(x, 1)
    return whole_x @ w, torch.addmm(b, whole_x.view(-1, 8), w), whole_x @ (w * 2), whole_x.sum(-1)


def _backward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradient of a linear whose result was scattered: gathered, it is a first factor, and a second one transposed."""
    grad = gather(x, 1).reshape(-1, 8)
    return grad @ w, grad.t() @ (grad * 3), grad.sum(0)


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.addmm(b / dist.get_world_size(), x.reshape(-1, 8), w).view(4, 6, 5)


def _float8(x: torch.Tensor) -> torch.Tensor:
    """[.., 8] -> [.., 32], in FP8."""
    return torch.cat([x, x * 2, x / 4, -x], -1).to(torch.float8_e4m3fn)


def _columns8(w: torch.Tensor) -> torch.Tensor:
    """[8, 5] -> [32, 16], in FP8, its columns contiguous."""
    return _float8(torch.cat([w, w, w, w[:, :1]], 1).t().contiguous()).t()


def _tensorwise(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scale_a, scale_b = torch.full((), 0.5), torch.full((), 0.25)
    out = torch._scaled_mm(a.reshape(-1, a.shape[-1]), b, scale_a, scale_b, out_dtype=torch.float32, use_fast_accum=True)
    return out.view(*a.shape[:-1], b.shape[1])


def _row_scales(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True)


def _rowwise(a: torch.Tensor, scale_a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scale_b = torch.arange(1, 17, dtype=torch.float32)[None] / 8
    out = torch._scaled_mm(a.reshape(-1, a.shape[-1]), b, scale_a.reshape(-1, 1), scale_b, out_dtype=torch.bfloat16)
    return out.view(*a.shape[:-1], b.shape[1])


def _gather8(x: torch.Tensor, dim: int) -> torch.Tensor:
    """By bytes, as gloo has no FP8."""
    return gather(_float8(x).view(torch.uint8), dim).view(torch.float8_e4m3fn)


def _several8(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gathered elements are needed for another product, too, as for a weight's gradient."""
    whole_x = _gather8(x, 1)
    return _tensorwise(whole_x, _columns8(w)), _tensorwise(whole_x, _columns8(w * 2)), whole_x.float().sum(-1)


def _rowwise8(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    whole_x, scales = _gather8(x, 1), gather(_row_scales(x), 1)
    return _rowwise(whole_x, scales, _columns8(w)), _rowwise(whole_x, scales, _columns8(w * 2))


def _bias8(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    one, bias = x.new_ones(()), torch.ones(16, dtype=torch.bfloat16)
    return torch._scaled_mm(_float8(x[0]), _columns8(w), one, one, bias, out_dtype=torch.bfloat16)


def _mean_of_pairs(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0::2] + x[:, 1::2]


def _doubled(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The result of one reduction counts twice, that of the other once."""
    total = reduced(x @ w) + x[..., :5]
    return (total + total) + reduced((x * 2) @ w)


def _reduction_is_saved(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As a graph of a selective checkpoint that keeps reductions: what they return is a result before its wait."""
    both = [c10d.reduce_scatter_tensor(y, "sum", 2, _group()) for y in (x @ w, (x * 2) @ w)]
    return c10d.wait_tensor(both[0]) + c10d.wait_tensor(both[1]), *both


def _gather_is_saved(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    start = _started(x)
    return c10d.wait_tensor(start) @ w, start


def _waited_for_twice(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As torch since 2.14 leaves two gathers of one tensor: one, with two waits, and all that follows twice."""
    start, size = _started(x), dist.get_world_size()
    one, two = (torch.cat(c10d.wait_tensor(start).chunk(size), 1).bfloat16() for _ in range(2))
    return one @ w.bfloat16(), two.view(-1, 8) @ (w * 2).bfloat16()


def _saved_and_laid(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    start = _started(x)
    return torch.cat(c10d.wait_tensor(start).chunk(2), 1) @ w, start


def _saved_and_cast(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    start = _started(x)
    return c10d.wait_tensor(start).bfloat16() @ w.bfloat16(), start


def _viewed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What was gathered lies otherwise in memory afterwards, and is viewed by an operator that could not."""
    whole_x = gather(x, 1)
    return whole_x @ w, torch.ops.aten._unsafe_view(whole_x.sin(), [48, 8])


def _cast_behind_a_view(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Torch gathers along the first dimension and views, where the one before the second is one."""
    whole_x = gather(x[:1], 1).bfloat16()
    return whole_x @ w.bfloat16(), whole_x.mean(1), whole_x + 1


def _own_factor(whole_x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return whole_x @ (w * whole_x.sum())


def _both_kinds(whole_x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return whole_x.bfloat16() @ w.bfloat16() + whole_x[..., :5]


def _other(b: torch.Tensor) -> torch.Tensor:
    """Another one on each rank."""
    return b + dist.get_rank()


BIASES = [
    Case("a shared bias", lambda x, w, b: scatter(_linear(x, w, b), 1), ("matmul_reduce_scatter",)),
    Case("all-reduced with a bias", lambda x, w, b: reduced(_linear(x, w, b)), ("matmul_all_reduce",)),
    Case("another bias", lambda x, w, b: scatter(_linear(x, w, _other(b)), 1), ("matmul_reduce_scatter",)),
    Case("all-reduced with another", lambda x, w, b: reduced(_linear(x, w, _other(b))), ("matmul_all_reduce",)),
    Case(
        "another of fewer bits",
        lambda x, w, b: reduced(_linear(x.bfloat16(), w.bfloat16(), _other(b).bfloat16())),
        ("matmul_all_reduce",),
    ),
]
GATHERS = [
    Case("rows", lambda x, w, b: gather(x[0]) @ w, ("all_gather_matmul",)),
    Case("first of three dimensions", lambda x, w, b: gather(x) @ w, ("all_gather_matmul",)),
    Case("second of three dimensions", lambda x, w, b: gather(x, 1) @ w, ("all_gather_matmul",)),
    Case("second, where the first is one", lambda x, w, b: gather(x[:1], 1) @ w, ("all_gather_matmul",)),
    Case("slices", lambda x, w, b: sliced(x) @ w, ("all_gather_matmul",)),
    Case("a weight transposed", lambda x, w, b: gather(x[0]) @ w.t().contiguous().t(), ("all_gather_matmul",)),
    Case("several, and the gathered", _several, ("all_gather_matmul",)),
    Case("a backward", _backward, ("all_gather_matmul",)),
    Case("saved before its wait", _gather_is_saved, ("all_gather_matmul",)),
    Case("waited for twice", _waited_for_twice, ("all_gather_matmul",)),
    Case("viewed as it lay", _viewed, ("all_gather_matmul",)),
    Case("cast behind a view, and used", _cast_behind_a_view, ("all_gather_matmul",)),
    Case("FP8", lambda x, w, b: _tensorwise(_gather8(x[0], 0), _columns8(w)), ("all_gather_matmul",)),
    Case("FP8, the first of three", lambda x, w, b: _tensorwise(_gather8(x, 0), _columns8(w)), ("all_gather_matmul",)),
    Case("FP8, several, and the gathered", _several8, ("all_gather_matmul",)),
    Case("FP8 with a scale for each row", _rowwise8, ("all_gather_matmul",)),
    Case("cast to fewer bits", lambda x, w, b: gather(x, 1).bfloat16() @ w.bfloat16(), ("all_gather_matmul",)),
]
SCATTERS = [
    Case("rows scattered", lambda x, w, b: scatter(x[0] @ w), ("matmul_reduce_scatter",)),
    Case("first scattered", lambda x, w, b: scatter(x @ w), ("matmul_reduce_scatter",)),
    Case("second scattered", lambda x, w, b: scatter(x @ w, 1), ("matmul_reduce_scatter",)),
    Case("mean", lambda x, w, b: scatter(x @ w, 1, "avg"), ("matmul_reduce_scatter",)),
    Case("a sum", lambda x, w, b: scatter(x @ w + (x * 2) @ (w * 3), 1), ("matmul_reduce_scatter",)),
    Case("scattered and added", lambda x, w, b: scatter(x @ w, 1) + scatter((x * 2) @ w, 1), ("matmul_reduce_scatter",)),
    Case(
        "added to something first",
        lambda x, w, b: (b + 0 * scatter(x @ w, 1)) + scatter(x @ w, 1) + scatter((x * 2) @ w, 1),
        ("matmul_reduce_scatter", "matmul_reduce_scatter"),
    ),
    Case("all-reduced", lambda x, w, b: reduced(x @ w), ("matmul_all_reduce",)),
    Case("FP8 scattered", lambda x, w, b: scatter(_tensorwise(_float8(x), _columns8(w)), 1), ("matmul_reduce_scatter",)),
    Case(
        "FP8 scattered, with a scale for each row",
        lambda x, w, b: scatter(_rowwise(_float8(x), _row_scales(x), _columns8(w)), 1),
        ("matmul_reduce_scatter",),
    ),
    Case("FP8 all-reduced", lambda x, w, b: reduced(_tensorwise(_float8(x), _columns8(w))), ("matmul_all_reduce",)),
    Case(
        "FP8 reductions that stay two",
        lambda x, w, b: (lambda i, j: scatter(_tensorwise(i, j), 1) + scatter(_tensorwise(j.t(), j), 0)[:3])(
            _float8(x), _columns8(w)
        ),
        ("matmul_reduce_scatter", "matmul_reduce_scatter"),
    ),
    Case(
        "of what was reduced",
        lambda x, w, b: reduced(reduced(x[0] @ w) @ w.t()),
        ("matmul_all_reduce", "matmul_all_reduce"),
    ),
    Case(
        "by what was reduced",
        lambda x, w, b: scatter(x.view(-1, 8) @ scatter(w.repeat(2, 1) @ w.t())),
        ("matmul_reduce_scatter", "matmul_reduce_scatter"),
    ),
    Case("three added", lambda x, w, b: reduced(x @ w) + reduced(x @ (w + 1)) + reduced((x + 1) @ w), ("matmul_all_reduce",)),
    Case(
        "reductions that stay two: one has another use",
        lambda x, w, b: (lambda y: y.sin() + (y + scatter((x * 2) @ w, 1)))(scatter(x @ w, 1)),
        ("matmul_reduce_scatter", "matmul_reduce_scatter"),
    ),
    Case(
        "reductions that stay two: their sum has",
        lambda x, w, b: (lambda y: y.sin() + (y + scatter((x * 2) @ w, 1)))(scatter(x @ w, 1) + x[:, :3, :5]),
        ("matmul_reduce_scatter", "matmul_reduce_scatter"),
    ),
    Case(
        "reductions that stay two: of two dtypes",
        lambda x, w, b: scatter(x @ w, 1) + scatter(x.sign().bfloat16() @ w.sign().bfloat16(), 1),
        ("matmul_reduce_scatter", "matmul_reduce_scatter"),
    ),
    Case(
        "reductions that stay two: what is added between is wider",
        lambda x, w, b: (lambda i, j: scatter(i @ j, 1) + x[:, :3, :5] + scatter(-i @ j, 1))(x.sign().half(), w.sign().half()),
        ("matmul_reduce_scatter", "matmul_reduce_scatter"),
    ),
    Case("reductions that stay two: one is doubled", _doubled, ("matmul_all_reduce", "matmul_all_reduce")),
    Case(
        "reductions that stay two: they are saved before their waits",
        _reduction_is_saved,
        ("matmul_reduce_scatter", "matmul_reduce_scatter"),
    ),
    Case(
        "both",
        lambda x, w, b: scatter((gather(x, 1) @ w) @ w.t(), 1),
        ("all_gather_matmul", "matmul_reduce_scatter"),
    ),
]
ALONE = [
    Case("last gathered", lambda x, w, b: gather(x, 2) @ torch.cat([w, w]), reason="the last: weft overlaps a gather of rows"),
    Case("no matmul", lambda x, w, b: gather(x).sin(), reason=r"no matmul takes what is gathered \[8, 6, 8\]"),
    Case("the second factor", lambda x, w, b: x[0] @ gather(x[0, :4]), reason="no matmul takes what is gathered"),
    Case("a factor of its own", lambda x, w, b: _own_factor(gather(x[0]), w), reason="is computed from what is gathered"),
    Case("a batch", lambda x, w, b: torch.bmm(gather(x), w.expand(8, 8, 5)), reason="bmm multiplies a batch"),
    Case("cast to more bits", lambda x, w, b: gather(x.bfloat16()).float() @ w, reason="cast first, more bytes would travel"),
    Case("cast to integers", lambda x, w, b: gather(x).int() @ w.int(), reason="torch.int32 is multiplied; weft takes"),
    Case("saved, then laid anew", _saved_and_laid, reason="what is gathered is saved before it is laid anew"),
    Case("saved, then cast", _saved_and_cast, reason="what is gathered is saved before it is cast"),
    Case("a factor", lambda x, w, b: torch.addmm(b, gather(x[0]), w, alpha=3), reason="the matmul has a factor"),
    Case("a broadcast", lambda x, w, b: c10d.wait_tensor(c10d.broadcast(x, 0, _group())) @ w, reason="^broadcast: no operator"),
    Case("of both kinds", lambda x, w, b: _both_kinds(gather(x), w), reason="is needed as .*, too"),
    Case("float64", lambda x, w, b: gather(x.double()) @ w.double(), reason="weft takes bfloat16, float16, float32"),
    Case("last scattered", lambda x, w, b: scatter(x @ w[:, :4], 2), reason="scattered, the last"),
    Case("maximum", lambda x, w, b: reduced(x @ w, "max"), reason="the reduction is 'max'; weft supports sum"),
    Case("needed before", lambda x, w, b: (lambda y: scatter(y) + y[:2])(x @ w), reason="also used before it is reduced"),
    Case("cast to fewer bits after", lambda x, w, b: scatter((x @ w).bfloat16()), reason="is cast to torch.bfloat16 before"),
    Case(
        "cast to more bits after",
        lambda x, w, b: scatter((x.bfloat16() @ w.bfloat16()).float()),
        reason="is cast to torch.float32 before",
    ),
    Case("gathered for another graph", lambda x, w, b: gather(x), reason="goes to another graph .* behind a graph break"),
    Case("made in another graph", lambda x, w, b: scatter(x), reason="was made in another graph .* behind a graph break"),
    Case("nothing multiplied", lambda x, w, b: scatter(x.sin()), reason="is made by aten.sin"),
    Case("something added", lambda x, w, b: scatter(x @ w + x[..., :5]), reason="instead of a matmul"),
    Case("a bias of its own", lambda x, w, b: scatter(torch.addmm(b, x[0], w)), reason="adds its own bias"),
    Case(
        "one bias for all columns",
        lambda x, w, b: reduced(_linear(x, w, b[:1])),
        reason="adds a bias of shape .1. to 5 columns",
    ),
    Case("FP8 and a bias", lambda x, w, b: scatter(_bias8(x, w)), reason="adds its own bias"),
    Case(
        "FP8 with scales that are not gathered",
        lambda x, w, b: _rowwise(_gather8(x, 0), torch.ones(48), _columns8(w)),
        reason="the scales of rows are not gathered",
    ),
    Case("bytes", lambda x, w, b: gather(_float8(x).view(torch.uint8)), reason="goes to another graph"),
    Case("pairs", lambda x, w, b: scatter(_mean_of_pairs(x @ w)), reason="instead of a matmul"),
]


def check(case: Case, *, reduces: int = 0) -> None:
    """Trace, rewrite, run: the same numbers, by the operators that are expected, and no collective beside them, but for so many
    all-reduces."""
    rank = dist.get_rank()
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(rank))
    w, b = whole(8, 5, 8, torch.float32, 7 + rank)[1], torch.randn(5, generator=torch.Generator().manual_seed(3))
    wanted = case.work(x, w, b)
    traced = make_fx(case.work, tracing_mode="fake")(x, w, b)
    overlap = CompilePass()
    overlap(traced.graph)
    traced.recompile()
    got = traced(x, w, b)
    operators = tuple(op for layer in overlap.layers for op in layer.operators)
    assert operators == case.expected, (case.name, overlap.report())
    if case.expected:
        left = [str(node.target).split(".")[1] for node in traced.graph.nodes if "_c10d_functional" in str(node.target)]
        assert left == ["all_reduce", "wait_tensor"] * reduces, (case.name, traced.code)
    for one, other in zip(_listed(got), _listed(wanted), strict=True):
        assert one.dtype == other.dtype
        # Parts of ranks are rounded before they are added: the error is one of the largest, not of a sum in which they cancel.
        rounding = torch.finfo(torch.bfloat16).eps * max(float(other.abs().max()), 2.0)
        tolerance = {"rtol": 2e-2, "atol": rounding} if other.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(one, other, **tolerance)


def reasons(case: Case) -> list[str]:
    """Why the pass leaves this alone; on the way the graph must stay as it is."""
    check(case)
    x, w, b = torch.ones(4, 6, 8), torch.ones(8, 5), torch.ones(5)
    overlap = CompilePass()
    overlap(make_fx(case.work, tracing_mode="fake")(x, w, b).graph)
    return [layer.reason for layer in overlap.layers]


def _listed(found: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """All of them, waited for."""
    return tuple(c10d.wait_tensor(one) for one in (found if isinstance(found, tuple) else (found,)))


def eager(overlap: CompilePass) -> Callable[..., Any]:
    """A backend of torch.compile that runs the rewritten graphs operator by operator: Inductor would have kernels compiled."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compile_graph(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        overlap(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compile_graph, partition_fn=min_cut_rematerialization_partition)
