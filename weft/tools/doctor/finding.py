"""A Finding is the result of one examination by `weft doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "missing"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Finding is the result of one examination.

    what: the subject.
    state: ok, warn if weft works more slowly or with fewer features, or missing if weft needs it.
    detail: what was found.
    cure: how to fix it. Empty if nothing needs to be done.
    """

    what: str
    state: State
    detail: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.what}: {self.detail}" + (f" -> {self.cure}" if self.cure else "")
