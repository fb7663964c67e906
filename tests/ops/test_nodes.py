"""Ranks on several nodes: every operator by messages between them, on CPU ranks of one host that is cut into nodes.

What is cut off is out of reach in weft's eyes: no segment of another node's rank is mapped, so a schedule that went through
memory would fail, not pass.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from collective_work import Case, in_place, moves, sums
from launch_counts import counting
from nodes_work import SPECS, check_every_operator
from rank_pools import on_ranks
from rank_work import check_gather, slowed, whole
from single_process_ranks import wait_for
from test_all_to_all import check_both as check_exchanges

import weft
from weft import collectives
from weft.comm.membership import nodes_of, ranks_per_node
from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import heap_of, rendezvous_of
from weft.core.errors import PeerLost, RankMismatch, WaitTimeout
from weft.runtime.groups import GROUPS
from weft.runtime.ranks import RankFailed, Ranks

BOUND_S = 3.0


def _nodes(per_node: int, world_size: int = 4) -> Ranks:
    return Ranks(world_size, environment={"WEFT_RANKS_PER_NODE": str(per_node), "WEFT_TIMEOUT_S": "20"})


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Ranks]:
    with _nodes(2) as pool:
        yield pool


@on_ranks(pool="two_nodes")
def test_nodes_of_different_sizes() -> None:
    """Three ranks on one node, one on another: a group that begins anew asks how ranks are cut."""
    weft.close()
    os.environ["WEFT_RANKS_PER_NODE"] = "3"
    try:
        for spec in SPECS:
            check_exchanges(37, 23, 19, torch.float32, spec, spec, 1)
            check_gather(37, 23, 19, torch.float32, spec, 2)
        with pytest.raises(ValueError, match=r"needs nodes of one size, not of \(3, 1\); use sequential"):
            weft.matmul_all_reduce(torch.ones(4, 3), torch.ones(3, 4), schedule="node_slices")
    finally:
        weft.close()
        os.environ["WEFT_RANKS_PER_NODE"] = "2"


def _interpreted() -> int:
    """Launches of kernels. No other work of these ranks loads a kernel: what is loaded here is interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"
    from weft.runtime import fused, lookups

    weft.close()
    bound, os.environ["WEFT_TIMEOUT_S"] = os.environ["WEFT_TIMEOUT_S"], "60"
    try:
        with counting(fused.FusedGemm, fused.FusedSum, lookups.FusedLookup) as launches:
            check_every_operator(40, 24, 32, torch.float16, "node_slices:2", 0)
    finally:
        dist.barrier()
        weft.close()
        os.environ["WEFT_TIMEOUT_S"] = bound
        del os.environ["TRITON_INTERPRET"]
    return launches.count


@pytest.mark.ranks
def test_kernels_interpreted(two_nodes: Ranks) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    # A GEMM that counts slices, one that waits within the node (twice, as received rows are handed out, too), and so on.
    assert min(two_nodes.run(_interpreted)) >= 6


@on_ranks(pool="two_nodes")
def test_backward_goes_across_nodes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b, _ = whole(24, 16, 8, torch.float32, 3)
    mine = a.chunk(size)[rank].clone().requires_grad_()
    weight = b.chunk(size, 1)[rank].clone().requires_grad_()
    out = weft.all_gather_matmul(mine, weight, schedule="node_slices:2")
    grad = whole(24, 16, 1, torch.float32, 4)[2].float()
    out.backward(grad.chunk(size, 1)[rank])
    assert mine.grad is not None
    assert weight.grad is not None
    assert torch.allclose(mine.grad, (grad @ b.t()).chunk(size)[rank], atol=1e-4)
    assert torch.allclose(weight.grad, (a.t() @ grad).chunk(size, 1)[rank], atol=1e-4)


@on_ranks(pool="two_nodes")
@pytest.mark.parametrize("late", ["compute", "transport"])
def test_calls_in_a_row_with_a_slow_rank(late: str) -> None:
    """New data each call, with one rank late to compute, or to send: what has not been received is not overwritten."""
    from weft.runtime.host import HostProgram
    from weft.runtime.host_resources import HostWire

    owner, name = {"compute": (HostProgram, "multiply"), "transport": (HostWire, "exchange")}[late]
    with slowed(owner, name, 0.004, rank=2):
        for call in range(6):
            check_every_operator(24, 12, 10, torch.float32, "node_slices:2", call)


