"""What ranks do in the tests of weft.triton, interpreted and on GPUs: the documented examples, and protocols call after call."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[1] / "docs" / "triton.md"
_BLOCK = re.compile(r"^```py ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def documented() -> dict[str, str]:
    """By name, the source of each example in the document, with the imports that it says they begin with."""
    (_, imports), *named = _BLOCK.findall(DOCUMENT.read_text(encoding="utf-8"))
    return {name: f"{imports}\n\n{code}" for name, code in named}


def load(path: str) -> Any:
    """A module from a file: Triton reads a kernel's source there."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(path: str) -> None:
    """One documented example on this rank."""
    from weft.triton import Peers

    example: Callable[[Peers], None] = load(path).example
    with Peers() as peers:
        example(peers)
