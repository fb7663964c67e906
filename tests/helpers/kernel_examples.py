"""Every kernel of weft as it is launched on a GPU, for compilers: types, constants and options, with everything turned on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product as pairs_of
from typing import Any, Literal

import torch
import triton.language as tl

from weft.core.experts import FARTHEST, REFUSED
from weft.core.hardware import Capabilities
from weft.core.problem import SCALE_BLOCK, Op, Problem, Scaling, split
from weft.kernels import (
    all_reduce,
    exchange,
    experts,
    flag_operations,
    gemm,
    gemm_kernel,
    lookup,
    norm,
    push,
    quantise,
    ragged,
    ragged_rows,
    scaled,
    segments,
    sums,
)
from weft.kernels import update as update_kernels
from weft.perf.shapes import TileShape, promotes, shapes_for

SCALINGS = (
    Scaling(recipe="tensorwise", use_fast_accum=True),
    Scaling(recipe="rowwise", a="float8_e5m2"),
    Scaling(recipe="blockwise", b="float8_e5m2"),
)
_FLOAT8: dict[str, str] = {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
_SCALES = scaled.Scales(**{name: "*fp32" if name in ("a0", "a1", "b") else "i32" for name in scaled.Scales._fields})
_NUMBERS, _ADDRESSES = "*i32", "*i64"
_FLOAT8 = {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
_SCALES = scaled.Scales(**{name: "*fp32" if name in ("a0", "a1", "b") else "i32" for name in scaled.Scales._fields})
Types = dict[str, str | tuple[str | None, ...]]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One launch of a kernel. words: what distinguishes it from others of the kernel. types, multiples: as for
    compiled.for_a_gpu."""

    kernel: Any
    words: str = ""
    constants: Mapping[str, Any]
    types: Mapping[str, str | tuple[str | None, ...]] = field(default_factory=dict)
    multiples: tuple[str, ...] = ()
    warps: int
    stages: int | None = None


def examples(module: str, gpu: Capabilities) -> Iterator[Example]:
    """Launches of the kernels of a module of weft.kernels, as on this GPU, which torch must report meanwhile."""
    yield from {
        "gemm_kernel": _gemms,
        "all_reduce": _all_reduces,
        "ragged": _ragged,
        "ragged_rows": _rows,
        "segments": _layout,
        "experts": _experts,
        "lookup": _lookup,
        "update": _update,
        "push": _push,
        "quantise": _quantise,
        "sums": _sums,
        "norm": _norms,
        "flag_operations": _flag_operations,
    }[module](gpu)


_ADDED_DESCRIPTORS = ("added_a_desc", "added_b_desc", "added_b_half_desc")


def gemm_example(
    blocks: TileShape, gpu: Capabilities, *, out_tma: bool = True, inner: bool = False, added: bool = False
) -> Example:
    """Tiles that wait, add, count, and go to peers. out_tma: results can be stored by descriptors. added: two products are
    added up."""
    variant = gemm_kernel.Variant(
        BLOCK_M=blocks.m,
        BLOCK_N=blocks.n,
        BLOCK_K=blocks.k,
        GROUP=blocks.group,
        TWO_SOURCES=not added,
        B_TRANSPOSED=False,
        GATED=True,
        INNER=inner,
        ADDED=added,
        COUNTED=True,
        ADDRESSED=True,
        OUT_TMA=out_tma,
        ASYNCHRONOUS=gpu.tma,
        ALIGN_BYTES=16,
        ADDS=True,
        ADD_STAGES=gemm._add_stages(blocks, out_tma, gpu),
        DIVIDE_BY=4,
        HALVES=blocks.halves,
    )
    return gemm_variant(blocks, variant)


def scaled_example(
    blocks: TileShape, gpu: Capabilities, scaling: Scaling, *, out_tma: bool = True, inner: bool = False, plain: bool = False
) -> Example:
    """The same for FP8 operands with scales of any strides. plain: tiles only multiply, and are stored in `out`."""
    promoted = promotes(gpu, scaling)
    variant = gemm_example(blocks, gpu, out_tma=out_tma, inner=inner).constants["V"]
    variant = variant._replace(
        B_TRANSPOSED=True, RECIPE=scaling.recipe, PROMOTED=promoted, PAIRS=promoted and blocks.pairs, DIVIDE_BY=1
    )
    if plain:
        less = dict.fromkeys(("GATED", "COUNTED", "ADDRESSED", "ADDS", "TWO_SOURCES", "HALVES"), False)
        variant = variant._replace(**less)
    one = gemm_variant(blocks, variant, _FLOAT8[scaling.a], _FLOAT8[scaling.b])
    constants = {name: value for name, value in one.constants.items() if name != "scales"}
    return dataclasses.replace(
        one, constants=constants, types={**one.types, "scales": _SCALES}, words=f"{one.words}, {scaling}{', plain' * plain}"
    )


