"""Triton kernels for steps that are more than a matmul: tiles that wait for flags, count, or are stored at peers; sums."""
