"""A RaggedCall is a call with splits, whose row counts are only known on the device.

Hosts read the counts in weft.runtime.host_resources. On GPUs, and under Triton's interpreter, the kernels do
(weft.runtime.ragged_kernels). Rows that do not fit are dropped on all devices, and all ranks report the same error. If hosts
know the counts of all ranks, the call itself raises it. Otherwise a later call or `weft.synchronize` raises it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft.core import __version__
from weft.core.problem import DType, Problem, RaggedProblem
from weft.runtime.bindings import Inputs, Outputs, scales_name
from weft.runtime.calls import Call, ScaledOperands

_COLUMNS = 8


@dataclass(kw_only=True, slots=True)
class RaggedCall(Call):
    """A RaggedCall is a call with splits.

    a: [rows, K].
    b: [experts, K, N].
    splits: the rows by (expert, dst_rank) for a combine, or by (dst_rank, expert) for a dispatch.
    max_rows: the most rows that may arrive.
    gated: whether a dispatch returns silu(left half) * right half of its product, N / 2 columns.
    a_rows: the most rows that a has on any rank, the same on all ranks. None if it is not known.
    limit: as in RaggedProblem.
    scales: the scales of FP8 operands. Those of b are one tensor, whose first dimension is the experts.
    """

    schedule: str = "auto"
    a: torch.Tensor
    b: torch.Tensor
    splits: torch.Tensor
    max_rows: int
    return_received: bool = False
    gated: bool = False
    a_rows: int | None = None
    limit: str = ""
    scales: ScaledOperands | None = None

    def results_of(self, outputs: Outputs) -> list[torch.Tensor]:
        """Return the result, the counts of the rows that arrived, and these rows and their scales if they were requested."""
        rows, scales = outputs.get("received", []), outputs.get(scales_name("received"), [])
        return [*outputs["out"], *outputs["counts"], *rows, *scales]

    @property
    def inputs(self) -> Inputs:
        found: dict[str, Sequence[torch.Tensor]] = {"a": (self.a,), "b": (self.b,), "splits": (self.splits,)}
        if self.scales is not None:
            assert self.scales.a is not None, "rows with splits are quantised before the call"
            found[scales_name("a")], found[scales_name("b")] = (self.scales.a,), self.scales.bs
        return found

    @property
    def device(self) -> torch.device:
        return self.a.device

    @property
    def tried(self) -> bool:
        return False

    @property
    def share(self) -> int:
        """The rows of a."""
        return int(self.a.shape[0])

    @property
    def key(self) -> tuple[object, ...]:
        """The key does not contain the rows of a, which differ between calls and between ranks."""
        sizes = (self.max_rows, self._products, self.limit, self.b.shape)
        scaled = None if self.scales is None else (self.scales.scaling, self.scales.output_dtype)
        return (self.op, self.gated, self.return_received, sizes, self.a.dtype, self.a.get_device(), self.schedule, scaled)

    def describe(self) -> str:
        experts, k, n = self.b.shape
        name = "all_to_all_matmul" if self._dispatches else "matmul_all_to_all"
        lines = (
            f"op: {name} with splits{', gated' * self.gated}",
            f"settings: {self.limit or 'none'}",
            f"{'room for rows' if self.limit else 'max_rows'}: {self.max_rows}",
            f"room for products: {self._products}",
            f"experts: {experts}",
            f"K: {k}",
            f"N: {n}",
            f"{'gradient of experts' if self.limit else 'return_received'}: {self.return_received}",
            f"dtype: {self.a.dtype}",
            *([] if self.scales is None else self.scales.describe().splitlines()),
            f"device: {self.a.device.type}",
            f"schedule: {self.schedule}",
            f"weft: {__version__}",
        )
        return "\n".join(lines)

    def sums_nothing(self, shares: tuple[int, ...]) -> bool:
        return not self.b.shape[1]

    def filled(self, world_size: int) -> RaggedCall:
        """Return the call with columns of zeros, as many as the kernels need."""
        experts, _, n = self.b.shape
        a, b = self.a.new_zeros(self.a.shape[0], _COLUMNS), self.b.new_zeros(experts, _COLUMNS, n)
        return replace(self, a=a, b=b)

    def problem(self, shares: tuple[int, ...]) -> Problem:
        """Return the problem.

        If a_rows is not known, a combine reserves memory for an eighth more rows than the longest a has now, but at least for
        max_rows. In a dispatch at most max_rows rows arrive at each rank.
        """
        experts, k, n = self.b.shape
        capacity = self._products or room(max(9 * max(shares) // 8, self.max_rows))
        result = self.a.dtype if self.scales is None else self.scales.output_dtype
        dtype: DType = str(result).removeprefix("torch.")  # type: ignore[assignment]
        return RaggedProblem(
            op=self.op,
            m=self.max_rows,
            n=n // 2 if self.gated else n,
            k=k,
            world_size=len(shares),
            dtype=dtype,
            capacity=len(shares) * self.max_rows if self._dispatches else capacity,
            experts=experts,
            gated=self.gated,
            return_received=self.return_received,
            limit=self.limit,
            scaling=None if self.scales is None else self.scales.scaling,
        )

    @property
    def _products(self) -> int | None:
        """The rows for which a combine reserves memory for products. None if the first call decides it."""
        return None if self._dispatches or self.a_rows is None else room(max(self.a_rows, self.max_rows))

    @property
    def _dispatches(self) -> bool:
        return self.op == "ragged_all_to_all_matmul"

    def refusal(self, shares: Sequence[int]) -> str:
        most = max(shares)
        if self.a_rows is None or most <= self.a_rows:
            return ""
        where = f"rank {shares.index(most)}" if len(shares) > 1 else "this rank"
        return (
            f"{self.limit} leaves room for {self.a_rows} rows (tokens times top k) of a rank, but {where} has {most}; "
            "raise max_tokens, or omit it"
        )


def room(rows: int) -> int:
    """Return a max_rows for at least this many rows.

    It has few different values, because each needs a program with its own memory. It is at most an eighth larger.

    >>> [room(rows) for rows in (0, 7, 16, 17, 1000, 16384)]
    [1, 7, 16, 18, 1024, 16384]
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return max(1, -(-rows // step) * step)
