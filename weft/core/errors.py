"""The errors of distributed runs. A user's mistake is a ValueError; these errors concern other ranks and timeouts."""

from __future__ import annotations

from typing import Any


def require(name: str, value: Any, kind: type | tuple[type, ...], use: str) -> None:
    """Raises ValueError that names the argument, what it is, and what would work, unless `value` is of this kind."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}; {use}")


class WeftError(RuntimeError):
    """A distributed run could not go on. Every rank of the group gets one; once each that lives has called weft.close(group),
    the group can be used again. docs/troubleshooting.md goes through the messages."""


class RankMismatch(WeftError, ValueError):
    """Ranks made different calls: the message prints the difference."""


class PeerLost(WeftError):
    """Another rank died, failed or left: the message names it."""


class WaitTimeout(WeftError):
    """A bounded wait ended: the message has rank, lane, step, flag, expected and seen value, and the rank that should have
    raised it."""
