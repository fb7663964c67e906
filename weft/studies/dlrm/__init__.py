"""DLRM at scale, simulated: training on many nodes, with embedding and all-to-all fused or not (arXiv 2305.06942)."""
