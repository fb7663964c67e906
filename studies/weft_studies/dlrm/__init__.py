"""This package simulates DLRM training on many nodes, with embedding and all-to-all fused or unfused (arXiv 2305.06942)."""
