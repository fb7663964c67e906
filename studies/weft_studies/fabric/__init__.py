"""Fabrics connect many GPUs (topology.py). If all ranks do the same, one rank represents all (symmetry.py)."""

from weft_studies.fabric.topology import FatTree, SymmetricFabric, Torus

__all__ = ["FatTree", "SymmetricFabric", "Torus"]
