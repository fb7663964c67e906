"""matmul_all_reduce on GPUs: dtypes, odd shapes, graphs replayed with new data, programs in turns, a late and a silent rank."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from on_gpus import GPUS, NEEDS_TWO, alarm, fewer
from own_schedules import check_from_parts
from rank_pools import ranks_on_gpus
from rank_work import bound, check_all_reduce
from silenced_rank import told_of

import weft
from weft.core.problem import Op, split
from weft.runtime.bindings import Bindings
from weft.runtime.groups import GROUPS
from weft.runtime.ranks import Ranks
from weft.schedules import names

pytestmark = NEEDS_TWO
SIZE = 4 if GPUS >= 4 else 2
FAMILIES = names("matmul_all_reduce")
KERNELS = ("one_shot", "two_shot", "sequential_stores")
SHAPES = [(1, 2048, 1024, 0), (130, 260, 96, 1), (3, 2, 1, 2), (5, 129, 77, 3)]
"""M, N, K, addends: a decode step; more rows than a tile; fewer columns and less K than ranks; odd. What differs compiles anew,
a second or two for each kernel, and takes most of the time: tests use the same alignments, tiles and addends where they can."""
BOUND_S = 5.0
SHORT_BOUND_S = 2.0
"""Where a call has to fail."""
pool = ranks_on_gpus(SIZE, BOUND_S)


def _same_everywhere(out: torch.Tensor) -> bool:
    bits = out.view(torch.int16 if out.element_size() == 2 else torch.int32).to(torch.int32)
    found = torch.empty(dist.get_world_size() * bits.numel(), dtype=torch.int32, device=bits.device)
    dist.all_gather_into_tensor(found, bits.flatten())
    return bool((found.view(-1, bits.numel()) == bits.flatten()).all())


@alarm(40)
def _every_family(dtype: torch.dtype, shapes: list[tuple[int, int, int, int]]) -> None:
    for turn, (m, n, k, addends) in enumerate(shapes):
        for name in FAMILIES:
            for call in range(6):
                out = check_all_reduce(m, n, k, dtype, name, 10 * turn + call, addends=addends)
                assert name not in KERNELS or _same_everywhere(out), (name, (m, n, k))


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [(torch.bfloat16, SHAPES), (torch.float16, SHAPES[3:]), (torch.float32, SHAPES[1:2])],
    ids=["bfloat16", "float16", "float32"],
)
def test_every_family_is_right(pool: Ranks, dtype: torch.dtype, shapes: list[tuple[int, int, int, int]]) -> None:
    pool.run(_every_family, dtype, shapes)


@pytest.mark.parametrize("multiplies", [False, True], ids=["partial", "factors"])
@pytest.mark.parametrize(("op", "hops"), [("matmul_all_reduce", 1), ("matmul_all_reduce", 2), ("matmul_reduce_scatter", 1)])
def test_the_kernel_reads_parts_of_buffers(pool: Ranks, op: Op, hops: int, multiplies: bool) -> None:
    pool.run(check_from_parts, op, hops, multiplies)


class _Site:
    """A rank's tensors, filled anew with data that every rank can compute the result of."""

    def __init__(self, m: int, n: int, k: int, *, transposed: bool) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.inner, self.k = slice(*split(k, size)[rank]), k
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.whole_a = torch.empty(m, k, **options)  # type: ignore[call-overload]
        self.whole_b = torch.empty((n, k) if transposed else (k, n), **options)  # type: ignore[call-overload]
        self.whole_b = self.whole_b.t() if transposed else self.whole_b
        self.bias, self.residual = torch.empty(n, **options), torch.empty(m, n, **options)  # type: ignore[call-overload]
        self.a = self.whole_a[:, self.inner].contiguous()
        self.b = self.whole_b[self.inner]
        self.random = torch.Generator("cuda").manual_seed(7)

    def refill(self) -> None:
        for tensor in (self.whole_a, self.bias, self.residual):
            tensor.normal_(generator=self.random)
        self.whole_b.normal_(std=self.k**-0.5, generator=self.random)
        self.a.copy_(self.whole_a[:, self.inner])

    def call(self, name: str) -> torch.Tensor:
        return weft.matmul_all_reduce(self.a, self.b, schedule=name, bias=self.bias, residual=self.residual)

    def error(self, out: torch.Tensor) -> torch.Tensor:
        """The largest error over what rounding explains, on the GPU: no call waits for the host."""
        expected = self.whole_a.float() @ self.whole_b.float() + self.bias.float() + self.residual.float()
        allowed = bound(torch.bfloat16, self.k, 2 * dist.get_world_size(), torch.ones(1))
        return (out.float() - expected).abs().max() / (allowed * expected.abs().max())


