"""This module checks FP8 operands and their scales, and defines the torch.library operator that all operators use for FP8.

    weft::scaled_matmul(a [m, k], bs [k, n]..., scale_a, scale_bs, bias?, residual?, op, ...)  -> [out, ..., gathered, scales]

op names the public operator. The scales are matrices of the shapes that weft.core.problem.Scaling names. There is no backward,
so tensors that require a gradient are refused. weft.models.float8 has layers that quantise in the forward and in the backward
(docs/fp8.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Required, TypedDict, cast

import torch
import torch.distributed as dist

from weft.compat.device import capabilities
from weft.core.errors import warn_once
from weft.core.problem import FLOAT8_UNIT, GATHERS, RECIPES, ROWWISE_OPS, SCALE_BLOCK, Op, Recipe, Scaling, split
from weft.ops.common import DTYPES, FLOAT8, RowsOf, as_matrix, check_addend
from weft.ops.front import OperatorRequest
from weft.ops.operator import define
from weft.ops.schema import SymInt
from weft.runtime.calls import MatmulCall, ScaledOperands, matmul_call
from weft.runtime.products import quantise

QUANTISED = torch.float8_e4m3fn
"""The dtype to which an a of 16 or 32 bits is quantised."""
_RECIPES: dict[str, dict[Literal["a", "b"], Recipe]] = {
    "TensorWise": {"a": "tensorwise", "b": "tensorwise"},
    "RowWise": {"a": "rowwise", "b": "rowwise"},
    "BlockWise1x128": {"a": "blockwise"},
    "BlockWise128x128": {"b": "blockwise"},
}
"""The recipe of each operand, by the name of a torch.nn.functional.ScalingType."""


class ScaleOptions(TypedDict, total=False):
    """ScaleOptions are the arguments for FP8 operands, named as in torch.nn.functional.scaled_mm."""

    scale_a: torch.Tensor
    scale_recipe_a: Any
    scale_b: torch.Tensor | Sequence[torch.Tensor]
    scale_recipe_b: Any
    output_dtype: torch.dtype
    use_fast_accum: bool


class ScaleAndBias(ScaleOptions, total=False):
    """ScaleAndBias adds the bias of operators that take one only with FP8 operands."""

    bias: torch.Tensor


class ScalesAndBias(ScaleAndBias):
    """ScalesAndBias are the arguments of a call that has FP8 operands, so that scale_b is required."""

    scale_b: Required[torch.Tensor | Sequence[torch.Tensor]]  # type: ignore[misc]


class Quantised(NamedTuple):
    """Quantised holds the checked scales and options of FP8 operands.

    scale_a: the shape of a except for its last dimension. None for an a that has yet to be quantised.
    scale_bs: a matrix for each b, or one for each of its experts.
    bias: [N], or None.
    """

    scale_a: torch.Tensor | None
    scale_bs: list[torch.Tensor]
    recipe: Recipe
    output_dtype: torch.dtype
    use_fast_accum: bool
    bias: torch.Tensor | None


def quantised(op: Op, a: torch.Tensor, bs: Sequence[torch.Tensor], given: ScaleAndBias | ScaleOptions) -> Quantised:
    """Check the arguments for FP8 operands, and return them. a and b must have passed check_operands.

    Raises ValueError for arguments that do not fit a and b, and TypeError for an argument that no operator has.
    """
    refuse_unknown(op, given)
    for name in given:
        if bs[0].dtype not in FLOAT8:
            raise ValueError(f"{name} is for FP8 operands, and a is {a.dtype}; leave it out")
    refuse_gradients(a=a, scale_a=given.get("scale_a"))
    scale_a, several, bias = given.get("scale_a"), given.get("scale_b"), cast("ScaleAndBias", given).get("bias")
    scales: list[Any] = list(several) if isinstance(several, (list, tuple)) else [several]
    if any(scale is None for scale in scales) or (scale_a is None) == (a.dtype in FLOAT8):
        needs = "scale_a and scale_b, float32 tensors" if a.dtype in FLOAT8 else "scale_b alone: a has none yet"
        raise ValueError(f"a is {a.dtype} and b {bs[0].dtype}; FP8 operands come with {needs}")
    if len(scales) != len(bs):
        raise ValueError(f"scale_b has {len(scales)} tensors for {len(bs)} b; pass one for each")
    fits = [_given_recipe(given.get("scale_recipe_a"))] if scale_a is None else []
    fits += [] if scale_a is None else [_recipes("a", a, scale_a, given.get("scale_recipe_a"))]
    fits += [_recipes("b", b, scale, given.get("scale_recipe_b")) for b, scale in zip(bs, scales, strict=True)]
    recipe = next((recipe for recipe in RECIPES if all(recipe in some for some in fits)), None)
    if recipe is None:
        raise ValueError(f"scale_a is {fits[0][0]} and scale_b {fits[-1][0]}; both operands must have the same recipe")
    for number, b in enumerate(bs):
        _check_layout(f"b[{number}]" if len(bs) > 1 else "b", b, recipe)
    output_dtype = given.get("output_dtype") or (torch.bfloat16 if a.dtype in FLOAT8 else a.dtype)
    if output_dtype not in DTYPES:
        raise ValueError(f"output_dtype is {output_dtype}; weft writes {', '.join(DTYPES.values())}")
    if scale_a is None and output_dtype != a.dtype:
        raise ValueError(f"output_dtype is {output_dtype}; for an a that is quantised it must be a's, {a.dtype}")
    if bias is not None and len(bs) > 1:
        raise ValueError("bias is given with several b; add it to their results, or pass one b")
    if bias is not None:
        check_addend("bias", bias, (bs[0].shape[1],), output_dtype, bs[0].device)
    if recipe == "tensorwise":
        scale_a = None if scale_a is None else scale_a.reshape(1, 1)
        scales = [scale.reshape(-1, 1, 1) if scale.dim() == 3 else scale.reshape(1, 1) for scale in scales]
        if op in ROWWISE_OPS or scale_a is None:
            # Each row is sent with its scale, because tensorwise scales of two ranks may differ.
            recipe, scale_a = "rowwise", None if scale_a is None else scale_a.expand(*a.shape[:-1], 1)
            scales = [scale.expand(*b.shape[:-2], 1, b.shape[-1]) for scale, b in zip(scales, bs, strict=True)]
    return Quantised(scale_a, scales, recipe, output_dtype, given.get("use_fast_accum", False), bias)


def refuse_unknown(op: Op, given: ScaleAndBias | ScaleOptions) -> None:
    """Raise TypeError for an argument that no operator has."""
    for name in given:
        if name not in ScaleAndBias.__annotations__:
            raise TypeError(f"{op.removeprefix('ragged_')}() got an unexpected keyword argument {name!r}")


def refuse_gradients(**tensors: Any) -> None:
    """Raise ValueError for a tensor that requires a gradient, which FP8 operators do not compute."""
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, and operators with FP8 operands have none; call them under torch.no_grad(), or "
                "train with torchao's Float8Linear under weft's styles"
            )


def refuse_several(factors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError for several products that are to be added up."""
    if len(factors) > 1:
        raise ValueError(f"a is {len(factors)} tensors; with FP8 operands pass one a and one b")


