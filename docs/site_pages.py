"""What the site makes of a page: generated blocks are filled in, and links to files outside the site become paths."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./|lab/)([^)\s#]+)[^)\s]*\)")
"""A link to a file outside docs/, or to the notes of docs/lab."""
_FENCE = re.compile(r"^(```[a-z]+) [^\n]*$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for each page."""
    sys.path.append(str(Path(__file__).parent))
    return adapted(importlib.import_module("generate").filled(markdown))


def adapted(markdown: str) -> str:
    """Return a page whose links lead somewhere on the site, and whose fenced blocks name their language alone.

    >>> adapted("see [the engine](../weft/perf/engine.py#x), [engine.py](../weft/perf/engine.py)")
    'see the engine (`weft/perf/engine.py`), `weft/perf/engine.py`'
    >>> adapted("in the [log](lab/log.md#fp8)")
    'in the log (`docs/lab/log.md`)'
    """
    return _FENCE.sub(r"\1", _OUTSIDE.sub(_path, markdown))


def _path(link: re.Match[str]) -> str:
    words, folder, path = link.groups()
    path = f"docs/lab/{path}" if folder == "lab/" else path
    return f"`{path}`" if path.endswith(words) else f"{words} (`{path}`)"