def gemm_variant(blocks: TileShape, variant: gemm_kernel.Variant, a: str = "bf16", b: str = "bf16") -> Example:
    """A variant of the GEMM kernel, with blocks of this shape. a, b: their element types; that of the result is bfloat16."""
    half = blocks.n // 2 if blocks.halves else blocks.n
    types: Types = dict.fromkeys(("a0_desc", "a1_desc"), _tile(blocks.m, blocks.k, of=a))
    if variant.ADDED:
        types["added_a_desc"] = types["a0_desc"]
    for name, width in (("", blocks.n), ("_half", half)):
        shape = (width, blocks.k) if variant.B_TRANSPOSED else (blocks.k, width)
        types[f"b{name}_desc"] = _tile(*shape, of=b)
        if variant.ADDED:
            types[f"added_b{name}_desc"] = types[f"b{name}_desc"]
        types[f"adds{name}_desc"] = _tile(blocks.m, width)
        stored = _tile(*([1] * variant.ADDRESSED), blocks.m, width) if variant.OUT_TMA else "*bf16"
        types |= {f"out{name}_desc": stored, f"scattered{name}_desc": stored if variant.ADDRESSED else "*bf16"}
    types["tables"] = gemm_kernel.Pointers(
        adds=_NUMBERS,
        rows=_NUMBERS,
        slices=_NUMBERS,
        outs=_ADDRESSES,
        gates=_ADDRESSES,
        needs=_NUMBERS,
        counts=_ADDRESSES,
        status=_NUMBERS,
    )
    return Example(
        kernel=gemm_kernel.gemm_kernel,
        words=f"{blocks.m} x {blocks.n}{', slices of K' * variant.INNER}{', two products' * variant.ADDED}",
        constants={"V": variant, "scales": None} | ({} if variant.ADDED else dict.fromkeys(_ADDED_DESCRIPTORS)),
        types=types | {"out_ptr": "*bf16"},
        multiples=("N", "K", "added_K", "out_stride"),
        warps=blocks.warps,
        stages=blocks.stages,
    )


def _tile(*shape: int, of: str = "bf16") -> str:
    return f"tensordesc<{of}{list(shape)}>"


def _gemms(gpu: Capabilities) -> Iterator[Example]:
    shapes = shapes_for(gpu)
    yield gemm_example(shapes[0], gpu)
    yield gemm_example(shapes[-1], gpu, inner=True)
    yield gemm_example(shapes[0], gpu, added=True)
    for scaling in SCALINGS:
        for blocks in shapes_for(gpu, scaling):
            yield scaled_example(blocks, gpu, scaling)
            yield scaled_example(blocks, gpu, scaling, inner=True, plain=True)


def _all_reduces(gpu: Capabilities) -> Iterator[Example]:
    hops: tuple[Literal["one", "two", "scatter"], ...] = ("one", "two", "scatter")
    for way, rows, multiply in zip(hops, (16, 128, 512), (True, True, False), strict=True):
        op: Op = "matmul_reduce_scatter" if way == "scatter" else "matmul_all_reduce"
        problem = Problem(op=op, m=rows, n=8192, k=4 * 3584, world_size=4)
        owned = problem.shards if way == "scatter" else split(8192, 4)
        for scaling in (None, *(SCALINGS if gpu.tma and multiply else ())):
            layout = all_reduce.plan(
                dataclasses.replace(problem, scaling=scaling),
                0,
                owned,
                hops=way,
                multiply=multiply,
                device=torch.device("cuda"),
                sms=gpu.sms,
            )
            yield all_reduce_example(layout, gpu)
            if way == "one" and scaling is None:
                normed = dataclasses.replace(problem, norm_eps=1e-6)
                yield all_reduce_example(dataclasses.replace(layout, problem=normed, norm=True), gpu)


