"""Ring collectives as kernels on units of the GPU, after NCCL's: N - 1 steps that each pass a chunk of c bytes on.

| a step of | reads here | writes here (what arrives) | a unit touches |
| --- | --- | --- | --- |
| reduce-scatter, the first | c | c | 2 c |
| reduce-scatter, further ones | 2 c | c | 3 c |
| reduce-scatter, at last the own sum | 2 c | c | 3 c |
| reduce-scatter with near-memory reduction | c | c, as updates | 2 c |
| all-gather | c | c | 2 c |

So a reduce-scatter reads (2 N - 1) c and writes N c, with near-memory reduction (N - 1) c each, and has no last sum. A step
goes at the slowest of link, units and memory, and its first piece (of `pipeline`) reaches the link only when units have
touched it. A hop's latency is paid once a step. All GPUs do the same, so what leaves here arrives here.
"""

from __future__ import annotations

from weft.studies.t3.gemm import Process
from weft.studies.t3.memory import GpuMemory


def reduce_scatter(memory: GpuMemory, chunk: int, world_size: int, units: int) -> Process:
    """Ring reduce-scatter of `world_size` chunks of `chunk` bytes."""
    for step in range(world_size - 1):
        reads = 2 if step else 1
        yield from _pass_on(memory, chunk, units, {"rs_read": reads * chunk, "rs_write": chunk}, touched=reads + 1)
    rate = memory.system.unit_gbps * units / 3
    yield memory.flow("communication", chunk, lambda: rate, {"rs_read": 2 * chunk, "rs_write": chunk})


def reduce_scatter_near_memory(memory: GpuMemory, chunk: int, world_size: int, units: int) -> Process:
    """The same, where what arrives is added by the memory."""
    for _ in range(world_size - 1):
        yield from _pass_on(memory, chunk, units, {"rs_read": chunk, "rs_write": chunk}, touched=2, update="rs_write")


def all_gather(memory: GpuMemory, chunk: int, world_size: int, units: int) -> Process:
    """Ring all-gather of `world_size` chunks of `chunk` bytes."""
    for _ in range(world_size - 1):
        yield from _pass_on(memory, chunk, units, {"ag_read": chunk, "ag_write": chunk}, touched=2)


def _pass_on(
    memory: GpuMemory, chunk: int, units: int, traffic: dict[str, int], *, touched: int, update: str | None = None
) -> Process:
    system = memory.system
    rate = system.unit_gbps * units / touched
    yield memory.env.timeout(round(chunk / system.pipeline / rate))
    pace = min(rate, system.link.gbps)
    yield memory.flow("communication", chunk, lambda: pace, traffic, update=frozenset([update] if update else []))
    yield memory.env.timeout(system.link.latency_ns)
