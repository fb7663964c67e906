"""Fabrics: how many GPUs are connected, and what they do there when all do the same (symmetry.py)."""

from weft.studies.fabric.topology import FatTree, SymmetricFabric, Torus

__all__ = ["FatTree", "SymmetricFabric", "Torus"]
