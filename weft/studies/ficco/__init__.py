"""FiCCO's evaluation simulated: overlap finer than the shard on a full mesh of eight MI300X (arXiv 2512.10236)."""
