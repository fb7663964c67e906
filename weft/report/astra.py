"""What ASTRA-sim needs to run a schedule on a machine: Chakra traces, and its network, system and memory files.

    AstraSim_Analytical_Congestion_Aware --workload-configuration=DIR/rank --system-configuration=DIR/system.json
        --network-configuration=DIR/network.yml --remote-memory-configuration=DIR/memory.json

Its analytical network has rings, switches and full meshes of equal links, whose rate and latency are the machine's; of several
nodes, a dimension within and one between. What it does not know: that copy engines, stores and ports share rates, and that a
GPU's kernels and messages are more than one at a time (it runs one kernel and one send of a rank at a time).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from weft.core.machine import Machine, Topology
from weft.core.schedule import Schedule
from weft.report.chakra import write_chakra

TOPOLOGIES: dict[Topology, str] = {"switch": "Switch", "mesh": "FullyConnected", "ring": "Ring", "pcie": "Switch"}
ALGORITHMS: dict[Topology, str] = {"switch": "direct", "mesh": "direct", "ring": "ring", "pcie": "ring"}
PREFIX = "rank"


def write_astra(schedule: Schedule, machine: Machine, folder: Path) -> list[Path]:
    """Write all files into `folder`, which exists; returns their paths. Raises ValueError as `write_chakra` does, and for nodes
    of different sizes, which its networks have not."""
    texts = {
        "network.yml": network(schedule, machine),
        "system.json": json.dumps(system(schedule, machine), indent=2) + "\n",
        "memory.json": json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}, indent=2) + "\n",
    }
    written = write_chakra(schedule, machine, folder, prefix=PREFIX)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        written.append(folder / name)
    return written


def network(schedule: Schedule, machine: Machine) -> str:
    """Dimensions from the inside out: topology, ranks, GB/s, ns."""
    links, nodes = machine.links, schedule.problem.nodes
    if len(set(nodes)) > 1:
        raise ValueError(f"nodes is {nodes}; a network of ASTRA-sim has nodes of one size")
    dims = [
        (TOPOLOGIES[links.topology], nodes[0] if nodes else schedule.problem.world_size, links.gbps, 1e3 * links.latency_us)
    ]
    if nodes and machine.network is not None:
        dims.append(("Switch", len(nodes), machine.network.gbps, 1e3 * machine.network.latency_us))
    rows = zip(*dims, strict=True)
    keys = ("topology", "npus_count", "bandwidth", "latency")
    return "".join(f"{key}: [ {', '.join(map(str, row))} ]\n" for key, row in zip(keys, rows, strict=True))


def system(schedule: Schedule, machine: Machine) -> dict[str, int | float | str | Sequence[str]]:
    """Collectives by one algorithm a dimension, in one piece, as they come; the matrix and memory rates for its roofline, which
    is off: nodes have durations."""
    algorithm = [ALGORITHMS[machine.links.topology]] + ["direct"] * bool(schedule.problem.nodes)
    return {
        "scheduling-policy": "FIFO",
        "endpoint-delay": 0,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": 1,
        **{f"{op}-implementation": algorithm for op in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")},
        "collective-optimization": "baseline",
        "local-mem-bw": machine.gpu.hbm_gbps,
        "peak-perf": max(machine.gpu.tflops.values()),
        "roofline-enabled": 0,
        "boost-mode": 0,
    }
