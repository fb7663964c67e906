"""What outlives what, on GPUs: graphs and the memory of their copies, lanes and their streams, groups that come and go."""

from __future__ import annotations

import faulthandler
import gc
import os
import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from collective_work import Case, moves, sums
from on_gpus import GPUS, NEEDS_TWO, alarm
from rank_pools import ranks_on_gpus
from rank_work import bound, check_gather, whole

import weft
from weft import collectives
from weft.compat.c10d import free_unused
from weft.runtime import programs
from weft.runtime.cuda_resources import CudaResources
from weft.runtime.groups import GROUPS
from weft.runtime.ranks import Ranks

pytestmark = NEEDS_TWO
MIB = 1 << 20
pool = ranks_on_gpus(min(4, GPUS), 20)


def _here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@alarm(60)
def _freed(rounds: int) -> int:
    """Calls on tensors that are made anew each round, after all that the allocator kept went back to the driver; how often
    they came to lie where they had lain before, in other memory."""
    weft.close()
    driver, met, again = None, dict[tuple[int, int], int](), 0
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(rounds):
        # Sizes between, so that what is made comes to lie behind memory of another size now and then.
        other = torch.empty((1 + turn % 3) * 32 * MIB, dtype=torch.uint8, device="cuda")
        given = torch.full((size * 8 * MIB,), 1000 * rank + turn, dtype=torch.int32, device="cuda")
        out = torch.empty_like(given)
        for _ in range(3):
            out.zero_()
            collectives.all_to_all_single(out, given, schedule="copy_engine:2")
            parts = out.view(size, -1)
            assert [int(parts[src].min()) for src in range(size)] == [1000 * src + turn for src in range(size)], turn
            assert torch.equal(parts, parts[:, :1].expand_as(parts)), turn
        driver = driver or GROUPS.state(dist.group.WORLD.group_name)._resources_of(_here()).driver  # type: ignore[union-attr]
        number = driver.memory_at(given.data_ptr())
        assert number is not None
        place = given.data_ptr(), out.data_ptr()
        again += met.get(place, number) != number
        met[place] = number
        torch.cuda.synchronize()
        if turn == 0 and rank == 0:
            begun = time.perf_counter()
            for _ in range(1000):
                driver.memory_at(given.data_ptr())
            print(f"to ask what lies at an address takes {1e3 * (time.perf_counter() - begun):.2f} us")
        del other, given, out, parts
        torch.cuda.empty_cache()
    weft.close()
    return again


def test_no_graph_is_replayed_on_memory_that_came_later(pool: Ranks) -> None:
    """Without asking what lies at an address, a rank ends in libcuda, or a copy goes nowhere."""
    assert min(pool.run(_freed, 24)) > 0, "the driver never gave an address twice: more rounds are needed"


@alarm(60)
def _expandable() -> None:
    """Segments that expand: a tensor lies on several mappings, and each of them has a number."""
    weft.close()
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        for seed in range(4):
            case = Case(elements=16 * MIB, dtype=torch.bfloat16, seed=seed)
            for _ in range(3):
                moves(case, "copy_engine:1")
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        given = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        behind = (
            GROUPS.state(dist.group.WORLD.group_name)
            ._resources_of(_here())
            .driver.memory_behind(  # type: ignore[union-attr]
                given.data_ptr(), given.nbytes
            )
        )
        if dist.get_rank() == 0:
            print(f"64 MiB of an expandable segment: {behind and len(behind)} mappings")
        assert behind is None or (len(behind) > 1 and len({number for _, number in behind}) == len(behind))
    finally:
        weft.close()
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_segments_that_expand(pool: Ranks) -> None:
    pool.run(_expandable)


@alarm(80)
def _come_and_go(rounds: int) -> tuple[int, int]:
    """A group's state, with its lanes, made, used and closed over and over; (streams ever seen, of a round)."""
    weft.close()
    seen, most = set[int](), 0
    for turn in range(rounds):
        case = Case(elements=70_000, dtype=torch.bfloat16, seed=turn)
        for _ in range(3):
            sums(case, "copy_engine:1")
            moves(case, "copy_engine:2")
        x = torch.zeros(1 << 16, device="cuda")
        weft.concurrent(lambda x=x: x + 1, weft.AllReduce(x), method=("nccl+priority", "copy_engine+priority")[turn % 2])
        lanes = {stream.cuda_stream for stream in _lanes(dist.group.WORLD)}
        seen, most = seen | lanes, max(most, len(lanes))
        weft.close()
    return len(seen), most