def all_reduce_example(layout: all_reduce.AllReducePlan, gpu: Capabilities) -> Example:
    """The kernel that exchanges, by a plan of its, without addends; of FP8 factors, with scales of any strides."""
    kernel, scaling = all_reduce._all_reduce_kernel, layout.problem.scaling if layout.multiply else None
    types: Types = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")} | {"abort_ptr": "*i32"}
    types |= dict.fromkeys(("boxes_ptr", "epochs_ptr", "begun_ptr", "status_ptr"), "*i64")
    constants: dict[str, Any] = {**all_reduce._constants(layout, False, False, gpu), "stride_bk": 1}
    if scaling is None:
        constants["scales"] = None
    else:
        types |= {"a_ptr": f"*{_FLOAT8[scaling.a]}", "b_ptr": f"*{_FLOAT8[scaling.b]}", "scales": _SCALES}
    return Example(
        kernel=kernel,
        words=f"{layout.hops}, {layout.problem.m} rows{f', {scaling}' if scaling else ''}{', norm' if layout.norm else ''}",
        constants=constants,
        types=types,
        multiples=("n", "k", "stride_am", "stride_bn"),
        warps=layout.tiling.warps,
    )


def _shared(element: str) -> exchange.Shared:
    """The types of a tensor that every rank has."""
    return exchange.Shared(element, _ADDRESSES)


def _moving(rows: int, scales: int = 0) -> ragged_rows.Moving:
    """scales: of each row, if it is FP8."""
    more = {"COLS": 512, "COPY_ALIGN": 16} if scales else {"COLS": 256, "COPY_ALIGN": 8}
    return ragged_rows.Moving(W=8, E=4, Q=32, GATES=1, ROWS=64, STAGES=4, ALIGN=8, TILE_ROWS=rows, SCALES=scales, **more)


def _copied_scales(*, peers: bool) -> ragged_rows.CopiedScales:
    return ragged_rows.CopiedScales("*fp32", "i32", "*fp32", _ADDRESSES if peers else None)


def _step_tables(*names: str) -> ragged_rows.StepTables:
    """The types of a step's tables, of which a kernel reads those with these names."""
    return ragged_rows.StepTables(**{name: _ADDRESSES if name == "notes" else _NUMBERS for name in names})


def ragged_example(
    name: str,
    blocks: TileShape,
    gpu: Capabilities,
    *,
    transposed: bool = False,
    gated: bool = False,
    scaling: Scaling | None = None,
) -> Example:
    """A kernel of weft.kernels.ragged, by name."""
    a, b, moved = "bf16", "bf16", "*bf16"
    if scaling is not None:
        a, b, moved, transposed = _FLOAT8[scaling.a], _FLOAT8[scaling.b], "*u8", True
    whole, tile, b_tile = (blocks.m, blocks.n), (blocks.m, blocks.k), (blocks.k, blocks.n)
    types: Types = {
        "out_desc": _tile(*whole),
        "product_desc": _tile(*whole),
        "a_desc": _tile(*tile, of=a),
        "landing_desc": _tile(*tile, of=a),
    }
    types |= {"b_desc": _tile(1, *(b_tile[::-1] if transposed else b_tile), of=b)}
    types |= {"a_ptr": moved, "out_ptr": "*bf16", "landing": _shared(moved), "product": _shared("*bf16")}
    types |= {"arrived": _shared("*i32"), "tables": _step_tables(*ragged_rows.StepTables._fields)}
    product = ragged.GroupedProduct(
        BLOCK_M=blocks.m,
        BLOCK_N=blocks.n,
        BLOCK_K=blocks.k,
        GROUP=blocks.group,
        B_TRANSPOSED=transposed,
        GATED=gated,
        ASYNCHRONOUS=gpu.tma,
    )
    none = dict.fromkeys(("scales", "scales_pitch") + ("pushed_scales",) * (name == "dispatch_kernel"))
    constants, words = {"M": _moving(blocks.m), "P": product} | none, ""
    if scaling is not None:
        promoted, words = promotes(gpu, scaling), f"{scaling}{', gated' * gated}"
        product = product._replace(RECIPE=scaling.recipe, PROMOTED=promoted, PAIRS=promoted and blocks.pairs)
        constants = {"M": _moving(blocks.m, 64 if scaling.recipe == "blockwise" else 1), "P": product}
        types |= {"scales": _SCALES, "pushed_scales": _copied_scales(peers=True)}
    kernel = getattr(ragged, name)
    return Example(kernel=kernel, constants=constants, types=types, warps=blocks.warps, stages=blocks.stages, words=words)


