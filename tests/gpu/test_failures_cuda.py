"""Failures on GPUs: a rank that dies, stops, sleeps, raises, calls something else, or never comes.

Every other one is told, soon; none takes what was cut short for a result; and all can go on.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_gpus import NEEDS_TWO, SHARED, SIZES, alarm
from rank_pools import gpus, ranks_on_gpus
from rank_work import check_gather, check_scatter, here
from silenced_rank import before_launches, told_of, told_without

import weft
from weft.core.errors import PeerLost, WeftError
from weft.runtime.groups import GROUPS
from weft.runtime.ranks import RankFailed, Ranks

pytestmark = NEEDS_TWO
BOUND_S = 5.0
pool = ranks_on_gpus(SIZES, BOUND_S)


@alarm(90)
def _never_arrives(name: str) -> str:
    """Rank 1 raises no flag of its peers in a call in which they already wait on the GPU; then all go on together."""
    weft.close()  # of a group that has captured NCCL's collectives, the communicator would be aborted
    check_scatter(256, 128, 64, torch.bfloat16, name, 0)
    message = told_without(1, lambda: check_scatter(256, 128, 64, torch.bfloat16, name, 1))
    torch.cuda.synchronize()
    time.sleep(1)
    dist.barrier()
    weft.close()
    check_scatter(256, 128, 64, torch.bfloat16, name, 2)
    assert here().type == "cuda"
    return message


@pytest.mark.parametrize("name", ["hetero_unfused_1d:2", "track_and_trigger:2"])
def test_a_flag_that_never_comes(pool: Ranks, name: str) -> None:
    messages = pool.run(_never_arrives, name)
    assert any("arrived[" in m and "rank 1's lane copy raises it" in m for m in messages if m != "right"), messages


_REPLAYED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "lanes": lambda a, b: weft.matmul_reduce_scatter(a, b, schedule="track_and_trigger:2"),
    "one kernel": lambda a, b: weft.matmul_all_reduce(a[:8], b, schedule="one_shot"),
}
"""Calls whose waits are seen in the words of lanes, and in those of a kernel."""


@alarm(90)
def _replays_until(victim: int, how: int, what: str) -> tuple[str, float]:
    """Replay a captured call without end; `victim` gets the signal on the way. What the others are told, and how soon after."""
    a, b = torch.ones(256, 64, device="cuda").bfloat16(), torch.ones(64, 128, device="cuda").bfloat16()
    call = _REPLAYED[what]
    assert not bool(call(a, b).isnan().all())
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call(a, b)
    struck = time.monotonic() + 0.5
    if dist.get_rank() == victim:
        if how == signal.SIGSTOP:  # it goes on when the others have given up
            subprocess.Popen(["sh", "-c", f"sleep {3 * BOUND_S + 0.5}; kill -CONT {os.getpid()}"])
        threading.Timer(0.5, lambda: os.kill(os.getpid(), how)).start()
    message, slowest = "", 0.0
    while not message and time.monotonic() < struck + 30:
        began = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        slowest = max(slowest, time.monotonic() - began)
        try:
            weft.synchronize()
        except WeftError as error:
            message = f"{type(error).__name__}: {error}"
    ended = time.monotonic() - struck
    if dist.get_rank() != victim:
        until = time.monotonic() + 5
        while not bool(out.isnan().all()) and time.monotonic() < until:
            time.sleep(0.1)
        assert bool(out.isnan().all()), "what a replay that was cut short has returned"
    for _ in range(3):  # each replay ends from now on, too
        began = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        assert time.monotonic() - began < BOUND_S
    if dist.get_rank() != victim:
        assert slowest < BOUND_S + (5 if how == signal.SIGSTOP else 0), slowest
    # The GPU is usable, and calls say what happened.
    assert float((a.float() @ b.float()).sum()) == 256 * 128 * 64
    with pytest.raises(WeftError, match="has failed"):
        call(a, b)
    return message, ended


@pytest.mark.parametrize("what", _REPLAYED)
def test_a_rank_that_dies_while_graphs_are_replayed(what: str) -> None:
    """Replays that wait for it end soon: the watch looks after peers between calls, too, and releases the streams."""
    with Ranks(2, device=gpus(), environment={"WEFT_TIMEOUT_S": str(BOUND_S)}) as ranks:
        ranks.start(_replays_until, 1, signal.SIGKILL, what)
        with pytest.raises(RankFailed) as caught:
            ranks.finish(timeout_s=60)
    assert [rank for rank, _ in caught.value.failures] == [1], caught.value.failures
    message, seconds = caught.value.results[0]
    assert message.startswith("PeerLost: rank 1 (process")
    assert seconds < BOUND_S


@pytest.mark.parametrize("what", _REPLAYED)
def test_a_rank_that_is_stopped_while_graphs_are_replayed(what: str) -> None:
    """Its process lives, so only the bound of the replay that waits for it ends that; it gets the error once it goes on."""
    with Ranks(2, device=gpus(), environment={"WEFT_TIMEOUT_S": str(BOUND_S)}) as ranks:
        ranks.start(_replays_until, 1, signal.SIGSTOP, what)
        (message, seconds), (stopped, _) = ranks.finish(timeout_s=90)
    assert message.startswith("WaitTimeout: rank 0"), message
    assert "in a replay of a CUDA graph" in message
    assert BOUND_S < seconds < BOUND_S + 5
    assert stopped.startswith("PeerLost: rank 0 failed"), stopped


@alarm(60)
def _replays_for(what: str, seconds: float) -> int:
    """Replay a captured call for longer than the bound, a few replays ahead of the GPU. How many."""
    a, b = torch.ones(256, 64, device="cuda").bfloat16(), torch.ones(64, 128, device="cuda").bfloat16()
    call, count = _REPLAYED[what], 0
    expected = call(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call(a, b)
    over = torch.zeros(1)
    dist.barrier()
    until = time.monotonic() + seconds
    while not bool(over):
        for _ in range(8):
            graph.replay()
        count += 8
        torch.cuda.synchronize()
        over.fill_(time.monotonic() > until)
        dist.all_reduce(over, op=dist.ReduceOp.MAX)  # every rank makes as many replays
    weft.synchronize()
    assert torch.equal(out, expected)
    del graph
    return count


@pytest.mark.parametrize("what", _REPLAYED)
def test_replays_that_go_on_are_no_failure(what: str) -> None:
    with Ranks(2, device=gpus(), environment={"WEFT_TIMEOUT_S": "1"}) as ranks:
        assert all(count > 100 for count in ranks.run(_replays_for, what, 5.0))


@alarm(60)
def _wakes_too_late(victim: int, step: int) -> str:
    """`victim` sleeps past the bound while it enqueues a call, its watch too, as if it were stopped; the others give up, and
    let go of what waits on their GPUs."""
    from weft.runtime.watchdog import Watchdog

    weft.close()  # of a group that has captured NCCL's collectives, the communicator would be aborted
    check_scatter(256, 128, 64, torch.bfloat16, "track_and_trigger:2", 0)
    look, asleep = Watchdog._look, threading.Event()

    def sleep_at(number: int) -> None:
        if number == step:
            asleep.set()
            time.sleep(2 * BOUND_S)
            asleep.clear()

    def drowsy(self: Watchdog) -> bool:
        return asleep.is_set() or look(self)

    if dist.get_rank() == victim:
        Watchdog._look = drowsy  # type: ignore[method-assign]
    try:
        with before_launches(sleep_at) if dist.get_rank() == victim else nullcontext():
            message = told_of(lambda: check_scatter(256, 128, 64, torch.bfloat16, "track_and_trigger:2", 1))
    finally:
        Watchdog._look = look  # type: ignore[method-assign]
    torch.cuda.synchronize()
    weft.close()
    dist.barrier()
    check_scatter(256, 128, 64, torch.bfloat16, "track_and_trigger:2", 2)
    weft.close()
    return message


@pytest.mark.parametrize("step", [1, 3])
def test_a_rank_that_wakes_after_the_others_gave_up_takes_no_result(pool: Ranks, step: int) -> None:
    """What released streams send is rubbish: whoever was asleep in the meantime is told, too (AssertionError if it is not)."""
    messages = pool.run(_wakes_too_late, 0, step)
    assert messages[0].startswith("PeerLost"), messages
    assert any("WaitTimeout" in message for message in messages[1:]), messages


@alarm(60)
def _nccl_waits_for(victim: int, how: str, again: str) -> tuple[str, float]:
    """Sequential calls; `victim` does not come to NCCL's collective. What a rank is told, and how soon; then it goes on
    in another process group."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), here()
    a, b = torch.ones(64 * size, 64, device=device).bfloat16(), torch.ones(64, 128, device=device).bfloat16()
    weft.matmul_reduce_scatter(a, b, schedule="sequential")
    torch.cuda.synchronize()
    dist.barrier()
    began, message = time.monotonic(), ""
    graph = torch.cuda.CUDAGraph()
    if how == "dies, graph":
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            weft.matmul_reduce_scatter(a, b, schedule="sequential")
        dist.barrier()
    if rank == victim and how.startswith("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == victim:
        time.sleep(2 * BOUND_S)
    try:
        out = weft.matmul_reduce_scatter(a, b, schedule="sequential")
        torch.cuda.synchronize()
        assert bool(out.isnan().all()), "a result without the lost rank's part"
        weft.synchronize()
    except WeftError as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    weft.close()
    # NCCL's abort waits for graphs that hold its collectives, and weft.close() only so long for it.
    del graph
    if how == "late" or not SHARED:  # ranks that share a GPU reach each other by sockets, whose end NCCL waits for
        dist.destroy_process_group()
    if how == "late":
        store = dist.FileStore(again, size)  # type: ignore[attr-defined]
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, device_id=device)
        out = weft.matmul_reduce_scatter(a, b, schedule="sequential")
        assert float(out.sum()) == 64 * 128 * 64 * size
        weft.close()
    assert float((a.float() @ b.float()).sum()) == 64 * size * 128 * 64
    return message, seconds