def _lanes(group: dist.ProcessGroup | None) -> list[torch.cuda.Stream]:
    assert group is not None
    resources = GROUPS.state(group.group_name)._resources_of(_here())
    assert isinstance(resources, CudaResources)
    return [resources.rescue, *resources._streams.values()]


def test_groups_come_and_go(pool: Ranks) -> None:
    for seen, most in pool.run(_come_and_go, 40):
        assert most >= 3
        assert seen <= 2 * most, "streams are taken again"


@alarm(80)
def _many_groups(count: int) -> None:
    """More lanes at once than torch has streams of one priority: each has its own, and calls of all groups end, also where all
    are under way at once."""
    weft.close()
    groups = [dist.new_group(backend="cpu:gloo,cuda:nccl") for _ in range(count)]
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.empty(70_001, device="cuda") for _ in groups]
    for turn in range(6):
        works = []
        for number, (x, group) in enumerate(zip(tensors, groups, strict=True)):
            x.fill_(number + turn * rank)
            works.append(collectives.all_reduce(x, "sum", group, turn > 2, schedule="copy_engine:1"))
        for work in filter(None, works):
            work.wait()
        expected = [size * number + turn * sum(range(size)) for number in range(count)]
        assert all(bool((x == float(want)).all()) for x, want in zip(tensors, expected, strict=True)), turn
    lanes = [stream.cuda_stream for group in groups for stream in _lanes(group)]
    assert len(lanes) >= 2 * count
    assert len(set(lanes)) == len(lanes)
    for group in groups:
        weft.close(group)
        dist.destroy_process_group(group)


def test_every_group_has_lanes_of_its_own(pool: Ranks) -> None:
    pool.run(_many_groups, 20)


@alarm(80)
def _overlapping(left_out: Sequence[int]) -> None:
    """Groups that each leave a rank out, and the world, take symmetric memory in turns: more of it each time."""
    weft.close()
    everyone, rank = list(range(dist.get_world_size())), dist.get_rank()
    groups = [dist.new_group([r for r in everyone if r != out], backend="cpu:gloo,cuda:nccl") for out in left_out]
    for turn, out in enumerate(left_out):
        for group, member in ((groups[turn], rank != out), (dist.group.WORLD, True)):
            if member:
                check_gather(96 << turn, 64, 32, torch.bfloat16, "shard_p2p", turn, group)
    for group, out in zip(groups, left_out, strict=True):
        if rank != out:
            weft.close(group)
            dist.destroy_process_group(group)
    weft.close()


@pytest.mark.skipif(GPUS < 3, reason=f"needs three GPUs, of which two are a group, this machine has {GPUS}")
def test_groups_that_overlap(pool: Ranks) -> None:
    """torch's own rendezvous waits for good there."""
    pool.run(_overlapping, [2, 0, 1, 0])


def _free_everywhere() -> int:
    """This GPU's free memory once all ranks are here: what peers have mapped stays until they let go of it, too."""
    dist.barrier()
    free, _ = torch.cuda.mem_get_info()
    dist.barrier()
    return int(free)


@alarm(60)
def _collected_in_a_capture() -> list[int]:
    """A closed group's programs, and a tensor that the caller had, go while a stream is captured; the free memory before,
    once the group is closed, and once the tensor is gone, too."""
    size = dist.get_world_size()
    a = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
    gc.collect()
    gc.disable()
    try:
        for schedule in ("sequential_stores", "shard_p2p", "track_and_trigger:2"):
            weft.matmul_reduce_scatter(a.repeat(size, 1), a, schedule=schedule)
        mine = collectives.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        free = [_free_everywhere()]
        weft.close()
        free.append(_free_everywhere())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            a.add_(1)
            del mine
            gc.collect()
        free_unused()
        free.append(_free_everywhere())
    finally:
        gc.enable()
    graph.replay()
    torch.cuda.synchronize()
    assert float(a[0, 0]) == 2
    return free


def test_symmetric_memory_is_freed_in_no_capture(pool: Ranks) -> None:
    """That would end the process. It is freed when its group is closed, and later if the caller still has it then."""
    for before, closed, gone in pool.run(_collected_in_a_capture):
        assert before < closed < gone