def _out_of_reach() -> tuple[tuple[int, ...], bool, list[int]]:
    """What a group knows of nodes, and whose memory a new allocation maps."""
    group = dist.group.WORLD
    assert group is not None
    rank_group = RankGroup(group)
    try:
        piece = heap_of(rank_group, torch.device("cpu")).allocate(64)
        assert len(piece.addresses) == len(rank_group.ranks_on_node)
        return rank_group.nodes, rank_group.one_host, list(piece.ranks)
    finally:
        rank_group.close()


@pytest.mark.ranks
def test_memory_of_another_node_is_not_mapped(two_nodes: Ranks) -> None:
    assert two_nodes.run(_out_of_reach) == [((2, 2), True, [0, 1])] * 2 + [((2, 2), True, [2, 3])] * 2


def _near() -> list[list[int]]:
    """Twice, as after a close: whom ranks meet, that GPUs of a node share memory with."""
    from rendezvous_work import gather_numbers, meet

    found = []
    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "rendezvous", gather_numbers)
        for _ in range(2):
            rank_group = RankGroup(group)
            rendezvous = rendezvous_of(rank_group)
            found += [meet(rendezvous), meet(rendezvous)]
            rank_group.close()
    return found


@pytest.mark.ranks
def test_a_nodes_ranks_meet_alone(two_nodes: Ranks) -> None:
    assert two_nodes.run(_near) == [[[0, 1]] * 4] * 2 + [[[2, 3]] * 4] * 2


def _refused() -> list[str]:
    a, b = torch.ones(8, 4), torch.ones(4, 8)
    messages = []
    problem = weft.Problem(op="matmul_all_to_all", m=8, n=8, k=4, world_size=4, dtype="float32")
    schedule = weft.schedule.build(problem, "direct_store")
    for asked in ("direct_store", "track_and_trigger:2", schedule):
        with pytest.raises(ValueError, match=r"nodes of|schedule is for") as caught:
            weft.matmul_all_to_all(a, b, schedule=asked)
        messages.append(str(caught.value))
    check_exchanges(8, 8, 4, torch.float32, "node_slices:1", "sequential", 0)
    return messages


@pytest.mark.ranks
def test_what_needs_memory_of_other_nodes_is_refused(two_nodes: Ranks) -> None:
    for name, _, value in two_nodes.run(_refused):
        assert name == (
            "schedule is 'direct_store', which loads from and stores to all ranks; on nodes of (2, 2) ranks, "
            "use sequential or node_slices"
        )
        assert value.startswith("schedule is for matmul_all_to_all M=8")


def _collectives_alone() -> list[str]:
    """NCCL's collectives, into the caller's tensors, in place and chosen by auto; what needs memory of all ranks is refused."""
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        case = Case(elements=37, dtype=dtype, seed=seed)
        for spec in ("sequential", "auto"):
            moves(case, spec)
            sums(case, spec, ("sum", "avg")[seed])
            in_place(case, spec)
    collectives.all_reduce(torch.empty(0))
    assert {choice.spec for choice in weft.choices()} == {"sequential"}
    tensor = torch.ones(8)
    refused: tuple[Callable[[], object], ...] = (
        lambda: collectives.all_reduce(tensor, schedule="copy_engine"),
        lambda: collectives.all_gather(tensor, schedule="copy_engine_pull:2"),
        lambda: collectives.empty(8),
    )
    messages = []
    for call in refused:
        with pytest.raises(ValueError, match="nodes of") as caught:
            call()
        messages.append(str(caught.value))
    return messages


@pytest.mark.ranks
def test_collectives_alone_are_by_nccl(two_nodes: Ranks) -> None:
    for pushed, pulled, shared in two_nodes.run(_collectives_alone):
        why = "which loads from and stores to all ranks; on nodes of (2, 2) ranks, use sequential"
        assert pushed == f"schedule is 'copy_engine', {why}"
        assert pulled == f"schedule is 'copy_engine_pull', {why}"
        assert shared.startswith("group is on nodes of (2, 2) ranks; peers can only write memory within one node")


def _find_copy_engines() -> list[bool]:
    """A sum beside a product; whether GPUs would try copy engines for it, among all ranks and among those of a node."""
    from weft.overlap.concurrent.cuda import CudaExecutor

    rank, (a, b, _) = dist.get_rank(), whole(8, 6, 4, torch.float32, 5)
    grad = torch.full((16,), float(rank))
    out = weft.concurrent(lambda: a @ b, weft.AllReduce(grad), key="beside", repeatable=True)
    assert torch.equal(out, a @ b)
    assert torch.equal(grad, torch.full((16,), 6.0))
    near = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    device = CudaExecutor(torch.device("cpu"))
    found = [device.abilities((weft.AllReduce(grad, group),)).copy_engine for group in (None, near)]
    weft.close(near)
    dist.destroy_process_group(near)
    return found


