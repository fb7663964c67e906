"""Reads aten._scaled_mm, a product of FP8 factors with scales, from a graph, and writes it as weft's operators.

    scale of the first factor     of the second     recipe
    one element                   one element       tensorwise
    [rows, 1]                     [1, columns]      rowwise

Rowwise scales are gathered with their rows. A tensorwise scale is on every rank already: it is multiplied into the columns'
scales, and the rows have scales of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from weft.core.problem import FLOAT8_UNIT, Recipe
from weft.models.inductor.graph import Refused, Writer, aten, get_argument, get_shape, get_value
from weft.ops.common import DTYPES, FLOAT8

SCALED = aten._scaled_mm.default


@dataclass(frozen=True)
class ProductScales:
    """The scales of a product's factors, as nodes. output_dtype and use_fast_accum are the arguments of _scaled_mm."""

    a: Node
    b: Node
    recipe: Recipe
    output_dtype: torch.dtype
    use_fast_accum: bool

    def like(self, other: ProductScales) -> bool:
        """Return whether one call of weft's operator can compute both products, judging by their scales only."""
        mine = self.recipe, self.output_dtype, self.use_fast_accum
        return mine == (other.recipe, other.output_dtype, other.use_fast_accum)


def scales_of(product: Node) -> ProductScales | None:
    """Return the scales of an aten._scaled_mm, or None for another product. Raises Refused for unsupported options."""
    if product.target is not SCALED:
        return None
    a, b, scale_a, scale_b = (get_argument(product, at, name) for at, name in enumerate(("self", "mat2", "scale_a", "scale_b")))
    if get_argument(product, 5, "scale_result") is not None:
        raise Refused("the matmul has a scale for its result")
    if {get_value(a).dtype, get_value(b).dtype} - FLOAT8.keys() or get_value(product).dtype not in DTYPES:
        dtypes = f"{get_value(a).dtype} and {get_value(b).dtype} to {get_value(product).dtype}"
        raise Refused(
            f"the matmul is of {dtypes}; weft multiplies {', '.join(FLOAT8.values())} to {', '.join(DTYPES.values())}"
        )
    (k, n), stride = get_shape(b), get_value(b).stride()
    if k % FLOAT8_UNIT or n % FLOAT8_UNIT or stride[0] != 1:
        raise Refused(
            f"the second factor {[k, n]} has strides {list(stride)}; FP8 needs columns in one piece, and multiples of 16"
        )
    sizes = get_value(scale_a).numel(), get_value(scale_b).numel()
    if sizes == (1, 1):
        recipe: Recipe = "tensorwise"
    elif (get_shape(scale_a), get_shape(scale_b)) == ([get_shape(a)[0], 1], [1, n]):
        recipe = "rowwise"
    else:
        raise Refused(
            f"the scales are {get_shape(scale_a)} and {get_shape(scale_b)}; weft overlaps tensorwise and rowwise ones"
        )
    return ProductScales(
        scale_a, scale_b, recipe, get_value(product).dtype, bool(get_argument(product, 7, "use_fast_accum", False))
    )


def bias_of(product: Node) -> Node | None:
    """Return the bias of an aten._scaled_mm, or None."""
    found = get_argument(product, 4, "bias")
    return found if isinstance(found, Node) else None


def write_gather_scales(
    write: Writer, rows: Node, bs: Sequence[Node], scale_rows: Node | None, scales: Sequence[ProductScales]
) -> tuple[object, ...]:
    """Write the scales of an all_gather_matmul of this rank's rows [m, K], and return its last arguments.

    scale_rows: [m, 1], or None for tensorwise scales.
    """
    columns = []
    for b, one in zip(bs, scales, strict=True):
        if scale_rows is not None:
            columns.append(one.b)
            continue
        both = write(aten.mul.Tensor, write.reshape(one.a, [1, 1]), write.reshape(one.b, [1, 1]))
        columns.append(write(aten.expand.default, both, [1, get_shape(b)[1]]))
    if scale_rows is None:
        scale_rows = write(aten.new_ones.default, scales[0].a, [get_shape(rows)[0], 1])
    return scale_rows, columns, "rowwise", scales[0].output_dtype, scales[0].use_fast_accum


def write_reduction_scales(write: Writer, scale_a: Node, scales: ProductScales) -> tuple[object, ...]:
    """Write the scales of a matmul_reduce_scatter or matmul_all_reduce, and return its last arguments.

    scale_a: the scales in the order of a's rows.
    """
    scale_b = scales.b
    if scales.recipe == "tensorwise":
        scale_a, scale_b = write.reshape(scale_a, [1, 1]), write.reshape(scale_b, [1, 1])
    return scale_a, [scale_b], scales.recipe, scales.output_dtype, scales.use_fast_accum