@alarm(40)
def _wide_tiles(m: int, name: str) -> None:
    """A tile of 128 columns for each SM; and rank 1 compiles for longer than the others would look, did they look."""
    from weft.runtime.fused_collective import FusedCollectiveKernel

    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    launch, site = FusedCollectiveKernel.launch, _Site(m, 128 * sms, 1024, transposed=True)

    def slow(self: FusedCollectiveKernel, bindings: Bindings, *, silent: bool, tries: int, **options: int | None) -> None:
        assert (self.plan.tiling.n, self.plan.count) == (128, sms)
        time.sleep(1.0 if silent and dist.get_rank() == 1 else 0.0)
        launch(self, bindings, silent=silent, tries=min(tries, 1_000_000), **options)  # type: ignore[arg-type]

    FusedCollectiveKernel.launch = slow  # type: ignore[method-assign]
    try:
        for call in range(6):
            site.refill()
            error = float(site.error(site.call(name)))
            assert error <= 1, (name, m, call, error)
    finally:
        FusedCollectiveKernel.launch = launch  # type: ignore[method-assign]


@pytest.mark.parametrize(("m", "name"), [(1, "one_shot"), (1, "two_shot"), (128, "two_shot")])
def test_wide_tiles_after_a_slow_compilation(pool: Ranks, m: int, name: str) -> None:
    pool.run(_wide_tiles, m, name)


@alarm(40)
def _graphs(m: int, name: str, replays: int, late: bool) -> None:
    """A graph replayed with new data, between eager calls; late: each rank in turn, by 5 ms."""
    site = _Site(m, 1024, 512, transposed=True)
    site.refill()
    site.call(name)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = site.call(name)
    worst = torch.zeros((), device="cuda")
    for replay in range(replays):
        site.refill()
        if late and replay % 20 == 3 and dist.get_rank() == replay // 20 % dist.get_world_size():
            torch.cuda._sleep(10_000_000)
        graph.replay()
        worst = torch.maximum(worst, torch.nan_to_num(site.error(out), nan=float("inf")))
        if replay % 40 == 7:
            worst = torch.maximum(worst, torch.nan_to_num(site.error(site.call(name)), nan=float("inf")))
    assert float(worst) <= 1, (name, m, float(worst))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("m", "replays"), [(1, 1000), (200, 200)])
def test_a_replayed_graph(pool: Ranks, m: int, replays: int, name: str) -> None:
    pool.run(_graphs, m, name, replays, False)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("m", [1, 4096])
def test_a_late_rank(pool: Ranks, m: int, name: str) -> None:
    pool.run(_graphs, m, name, 200, True)


@alarm(40)
def _in_turns() -> None:
    """Programs of several sizes and families between each other, in one graph and outside."""
    sites = [_Site(m, n, 512, transposed=bool(n % 2048)) for m, n in ((1, 1024), (16, 2048), (128, 1024))]
    for site in sites:
        site.refill()
        for name in KERNELS:
            site.call(name)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = [(site, site.call(name)) for _ in range(2) for name in KERNELS for site in sites]
    for _ in range(20):
        for site in sites:
            site.refill()
        graph.replay()
        errors = [site.error(out) for site, out in outs] + [site.error(site.call(name)) for site in sites for name in KERNELS]
        assert float(torch.stack(errors).max()) <= 1


def test_programs_in_turns(pool: Ranks) -> None:
    pool.run(_in_turns)


