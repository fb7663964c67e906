"""Writes the presets that weft reads from modules: python tests/helpers/preset_files.py, with transformers installed.

Such a preset is what `weft plan` makes of the model's config.json: the calls that remain after weft.parallelize. They are the
same for all numbers of ranks that divide the model's heads. The configs have the published files' keys that decide shapes.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.cli.choices import choose_layers
from weft.core import codec
from weft.planner.models import Model

FOLDER = Path(__file__).resolve().parents[2] / "weft" / "planner" / "models"


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
    },
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt-oss-20b": _gpt_oss(24, 32),
}
SOURCES = {
    "deepseek-v3": "config.json of deepseek-ai/DeepSeek-V3; arXiv 2412.19437",
    "gpt-oss-120b": "config.json of openai/gpt-oss-120b; arXiv 2508.10925",
    "gpt-oss-20b": "config.json of openai/gpt-oss-20b; arXiv 2508.10925",
}


def write_config(name: str, folder: Path) -> str:
    """Write a model's config.json, and return its path."""
    path = folder / name / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    return str(path)


def make(name: str, folder: Path, ranks: int = 8) -> Model:
    """Return the preset for `ranks` ranks. folder: where its config is written."""
    found, _ = choose_layers(write_config(name, folder), None, ranks=ranks)
    return replace(found, name=name, source=f"{SOURCES[name]}; {found.source.rpartition(', ')[2]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for each in CONFIGS:
            (FOLDER / f"{each}.json").write_text(codec.dumps(make(each, Path(scratch)), indent=2) + "\n", encoding="utf-8")
