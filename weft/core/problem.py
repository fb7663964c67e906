"""Problem: a distributed operator by its sizes, independent of machine and schedule.

M, N and K are the global extents of the sequential program; shards follow from world_size by `split`, the same
rule as torch.chunk and DTensor's Shard: every part has ceil(extent / parts) but the last ones, which are shorter or empty.

    all_gather_matmul       a_mK (rows sharded)  b_Kn (columns sharded)  ->  out_Mn       all_gather(a) @ b
    matmul_reduce_scatter   a_Mk (columns)       b_kN (rows sharded)     ->  out_mN       reduce_scatter(a @ b)
    matmul_all_reduce       a_Mk (columns)       b_kN (rows sharded)     ->  out_MN       all_reduce(a @ b) + bias + residual
                                                      norm_eps: and rms_norm(out) * norm_weight -> normed_MN
    embedding_bag_all_to_all   bags of M samples, tables by rank         ->  out_mN       all_to_all(embedding_bag(...))

In an all-to-all of rows, every rank has a whole matmul of its own: M, N and K are a rank's, the same on all, and b is not
sharded. Shard d of each rank's M rows goes to rank d, which stores them in the order of ranks (`arrivals`):

    matmul_all_to_all       a_MK  b_KN  ->  out [world_size * m, N]       all_to_all(a @ b)
    all_to_all_matmul       a_MK  b_KN  ->  out [world_size * m, N]       all_to_all(a) @ b

An exchange between shards of a sequence and shards of its features (Ulysses) is cut by columns on one side. Rank d has shard d
of the product's columns, for the rows of all ranks; or shard d of the rows, with the columns of all ranks concatenated:

    matmul_all_to_all_columns   a_MK  b_KN  ->  out [world_size * M, n]   all_to_all of the columns of a @ b
    all_to_all_columns_matmul   a_Mk  b_KN  ->  out_mN                    all_to_all(a), concatenated, @ b

A collective alone moves M contiguous elements (`CollectiveProblem`):

    all_gather      a_m  ->  out_M        reduce_scatter  a_M  ->  out_m
    all_to_all      a_M  ->  out_M        all_reduce      a_M  ->  out_M

An all_reduce may also be of matrices, with addends and a norm as in a matmul_all_reduce:

    all_reduce      a_MN ->  out_MN       all_reduce(a) + bias + residual, and rms_norm(out) * norm_weight -> normed_MN

Ranks of one node load from and store to each other's memory; ranks of different nodes can only send and receive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Literal

Op = Literal[
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_to_all",
    "all_to_all_matmul",
    "matmul_all_reduce",
    "embedding_bag_all_to_all",
    "matmul_all_to_all_columns",
    "all_to_all_columns_matmul",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "concurrent",
    "ragged_all_to_all_matmul",
    "ragged_matmul_all_to_all",
]
DType = Literal["bfloat16", "float16", "float32", "uint8"]
Ops = tuple[Op, ...]
OPS: Ops = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_to_all", "all_to_all_matmul", "matmul_all_reduce")
"""Operators with a matmul; each is a Problem."""
LOOKUP_OPS: Ops = ("embedding_bag_all_to_all",)
"""Operators with a lookup; each is a LookupProblem."""
COLUMN_OPS: Ops = ("matmul_all_to_all_columns", "all_to_all_columns_matmul")
"""Operators with a matmul and an exchange that is cut by columns on one side; each is a ColumnProblem."""
COLLECTIVE_OPS: Ops = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""Collectives without other computation; each is a CollectiveProblem."""
RAGGED_OPS: Ops = ("ragged_all_to_all_matmul", "ragged_matmul_all_to_all")
"""Operators with a grouped matmul whose row counts are on devices; each is a RaggedProblem."""
EXCHANGES: Ops = ("matmul_all_to_all", "all_to_all_matmul")
"""Operators with a matmul and an all-to-all of rows."""
REDUCTIONS: Ops = ("matmul_reduce_scatter", "matmul_all_reduce")
"""Operators whose products are summed over ranks: K is sharded."""
AVERAGES: Ops = ("matmul_reduce_scatter", "reduce_scatter", "all_reduce")
"""Operators that accept reduce_op="avg"."""
GATHERS: Ops = ("all_gather_matmul", "all_to_all_matmul", "all_to_all_columns_matmul")
"""Operators that can also return the rows that they received and multiplied."""
BACKWARD: dict[Op, Op] = {
    "all_gather_matmul": "matmul_reduce_scatter",
    "matmul_reduce_scatter": "all_gather_matmul",
    "all_to_all_matmul": "matmul_all_to_all",
    "matmul_all_to_all": "all_to_all_matmul",
    "ragged_all_to_all_matmul": "ragged_matmul_all_to_all",
    "ragged_matmul_all_to_all": "ragged_all_to_all_matmul",
}
"""The operator that communicates in an operator's backward pass, with N and K swapped. That of matmul_all_reduce is local."""
Addend = Literal["bias", "residual"]
SCALED_OPS: Ops = (*OPS, *RAGGED_OPS)
"""Operators whose operands may be FP8, with scales."""
ROWWISE_OPS: Ops = ("all_gather_matmul", "all_to_all_matmul", *RAGGED_OPS)
"""Operators of SCALED_OPS that need rowwise scales of an FP8 a, since rows of several ranks are multiplied together, or by
several b. A tensorwise scale is expanded to rows."""
ADDENDS: tuple[Addend, ...] = ("bias", "residual")
"""Tensors that operators of SUMMED_WHOLE add to their sum, the same on every rank: a row that is added to each row, and a
matrix."""
SUMMED_WHOLE: Ops = ("matmul_all_reduce", "all_reduce")
"""Operators whose sum every rank has whole. They can add ADDENDS to it, and normalise its rows."""
ITEMSIZE: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element, by dtype that weft computes with."""

Float8 = Literal["float8_e4m3fn", "float8_e5m2"]
FLOAT8: tuple[Float8, ...] = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of operands with scales. At least one of a and b must be float8_e4m3fn, as in torch."""
Recipe = Literal["tensorwise", "rowwise", "blockwise"]
Operand = Literal["a", "b", "norm"]
"""Matrices that may be FP8 with scales: the factors of a product, and a norm, which is the a of a next product."""
RECIPES: tuple[Recipe, ...] = ("tensorwise", "rowwise", "blockwise")
RATE_ITEMSIZE: dict[str, int] = {**ITEMSIZE, "float8": 1, "float8_blockwise": 1, "float8_kernel": 1, "float8_promoted": 1}
"""Bytes of an operand's element, by the name of the matrix rate that a machine has for it."""
SCALE_BLOCK = 128
"""Elements of K, and of N, that share a scale of the blockwise recipe."""
LEAST_MAGNITUDE = 1e-12
"""The lower bound of the magnitude from which a scale is computed, as in torchao, so that zeros have a scale above 0."""
FLOAT8_UNIT = 16
"""K and N of FP8 operands are multiples of it, as torch's scaled products need them."""

