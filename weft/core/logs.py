"""The logger of the library. weft prints nothing: a program that configures `logging` decides what is shown and where."""

from __future__ import annotations

import logging
from functools import lru_cache

LOGGER = logging.getLogger("weft")
_REMEMBERED = 1024
"""A process remembers this many warnings and does not repeat them."""


@lru_cache(maxsize=_REMEMBERED)
def warn_once(text: str) -> None:
    """Log a warning about a fallback or a choice, with its reason, the first time that it has this text."""
    LOGGER.warning(text)