@alarm(60)
def _held_by_a_graph() -> list[float]:
    """A replay's result after many other problems have come and gone, and each of theirs, which use what was given back."""
    overhead_bytes = programs.OVERHEAD_BYTES
    programs.OVERHEAD_BYTES, os.environ["WEFT_PROGRAM_MEMORY_GB"] = 10**9, "2.5"  # two beside those in graphs
    size = dist.get_world_size()

    def call(rows: int) -> torch.Tensor:
        a = torch.full((rows, 64), 1.0 + dist.get_rank(), dtype=torch.bfloat16, device="cuda")
        return weft.all_gather_matmul(a, torch.eye(64, dtype=torch.bfloat16, device="cuda"), schedule="shard_p2p")

    try:
        call(32)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = call(32)
        wrong = []
        for rows in range(33, 45):
            others = call(rows)
            out.zero_()
            graph.replay()
            expected = torch.arange(1.0, size + 1, device="cuda").repeat_interleave(32)
            wrong.append(float((out.float() - expected[:, None]).abs().max()))
            wrong.append(float((others.float().view(size, rows, 64)[:, 0, 0] - expected[::32]).abs().max()))
        del graph
    finally:
        programs.OVERHEAD_BYTES = overhead_bytes
        del os.environ["WEFT_PROGRAM_MEMORY_GB"]
    weft.close()
    return wrong


def test_what_a_graph_holds_is_not_given_back(pool: Ranks) -> None:
    assert all(not any(wrong) for wrong in pool.run(_held_by_a_graph))


