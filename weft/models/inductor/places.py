"""Finds where a node of a graph comes from, as recorded by torch.compile."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.fx import Node

_TORCH = str(Path(torch.__file__).parent)


def file_and_line(node: Node) -> str:
    """Return the innermost line outside torch, as "model.py:12", or "" if it is unknown."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(path, line) for path, line in frames if not path.startswith(_TORCH)] or frames
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def module_name(node: Node) -> str:
    """Return the module of a forward's node, as "layers.0.up", or "" if it is unknown, as in a backward."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    name = str(list(stack.values())[-1][0])
    inner = re.sub(r"^L\['\w+'\]\.?", "", name)
    return re.sub(r"\._modules\b|^_modules\b", "", re.sub(r"\['?(\w+)'?\]", r".\1", inner)).strip(".")