@pytest.mark.parametrize("how", ["dies", "dies, graph", "late"])
def test_a_rank_that_does_not_come_to_nccls_collective(how: str, tmp_path: Path) -> None:
    """Nothing but the communicator's end ends that collective: every rank is told in time, and can go on in a new group."""
    with Ranks(2, device=gpus(), environment={"WEFT_TIMEOUT_S": str(BOUND_S)}) as ranks:
        ranks.start(_nccl_waits_for, 1, how, str(tmp_path / "again"))
        if how == "late":
            reports = ranks.finish(timeout_s=60)
        else:
            with pytest.raises(RankFailed) as caught:
                ranks.finish(timeout_s=60)
            assert [rank for rank, _ in caught.value.failures] == [1], caught.value.failures
            reports = caught.value.results
    message, seconds = reports[0]
    assert message.startswith("WaitTimeout: rank 0" if how == "late" else "PeerLost: rank 1 (process"), message
    assert seconds < BOUND_S + 3
    if how == "late":
        assert "has failed (rank 0 failed: rank 0, lane compute" in reports[1][0], reports[1]


@alarm(60)
def _different_calls() -> str:
    """Two operators that every rank knows; then rank 1 calls the other one."""
    weft.close()  # of a group that has captured NCCL's collectives, the communicator would be aborted
    a, b = torch.ones(64, 64, device="cuda").bfloat16(), torch.ones(64, 48, device="cuda").bfloat16()
    for _ in range(2):
        weft.all_gather_matmul(a, b, schedule="flag_gated:1")
        weft.matmul_reduce_scatter(a, b, schedule="track_and_trigger:1")
    torch.cuda.synchronize()
    message = "right"
    try:
        if dist.get_rank() == 1:
            weft.matmul_reduce_scatter(a, b, schedule="track_and_trigger:1")
        else:
            weft.all_gather_matmul(a, b, schedule="flag_gated:1")
        torch.cuda.synchronize()
        time.sleep(1)
        weft.synchronize()
    except WeftError as error:
        message = f"{type(error).__name__}: {error}"
    torch.cuda.synchronize()
    dist.barrier()
    weft.close()
    check_scatter(256, 128, 64, torch.bfloat16, "flag_gated", 2)
    return message


