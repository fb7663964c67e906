"""Row counts that change, on GPUs: padded to a bucket, replayed and in a graph."""

from __future__ import annotations

import pytest
import torch
from on_gpus import NEEDS_TWO, SIZES, alarm
from rank_pools import ranks_on_gpus
from test_buckets import changing, clocked

import weft
from weft.core.problem import Op
from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO
pool = ranks_on_gpus(SIZES[0], 20.0)
SHARDED: dict[Op, str] = {
    "all_gather_matmul": "flag_gated:2",
    "matmul_reduce_scatter": "track_and_trigger:2",
    "matmul_all_reduce": "two_shot",
}


@pytest.mark.parametrize(
    ("op", "spec", "uneven"),
    [
        *((op, spec, uneven) for op, spec in SHARDED.items() for uneven in (False, True)),
        ("all_gather_matmul", "shard_p2p", True),
        # Rows of an all-to-all divide by ranks.
        ("matmul_all_to_all", "direct_store:1", False),
        ("all_to_all_matmul", "flag_gated:1", False),
    ],
)
def test_results_are_right_and_programs_few(pool: Ranks, op: Op, spec: str, uneven: bool) -> None:
    for measured, between in pool.run(changing, op, spec, uneven, timeout_s=60):
        assert len(between) <= len(measured) + 3


@alarm(60)
def _in_a_graph() -> None:
    """Captured after one call, replayed on new data; and eager calls whose tensors lie where they lay."""
    with clocked("flag_gated:2"):
        b = torch.randn(256, 384, device="cuda").bfloat16()
        for rows in (512, 1536, 256, 128):
            weft.all_gather_matmul(torch.randn(rows, 256, device="cuda").bfloat16(), b)
        a = torch.randn(601, 256, device="cuda").bfloat16()
        weft.all_gather_matmul(a, b)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = weft.all_gather_matmul(a, b)
        for _ in range(12):
            a.normal_()
            expected = weft.all_gather_matmul(a, b, schedule="sequential").float()
            graph.replay()
            torch.testing.assert_close(captured.float(), expected, rtol=2e-2, atol=0.3)
            torch.testing.assert_close(weft.all_gather_matmul(a, b).float(), expected, rtol=2e-2, atol=0.3)
        del graph


def test_in_a_graph_and_replayed(pool: Ranks) -> None:
    pool.run(_in_a_graph, timeout_s=90)
