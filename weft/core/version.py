"""The version, as `weft --version` prints it and as ranks compare it."""

from __future__ import annotations

__version__ = "0.1.0"