def refuse_scales(given: ScaleAndBias, option: str) -> None:
    """Raise a ValueError, because scales are passed with an option that does not support FP8 operands."""
    raise ValueError(f"{', '.join(given)} is given with {option}, which does not support FP8 operands; omit one of them")


def _recipes(operand: Literal["a", "b"], matrix: torch.Tensor, scale: Any, named: Any) -> list[Recipe]:
    """Return the recipes that a scale's shape fits. One element fits several. named: the caller's recipe, or None."""
    name = f"scale_{operand}"
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32 or scale.device != matrix.device:
        what = f"{scale.dtype} on {scale.device}" if isinstance(scale, torch.Tensor) else f"a {type(scale).__name__}"
        raise ValueError(f"{name} is {what}; it must be a float32 tensor on {matrix.device}")
    wanted = None if named is None else _RECIPES.get(getattr(named, "name", str(named)), {}).get(operand)
    if named is not None and wanted is None:
        known = ", ".join(one for one, of in _RECIPES.items() if operand in of)
        raise ValueError(f"scale_recipe_{operand} is {getattr(named, 'name', named)}; weft has {known}")
    shapes = {recipe: _shape(operand, matrix, recipe) for recipe in ("rowwise", "blockwise")}
    by_expert = operand == "b" and list(scale.shape) == [*matrix.shape[:-2], 1, 1]
    fits: list[Any] = ["tensorwise"] if scale.numel() == 1 or by_expert else []
    fits += [recipe for recipe, shape in shapes.items() if list(scale.shape) == shape]
    if wanted is not None:
        fits = [recipe for recipe in fits if recipe == wanted]
    if not fits:
        asked = "" if wanted is None else f" and its recipe {wanted}"
        use = f"[1] tensorwise, {shapes['rowwise']} rowwise or {shapes['blockwise']} blockwise"
        raise ValueError(f"{name} is {list(scale.shape)}{asked}; for {operand} of {list(matrix.shape)} use {use}")
    return fits