def test_ranks_that_call_different_things_they_know(pool: Ranks) -> None:
    messages = pool.run(_different_calls)
    assert all("RankMismatch" in m or "PeerLost" in m for m in messages), messages
    assert any("op: rank" in m and "matmul_reduce_scatter" in m for m in messages), messages


def _operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(64 * dist.get_world_size(), 64, device=here()).bfloat16(), torch.ones(64, 128, device=here()).bfloat16()


def _time_to_error(work: Callable[[], object]) -> tuple[str, float]:
    """What some work, or waiting for the GPU behind it, raises, and after how many seconds."""
    began = time.monotonic()
    message = told_of(work)
    return message, time.monotonic() - began


def _all_go_on() -> None:
    """After a failure: closed at once, whatever is under way."""
    weft.close()
    dist.barrier()
    torch.cuda.empty_cache()
    check_scatter(256, 128, 64, torch.bfloat16, "track_and_trigger:2", 9)
    weft.close()
    faulthandler.cancel_dump_traceback_later()


def _queued() -> tuple[str, float]:
    """Rank 1 fails while the others' call is behind other work of their stream, which ends later."""
    faulthandler.dump_traceback_later(40, exit=True)
    weft.close()
    a, b = _operands()
    weft.matmul_reduce_scatter(a, b, schedule="track_and_trigger:2")
    torch.cuda.synchronize()
    dist.barrier()
    faulthandler.dump_traceback_later(40, exit=True)

    def queued() -> None:
        torch.cuda._sleep(4_000_000_000)
        weft.matmul_reduce_scatter(a, b, schedule="track_and_trigger:2")

    def fails() -> None:
        time.sleep(0.5)
        group = dist.group.WORLD
        assert group is not None
        raise GROUPS.state(group.group_name).rank_group.fail(MemoryError("planted"))

    reports = _time_to_error(fails if dist.get_rank() == 1 else queued)
    _all_go_on()
    return reports