MOST_EXTENT, MOST_WORLD = 2**63 - 1, 1 << 16
"""Bounds of extents and ranks. Tensors cannot be larger, and layouts are computed rank by rank."""
Span1D = tuple[int, int]
"""A half-open range [low, high)."""


def split(extent: int, parts: int) -> tuple[Span1D, ...]:
    """Cut [0, extent) into `parts` ranges as torch.chunk does.

    >>> split(10, 4)
    ((0, 3), (3, 6), (6, 9), (9, 10))
    >>> split(2, 4)
    ((0, 1), (1, 2), (2, 2), (2, 2))
    """
    size = -(-extent // parts) if extent else 0
    return tuple((min(i * size, extent), min((i + 1) * size, extent)) for i in range(parts))


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The dtypes and the scale layout of FP8 operands, whose elements are multiplied by float32 scales.

    a, b: their dtypes. recipe: what shares a scale, as in torch.nn.functional.scaled_mm:

        tensorwise   all of a: 1 scale       all of b: 1 scale
        rowwise      a row of a: [M, 1]      a column of b: [1, N]
        blockwise    1 x 128: [M, K / 128]   128 x 128: [K / 128, N / 128], the last block of N may be narrower

    use_fast_accum: whether tensor cores may accumulate with fewer bits, as in torch. quantises: whether the caller's a has the
    problem's dtype and is quantised to FP8 before it is sent; the scale of a row, or of a block, is its largest magnitude over
    the largest FP8 number.
    Raises ValueError for an unknown name, for two operands of float8_e5m2, and for a tensorwise scale of a quantised a, which
    would need a maximum over all ranks.
    """

    a: Float8 = "float8_e4m3fn"
    b: Float8 = "float8_e4m3fn"
    recipe: Recipe = "rowwise"
    use_fast_accum: bool = False
    quantises: bool = False

    def __post_init__(self) -> None:
        for name, known in (("a", FLOAT8), ("b", FLOAT8), ("recipe", RECIPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} of the scaling is {getattr(self, name)!r}; use one of {', '.join(known)}")
        if self.a == self.b == "float8_e5m2":
            raise ValueError("a and b are both float8_e5m2; one of them must be float8_e4m3fn")
        if self.quantises and (self.recipe == "tensorwise" or self.a != "float8_e4m3fn"):
            raise ValueError(
                f"a is quantised {self.recipe} to {self.a} before it is sent; use float8_e4m3fn, rowwise or blockwise"
            )

    def scales_of(self, operand: Operand, rows: Span1D, cols: Span1D) -> tuple[Span1D, Span1D]:
        """Return the rows and columns of the scales of a rectangle of an operand. A norm has those of an a.

        >>> Scaling(recipe="blockwise").scales_of("a", (4, 8), (128, 384))
        ((4, 8), (1, 3))
        """
        if self.recipe == "tensorwise":
            return (0, 1), (0, 1)
        if self.recipe == "rowwise":
            return ((0, 1), cols) if operand == "b" else (rows, (0, 1))
        blocks = cols[0] // SCALE_BLOCK, -(-cols[1] // SCALE_BLOCK)
        return ((rows[0] // SCALE_BLOCK, -(-rows[1] // SCALE_BLOCK)) if operand == "b" else rows), blocks

    def scales_shape(self, operand: Operand, rows: int, cols: int) -> tuple[int, int]:
        """Return the shape of the scales of an operand with these rows and columns."""
        (_, height), (_, width) = self.scales_of(operand, (0, rows), (0, cols))
        return height, width

    @property
    def rate_name(self) -> str:
        """The name of the matrix rate of such operands in a machine's gpu.tflops."""
        return "float8_blockwise" if self.recipe == "blockwise" else "float8"

    @property
    def kernel_rate_name(self) -> str:
        """The rate name of weft's GEMM kernel, which is slower if it adds each 128 of K in float32. A machine may lack
        this rate."""
        return "float8_kernel" if self.use_fast_accum and self.recipe != "blockwise" else "float8_promoted"

    def __str__(self) -> str:
        flags = ", fast accumulation" * self.use_fast_accum + ", a quantised before it is sent" * self.quantises
        return f"{self.a} by {self.b}, {self.recipe}{flags}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A distributed operator with static sizes.

    op: which operator. m, n, k: global extents (rows of the result, columns of the result, contraction); of an all-to-all, each
    rank's (rows of its a, columns of its result, contraction).
    dtype: of inputs and result; partial results are summed in float32. world_size: ranks that share the work.
    scaling: of FP8 operands a and b; dtype is then that of the result, and of what is summed, alone.
    return_gathered: operators of GATHERS also return the rows that they multiply. reduce_op: "avg" for one of AVERAGES.
    row_multiple: shards of M are cut at multiples of it (a leading dimension's entry may be several rows).
    b_sizes: by rank, the length of b's sharded dimension (N or K) if it differs from `split`; not for an all-to-all.
    addends: the tensors that an operator of SUMMED_WHOLE adds to the sum over ranks, in the order of ADDENDS.
    products: how many products each rank of an operator of REDUCTIONS adds up. Their a are side by side along K, and their b
    one below the other; k is of all of them.
    weight_gradients: matmul_reduce_scatter also returns x^T @ a, N x k, for another input x, M x N. If out is the gradient of
    the a of an all_gather_matmul, then x is that a, and x^T @ a are the gradients of its b. With "whole" every rank has all of
    x. With "shard" it has its shard of x's rows, which are gathered.
    norm_eps: an operator of SUMMED_WHOLE also returns rms_norm(out) * norm_weight, with this epsilon. None for no norm.
    norm_recipe: if not "", normed is float8_e4m3fn, with scales by this recipe, as of an a. The float32 norm is quantised.
    residual_sharded: the residual and out of a matmul_all_reduce with a norm have only the rows of this rank's shard.
    nodes: ranks on each node, where there are several; ranks of one node are neighbours.
    Raises ValueError for an unknown name, an extent below zero (k and world_size: below one) or above MOST_EXTENT (world_size:
    MOST_WORLD), or inconsistent sizes.
    """

    KNOWN: ClassVar[tuple[Op, ...]] = OPS
    DTYPES: ClassVar[tuple[str, ...]] = tuple(ITEMSIZE)

    op: Op
    m: int
    n: int
    k: int
    world_size: int
    dtype: DType = "bfloat16"
    return_gathered: bool = False
    reduce_op: Literal["sum", "avg"] = "sum"
    row_multiple: int = 1
    b_sizes: tuple[int, ...] = ()
    addends: tuple[Addend, ...] = ()
    nodes: tuple[int, ...] = ()
    scaling: Scaling | None = None
    products: int = 1
    weight_gradients: Literal["", "whole", "shard"] = ""
    norm_eps: float | None = None
    norm_recipe: Literal["", "rowwise", "blockwise"] = ""
    residual_sharded: bool = False

    def __post_init__(self) -> None:
        if self.op not in self.KNOWN:
            raise ValueError(f"op is {self.op!r}; weft has {', '.join(self.KNOWN)}")
        if self.dtype not in self.DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; weft overlaps {', '.join(self.DTYPES)}")
        if self.reduce_op not in ("sum", "avg"):
            raise ValueError(f"reduce_op is {self.reduce_op!r}; use 'sum' or 'avg'")
        if self.reduce_op != "sum" and self.op not in AVERAGES:
            does = "averages" if self.op in REDUCTIONS else "sums"
            raise ValueError(f"reduce_op is {self.reduce_op!r}; {self.op} {does} nothing, use 'sum'")
        if self.return_gathered and self.op not in GATHERS:
            raise ValueError(f"return_gathered is {self.return_gathered!r}; {self.op} gathers nothing to hand back, use False")
        for name, low in (("m", 0), ("n", 0), ("k", 1), ("world_size", 1), ("row_multiple", 1), ("products", 1)):
            value, most = getattr(self, name), MOST_WORLD if name == "world_size" else MOST_EXTENT
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= most:
                raise ValueError(f"{name} is {value!r:.40}; it must be a whole number of at least {low}, and at most {most}")
        for name in ("b_sizes", "nodes"):
            sizes = getattr(self, name)
            if not isinstance(sizes, tuple) or any(not isinstance(size, int) for size in sizes):
                raise ValueError(f"{name} is {sizes!r}; it must be a tuple of whole numbers")
        if self.m % self.row_multiple:
            raise ValueError(f"m is {self.m}; it must be a multiple of row_multiple, {self.row_multiple}")
        if self.b_sizes:
            self._check_sizes()
        allowed = ADDENDS if self.op in SUMMED_WHOLE and self.reduce_op == "sum" else ()
        if self.addends != tuple(name for name in allowed if name in self.addends):
            raise ValueError(f"addends is {self.addends}; {self.op} takes any of {allowed}, each once, in this order")
        if self.nodes and (len(self.nodes) == 1 or min(self.nodes) < 1 or sum(self.nodes) != self.world_size):
            several = f"the ranks of two nodes or more, each at least 1, {self.world_size} in all; or (), for one node"
            raise ValueError(f"nodes is {self.nodes}; it must be {several}")
        if self.products > 1 and (self.op not in REDUCTIONS or self.scaling is not None):
            takes = "with FP8 operands there is one" if self.op in REDUCTIONS else f"{self.op} adds up none"
            raise ValueError(f"products is {self.products}; {takes}, use 1")
        if self.weight_gradients:
            self._check_weight_gradients()
        if self.norm_eps is not None and (self.op not in SUMMED_WHOLE or not 0 <= self.norm_eps < 1):
            takes = "use a number from 0 to below 1" if self.op in SUMMED_WHOLE else f"{self.op} has no norm, use None"
            raise ValueError(f"norm_eps is {self.norm_eps!r}; {takes}")
        if self.norm_recipe:
            self._check_norm_recipe()
        if self.residual_sharded and (self.norm_eps is None or self.op != "matmul_all_reduce"):
            raise ValueError(f"residual_sharded is {self.residual_sharded!r}; only a matmul_all_reduce with a norm has it")
        if self.scaling is not None:
            self._check_scaling(self.scaling)

    def _check_norm_recipe(self) -> None:
        given, unit = f"norm_recipe is {self.norm_recipe!r}", SCALE_BLOCK if self.norm_recipe == "blockwise" else FLOAT8_UNIT
        if self.norm_recipe not in ("rowwise", "blockwise") or self.norm_eps is None:
            raise ValueError(f"{given}; use 'rowwise' or 'blockwise' with a norm, or '' for a norm of the problem's dtype")
        if self.n % unit or not self.n:
            raise ValueError(f"N is {self.n}; a norm that is quantised {self.norm_recipe} needs a multiple of {unit}")

    def _check_weight_gradients(self) -> None:
        given = f"weight_gradients is {self.weight_gradients!r}"
        if self.weight_gradients not in ("whole", "shard"):
            raise ValueError(f"{given}; use 'whole' or 'shard', or '' for none")
        if self.op != "matmul_reduce_scatter" or self.scaling is not None:
            has = "with FP8 operands there are none" if self.op == "matmul_reduce_scatter" else f"{self.op} has none"
            raise ValueError(f"{given}; {has}, use ''")

    def _check_scaling(self, scaling: Scaling) -> None:
        if self.op not in SCALED_OPS:
            raise ValueError(
                f"scaling is {scaling}; {self.op} takes no FP8 operands, those that do are {', '.join(SCALED_OPS)}"
            )
        if scaling.recipe == "tensorwise" and self.op in ROWWISE_OPS:
            raise ValueError(f"scaling is tensorwise; in {self.op} each row of a has a scale of its own: use rowwise")
        if scaling.quantises and self.op not in GATHERS:
            raise ValueError(f"scaling quantises a before it is sent; {self.op} sends no rows of a: quantise a first")
        unit = SCALE_BLOCK if scaling.recipe == "blockwise" else FLOAT8_UNIT
        for rank in range(self.world_size):
            inner, columns = self.inner(rank), self.columns(rank)
            if inner % unit or not inner:
                raise ValueError(f"K is {inner} on rank {rank}; {scaling.recipe} FP8 operands need a multiple of {unit}")
            if columns % FLOAT8_UNIT:
                raise ValueError(f"N is {columns} on rank {rank}; FP8 operands need a multiple of {FLOAT8_UNIT}")

    def _check_sizes(self) -> None:
        if self.op in EXCHANGES:
            raise ValueError(f"b_sizes is {self.b_sizes}; {self.op} has no sharded b, use ()")
        name, whole = ("n", self.n) if self.op == "all_gather_matmul" else ("k", self.k)
        if len(self.b_sizes) != self.world_size or min(self.b_sizes) < 0 or sum(self.b_sizes) != whole:
            sizes = f"{self.world_size} sizes of at least 0 that add up to {name}, {whole}"
            raise ValueError(f"b_sizes is {self.b_sizes}; it must be {sizes}")

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def operand_itemsize(self) -> int:
        """The bytes of one element of a and b, without their scales."""
        return 1 if self.scaling is not None else self.itemsize

    @cached_property
    def scalings(self) -> Mapping[str, Scaling]:
        """The scaling of each operand that is FP8."""
        found = {} if self.scaling is None else {"a": self.scaling, "b": self.scaling}
        return {**found, "norm": Scaling(recipe=self.norm_recipe)} if self.norm_recipe else found

    @property
    def rate_name(self) -> str:
        """The name of the matrix rate in a machine's gpu.tflops: dtype; for FP8 operands float8, or float8_blockwise if scales
        vary along K."""
        return self.dtype if self.scaling is None else self.scaling.rate_name

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of a with this many columns and its scales."""
        if self.scaling is None:
            return columns * self.itemsize
        return columns + 4 * self.scaling.scales_shape("a", 1, columns)[1]

    @property
    def normed_row_bytes(self) -> int:
        """The bytes of a row of the norm, and of its scales."""
        if not self.norm_recipe:
            return self.n * self.itemsize
        return self.n + 4 * self.scalings["norm"].scales_shape("norm", 1, self.n)[1]

    @cached_property
    def shards(self) -> tuple[Span1D, ...]:
        """The rows of M that each rank owns: of `a` before the gather, of the result after the scatter. In an all-to-all, the
        rows of every rank that go to that rank."""
        unit = self.row_multiple
        return tuple((low * unit, high * unit) for low, high in split(self.m // unit, self.world_size))

    @cached_property
    def node_ranks(self) -> tuple[range, ...]:
        """The ranks of each node; a single node has all ranks."""
        ends = tuple(accumulate(self.nodes or (self.world_size,)))
        return tuple(range(first, end) for first, end in zip((0, *ends), ends, strict=False))

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The node of each rank."""
        return tuple(node for node, ranks in enumerate(self.node_ranks) for _ in ranks)

    def arrivals(self, src_rank: int, dst_rank: int) -> Span1D:
        """Return, for an all-to-all, the position of the rows from `src_rank` among all rows that arrive at `dst_rank`."""
        low, high = self.shards[dst_rank]
        return src_rank * (high - low), (src_rank + 1) * (high - low)

    @cached_property
    def b_shards(self) -> tuple[Span1D, ...]:
        """The part of b's sharded dimension on each rank: of N for all_gather_matmul, of K for the others. In an all-to-all
        each rank has its own b, so the part is all of N."""
        if self.op in EXCHANGES:
            return ((0, self.n),) * self.world_size
        if not self.b_sizes:
            return split(self.n if self.op == "all_gather_matmul" else self.k, self.world_size)
        ends = tuple(accumulate(self.b_sizes))
        return tuple((end - size, end) for end, size in zip(ends, self.b_sizes, strict=True))

    @cached_property
    def blocks(self) -> tuple[Span1D, ...]:
        """The columns from each rank, where columns of different ranks are concatenated."""
        return self.b_shards

    def columns(self, rank: int) -> int:
        """Return the columns of b, and of the result, on `rank`: its shard for all_gather_matmul, else all N."""
        if self.op != "all_gather_matmul":
            return self.n
        low, high = self.b_shards[rank]
        return high - low

    def inner(self, rank: int) -> int:
        """Return the contraction length on `rank`: its shard where the product is reduced, else all K."""
        if self.op not in REDUCTIONS:
            return self.k
        low, high = self.b_shards[rank]
        return high - low

    def a_columns(self, rank: int) -> int:
        """Return the columns of a on `rank`."""
        return self.inner(rank)

    def a_rows(self, rank: int) -> int:
        """Return the rows of a on `rank`: its shard for all_gather_matmul, else M."""
        low, high = self.shards[rank]
        return high - low if self.op == "all_gather_matmul" else self.m

    def out_rows(self, rank: int) -> int:
        """Return the rows of the result on `rank`: M, its shard, or for an all-to-all the rows that arrive from all ranks."""
        low, high = self.shards[rank]
        if self.op in ("all_gather_matmul", "matmul_all_reduce") and not self.residual_sharded:
            return self.m
        return (high - low) * (self.world_size if self.op in EXCHANGES else 1)

    def product_rows(self, rank: int) -> int:
        """Return the rows that `rank` multiplies: those that arrive for all_to_all_matmul, else M."""
        return self.out_rows(rank) if self.op == "all_to_all_matmul" else self.m

    @property
    def flops(self) -> int:
        """The floating-point operations of the largest rank's matmuls."""
        ranks = range(self.world_size)
        times = 4 if self.weight_gradients else 2
        return times * max(self.product_rows(r) * self.columns(r) * self.inner(r) for r in ranks)

    @property
    def shard_bytes(self) -> int:
        """The bytes that one rank sends to one peer: a part of its a if rows are sent before the matmul, else of its product
        (as if the product were scattered)."""
        low, high = self.shards[0]
        before = self.op in ("all_gather_matmul", "all_to_all_matmul")
        return (high - low) * (self.row_bytes(self.k) if before else self.n * self.itemsize)

    def __str__(self) -> str:
        flags = "".join([" +gathered" * self.return_gathered, " avg" * (self.reduce_op == "avg")])
        flags += f" of {self.products} products" * (self.products > 1)
        flags += f" +gradients of weights, x {self.weight_gradients}" if self.weight_gradients else ""
        flags += self._added + _on_nodes(self.nodes)
        return f"{self.op} M={self.m} N={self.n} K={self.k} {self._dtypes} world_size={self.world_size}{flags}"

    @property
    def _added(self) -> str:
        found = "".join(f" +{name}" for name in self.addends)
        if self.norm_eps is None:
            return found
        quantised = f", FP8 {self.norm_recipe}" if self.norm_recipe else ""
        return f"{found} +norm, eps {self.norm_eps:g}{quantised}" + ", sharded residual" * self.residual_sharded

    @property
    def _dtypes(self) -> str:
        return self.dtype if self.scaling is None else f"{self.scaling}, to {self.dtype},"


@dataclass(frozen=True, kw_only=True)
class LookupProblem(Problem):
    """Embedding bags whose tables are each on one rank; pooled bags are sent to the ranks of their samples.

    Its sizes are those of a product: M samples (the global batch, sharded by `split`) by N columns (all ranks' tables,
    concatenated in the order of ranks), with K rows summed for each element. `LookupProblem.of` fills them in.
    k: rows in a bag on average, used only by predictions; each call's offsets define the bags.
    dims: by rank, the columns of each of its tables. mode: the pooling of a bag.
    """

    TAGGED: ClassVar[bool] = True
    KNOWN: ClassVar[tuple[Op, ...]] = LOOKUP_OPS

    op: Op = "embedding_bag_all_to_all"
    dtype: DType = "float32"
    dims: tuple[tuple[int, ...], ...] = ()
    mode: Literal["sum", "mean"] = "sum"

    @classmethod
    def of(
        cls,
        *,
        batch: int,
        dims: tuple[tuple[int, ...], ...],
        pooling: int = 1,
        mode: Literal["sum", "mean"] = "sum",
        dtype: DType = "float32",
    ) -> LookupProblem:
        """Return the problem of `batch` samples and, by rank, tables with these columns. Raises ValueError as the class
        does."""
        dims = _whole_numbers("dims", dims)
        widths = tuple(sum(own) for own in dims)
        return cls(m=batch, n=sum(widths), k=pooling, world_size=len(dims), b_sizes=widths, dims=dims, mode=mode, dtype=dtype)

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole_numbers("dims", self.dims)
        if self.mode not in ("sum", "mean"):
            raise ValueError(f"mode is {self.mode!r}; use 'sum' or 'mean'")
        if len(self.dims) != self.world_size or any(dim < 1 for own in self.dims for dim in own):
            raise ValueError(f"dims is {self.dims}; it must have {self.world_size} entries of whole numbers of at least 1")
        widths = tuple(sum(own) for own in self.dims)
        if self.b_sizes != widths or self.n != sum(widths):
            raise ValueError(
                f"n is {self.n} and b_sizes {self.b_sizes}; for these dims they must be {sum(widths)} and {widths}"
            )

    def _check_sizes(self) -> None:
        """Check sizes against dims."""

    def columns(self, rank: int) -> int:
        """Return the columns of the tables on `rank`."""
        return self.b_sizes[rank]

    def inner(self, rank: int) -> int:
        return self.k

    def table_columns(self, rank: int) -> tuple[Span1D, ...]:
        """Return the columns of each table on `rank`, counted from the rank's first."""
        ends = tuple(accumulate(self.dims[rank]))
        return tuple((end - dim, end) for dim, end in zip(self.dims[rank], ends, strict=True))

    @property
    def shard_bytes(self) -> int:
        """The bytes that the rank with the most columns sends to one peer."""
        low, high = self.shards[0]
        return (high - low) * max(self.b_sizes) * self.itemsize

    def __str__(self) -> str:
        tables = sum(map(len, self.dims))
        sizes = f"M={self.m} N={self.n} K={self.k} in {tables} tables"
        return f"{self.op} {sizes} {self.mode} {self.dtype} world_size={self.world_size}{_on_nodes(self.nodes)}"


@dataclass(frozen=True, kw_only=True)
class ColumnProblem(Problem):
    """A matmul, and an all-to-all between parts of rows and parts of columns. m, k and n are those of one rank; b has k rows.

    matmul_all_to_all_columns: the columns of a @ b are cut. The columns for one rank are stored contiguously, so the product
    has world_size * m rows and n / world_size columns, and its shard d, of m rows, goes to rank d (`shards`).
    all_to_all_columns_matmul: the m rows are cut; each rank has k / world_size columns of a.
    Raises ValueError if world_size does not divide the dimension that is cut.
    """

    TAGGED: ClassVar[bool] = True
    KNOWN: ClassVar[tuple[Op, ...]] = COLUMN_OPS

    op: Op = "matmul_all_to_all_columns"

    def __post_init__(self) -> None:
        super().__post_init__()
        cut = {"n": self.n} if self.sends_columns else {"m": self.m, "k": self.k}
        for name, extent in cut.items():
            if extent % self.world_size:
                raise ValueError(f"{name} is {extent}; {self.op} needs a multiple of world_size, {self.world_size}")

    def _check_sizes(self) -> None:
        raise ValueError(f"b_sizes is {self.b_sizes}; {self.op} has no sharded b, use ()")

    @property
    def sends_columns(self) -> bool:
        """True if the product's columns are cut and the received rows are stacked."""
        return self.op == "matmul_all_to_all_columns"

    @cached_property
    def shards(self) -> tuple[Span1D, ...]:
        """The sent rows that go to each rank."""
        return split(self.m * (self.world_size if self.sends_columns else 1), self.world_size)

    def arrivals(self, src_rank: int, dst_rank: int) -> Span1D:
        low, high = self.shards[dst_rank]
        at = src_rank * self.m if self.sends_columns else 0
        return at, at + high - low

    @cached_property
    def blocks(self) -> tuple[Span1D, ...]:
        """Each rank's part of the columns that are cut, or that are concatenated when received."""
        return split(self.n if self.sends_columns else self.k, self.world_size)

    @cached_property
    def b_shards(self) -> tuple[Span1D, ...]:
        return ((0, self.n),) * self.world_size

    def columns(self, rank: int) -> int:
        """Return the columns of the result and of the stored product."""
        return self.n // self.world_size if self.sends_columns else self.n

    def a_columns(self, rank: int) -> int:
        return self.k if self.sends_columns else self.k // self.world_size

    def out_rows(self, rank: int) -> int:
        low, high = self.shards[rank]
        return (high - low) * (self.world_size if self.sends_columns else 1)

    def product_rows(self, rank: int) -> int:
        return self.out_rows(rank)

    @property
    def shard_bytes(self) -> int:
        """The bytes that one rank sends to one peer."""
        rows, cols = (high - low for low, high in (self.shards[0], self.blocks[0]))
        return rows * cols * self.itemsize


@dataclass(frozen=True, kw_only=True)
class CollectiveProblem(Problem):
    """A collective without other computation, of M contiguous elements: rows of one column.

    all_gather: m elements of each rank, M in all. reduce_scatter: M of each rank, summed; each gets m of the sum. all_reduce: M
    of each, summed. all_to_all: M of each; m of them go to each rank.
    n: an all_reduce may be of matrices of n columns (`rows_matter`). With addends or a norm it is.
    Calls may be in place: a may be its own part of out (all_gather), out its own part of a (reduce_scatter), or both may be the
    same (all_reduce, of single columns). A schedule must be correct for these, too.
    dtype: "uint8" for bytes of any type if nothing is summed. Sums are in float32, in the order of ranks, and rounded once.
    staging_bytes: the symmetric memory that a schedule may use on a rank. sms: the number of SMs that sum.
    reachable: out is in symmetric memory on every rank, so that peers may write to it during a call.
    Raises ValueError as Problem does, and if M is no multiple of world_size, except for an all_reduce.
    """

    TAGGED: ClassVar[bool] = True
    KNOWN: ClassVar[tuple[Op, ...]] = COLLECTIVE_OPS
    DTYPES: ClassVar[tuple[str, ...]] = (*ITEMSIZE, "uint8")
    LEAST_STAGING: ClassVar[int] = 1 << 16
    ALIGN_BYTES: ClassVar[int] = 16
    """Parts of an all_reduce, and all pieces, begin at multiples of this number of bytes from the part's first byte."""

    n: int = 1
    k: int = 1
    staging_bytes: int = 1 << 28
    sms: int = 32
    reachable: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("staging_bytes", self.LEAST_STAGING), ("sms", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {low}")
        if (self.n != 1 and self.op != "all_reduce") or self.k != 1 or self.row_multiple != 1 or self.b_sizes:
            raise ValueError(f"n is {self.n}, k {self.k}; {self.op} has m alone: leave out the others")
        if self.op != "all_reduce" and self.m % self.world_size:
            raise ValueError(f"m is {self.m}; {self.op} needs a multiple of world_size, {self.world_size}")
        if self.sums and self.dtype == "uint8":
            raise ValueError(f"dtype is 'uint8'; {self.op} sums {', '.join(ITEMSIZE)}")

    @property
    def sums(self) -> bool:
        """True if elements of ranks are added up."""
        return self.op in ("reduce_scatter", "all_reduce")

    @property
    def rows_matter(self) -> bool:
        """True if data are matrices, whose rows addends and norms need. Otherwise they are elements in a row."""
        return self.n != 1 or bool(self.addends) or self.norm_eps is not None

    @property
    def divide_by(self) -> int:
        """The divisor of the sum."""
        return self.world_size if self.reduce_op == "avg" else 1

    @property
    def itemsize(self) -> int:
        return ITEMSIZE.get(self.dtype, 1)

    @cached_property
    def shards(self) -> tuple[Span1D, ...]:
        """The elements of M that each rank owns; in an all-to-all, those of every rank that go to it."""
        unit = self.ALIGN_BYTES // self.itemsize if self.op == "all_reduce" and self.n == 1 else 1
        cuts = split(-(-self.m // unit), self.world_size)
        return tuple((min(low * unit, self.m), min(high * unit, self.m)) for low, high in cuts)

    def a_rows(self, rank: int) -> int:
        """Return the number of elements of the input on `rank`."""
        low, high = self.shards[rank]
        return high - low if self.op == "all_gather" else self.m

    def out_rows(self, rank: int) -> int:
        """Return the number of elements of the result on `rank`."""
        low, high = self.shards[rank]
        return high - low if self.op == "reduce_scatter" else self.m

    def alias(self, rank: int) -> int | None:
        """Return which element of a is the first of out in an in-place call, or None if a call cannot be in place."""
        low = self.shards[rank][0]
        return None if self.rows_matter else {"all_gather": -low, "reduce_scatter": low, "all_reduce": 0}.get(self.op)

    @property
    def flops(self) -> int:
        return 0

    def __str__(self) -> str:
        flags = " avg" * (self.reduce_op == "avg") + " +reachable" * self.reachable + self._added
        sizes = f"M={self.m} N={self.n}" if self.rows_matter else f"M={self.m}"
        return f"{self.op} {sizes} {self.dtype} world_size={self.world_size}{_on_nodes(self.nodes)}{flags}"


@dataclass(frozen=True, kw_only=True)
class RaggedProblem(Problem):
    """A dispatch or a combine of mixture-of-experts, whose row counts only devices know (calls with `splits`).

    ragged_all_to_all_matmul (dispatch): rows go to the ranks of their experts and are multiplied there.
    ragged_matmul_all_to_all (combine): rows are multiplied by their expert's b and go to the ranks that own them.

    m: max_rows, the most rows that may arrive at a rank. capacity: the most rows that a rank's a may have. experts: on each
    rank; each expert has its own b, k by n. gated: the result is silu(left half) * right half of a product of 2 n
    columns. return_received: a dispatch also returns the rows that it multiplies. limit: the settings that determine m, as
    errors name them; "" if the caller passed max_rows. world_size, dtype, scaling: as in Problem; rows that are sent before
    they are multiplied are sent with their scales.

    A segment is the rows that rank src sends to rank dst for one expert. Their number may be any, 0 included. A buffer holds
    whole segments, one after the other without gaps, so that a segment begins at the sum of the counts of all segments before
    it in the buffer's order (`sent_order`, `received_order`). Rows beyond `capacity` rows of a, or `m` rows at the receiver,
    are cut off the end of the order by sender and receiver, and are reported; nothing is written past the capacity.
    Raises ValueError as Problem does, and for a capacity or experts below 1, or an option that the operator does not have.
    """

    TAGGED: ClassVar[bool] = True
    KNOWN: ClassVar[tuple[Op, ...]] = RAGGED_OPS

    op: Op = "ragged_all_to_all_matmul"
    capacity: int = 1
    experts: int = 1
    gated: bool = False
    return_received: bool = False
    limit: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("m", "capacity", "experts"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        for name in ("gated", "return_received"):
            if getattr(self, name) and not self.dispatches:
                raise ValueError(f"{name} is True; {self.op} has no such option, use False")
        if self.row_multiple != 1 or self.nodes:
            raise ValueError(f"row_multiple is {self.row_multiple}, nodes {self.nodes}; {self.op} has neither, leave them out")

    def _check_scaling(self, scaling: Scaling) -> None:
        super()._check_scaling(scaling)
        if self.gated and scaling.recipe == "blockwise" and self.n % SCALE_BLOCK:
            raise ValueError(
                f"N is {2 * self.n}, in halves of {self.n} columns; blockwise FP8 operands of a gated product need halves of a "
                f"multiple of {SCALE_BLOCK}"
            )

    def _check_sizes(self) -> None:
        raise ValueError(f"b_sizes is {self.b_sizes}; {self.op} has no sharded b, use ()")

    @property
    def dispatches(self) -> bool:
        """True if rows are sent before they are multiplied."""
        return self.op == "ragged_all_to_all_matmul"

    @property
    def shard_bytes(self) -> int:
        """The bytes that one rank sends to one peer, if all ranks get equal parts of its rows."""
        rows = -(-min(self.capacity, self.m) // self.world_size)
        return rows * (self.row_bytes(self.k) if self.dispatches else self.n * self.itemsize)

    @property
    def arriving(self) -> tuple[int, int]:
        """The shape of the counts of segments that arrive at a rank, in the order in which they land."""
        extents = (self.experts, self.world_size)
        return extents if self.dispatches else extents[::-1]

    def sent_order(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """Return the segments (src, dst, expert) that `rank` sends, in the order of its a and of its products."""
        ranks, experts = range(self.world_size), range(self.experts)
        if self.dispatches:
            return tuple((rank, dst, expert) for dst in ranks for expert in experts)
        return tuple((rank, dst, expert) for expert in experts for dst in ranks)

    def received_order(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """Return the segments (src, dst, expert) that arrive at `rank`, in the order in which they land."""
        ranks, experts = range(self.world_size), range(self.experts)
        if self.dispatches:
            return tuple((src, rank, expert) for expert in experts for src in ranks)
        return tuple((src, rank, expert) for src in ranks for expert in experts)

    def places(
        self, counts: Mapping[tuple[int, int, int], int], rows: Sequence[int] = (), *, room: int = 0
    ) -> dict[tuple[int, int, int], tuple[int, int, int]]:
        """Return for each segment its first row on the sender, its first row on the receiver, and the number of rows that move.

        Rows move if they are within a on the sender and also land within `m` on the receiver. rows: the rows of each rank's a
        in this call (default: capacity). room: the bound of the rows that arrive, in place of `m`."""
        begins, held = dict[tuple[int, int, int], int](), dict[tuple[int, int, int], int]()
        for rank in range(self.world_size):
            at, limit = 0, rows[rank] if rows else self.capacity
            for name in self.sent_order(rank):
                begins[name], held[name] = at, min(counts[name], max(limit - at, 0))
                at += counts[name]
        found = {}
        for rank in range(self.world_size):
            at = 0
            for name in self.received_order(rank):
                found[name] = begins[name], at, min(held[name], max((room or self.m) - at, 0))
                at += held[name]
        return found

    def __str__(self) -> str:
        sizes = f"max_rows={self.m} N={self.n} K={self.k} experts={self.experts} capacity={self.capacity}"
        flags = " gated" * self.gated + " +received" * self.return_received
        return f"{self.op} {sizes} {self._dtypes} world_size={self.world_size}{flags}"


def _whole_numbers(name: str, rows: Any) -> tuple[tuple[int, ...], ...]:
    """Return rows of whole numbers as tuples. Raises ValueError for anything else."""
    listed = isinstance(rows, (tuple, list)) and all(isinstance(row, (tuple, list)) for row in rows)
    if not listed or any(not isinstance(one, int) for row in rows for one in row):
        raise ValueError(f"{name} is {rows!r}; it must have a list of whole numbers for each rank")
    return tuple(map(tuple, rows))


def _on_nodes(nodes: tuple[int, ...]) -> str:
    return f" on nodes of {', '.join(map(str, nodes))}" if nodes else ""