def _given_recipe(named: Any) -> list[Recipe]:
    """Return the recipes by which a may be quantised: the caller's recipe, or all if it is None."""
    if named is None:
        return list(RECIPES)
    found = _RECIPES.get(getattr(named, "name", str(named)), {}).get("a")
    if found not in ("rowwise", "blockwise"):
        raise ValueError(f"scale_recipe_a is {getattr(named, 'name', named)}; a is quantised by RowWise or BlockWise1x128")
    return [found]


def _shape(operand: Literal["a", "b"], matrix: torch.Tensor, recipe: Any) -> list[int]:
    """Return the shape of an operand's scales, with its leading dimensions."""
    high, wide = Scaling(recipe=recipe).scales_shape(operand, matrix.shape[-2], matrix.shape[-1])
    return [*matrix.shape[:-1], wide] if operand == "a" else [*matrix.shape[:-2], high, wide]


def _check_layout(name: str, b: torch.Tensor, recipe: Recipe) -> None:
    """Raise ValueError unless torch's scaled matmul takes b. The rules are the same on every kind of device."""
    unit, (k, n) = SCALE_BLOCK if recipe == "blockwise" else FLOAT8_UNIT, b.shape[-2:]
    if k % unit or not k:
        raise ValueError(f"K is {k}; {recipe} FP8 operands need a multiple of {unit}: pad a and b with zeros")
    if n % FLOAT8_UNIT:
        raise ValueError(f"{name} has {n} columns; FP8 operands need a multiple of {FLOAT8_UNIT}: pad it with zeros")
    if b.stride(-2) != 1 and b.numel():
        raise ValueError(
            f"{name} is row-major; the columns of an FP8 b must be contiguous: pass weight.mT of a contiguous weight"
        )


class _Scaled(NamedTuple):
    """_Scaled holds the options of weft::scaled_matmul.

    rows: the rows of the whole flat M, or of a for an all-to-all.
    unit: the number of flat rows that stay together.
    """

    op: str
    group: str
    rank: int
    world_size: int
    rows: SymInt
    unit: SymInt
    schedule: str
    return_gathered: bool
    reduce_op: str
    recipe: str
    output_dtype: torch.dtype
    use_fast_accum: bool


def _run(
    a: torch.Tensor,
    bs: list[torch.Tensor],
    scale_a: torch.Tensor | None,
    scale_bs: list[torch.Tensor],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: _Scaled,
) -> MatmulCall:
    op: Any = options.op
    names: Any = FLOAT8.get(a.dtype, FLOAT8[QUANTISED]), FLOAT8[bs[0].dtype], options.recipe
    scaling = Scaling(a=names[0], b=names[1], recipe=names[2], use_fast_accum=options.use_fast_accum, quantises=scale_a is None)
    extras = {} if bias is None else {"bias": bias[None]}
    extras |= {} if residual is None else {"residual": residual}
    return matmul_call(
        op,
        a,
        bs,
        options.group,
        options.schedule,
        rows=options.rows,
        unit=options.unit,
        return_gathered=options.return_gathered,
        reduce_op=options.reduce_op,
        extras=extras,
        scales=ScaledOperands(scale_a, scale_bs, scaling, options.output_dtype),
    )


