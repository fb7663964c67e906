"""Computes the rates that the links between GPUs should give, from nvidia-smi's matrix, the GPUs' generation and PCIe slots.

NVn in that matrix is a bond of n NVLinks. A link carries 20 GB/s per direction on Pascal, 25 on Volta, Ampere and Hopper, and
50 on Blackwell. If the bonds to all peers have more links than the GPU, they go through a switch and share the GPU's links.
The rates of PCIe are those of a lane by generation, after encoding. Sources: NVIDIA's NVLink pages and whitepapers; PCI-SIG.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NVLINK_GBPS = {6: 20.0, 7: 25.0, 8: 25.0, 9: 25.0, 10: 50.0, 12: 50.0}
"""The rate of one NVLink in one direction, by major compute capability."""
_NVLINKS = {6: 4, 7: 6, 8: 12, 9: 18, 10: 18, 12: 18}
"""The largest number of NVLinks of one GPU, by major compute capability."""
_PCIE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""The rate of one PCIe lane in one direction, by generation."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates has the rates from one GPU to one other (`pair_gbps`) and to all others at once (`port_gbps`).

    kind: the kind of link of the slowest pair."""

    kind: str
    pair_gbps: float
    port_gbps: float


def rates(matrix: list[list[str]], major: int, pcie: str) -> Rates | None:
    """Return the rates that the links should give, or None if a kind of link is not known.

    matrix: the kinds of link between GPUs as nvidia-smi prints them, with X on the diagonal.
    major: the major compute capability. pcie: "generation, lanes" of the slots, as nvidia-smi's query prints them.

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
    """Return the rates of one GPU's links to all others, or None if a kind of link is not known."""
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
