"""What the site makes of a page: whole docstrings in place of signatures, links to files outside the site become paths."""

from __future__ import annotations

import pydoc
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
import signatures

STUDIES = Path(__file__).parents[1] / "studies" / "README.md"
"""A page of the site, as studies.md, that is not in docs/."""
_SIGNATURES = re.compile(r"^```py signatures (\w+)\n.*?^```$", re.MULTILINE | re.DOTALL)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./|lab/)([^)\s#]+)[^)\s]*\)")
"""A link to a file outside docs/, or to the notes of docs/lab."""
_FENCE = re.compile(r"^(```[a-z]+) [^\n]*$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """mkdocs calls this when it has listed the pages."""
    from mkdocs.structure.files import File  # here, as tests import this module where mkdocs is not installed

    files.append(File.generated(config, "studies.md", content=studies_page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for each page."""
    return adapted(markdown)


def studies_page() -> str:
    """Return studies/README.md with links that are right in the folder of the other pages."""
    text = STUDIES.read_text(encoding="utf-8").replace("](../docs/", "](")
    return text.replace("](weft_studies/", "](../studies/weft_studies/")


def adapted(markdown: str) -> str:
    """Return a page whose links lead somewhere on the site, and whose fenced blocks name their language alone.

    >>> adapted("see [the engine](../weft/perf/engine.py#x), [engine.py](../weft/perf/engine.py)")
    'see the engine (`weft/perf/engine.py`), `weft/perf/engine.py`'
    >>> adapted("in the [log](lab/log.md#fp8), [studies](../studies/README.md#t3)")
    'in the log (`docs/lab/log.md`), [studies](studies.md#t3)'
    """
    text = _SIGNATURES.sub(_docstrings, markdown.replace("](../studies/README.md", "](studies.md"))
    return _FENCE.sub(r"\1", _OUTSIDE.sub(_path, text))


def _docstrings(block: re.Match[str]) -> str:
    """Return mkdocstrings' lines for the names of a block of signatures: where each is defined."""
    return "\n\n".join(f"::: {_defined(name)}" for name in signatures.GROUPS[block[1]])


def _defined(name: str) -> str:
    found: Any = pydoc.locate(name)
    return f"{found.__module__}.{found.__qualname__}"


def _path(link: re.Match[str]) -> str:
    words, folder, path = link.groups()
    path = f"docs/lab/{path}" if folder == "lab/" else path
    return f"`{path}`" if path.endswith(words) else f"{words} (`{path}`)"