@pytest.mark.ranks
def test_copy_engines_beside_a_computation_within_a_node_alone(two_nodes: Ranks) -> None:
    assert two_nodes.run(_find_copy_engines) == [[False, True]] * 4


def _different() -> str:
    rows = 8 if dist.get_rank() < 3 else 12
    try:
        weft.matmul_all_to_all(torch.ones(rows, 4), torch.ones(4, 8), schedule="sequential")
    except (RankMismatch, PeerLost) as error:
        message = f"{type(error).__name__}: {error}"
    dist.barrier()
    weft.close()
    check_exchanges(8, 8, 4, torch.float32, "node_slices:1", "sequential", 0)
    return message


@pytest.mark.ranks
def test_ranks_of_different_nodes_compare_what_they_call(two_nodes: Ranks) -> None:
    messages = two_nodes.run(_different)
    assert all("M: rank" in message and "8" in message and "12" in message for message in messages), messages


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _call_until_lost(victim: int, how: int, notice: Path, bound_s: float) -> tuple[str, float]:
    """Call until the victim, which this function kills or stops, is noticed. Return the error, and how long it took.

    The victim's neighbour calls nothing until a rank of another node has the error, so the others learn of the loss from what
    the neighbour's relay publishes. If the victim is stopped, every rank reads its last state before it calls.

    notice: a file that a rank creates when it has the error.
    bound_s: the bound of waits after the first call.
    """
    check_exchanges(16, 8, 4, torch.float32, "node_slices:2", "node_slices:2", 0)
    dist.barrier()
    rank = dist.get_rank()
    rank_group = GROUPS.state(dist.group.WORLD.group_name).rank_group  # type: ignore[union-attr]
    rank_group.timeout_s = bound_s
    if rank == victim:
        os.kill(os.getpid(), how)
    struck = time.monotonic()
    if how == signal.SIGSTOP:
        assert wait_for(lambda: _stopped(rank_group.pids[victim]))
        rank_group._refresh()
    if rank == victim - 1 and dist.get_world_size() > 2:
        assert wait_for(notice.exists)
    try:
        check_exchanges(16, 8, 4, torch.float32, "node_slices:2", "node_slices:2", 1)
    except (PeerLost, WaitTimeout) as error:
        notice.touch()
        return f"{type(error).__name__}: {error}", time.monotonic() - struck
    raise AssertionError("a rank was lost and nobody noticed")


@pytest.mark.ranks
def test_a_rank_of_another_node_that_died_is_named(tmp_path: Path) -> None:
    with _nodes(2, world_size=3) as pool:
        pool.start(_call_until_lost, 1, signal.SIGKILL, tmp_path / "told", 10.0)
        with pytest.raises(RankFailed) as caught:
            pool.finish(timeout_s=60)
        message, _ = caught.value.results[2]
        assert re.match(r"PeerLost: rank 1 failed: process \d+ died$", message)
        assert "rank 1" in caught.value.results[0][0]


@pytest.mark.ranks
def test_a_rank_of_another_node_that_stopped_is_named_at_the_bound(tmp_path: Path) -> None:
    with _nodes(1, world_size=2) as pool:
        pool.start(_call_until_lost, 1, signal.SIGSTOP, tmp_path / "told", BOUND_S)
        assert pool._pipes[0].poll(60.0)
        pool.processes[1].kill()
        with pytest.raises(RankFailed) as caught:
            pool.finish()
        message, seconds = caught.value.results[0]
        heard = re.match(r"PeerLost: rank 1, on another node, has been silent for (\d+) s$", message)
        assert heard, message
        assert int(heard[1]) >= BOUND_S
        assert seconds < 20


def test_hosts_make_nodes() -> None:
    assert nodes_of(["a", "a", "b"]) == (2, 1)
    assert nodes_of(["a", "a"]) == ()
    with pytest.raises(ValueError, match=r"group has ranks of a among those of other hosts \(a, b, a\)"):
        nodes_of(["a", "b", "a"])


@pytest.mark.parametrize("text", ["0", "two", "-1", ""])
def test_ranks_per_node_that_are_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WEFT_RANKS_PER_NODE", text)
    with pytest.raises(ValueError, match="it must be a whole number of at least 1"):
        ranks_per_node()
