"""Controls on GPUs: what blocks see of their multiprocessor, beside what the driver says and what is restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpus import GPUS, NEEDS_ONE, SHARED, alarm
from rank_pools import gpus

from weft.compat.streams import checked, driver_api
from weft.overlap import controls
from weft.overlap.controls import (
    DEVICES,
    comm_stream,
    launch_order,
    nccl_group,
    occupancy,
    shape,
    sm_budget,
    sm_partition,
    this_device,
)
from weft.runtime.ranks import Ranks

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = NEEDS_ONE
SPIN_NS = 30_000


@triton.jit
def _residents_kernel(now_ptr, peak_ptr, spin_ns, LANES: tl.constexpr):
    """Each block adds itself to its SM's count, notes the most that it has seen there, and stays for spin_ns."""
    sm = tl.extra.cuda.smid()
    residents = tl.atomic_add(now_ptr + sm, 1) + 1
    tl.atomic_max(peak_ptr + sm, residents)
    end = tl.extra.cuda.globaltimer() + spin_ns
    at = tl.extra.cuda.globaltimer()
    while at < end:
        at = tl.extra.cuda.globaltimer()
    # Its answer is used, so that a block does not end, and the next one begin, before the count has gone down.
    tl.atomic_max(peak_ptr + sm, tl.atomic_add(now_ptr + sm, -1))


@triton.jit
def _sum_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out[r] = the sum of row r of x_RC, of a block's rows, through shared memory."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = tl.load(x_ptr + rows[:, None] * COLS + tl.arange(0, COLS)[None, :])
    tl.store(out_ptr + rows, tl.sum(tl.dot(x, x.T).to(tl.float32), axis=1))


@pytest.fixture(autouse=True)
def _never_hangs() -> Iterator[None]:
    with alarm(40):
        yield


class Seen:
    """Residents of every SM, as the kernel's blocks count them."""

    def __init__(self) -> None:
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.now, self.peak = (torch.zeros(256, dtype=torch.int32, device="cuda") for _ in range(2))

    def launch(self, kernel: Any, blocks_an_sm: int = 40, num_warps: int = 4) -> Any:
        return kernel[(self.sms * blocks_an_sm,)](self.now, self.peak, SPIN_NS, LANES=32, num_warps=num_warps)

    def most(self) -> int:
        torch.cuda.synchronize()
        assert not self.now.any()
        return int(self.peak.max())


def _by_driver(compiled: Any, threads: int, dynamic_bytes: int) -> int:
    api = driver_api()
    return int(
        checked(api.cuOccupancyMaxActiveBlocksPerMultiprocessor(api.CUfunction(compiled.function), threads, dynamic_bytes))
    )


def test_the_device_is_as_the_table_says() -> None:
    device = this_device()
    known = [d for d in DEVICES.values() if d.capability == device.capability]
    if not known:
        pytest.skip(f"no figures of {device.name} to compare")
    numbers = {name: value for name, value in vars(device).items() if name != "name"}
    assert numbers == {name: value for name, value in vars(known[0]).items() if name != "name"}


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("cols", [16, 128, 512])
def test_occupancy_is_the_drivers(num_warps: int, cols: int) -> None:
    x, out = torch.ones(64, cols, device="cuda", dtype=torch.float16), torch.empty(64, device="cuda")
    compiled = _sum_kernel[(1,)](x, out, ROWS=64, COLS=cols, num_warps=num_warps)
    assert occupancy(compiled).blocks == _by_driver(compiled, 32 * num_warps, compiled.metadata.shared)


@pytest.mark.parametrize("num_warps", [1, 4, 8])
def test_no_sm_holds_more_blocks_than_the_cap(num_warps: int) -> None:
    own = Seen()
    natural = occupancy(own.launch(_residents_kernel, num_warps=num_warps)).blocks
    assert own.most() == natural
    for r in range(1, natural):
        seen = Seen()
        with shape(_residents_kernel, blocks_per_sm=r) as shaped:
            compiled = seen.launch(shaped, num_warps=num_warps)
            assert seen.most() == r
            assert _by_driver(compiled, 32 * num_warps, compiled.metadata.shared) == r
    again = Seen()
    again.launch(_residents_kernel, num_warps=num_warps)
    assert again.most() == natural


def test_a_graph_keeps_the_cap() -> None:
    seen, shaped = Seen(), shape(_residents_kernel, blocks_per_sm=3)
    seen.launch(shaped)
    seen.most()
    seen.peak.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        seen.launch(shaped)
    for _ in range(6):
        seen.peak.zero_()
        graph.replay()
        assert seen.most() == 3


