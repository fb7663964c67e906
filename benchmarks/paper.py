"""Is the gain that the fused kernels' paper reports there on this machine, over its own ranges?

Punniyamurthy, Hamidouche, Beckmann, arXiv 2305.06942: on 4 GPUs of one host, the mean and the largest reduction of the time of
a separate kernel followed by NCCL's collective. Here that is torch's operator and NCCL on plain buffers, and the time is
that of weft's "auto", each in a CUDA graph. Ranges as in the paper: batch and tables of an embedding of dim 256, M and K of a
GEMV whose K is cut between ranks, tokens of a GEMM. Ours, where it names none: 70 rows a bag (which its DLRM has), 20,000 rows
a table, tables a GPU, tokens of each rank, and a GEMM of 4096 x 4096.

Traps: the paper's GPUs are MI210 in a full mesh. Its lookups were the same with and without fusing, ours gather faster than
torch's: so there is a line, too, for weft's own lookup kernel followed by NCCL.

Cases are in cases.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.rows import Row, best_us

REPORTED: tuple[tuple[str, str, str, int, int], ...] = (
    ("embedding_bag_all_to_all", "torch's bags, NCCL", "sequential/", 20, 32),
    ("embedding_bag_all_to_all", "weft's lookup, NCCL", "weft/sequential", 20, 32),
    ("matmul_all_reduce", "cuBLAS, NCCL", "sequential/default", 13, 22),
    ("matmul_all_to_all", "cuBLAS, NCCL", "sequential/default", 12, 20),
)
"""Operator, what is compared with, how its methods' names begin, and the paper's mean and largest reduction in percent."""


def reductions(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[float], int, int]]:
    """Of each that the paper reports, our reductions of the time in percent in place of the methods' names."""
    for op, against, methods, mean, largest in REPORTED:
        times = [(row.us["weft/auto"], best_us(row, methods)) for row in rows if row.op == op and "weft/auto" in row.us]
        yield op, against, [100 * (1 - weft / us) for weft, us in times if us], mean, largest


def summary(rows: Sequence[Row]) -> str:
    """Reductions of the time in percent, and the paper's."""
    return "\n".join(
        f"{op} against {against}, {len(less)} cases: mean {statistics.fmean(less):.0f}%, max {max(less):.0f}%, min "
        f"{min(less):.0f}%; the paper: mean {mean}%, max {largest}%"
        for op, against, less, mean, largest in reductions(rows)
        if less
    )
