"""Finding: one thing that `weft doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "missing"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one examination: its subject, its state, what was seen, and a remedy.

    state: ok; warn: weft works, but slower or with less; missing: weft needs it. cure: empty where nothing is to be done.
    """

    what: str
    state: State
    detail: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.what}: {self.detail}" + (f" -> {self.cure}" if self.cure else "")
