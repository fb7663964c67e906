"""How weft reports what went wrong: the errors of distributed runs, and the logger of the library.

A mistake in a call is a ValueError; these errors concern other ranks and timeouts. weft prints nothing: a program that
configures `logging` decides what is shown and where.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any


def require(name: str, value: Any, kind: type | tuple[type, ...], use: str) -> None:
    """Raise ValueError unless `value` is of this kind. The message names the argument, its value, and what would work."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}; {use}")


class WeftError(RuntimeError):
    """A distributed run could not continue. Every rank of the group gets an error. The group can be used again once every
    surviving rank has called weft.close(group). docs/troubleshooting.md explains the messages."""


class RankMismatch(WeftError, ValueError):
    """Ranks made different calls. The message prints the difference."""


class PeerLost(WeftError):
    """Another rank died, failed or left. The message names it."""


class WaitTimeout(WeftError):
    """A wait timed out. The message has the rank, lane, step and flag, its expected and actual value, and the rank that should
    have signalled it."""


LOGGER = logging.getLogger("weft")
_REMEMBERED = 1024
"""A process remembers this many warnings and does not repeat them."""


@lru_cache(maxsize=_REMEMBERED)
def warn_once(text: str) -> None:
    """Log a warning about a fallback or a choice, with its reason, the first time that it has this text."""
    LOGGER.warning(text)
