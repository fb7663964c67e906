"""The version that `weft --version` prints and that ranks compare."""

from __future__ import annotations

__version__ = "0.1.0"
