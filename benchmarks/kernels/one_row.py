"""How much faster than torch.mm in bfloat16 does weft's kernel multiply one row by FP8 weights that no cache holds, on one GPU?

A decode step reads each weight once, so every method goes through copies of its weight of 1 GiB in all. A CUDA graph for each
method has twice as many calls as there are FP8 copies. Five sizes, N x K. Baseline: torch.mm of bfloat16 (cuBLAS). Methods: the
kernel of matmul_all_reduce's one_shot with a world of one rank, whole, by the scales' recipe (`rowwise`); the same, which
exchanges nothing (`rowwise product`); and with operands of bfloat16. A whole call sends its tiles to its own mailbox, waits for
them and stores them: what it costs above the product is an exchange without a peer.
Traps: results of `product` mean nothing. A kernel is compiled at its first call, one or two seconds for each.

    python -m benchmarks.kernels one_row --tilings 64,256,8,6 32,256,4,6

A tiling is columns of a tile, its step along K, warps and stages; it is tried with rowwise scales.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.kernels.single_gpu import Case, Part, Work
from weft.core.problem import RECIPES, Problem, Scaling, split
from weft.core.schedule import MAILBOX_COPIES
from weft.kernels.all_reduce import Tiling, all_reduce, mailbox, plan
from weft.kernels.launch import Launcher

SIZES = ((3584, 8192), (8192, 8192), (6656, 16384), (8192, 1024), (28672, 8192))
"""N and K."""
UNCACHED_BYTES = 1 << 30
"""Several times the L2 cache of an H200, 50 MiB."""
ROUNDS = 15
TRIES = 1 << 24
Call = Callable[[int], object]
"""The n-th call of a graph: by the n-th copy of the weight."""


def tiling(text: str) -> Tiling:
    """One of --tilings."""
    fields = text.split(",")
    if len(fields) != 4 or not all(field.isdecimal() for field in fields):
        raise argparse.ArgumentTypeError(f"{text!r} is not columns,step,warps,stages")
    columns, step, warps, stages = map(int, fields)
    return Tiling(m=16, n=columns, k=step, warps=warps, stages=stages)


class Product:
    """One row, weights of one size, and how they are multiplied."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k, self.device = n, k, torch.device("cuda")
        draw = torch.randn(n, k, device=self.device)
        self.a = torch.randn(1, k, device=self.device).to(torch.float8_e4m3fn)
        weight = draw.to(torch.float8_e4m3fn)
        self.weights = [weight.clone() for _ in range(-(-UNCACHED_BYTES // weight.nbytes))]
        self.wide_a, wide = self.a.bfloat16(), weight.bfloat16()
        self.wide_weights = [wide.clone() for _ in range(-(-UNCACHED_BYTES // wide.nbytes))]
        self.out = torch.empty(1, n, device=self.device, dtype=torch.bfloat16)
        self.mailboxes: list[torch.Tensor] = []
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count

    def mm(self, call: int) -> object:
        return torch.mm(self.wide_a, self.wide_weights[call % len(self.wide_weights)].t(), out=self.out)

    def scales(self, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = scaling.scales_shape("a", 1, self.k), scaling.scales_shape("b", self.k, self.n)
        of_a, of_b = (0.5 + torch.rand(shape, device=self.device) for shape in shapes)
        return of_a, of_b

    def kernel(self, scaling: Scaling | None, *, live: bool = True, tile: Tiling | None = None) -> Call:
        """The kernel that multiplies, exchanges and sums. live: whether it exchanges."""
        problem = Problem(op="matmul_all_reduce", m=1, n=self.n, k=self.k, world_size=1, scaling=scaling)
        layout = plan(problem, 0, split(self.n, 1), hops="one", multiply=True, device=self.device, sms=self.sms)
        layout = layout if tile is None else replace(layout, tiling=tile)
        box = torch.zeros(MAILBOX_COPIES * layout.copy_bytes, device=self.device, dtype=torch.uint8)
        self.mailboxes.append(box)
        memory, run = mailbox([box.data_ptr()], layout.copy_bytes, layout.blocks, self.device), Launcher()
        scales = None if scaling is None else self.scales(scaling)
        a, weights = (self.wide_a, self.wide_weights) if scaling is None else (self.a, self.weights)

        def call(number: int) -> None:
            all_reduce(
                layout,
                memory,
                self.out,
                factors=(a, weights[number % len(weights)].t()),
                partial=None,
                bias=None,
                residual=None,
                live=live,
                tries=TRIES,
                scales=scales,
                launched_by=run,
            )

        if live:
            self.check(call, scaling, scales)
        return call

    def check(self, call: Call, scaling: Scaling | None, scales: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Raises AssertionError for another result than that of dequantised operands in float32."""
        a, b = self.a.float(), self.weights[0].float().t()
        if scaling is not None and scales is not None:
            blocks = scaling.recipe == "blockwise"
            of_a, of_b = scales
            a = a * (of_a.repeat_interleave(128, 1)[:, : self.k] if blocks else of_a)
            b = b * (of_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[: self.k, : self.n] if blocks else of_b)
        self.out.fill_(torch.nan)
        call(0)
        torch.testing.assert_close(self.out.float(), a @ b, rtol=2e-2, atol=2e-2 * math.sqrt(self.k))


def calls(n: int, k: int, tilings: Sequence[Tiling]) -> dict[str, list[Work]]:
    """What is timed, ready to run."""
    product = Product(n, k)
    found: dict[str, Call] = {"cublas": product.mm, "bfloat16": product.kernel(None)}
    for recipe in RECIPES:
        found[recipe] = product.kernel(Scaling(recipe=recipe))
        found[f"{recipe} product"] = product.kernel(Scaling(recipe=recipe), live=False)
    for tile in tilings:
        found[f"{tile.n},{tile.k},{tile.warps},{tile.stages}"] = product.kernel(Scaling(), tile=tile)
    numbers = range(2 * len(product.weights))
    return {f"computation/{name}": [partial(call, number) for number in numbers] for name, call in found.items()}


def cases(given: argparse.Namespace) -> list[Case]:
    return [
        Case(op="matmul_all_reduce", name=f"{k}x{n} batch=1", shape=(1, n, k), calls=partial(calls, n, k, given.tilings))
        for n, k in SIZES
    ]


PART = Part(
    bench="one_row_fp8",
    about=__doc__,
    dtype="float8_e4m3fn",
    baseline="computation/cublas",
    rounds=ROUNDS,
    cases=cases,
    options=lambda parser: parser.add_argument(
        "--tilings", type=tiling, nargs="*", default=[], help="tile shapes to try, see above"
    ),
)