def test_an_autotuned_kernel_is_capped() -> None:
    configs = [triton.Config({}, num_warps=warps) for warps in (4, 8)]
    tuned = triton.autotune(configs, key=["COLS"])(_sum_kernel)
    x, out = torch.randn(256, 64, device="cuda", dtype=torch.float16), torch.empty(256, device="cuda")
    shaped = shape(tuned, blocks_per_sm=2)
    compiled = shaped[(4,)](x, out, ROWS=64, COLS=64)
    assert occupancy(compiled).blocks == _by_driver(compiled, compiled.metadata.num_warps * 32, compiled.metadata.shared) == 2
    capped = out.clone()
    tuned[(4,)](x, out, ROWS=64, COLS=64)
    torch.testing.assert_close(out, capped, rtol=1e-4, atol=1e-2)


_SOURCE = r"""
extern "C" __global__ void residents(int *now, int *peak, long long spin_ns) {
    if (threadIdx.x == 0) {
        unsigned sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        atomicMax(peak + sm, atomicAdd(now + sm, 1) + 1);
        long long at, end;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
        end += spin_ns;
        do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(at)); } while (at < end);
        atomicAdd(now + sm, -1);
    }
}
"""


def test_a_cuda_core_kernel_is_capped() -> None:
    core = pytest.importorskip("cuda.core")
    import numpy as np

    torch.cuda.synchronize()
    device = core.Device(torch.cuda.current_device())
    device.set_current()
    capability = torch.cuda.get_device_capability()
    options = core.ProgramOptions(arch=f"sm_{capability[0]}{capability[1]}")
    kernel = core.Program(_SOURCE, "c++", options).compile("cubin").get_kernel("residents")
    stream, config = device.create_stream(), core.LaunchConfig(grid=132 * 20, block=128)
    natural = occupancy(kernel, threads=128).blocks
    assert natural == kernel.occupancy.max_active_blocks_per_multiprocessor(128, 0)
    shaped = shape(kernel, blocks_per_sm=2)
    limit = shaped._limit()
    seen = Seen()
    with shaped:
        shaped.launch(stream, config, seen.now.data_ptr(), seen.peak.data_ptr(), np.int64(SPIN_NS))
        assert seen.most() == 2
        assert shaped._limit() > limit
    assert shape(kernel, blocks_per_sm=2)._limit() == limit


def test_a_cupy_kernel_is_capped() -> None:
    cupy = pytest.importorskip("cupy")
    kernel, seen = cupy.RawKernel(_SOURCE, "residents"), Seen()
    limit = kernel.max_dynamic_shared_size_bytes
    arguments = cupy.asarray(seen.now), cupy.asarray(seen.peak), cupy.int64(SPIN_NS)
    with shape(kernel, blocks_per_sm=2) as shaped:
        shaped((132 * 20,), (128,), arguments)
        cupy.cuda.Device().synchronize()
        assert seen.most() == 2
    assert kernel.max_dynamic_shared_size_bytes == limit


def test_refusals_have_the_numbers() -> None:
    seen = Seen()
    natural = occupancy(seen.launch(_residents_kernel)).blocks
    with pytest.raises(ValueError, match=f"blocks_per_sm is {natural + 1}, but fewer fit already: {natural} blocks an SM"):
        seen.launch(shape(_residents_kernel, blocks_per_sm=natural + 1))
    with pytest.raises(ValueError, match="blocks_per_sm is 0"):
        shape(_residents_kernel, blocks_per_sm=0)


@pytest.mark.parametrize(("priority", "number"), [("normal", 0), (-1, -1), ("high", None)])
def test_streams_have_their_priority(priority: Any, number: int | None) -> None:
    api = driver_api()
    lowest, highest = checked_pair(api.cuCtxGetStreamPriorityRange())
    found = int(checked(api.cuStreamGetPriority(comm_stream(priority=priority).cuda_stream)))
    assert highest <= found <= lowest
    assert found == number if number is not None else found < 0
    with pytest.raises(ValueError, match="priority is 1"):
        comm_stream(priority=1)


def checked_pair(result: tuple[Any, ...]) -> tuple[int, int]:
    checked(result)
    return int(result[1]), int(result[2])


def test_launch_order_waits_for_what_was_before() -> None:
    first, then = comm_stream(), torch.cuda.Stream()
    x = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(20_000_000)
        x.fill_(1)
    launch_order(first, then)
    with torch.cuda.stream(then):
        found = x.clone()
    torch.cuda.synchronize()
    assert float(found) == 1


