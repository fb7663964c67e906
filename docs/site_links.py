"""What the site changes in the documents: links to files that the site does not have become paths in the repository."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./|lab/)([^)\s#]+)[^)\s]*\)")
"""A link to a file outside docs/, or to the notes of docs/lab."""
_FENCE = re.compile(r"^(```[a-z]+) [^\n]*$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page. Fenced blocks keep their language alone: what else stands there is for docs/generate.py.

    >>> on_page_markdown("see [the engine](../weft/perf/engine.py#x), [engine.py](../weft/perf/engine.py)")
    'see the engine (`weft/perf/engine.py`), `weft/perf/engine.py`'
    >>> on_page_markdown("in the [log](lab/log.md#fp8)")
    'in the log (`docs/lab/log.md`)'
    """
    return _FENCE.sub(r"\1", _OUTSIDE.sub(_path, markdown))


def _path(link: re.Match[str]) -> str:
    words, folder, path = link.groups()
    path = f"docs/lab/{path}" if folder == "lab/" else path
    return f"`{path}`" if path.endswith(words) else f"{words} (`{path}`)"
