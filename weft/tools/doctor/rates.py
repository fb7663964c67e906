"""What the links between GPUs should give: from the matrix of nvidia-smi, the GPUs' generation, and their PCIe slots.

NVn in that matrix is a bond of n NVLinks. A link carries 20 GB/s a direction on Pascal, 25 on Volta, Ampere and Hopper, 50 on
Blackwell. Where all pairs' bonds together are more links than a GPU has, they go through a switch, and share the GPU's.
PCIe: a lane's rate by generation, after its encoding. Sources: NVIDIA's NVLink pages and whitepapers; PCI-SIG.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NVLINK_GBPS = {6: 20.0, 7: 25.0, 8: 25.0, 9: 25.0, 10: 50.0, 12: 50.0}
"""Of one link, one direction, by major compute capability."""
_NVLINKS = {6: 4, 7: 6, 8: 12, 9: 18, 10: 18, 12: 18}
"""Of one GPU, at most."""
_PCIE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Of one lane, one direction."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """kind: of the slowest pair. pair_gbps: from one GPU to one other. port_gbps: from one GPU to all others at once."""

    kind: str
    pair_gbps: float
    port_gbps: float


def rates(matrix: list[list[str]], major: int, pcie: str) -> Rates | None:
    """What GPU links should give; None where something in it is not known.

    matrix: kinds of link between GPUs, as nvidia-smi prints them, with X on the diagonal. major: of the compute capability.
    pcie: "generation, lanes" of the slots, as nvidia-smi's query prints them.

    >>> rates([["X", "NV18"], ["NV18", "X"]], 9, "5, 16")
    Rates(kind='NV18', pair_gbps=450.0, port_gbps=450.0)
    """
    found = [_row(kinds, major, pcie) for kinds in matrix]
    if not found or any(row is None for row in found):
        return None
    known = [row for row in found if row is not None]
    slowest = min(known, key=lambda row: row.pair_gbps)
    return Rates(kind=slowest.kind, pair_gbps=slowest.pair_gbps, port_gbps=min(row.port_gbps for row in known))


def _row(kinds: list[str], major: int, pcie: str) -> Rates | None:
    """One GPU's links to all others."""
    links = {kind: int(kind[2:]) for kind in kinds if re.fullmatch(r"NV\d+", kind)}
    others = [kind for kind in kinds if kind != "X"]
    if others and len(links) == len(set(others)) and major in _NVLINKS:
        fewest = min(links, key=lambda kind: links[kind])
        together = min(sum(links[kind] for kind in others), max(_NVLINKS[major], links[fewest]))
        one = _NVLINK_GBPS[major]
        return Rates(kind=fewest, pair_gbps=one * links[fewest], port_gbps=one * together)
    slow = [kind for kind in others if kind not in links]
    gbps = pcie_gbps(pcie)
    return Rates(kind=slow[0], pair_gbps=gbps, port_gbps=gbps) if slow and gbps else None


def pcie_gbps(slot: str) -> float | None:
    """Return the rate of a PCIe slot described as "generation, lanes"; None for any other text.

    >>> pcie_gbps("4, 16")
    31.504
    """
    match = re.match(r"\s*(\d+)\s*,\s*(\d+)", slot)
    lane = _PCIE_GBPS.get(int(match[1])) if match else None
    return lane * int(match[2]) if match and lane else None
