"""Signatures of public names for generate.py: `signatures NAME ...`, each with the first sentence of its docstring.

The site shows whole docstrings in their place (site_pages.py).
"""

from __future__ import annotations

import inspect
import pydoc
import re
import textwrap
from collections.abc import Callable
from typing import Any

WIDTH = 118


def signatures(*names: str) -> str:
    """Return the signatures of objects, which are named as a user writes them."""
    return "\n\n".join(_signature(name) for name in names)


def _signature(name: str) -> str:
    found: Any = pydoc.locate(name)
    if found is None:
        raise ValueError(f"there is no {name}")
    first = re.split(r"(?<=\.)\s|\n\n", inspect.getdoc(found) or "")[0]
    below = textwrap.fill(" ".join(first.split()), WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{_call(name, found)}\n{below}" if below.strip() else _call(name, found)


def _call(name: str, found: Any) -> str:
    """Return a call with names and defaults, as PyTorch's documents write it, in lines of at most WIDTH characters."""
    if inspect.isclass(found) and issubclass(found, Exception):
        return name
    given = inspect.signature(found)
    bare = [p.replace(annotation=p.empty) for p in given.parameters.values() if p.name not in ("self", "cls")]
    line = f"{name}{given.replace(parameters=bare, return_annotation=given.empty)}".replace("<factory>", "...")
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)


MAKERS: dict[str, Callable[..., str]] = {"signatures": signatures}