def _ragged(gpu: Capabilities) -> Iterator[Example]:
    for name in ("dispatch_kernel", "combine_kernel"):
        yield ragged_example(name, shapes_for(gpu)[0], gpu)
        for scaling in (*SCALINGS[1:], Scaling(recipe="rowwise", use_fast_accum=True)) if gpu.tma else ():
            for gated in (False,) + (True,) * (name == "dispatch_kernel"):
                blocks = shapes_for(gpu, scaling)[0]
                blocks = exchange.gated_shape(blocks) if gated else blocks
                yield ragged_example(name, blocks, gpu, gated=gated, scaling=scaling)


def _typed(kernel: Any, types: str, constants: Mapping[str, Any], *multiples: str, warps: int) -> Example:
    """types: of the first arguments, in order."""
    by_name = dict(zip(kernel.arg_names, types.split(), strict=False))
    return Example(kernel=kernel, types=by_name, constants=constants, multiples=multiples, warps=warps)


def _rows(_: Capabilities) -> Iterator[Example]:
    constants: dict[str, Any] = {"M": _moving(128)}
    none = {"scales": None}
    rows, arrived, pointer = _shared("*bf16"), _shared("*i32"), "*bf16"
    tables = _step_tables("parts", "tiles", "gates", "turns", "goals", "notes")
    types: Types = {"landing_ptr": pointer, "out_ptr": pointer, "tables": tables}
    yield Example(kernel=ragged_rows.collect_kernel, types=types, constants=constants | none, warps=8)
    types = types | {"landing_ptr": "*u8", "out_ptr": "*u8", "scales": _copied_scales(peers=False)}
    yield Example(kernel=ragged_rows.collect_kernel, types=types, constants={"M": _moving(128, 64)}, warps=8, words="FP8")
    types = {"a_ptr": pointer, "landing": rows, "arrived": arrived, "tables": _step_tables("groups", "moves")}
    yield Example(kernel=ragged_rows.push_kernel, types=types, constants=constants | none, warps=8)
    scaled_rows = {"M": _moving(128, 64)}
    types |= {"a_ptr": "*u8", "landing": _shared("*u8"), "scales": _copied_scales(peers=True)}
    yield Example(kernel=ragged_rows.push_kernel, types=types, constants=scaled_rows, warps=8, words="FP8")
    tables = _step_tables("moves", "gates", "turn", "goals", "notes")
    types = {"out_ptr": pointer, "product": rows, "tables": tables}
    yield Example(kernel=ragged_rows.pull_kernel, types=types, constants=constants, warps=8)
    yield _typed(ragged_rows.await_kernel, "*i32 i32 *i32 *i32 *i64", {}, warps=1)


def _layout(_: Capabilities) -> Iterator[Example]:
    tables = segments.LayoutTables(*[_NUMBERS] * len(segments.LayoutTables._fields))._replace(calls=_ADDRESSES)
    types: Types = {"splits_ptr": "*i64", "notes_ptr": "*i64", "host_address": "i64", "tables": tables}
    types |= dict.fromkeys(("counts", "notified"), _shared("*i32"))
    sizes = segments.LayoutSizes(
        W=8, E=4, Q=32, EQ=4, RANKS=8, COPYING=1, MULTIPLYING=1, TURNS=4, DISPATCH=1, MOVE_ROWS=64, TILE_ROWS=128
    )
    yield Example(kernel=segments.layout_kernel, types=types, constants={"S": sizes}, warps=8)


def _experts(gpu: Capabilities) -> Iterator[Example]:
    columns, top, counts = {"COLS": experts._COLS}, {"TOP": 2}, {"COUNTS": 8}
    for name, types, constants in (
        ("_permute_kernel", "*bf16 *i64 *bf16", top),
        ("_unpermute_kernel", "*bf16 *i64 *fp32 *bf16", top | {"WEIGHED": 1}),
        ("_unpermute_backward_kernel", "*bf16 *bf16 *i64 *fp32 *bf16 *fp32", top),
        ("_swiglu_kernel", "*bf16 *i32 *bf16", counts),
        ("_swiglu_backward_kernel", "*bf16 *bf16 *i32 *bf16", counts),
    ):
        yield _typed(getattr(experts, name), types, constants | columns, "width", warps=experts._WARPS)
    if gpu.tma:  # which GPUs with FP8 have
        blocks = {"COUNTED": True, "LARGEST": 448.0, "LEAST": 1e-12, "BLOCK": 128}
        types = "*bf16 *i32 *fp8e4nv *fp32"
        yield _typed(experts._quantise_kernel, types, counts | blocks | columns, "width", warps=experts._WARPS)
    indices = {"SIZE": experts._INDICES}
    refused = {"REFUSED": REFUSED, "FARTHEST": FARTHEST}
    yield _typed(experts._count_kernel, "*i64 *i64", refused | indices, warps=experts._WARPS)
    yield _typed(experts._places_kernel, "*i64 *i64 *i64 *i64", {"EXPERTS": 8} | indices, warps=experts._WARPS)


