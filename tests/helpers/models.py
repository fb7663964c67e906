"""Models small enough to run in a test."""

from __future__ import annotations

TINY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
"""What a config.json of one holds."""
