"""Ring collectives run as kernels on compute units, as NCCL's do. Each of N - 1 steps passes a chunk of c bytes on.

| a step of | reads here | writes here (what arrives) | a unit touches |
| --- | --- | --- | --- |
| reduce-scatter, the first | c | c | 2 c |
| reduce-scatter, further ones | 2 c | c | 3 c |
| reduce-scatter, at last the own sum | 2 c | c | 3 c |
| reduce-scatter with near-memory reduction | c | c, as updates | 2 c |
| all-gather | c | c | 2 c |

In total, a reduce-scatter reads (2 N - 1) c bytes and writes N c bytes. With near-memory reduction it reads and writes
(N - 1) c bytes each, and the last sum is not needed. The slowest of link, units and memory sets the rate of a step. The units
process the first of its `pipeline` pieces before the link starts. Each step adds the link's latency once. All GPUs do the same
at the same time, so the simulated GPU receives as many bytes as it sends.
"""

from __future__ import annotations

from weft_studies.t3.gemm import Process
from weft_studies.t3.memory import GpuMemory


def reduce_scatter(memory: GpuMemory, chunk: int, world_size: int, units: int) -> Process:
    """Simulate a ring reduce-scatter of `world_size` chunks of `chunk` bytes."""
    for step in range(world_size - 1):
        reads = 2 if step else 1
        yield from _pass_on(memory, chunk, units, {"rs_read": reads * chunk, "rs_write": chunk}, touched=reads + 1)
    rate = memory.system.unit_gbps * units / 3
    yield memory.flow("communication", chunk, lambda: rate, {"rs_read": 2 * chunk, "rs_write": chunk})


def reduce_scatter_near_memory(memory: GpuMemory, chunk: int, world_size: int, units: int) -> Process:
    """Simulate a ring reduce-scatter whose arriving data is added by the memory."""
    for _ in range(world_size - 1):
        yield from _pass_on(memory, chunk, units, {"rs_read": chunk, "rs_write": chunk}, touched=2, update="rs_write")


def all_gather(memory: GpuMemory, chunk: int, world_size: int, units: int) -> Process:
    """Simulate a ring all-gather of `world_size` chunks of `chunk` bytes."""
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
