"""This package simulates FiCCO's evaluation: overlap finer than the shard on a mesh of eight MI300X (arXiv 2512.10236)."""
