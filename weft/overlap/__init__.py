"""Runs collectives concurrently with computation: `concurrent`, copy-engine collectives, DDP and FSDP hooks, SM controls."""

from __future__ import annotations

from weft.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
