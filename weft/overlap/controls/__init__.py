"""Runtime controls for concurrent computation and communication, each usable alone.

| control | what it does | on |
| --- | --- | --- |
| shape, occupancy | cap the residency of a compute kernel, so that communication blocks also fit | one kernel |
| comm_stream, give_back, launch_order | let a collective's blocks be placed first | streams |
| lane_priority | let the blocks of weft's own lanes be placed first | a group's lanes |
| nccl_group | set the number of blocks of NCCL's kernels, and their streams' priority | a process group |
| sm_budget, sm_partition | leave SMs free of kernels whose residency cannot be lowered | cuBLAS GEMMs; a stream |

The first two rows are resource-aware overlap (arXiv 2606.09200). No control changes a kernel or a library. Contexts restore
the settings that they found, also after an exception. docs/controls.md says when to use which.
"""

from __future__ import annotations

from weft.compat.streams import Priority, comm_stream, give_back, lane_priority, launch_order
from weft.overlap.controls.budget import SmPartition, nccl_group, sm_budget, sm_partition
from weft.overlap.controls.residency import DEVICES, Multiprocessor, Occupancy, blocks_per_sm, padding_bytes, this_device
from weft.overlap.controls.shaping import occupancy, shape

__all__ = [
    "DEVICES",
    "Multiprocessor",
    "Occupancy",
    "Priority",
    "SmPartition",
    "blocks_per_sm",
    "comm_stream",
    "give_back",
    "lane_priority",
    "launch_order",
    "nccl_group",
    "occupancy",
    "padding_bytes",
    "shape",
    "sm_budget",
    "sm_partition",
    "this_device",
]