_TABLES = {"ROWS": 8, "WIDTH": 256, "ALIGN": 8, "ELEMENT": tl.bfloat16, "ITEM": 2}


def _lookup(_: Capabilities) -> Iterator[Example]:
    constants = {**_TABLES, "WEIGHTED": False, "MEAN": True, "BAGS": lookup._BAGS, "PART": lookup._PART, "SLICE": lookup._SLICE}
    yield _typed(lookup._lookup_kernel, "*i64 *i64 *i64 *i64 *i64 *i64 i64 i64 i64", constants, warps=1)


def _update(_: Capabilities) -> Iterator[Example]:
    constants = {**_TABLES, "FIELDS": update_kernels._FIELDS}
    types = "*i64 *i64 *i64 *i64 *fp32 *bf16 *i64 i64 i32 i32 fp32 fp32"
    yield _typed(update_kernels._update_kernel, types, constants | {"KIND": 2}, warps=1)
    yield _typed(update_kernels._weights_kernel, "*i64 *i64 *i1 *bf16 *i64 *fp32", constants, warps=1)


def _push(_: Capabilities) -> Iterator[Example]:
    units = push._TILE_BYTES // 16
    constants = {"UNITS": units, "ROUND": units, "LANES": 2, "UNIT_BYTES": 16, "ELEMENT": tl.int64, "RUNS": False}
    yield _typed(push._push_kernel, "*i64 i64", constants | {"FIELDS": push._FIELDS}, warps=push._WARPS)


def _quantise(_: Capabilities) -> Iterator[Example]:
    types = "*bf16 *i64 *i64 i32 i32 i32 i32"
    constants = {"COLUMNS": quantise._COLUMNS, "ROWS": quantise.ROWS}
    for block in (0, 128):
        yield _typed(quantise._quantise_kernel, types, constants | {"BLOCK": block}, "stride", warps=quantise._WARPS)


def _norms(gpu: Capabilities) -> Iterator[Example]:
    """Of rows that fit a block, and of longer ones; also quantised to FP8, which runs on GPUs with TMA."""
    kernel = norm._norm_kernel
    plain: Types = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
    recipes = {"": (False, 0), ", rowwise": (True, 0), ", blockwise": (True, SCALE_BLOCK)}
    for once, (recipe, (quantises, block)) in pairs_of((True, False), recipes.items()):
        if quantises and not gpu.tma:
            continue
        types = plain | ({"out_ptr": "*i8", "scales_ptr": "*fp32"} if quantises else {})
        yield Example(
            kernel=kernel,
            words=("at once" if once else "in parts") + recipe,
            constants={"EPS": 1e-6, "WIDTH": norm.WIDEST, "ONCE": once, "QUANTISE": quantises, "BLOCK": block},
            types=types,
            multiples=("n", "src_stride", "out_stride"),
            warps=8,
        )


def _sums(_: Capabilities) -> Iterator[Example]:
    constants = {
        "SOURCES": 4,
        "ELEMENT": tl.bfloat16,
        "RESULT": tl.bfloat16,
        "ALIGN": 8,
        "DIVIDE_BY": 4,
        "FIELDS": sums._FIELDS,
    }
    types = "*i32 *i64 i64 i64 i64 i64"
    for words, shape, warps in (
        ("", {"OWN": -1, "BIAS": False, "RESIDUAL": False, "ROWS": 4, "COLS": 1024}, 8),
        ("addends", {"OWN": -1, "BIAS": True, "RESIDUAL": True, "ROWS": 4, "COLS": 1024}, 8),
        ("runs", {"OWN": 1, "BIAS": False, "RESIDUAL": False, "ROWS": 1, "COLS": 8192}, 16),
    ):
        yield dataclasses.replace(_typed(sums._sum_kernel, types, constants | shape, warps=warps), words=words)


def _flag_operations(_: Capabilities) -> Iterator[Example]:
    constants = {"KINDS": flag_operations._KINDS, "SIZE": flag_operations._LEAST}
    yield _typed(flag_operations._flag_kernel, "*i64", constants, warps=1)