def _us(work: Any, repeat: int = 5) -> float:
    times = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def test_a_budget_makes_matmuls_leave_sms_alone() -> None:
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    whole, expected = _us(lambda: a @ b), a @ b
    with sm_budget(32):
        budgeted = _us(lambda: a @ b)
        torch.testing.assert_close(a @ b, expected, rtol=2e-2, atol=1.0)
        with sm_budget(64):
            half = _us(lambda: a @ b)
        assert torch._C._get_sm_carveout_experimental() == Seen().sms - 32
    with pytest.raises(RuntimeError, match="on purpose"), sm_budget(16):
        raise RuntimeError("on purpose")
    after = _us(lambda: a @ b)
    print(f"matmul 4096: {whole:.0f} us, on 64 SMs {half:.0f}, on 32 SMs {budgeted:.0f}, after {after:.0f}")
    assert torch._C._get_sm_carveout_experimental() is None
    assert budgeted > 1.5 * whole
    assert after < 1.3 * whole


def test_a_partition_keeps_kernels_on_its_sms() -> None:
    part, seen = sm_partition(64), Seen()
    torch.cuda.synchronize()
    with torch.cuda.stream(part.stream):
        seen.launch(_residents_kernel)
    seen.most()
    assert 8 <= part.sms <= 64
    assert int((seen.peak > 0).sum()) == part.sms
    assert sm_partition(64).stream == part.stream
    with pytest.raises(ValueError, match="sms is 1;"):
        sm_partition(1)


@alarm(40)
def _groups() -> None:
    few = nccl_group(max_ctas=2, high_priority=True)
    backend: Any = few._get_backend(torch.device("cuda", torch.cuda.current_device()))
    assert backend.options.is_high_priority_stream
    assert backend.options.config.max_ctas == 2
    with pytest.raises(ValueError, match="more than max_ctas"):
        nccl_group(few, min_ctas=4, max_ctas=2)
    for group in (few, nccl_group(few, min_ctas=16)):
        for call in range(6):
            x = torch.full((1 << 22,), float(dist.get_rank() + call), device="cuda")
            dist.all_reduce(x, group=group)
            assert (x == sum(range(call, call + dist.get_world_size()))).all()
    if not SHARED:  # ranks of one GPU exchange through its memory, which two blocks can keep busy
        _slower(few)


def _slower(few: dist.ProcessGroup) -> None:
    """Two blocks move less than as many as NCCL likes."""
    x = torch.zeros(1 << 26, device="cuda")
    times = {name: _us(lambda group=group: dist.all_reduce(x, group=group)) for name, group in (("2", few), ("own", None))}
    if dist.get_rank() == 0:
        print(f"all_reduce 256 MiB: 2 blocks {times['2']:.0f} us, NCCL's own number {times['own']:.0f} us")
    assert times["2"] > 1.5 * times["own"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    if GPUS < 2:
        pytest.skip(f"needs two or more GPUs, this machine has {GPUS}")
    with Ranks(2, device=gpus(), environment={"WEFT_TIMEOUT_S": "30"}) as ranks:
        yield ranks


def test_groups_with_their_own_number_of_blocks(pool: Ranks) -> None:
    pool.run(_groups)


def test_lanes_have_the_priority_of_their_context(pool: Ranks) -> None:
    assert pool.run(_lanes) == [True, True]


@alarm(40)
def _lanes() -> bool:
    import weft
    from weft.runtime.groups import GROUPS

    weft.close()
    device = torch.device("cuda", torch.cuda.current_device())
    a, b = (torch.randn(128, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    with controls.lane_priority(-2):
        weft.all_gather_matmul(a, b, schedule="shard_p2p")
    torch.cuda.synchronize()
    lanes = GROUPS.state(dist.group.WORLD.group_name)._resources_of(device)._streams  # type: ignore[union-attr]
    found = {stream.priority for stream in lanes.values()}
    weft.close()
    return found == {-2}


def test_streams_have_one_user_and_come_back() -> None:
    """More than torch has; each runs, and is found by what the driver knows of it."""
    api, x = driver_api(), torch.zeros(80, device="cuda")
    torch.cuda.synchronize()
    for _ in range(3):
        taken = [comm_stream(priority=priority) for priority in (-1, "high") for _ in range(40)]
        assert len({stream.cuda_stream for stream in taken}) == 80
        assert {int(checked(api.cuStreamGetPriority(stream.cuda_stream))) for stream in taken[:40]} == {-1}
        for number, stream in enumerate(taken):
            with torch.cuda.stream(stream):
                x[number] += number
        torch.cuda.synchronize()
        for stream in taken:
            controls.give_back(stream)
    assert x.tolist() == [3.0 * number for number in range(80)]