@alarm(60)
def _workspaces_given_away() -> int:
    """Products replayed after torch was asked to give all workspaces back and others got the memory. How many of these others a
    graph of torch's alone has written into: that workspaces are used, and given away."""
    weft.close()
    size = dist.get_world_size()
    generator = torch.Generator(device="cuda").manual_seed(7 + dist.get_rank())
    cases = [
        [torch.randn(*shape, generator=generator, device="cuda").bfloat16() for shape in ((m * size, k), (k, n))]
        for m, k, n in ((2048, 2048, 7168), (4096, 1536, 4096), (64, 16384, 64))
    ]
    outs = [[weft.matmul_reduce_scatter(a, b, schedule="shard_p2p") for _ in range(4)][-1].clone() for a, b in cases]
    theirs, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    products = [torch.empty(a.shape[0] // size, b.shape[1], device="cuda", dtype=torch.bfloat16) for a, b in cases]
    with torch.cuda.stream(theirs):
        for capturing in (False, True):
            if capturing:
                graph.capture_begin(capture_error_mode="thread_local")
            for (a, b), product in zip(cases, products, strict=True):
                torch.mm(a[: product.shape[0]], b, out=product)
            torch.cuda.synchronize() if not capturing else graph.capture_end()
    dist.barrier()
    torch._C._cuda_clearCublasWorkspaces()
    resources = GROUPS.state(dist.group.WORLD.group_name)._resources_of(_here())  # type: ignore[union-attr]
    others = dict[str, list[torch.Tensor]]()
    for name, stream in (("ours", resources.captures._workspace[0]), ("theirs", theirs)):  # type: ignore[union-attr]
        # The allocator gives what a stream had to that stream.
        with torch.cuda.stream(stream):
            others[name] = [torch.full((count * MIB,), 7.0, device="cuda") for count in (8, 4, 2, 1) for _ in range(16)]
    torch.cuda.synchronize()
    for _ in range(3):
        for (a, b), out in zip(cases, outs, strict=True):
            assert torch.equal(weft.matmul_reduce_scatter(a, b, schedule="shard_p2p"), out)
    graph.replay()
    torch.cuda.synchronize()
    touched = {name: sum(not bool((other == 7.0).all()) for other in some) for name, some in others.items()}
    assert touched["ours"] == 0, "a replay wrote into memory of others"
    weft.close()
    return touched["theirs"]


def test_replays_keep_their_workspace_whoever_clears_it(pool: Ranks) -> None:
    assert min(pool.run(_workspaces_given_away)) > 0


def _lying_otherwise() -> None:
    """Tensors of one size that lie in other ways than in the first calls: kernels that were not loaded."""
    size, rank = dist.get_world_size(), dist.get_rank()
    specs = {
        weft.all_gather_matmul: ("hetero_unfused_1d:2", "flag_gated:2", "direct_store:1", "shard_p2p", "uniform_fused_2d:2"),
        weft.matmul_reduce_scatter: ("hetero_unfused_1d:2", "track_and_trigger:1", "direct_store:1", "shard_p2p", "one_shot"),
        weft.matmul_all_reduce: ("one_shot", "two_shot"),
    }
    for call, names in specs.items():
        m, k, n = (48, 264, 328) if call is weft.all_gather_matmul else (48 * size, 264, 328)
        for spec in names:
            faulthandler.dump_traceback_later(40, exit=True)
            for turn, (shift, transposed, wide) in enumerate(
                ((0, False, 0), (0, True, 0), (1, False, 0), (0, False, 24), (3, True, 8))
            ):
                generator = torch.Generator(device="cuda").manual_seed(100 * turn + rank)
                a = torch.randn(m * k + 8, generator=generator, device="cuda").bfloat16()[shift : shift + m * k].view(m, k)
                b = torch.randn(k, n + wide, generator=generator, device="cuda").bfloat16()[:, :n]
                b = b.t().contiguous().t() if transposed else b
                wanted = call(a, b, schedule="sequential").float()
                for _ in range(3):
                    torch.testing.assert_close(call(a, b, schedule=spec).float(), wanted, atol=1.0, rtol=0.05)
    weft.close()
    faulthandler.cancel_dump_traceback_later()


def test_what_tensors_need_that_lie_otherwise_is_loaded_before_any_lane_waits(pool: Ranks) -> None:
    """CUDA waits for all streams where it loads a kernel: this ended in the bound of the ranks' processes."""
    pool.run(_lying_otherwise)


@alarm(60)
def _branches(spec: str) -> None:
    """Two calls of one program on two branches of a capture, replayed with new data."""
    weft.close()
    rank, size = dist.get_rank(), dist.get_world_size()
    low, high = 64 * rank, 64 * (rank + 1)
    a, b, _ = whole(64 * size, 256, 512, torch.bfloat16, 1)
    shards = [a[low:high].clone() for _ in range(2)]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    for shard in shards:
        weft.all_gather_matmul(shard, b, schedule=spec)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        first = weft.all_gather_matmul(shards[0], b, schedule=spec)
        with torch.cuda.stream(side):
            second = weft.all_gather_matmul(shards[1], b, schedule=spec)
        main.wait_stream(side)
    for turn in range(20):
        drawn = [whole(64 * size, 256, 512, torch.bfloat16, 100 * turn + at)[0] for at in range(2)]
        for shard, matrix in zip(shards, drawn, strict=True):
            shard.copy_(matrix[low:high])
        graph.replay()
        for got, matrix in zip((first, second), drawn, strict=True):
            expected = matrix.double() @ b.double()
            assert float((got.double() - expected).abs().max()) <= bound(torch.bfloat16, 512, 1, expected), (spec, turn)
    torch.cuda.synchronize()
    weft.close()


@pytest.mark.parametrize("spec", ["shard_p2p", "flag_gated:1", "sequential_stores"])
def test_branches_of_one_capture(pool: Ranks, spec: str) -> None:
    pool.run(_branches, spec)


@alarm(60)
def _full(spec: str) -> None:
    """A call that allocates on the way, by torch's matmuls, where all memory is in use or kept for another stream."""
    weft.close()
    rank, size = dist.get_rank(), dist.get_world_size()
    m, n, k = 1024 * size, 4096, 2048
    a, b, expected = whole(m, n, k, torch.float32, 1)
    shards = [a[1024 * rank : 1024 * (rank + 1)].clone() for _ in range(3)]
    for shard in shards[:2]:
        weft.all_gather_matmul(shard, b, schedule=spec)
    del a
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    result = torch.empty(m, n, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        tensors = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
        free, _ = torch.cuda.mem_get_info()
        rest = torch.empty(free - 16 * MIB, dtype=torch.uint8, device="cuda")
        tensors.clear()
    del result
    dist.all_reduce(torch.zeros(1))  # gloo's: NCCL would need memory
    out = weft.all_gather_matmul(shards[2], b, schedule=spec)
    torch.cuda.synchronize()
    del rest  # for what compares
    assert float((out.double() - expected).abs().max()) <= bound(torch.float32, k, size, expected)
    weft.close()


@pytest.mark.parametrize("spec", ["uniform_fused_1d:2", "hetero_fused_1d:2"])
def test_calls_on_a_gpu_that_is_full(pool: Ranks, spec: str) -> None:
    """The allocator gives memory back then, for which CUDA waits for all streams."""
    pool.run(_full, spec)
