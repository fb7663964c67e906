"""The bound of every wait for another rank, as the user has set it."""

from __future__ import annotations

import os

DEFAULT_TIMEOUT_S = 60.0
_MOST_TIMEOUT_S = 1e9
"""What waits of threads and stores can count."""


def timeout_from_environment() -> float:
    """WEFT_TIMEOUT_S, or 60 s. Raises ValueError if it is not a positive number, or is too large to be waited for."""
    text = os.environ.get("WEFT_TIMEOUT_S", str(DEFAULT_TIMEOUT_S))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST_TIMEOUT_S:
        raise ValueError(f"WEFT_TIMEOUT_S is {text!r}; it must be a number of seconds above 0, and at most {_MOST_TIMEOUT_S:g}")
    return value
