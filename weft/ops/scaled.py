"""This module checks FP8 operands and their scales, and passes them to the operators.

An operator of torch.library that takes FP8 operands has scales as its last arguments (weft.ops.schema.SCALES). They are
matrices of the shapes that weft.core.problem.Scaling names. There is no backward, so tensors that require a gradient are
refused. weft.models.float8 has layers that quantise in the forward and in the backward (docs/fp8.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Required, TypedDict, cast

import torch

from weft.compat.device import capabilities
from weft.core.errors import warn_once
from weft.core.problem import FLOAT8_UNIT, GATHERS, RECIPES, ROWWISE_OPS, SCALE_BLOCK, Op, Recipe, Scaling
from weft.ops.common import DTYPES, FLOAT8, QUANTISED, check_addend
from weft.ops.front import OperatorRequest
from weft.runtime.calls import ScaledOperands
from weft.runtime.products import quantise

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
    fits: list[list[Recipe]] = []
    if scale_a is None:  # a may be quantised by the caller's recipe, or by any
        named = given.get("scale_recipe_a")
        fits = [list(RECIPES) if named is None else [recipe_of_rows("a", named)]]
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


def recipe_of_rows(operand: str, named: Any) -> Literal["rowwise", "blockwise"]:
    """Return the caller's recipe by which rows are quantised. Raises ValueError for another one."""
    found = _RECIPES.get(getattr(named, "name", str(named)), {}).get("a")
    if found != "rowwise" and found != "blockwise":
        what = f"scale_recipe_{operand} is {getattr(named, 'name', named)}"
        raise ValueError(f"{what}; {operand} is quantised by RowWise or BlockWise1x128")
    return found


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


def with_scales(op: Op, request: OperatorRequest, of: Quantised) -> Any:
    """Return the request with FP8 operands, or its result if of.bias has to be added to it.

    request: as it is without scales. Its first tensor is a, or a list of one a, and its second one b or a list of these.
    """
    (first, b, *addends), (read, *reads), scale_a = request.tensors, request.reads, of.scale_a
    a = first if isinstance(first, torch.Tensor) else first[0]
    a = a if read is None else read.read(a)
    if scale_a is None and (op not in GATHERS or _converts_nowhere(a)):
        a, scale_a = quantised_here(a, of.recipe)
    elif scale_a is not None and read is not None and of.recipe != "tensorwise":
        scale_a = read.read(scale_a)
    request = request._replace(
        tensors=(a if isinstance(first, torch.Tensor) else [a], b, *addends, scale_a, of.scale_bs),
        options=(*request.options, of.recipe, of.output_dtype, of.use_fast_accum),
        reads=(None, *reads, None, None),
    )
    if of.bias is None:
        return request
    results = request._replace(after=None).run()
    if request.after is None:
        return results + of.bias
    return request.after([results[0] + of.bias, *results[1:]])


def new_product(a: torch.Tensor, rows: int, columns: int, scales: ScaledOperands | None) -> torch.Tensor:
    """Return an empty product of a."""
    return a.new_empty(rows, columns, dtype=None if scales is None else scales.output_dtype)


def new_gathered(a: torch.Tensor, rows: int, scales: ScaledOperands | None) -> list[torch.Tensor]:
    """Return empty rows of a, and their scales if they are FP8."""
    if scales is None:
        return [a.new_empty(rows, a.shape[1])]
    _, width = scales.scaling.scales_shape("a", *a.shape)
    elements = a.dtype if a.dtype in FLOAT8 else QUANTISED
    return [a.new_empty(rows, a.shape[1], dtype=elements), a.new_empty(rows, width, dtype=torch.float32)]
