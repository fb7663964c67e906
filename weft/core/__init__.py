"""The values that all of weft shares: problems, machines, schedules, spans and errors. `__version__` is the version of weft."""

from __future__ import annotations

__version__ = "0.1.0"