@alarm(40)
def _graphs_of_many_sizes() -> tuple[int, int]:
    """A graph for each of 24 numbers of rows, replayed in an order in which large follow small, with eager calls between them.
    Returns how many bytes of mailboxes there are, and what the largest call uses of one copy."""
    weft.close()
    graphs = []
    for turn, m in enumerate(range(1, 97, 4)):
        site, name = _Site(m, 1024, 512, transposed=True), KERNELS[turn % 2]
        site.refill()
        site.call(name)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            graphs.append((site, name, graph, site.call(name)))
    worst = torch.zeros((), device="cuda")
    for replay in range(200):
        site, name, graph, out = graphs[replay * 7 % len(graphs)]
        site.refill()
        graph.replay()
        worst = torch.maximum(worst, torch.nan_to_num(site.error(out), nan=float("inf")))
        if replay % 10 == 3:
            worst = torch.maximum(worst, torch.nan_to_num(site.error(site.call(name)), nan=float("inf")))
    assert float(worst) <= 1
    world = dist.group.WORLD
    assert world is not None
    mailboxes = GROUPS.state(world.group_name)._resources_of(torch.device("cuda", torch.cuda.current_device())).mailboxes
    return mailboxes.nbytes, SIZE * 128 * 1024 * torch.bfloat16.itemsize


def test_graphs_of_many_sizes_share_mailboxes(pool: Ranks) -> None:
    for held, used in pool.run(_graphs_of_many_sizes):
        assert 0 < held < 12 * used


@alarm(40)
def _often(name: str, calls: int, replays: int) -> int:
    """How many of so many calls in graphs, whose tiles have fewer words than a block has threads, gave other bits."""
    site = _Site(4, 1992, 512, transposed=False)
    site.refill()
    first = site.call(name).clone()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            wrong += (site.call(name) != first).any()
    for _ in range(replays):
        graph.replay()
    return int(wrong)


@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
def test_no_part_is_missing_from_narrow_tiles(pool: Ranks, name: str) -> None:
    """Where several threads load a word, the one whose value counts may look before it has come, and another one after."""
    assert pool.run(_often, name, 100, fewer(500, 100)) == [0] * SIZE


@alarm(40)
def _same_bits() -> None:
    """The same data gives the same bits, whoever comes first."""
    for m in (1, 200):
        site = _Site(m, 1024, 512, transposed=True)
        site.refill()
        for name in KERNELS:
            first = site.call(name)
            for call in range(20):
                torch.cuda._sleep(100_000 * ((call + dist.get_rank()) % 3))
                assert torch.equal(site.call(name), first)
            assert _same_everywhere(first)


def test_the_same_bits_each_call_and_on_each_rank(pool: Ranks) -> None:
    pool.run(_same_bits)


@alarm(40)
def _never_sent(m: int, name: str) -> str:
    """Rank 1 sends nothing in its second call; then all go on together."""
    from weft.runtime.fused_collective import FusedCollectiveKernel

    torch.cuda.synchronize()
    dist.barrier()
    weft.close()
    os.environ["WEFT_TIMEOUT_S"] = str(SHORT_BOUND_S)
    check_all_reduce(m, 256, 128, torch.bfloat16, name, 0)
    launch = FusedCollectiveKernel.launch
    if dist.get_rank() == 1:
        FusedCollectiveKernel.launch = lambda self, bindings, **options: launch(  # type: ignore[method-assign]
            self, bindings, **(options | {"silent": True})
        )

    def call() -> None:
        # What rank 1 sums is wrong: its kernel waits for nobody, either.
        with suppress(AssertionError) if dist.get_rank() == 1 else nullcontext():
            check_all_reduce(m, 256, 128, torch.bfloat16, name, 1)

    try:
        message = told_of(call)
    finally:
        FusedCollectiveKernel.launch = launch  # type: ignore[method-assign]
    torch.cuda.synchronize()
    time.sleep(1)
    dist.barrier()
    weft.close()
    os.environ["WEFT_TIMEOUT_S"] = str(BOUND_S)
    check_all_reduce(m, 256, 128, torch.bfloat16, name, 2)
    return message


@pytest.mark.parametrize(("m", "name"), [(1, "one_shot"), (2048, "two_shot")])
def test_a_tile_that_never_comes(pool: Ranks, m: int, name: str) -> None:
    messages = pool.run(_never_sent, m, name)
    assert any("of rank 1 has not arrived" in message for message in messages), messages


@alarm(40)
def _memory_of_many_calls() -> tuple[int, int]:
    seen = []
    for call in range(200):
        check_all_reduce(5, 129, 77, torch.bfloat16, FAMILIES[call % len(FAMILIES)], call, addends=3)
        if call in (50, 199):
            torch.cuda.synchronize()
            seen.append(torch.cuda.memory_allocated())
    return seen[0], seen[1]


def test_two_hundred_calls_grow_nothing(pool: Ranks) -> None:
    for early, late in pool.run(_memory_of_many_calls):
        assert late <= early