def test_a_call_that_is_queued_when_a_rank_fails_is_told(pool: Ranks) -> None:
    """It finds all flags raised when its turn comes."""
    reports = pool.run(_queued, timeout_s=90)
    assert reports.pop(1)[0] == "MemoryError: planted"
    assert all(message.startswith("PeerLost: rank") and "failed: planted" in message for message, _ in reports), reports


def _raises_within(step: int, replays: bool) -> tuple[str, float]:
    """Rank 1 raises in the middle of enqueuing, or of capturing what would be replayed, and closes at once."""
    from weft.runtime.replay import Replays

    faulthandler.dump_traceback_later(40, exit=True)
    weft.close()
    a, b = _operands()
    check_gather(256, 128, 64, torch.bfloat16, "flag_gated:2", 0)  # the program that is released first
    weft.matmul_reduce_scatter(a, b, schedule="track_and_trigger:2")
    torch.cuda.synchronize()
    dist.barrier()
    faulthandler.dump_traceback_later(40, exit=True)
    find = Replays.find

    def raise_at(number: int) -> None:
        if number == step:
            raise MemoryError("planted")

    if not replays:
        Replays.find = lambda *_: None  # type: ignore[method-assign, assignment]
    try:
        with before_launches(raise_at) if dist.get_rank() == 1 else nullcontext():
            reports = _time_to_error(lambda: weft.matmul_reduce_scatter(a, b, schedule="track_and_trigger:2"))
    finally:
        Replays.find = find  # type: ignore[method-assign]
    _all_go_on()
    return reports


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("step", [2, 4])
def test_a_rank_that_raises_while_it_enqueues(pool: Ranks, step: int, replays: bool) -> None:
    """What it has enqueued waits for what it has not; so it drains only once it is released."""
    reports = pool.run(_raises_within, step, replays, timeout_s=90)
    assert reports.pop(1)[0] == "MemoryError: planted"
    assert all(message.startswith("PeerLost: rank") and "planted" in message for message, _ in reports), reports
    assert all(seconds < BOUND_S for _, seconds in reports), reports


