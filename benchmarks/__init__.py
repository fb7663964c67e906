"""Measurements. Each module answers the question that it begins with; `python -m benchmarks.NAME`, or torchrun, runs it."""
