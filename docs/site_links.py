"""What the site changes in the documents: links that lead out of docs/ become the path of a file of the repository."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s#]+)[^)\s]*\)")
_FENCE = re.compile(r"^(```[a-z]+) [^\n]*$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page. Fenced blocks keep their language alone: what else stands there is for docs/generate.py.

    >>> on_page_markdown("see [the engine](../weft/perf/engine.py#x), [engine.py](../weft/perf/engine.py)")
    'see the engine (`weft/perf/engine.py`), `weft/perf/engine.py`'
    """
    return _FENCE.sub(r"\1", _OUTSIDE.sub(_path, markdown))


def _path(link: re.Match[str]) -> str:
    words, path = link.groups()
    return f"`{path}`" if path.endswith(words) else f"{words} (`{path}`)"