def _comes_late(what: str) -> tuple[str, float]:
    """Rank 1 comes past the bound: to a backward pass, whose calls autograd's thread makes; to the first of many calls, which
    the others make all at once; to a call after which the others close."""
    faulthandler.dump_traceback_later(60, exit=True)
    weft.close()
    a, b = _operands()
    gathered = a[:64].clone().requires_grad_()
    for _ in range(2):
        weft.matmul_reduce_scatter(a, b, schedule="track_and_trigger:2")
        weft.all_gather_matmul(gathered, b, schedule="flag_gated:1").sum().backward()
    out = weft.all_gather_matmul(gathered, b, schedule="flag_gated:1").sum()
    torch.cuda.synchronize()
    dist.barrier()
    faulthandler.dump_traceback_later(60, exit=True)

    def work() -> None:
        if dist.get_rank() == 1:
            time.sleep(2 * BOUND_S)
        if what == "backward":
            out.backward()
            torch.cuda.synchronize()
            assert not bool(gathered.grad.isnan().any()), "a gradient without a late rank's part"  # type: ignore[union-attr]
            return
        for _ in range(1500 if what == "many calls" else 1):
            weft.matmul_reduce_scatter(a, b, schedule="track_and_trigger:2")
        if what == "close":
            weft.close()

    reports = _time_to_error(work)
    _all_go_on()
    return reports


@pytest.mark.parametrize("what", ["backward", "close", "many calls"])
def test_whoever_reads_what_a_late_rank_is_missing_from_is_told(pool: Ranks, what: str) -> None:
    reports = pool.run(_comes_late, what, timeout_s=130)
    assert all(message != "right" for message, _ in reports), reports
    assert any(message.startswith("WaitTimeout: rank") for message, _ in reports), reports
    assert all(seconds < 6 * BOUND_S for _, seconds in reports), reports


@alarm(60)
def _is_lost_behind(victim: int, schedule: str) -> tuple[str, str, int, float]:
    """`victim` dies while the others' call waits for it on the GPU, and their threads call weft no more. What their results are
    once the GPU has ended; then what the next call and weft.synchronize raise, how many lines are logged, and how soon.

    What reads the results has run before: CUDA waits for all streams where it loads a kernel, and lets nobody release them."""
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logging.getLogger("weft").addHandler(handler)
    a, b = _operands()
    out = weft.matmul_reduce_scatter(a, b, schedule=schedule)
    out.float().sum()
    torch.cuda.synchronize()
    dist.barrier()
    struck = time.monotonic()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(PeerLost):  # the call itself raises where the peer is known to be dead by then
        out = weft.matmul_reduce_scatter(a, b, schedule=schedule)
        later = out.float().sum()
        torch.cuda.synchronize()
        seconds = time.monotonic() - struck
        assert bool(out.isnan().all()), out
        assert bool(later.isnan()), "what is computed from a result, in the order of the stream"
    seconds = time.monotonic() - struck
    said = []
    for call in (lambda: weft.matmul_reduce_scatter(a, b, schedule=schedule), weft.synchronize):
        with pytest.raises(PeerLost) as caught:
            call()
        said.append(str(caught.value))
    return said[0], said[1], len([line for line in lines if line.levelno >= logging.ERROR]), seconds


@pytest.mark.parametrize("schedule", ["track_and_trigger:2", "sequential_stores"])
def test_results_that_a_dead_rank_is_missing_from_are_nan(schedule: str) -> None:
    """No thread is interrupted: the log, NaN, the next call and weft.synchronize say it."""
    with Ranks(2, device=gpus(), environment={"WEFT_TIMEOUT_S": str(BOUND_S)}) as ranks:
        ranks.start(_is_lost_behind, 1, schedule)
        with pytest.raises(RankFailed) as caught:
            ranks.finish(timeout_s=60)
    assert [rank for rank, _ in caught.value.failures] == [1], caught.value.failures
    called, synchronized, lines, seconds = caught.value.results[0]
    assert "rank 1 (process" in called, called
    assert "rank 1 (process" in synchronized, synchronized
    assert lines == 1
    assert seconds < BOUND_S
