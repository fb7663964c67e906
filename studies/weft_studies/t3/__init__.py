"""This package simulates T3: track and trigger, near-memory reduction, memory-controller arbitration (arXiv 2401.16677)."""