def _fake(
    a: torch.Tensor,
    bs: list[torch.Tensor],
    scale_a: torch.Tensor | None,
    scale_bs: list[torch.Tensor],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: _Scaled,
) -> list[torch.Tensor]:
    low, high = split(options.rows // options.unit, options.world_size)[options.rank]
    own = (high - low) * options.unit
    rows = {
        "all_gather_matmul": options.rows,
        "matmul_all_reduce": options.rows,
        "matmul_reduce_scatter": own,
    }.get(options.op, own * options.world_size)
    outs = [a.new_empty(rows, b.shape[1], dtype=options.output_dtype) for b in bs]
    width = 1 if options.recipe == "rowwise" else a.shape[1] // SCALE_BLOCK
    elements = a.dtype if a.dtype in FLOAT8 else QUANTISED
    gathered = [a.new_empty(rows, a.shape[1], dtype=elements), a.new_empty(rows, width, dtype=torch.float32)]
    return outs + gathered * options.return_gathered


def _converts_nowhere(a: torch.Tensor) -> bool:
    """Return whether a is on a GPU that has no conversion to FP8."""
    if not a.is_cuda or capabilities(a.device).tma:
        return False
    warn_once(f"{a.device} cannot convert to FP8 in kernels that send rows, so rows are quantised before they are sent")
    return True


def quantised_here(a: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix on this rank before it is multiplied or sent. Return its elements and scales."""
    scaling = Scaling(recipe=recipe)
    elements = torch.empty_like(a, dtype=QUANTISED, memory_format=torch.contiguous_format)
    scales = a.new_empty(scaling.scales_shape("a", *a.shape), dtype=torch.float32)
    quantise(a, elements, scales, scaling)
    return elements, scales


_scaled_matmul = define("scaled_matmul", _run, _fake, returns=list[torch.Tensor])


def _first(results: Sequence[torch.Tensor]) -> torch.Tensor:
    return results[0]


def scaled_matmul(
    op: Op,
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    of: Quantised,
    group: tuple[dist.ProcessGroup | None, str, int, int],
    schedule: str,
    *,
    dim: int = 0,
    view: RowsOf | None = None,
    rows: int | None = None,
    unit: int = 1,
    return_gathered: bool = False,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    after: Callable[[Sequence[torch.Tensor]], Any] = _first,
) -> Any:
    """Return the OperatorRequest of an operator with FP8 operands, or its result if of.bias has to be added to it.

    Its results are the products, then the gathered rows and their scales if these were requested.

    a: any number of dimensions, whose scales are of.scale_a.
    group: its process group, name, this rank, and world_size.
    after: returns what the public function returns, given the results.
    dim: the dimension of a that is the outermost one of the matrix of its rows.
    view: how results are restored to the caller's shape. None if they are matrices.
    rows, unit: as MatmulCall's rows and row_multiple. By default the rows are those of a.
    """
    a, scale_a = as_matrix(a.movedim(dim, 0)), of.scale_a
    if scale_a is None and (op not in GATHERS or _converts_nowhere(a)):
        a, scale_a = quantised_here(a, of.recipe)
    elif scale_a is not None and scale_a.dim() > 2:
        scale_a = as_matrix(scale_a.movedim(dim, 0))
    rows, how = a.shape[0] if rows is None else rows, (of.recipe, of.output_dtype, of.use_fast_accum)
    of_group, name, rank, world_size = group
    options = _Scaled(op, name, rank, world_size, rows, unit, schedule, return_gathered, reduce_op, *how)
    tensors = (a, list(bs), scale_a, of.scale_bs, bias, residual)
    request = OperatorRequest(_scaled_matmul, tensors, options, of_group, (), view)
    if of.bias is None:
        return request._replace(after=after)
    out, *others = request.run()
    return after([out + of.bias, *others])
