"""What weft logs, in tests of ranks, where pytest's own fixture is not there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from weft.core.errors import LOGGER, warn_once


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    """What is logged from here on, each warning once; to nobody else."""
    warn_once.cache_clear()
    handler, propagates = _Messages(), LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.propagate = False
    try:
        yield handler.messages
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.propagate = propagates


@contextmanager
def warned(match: str) -> Iterator[list[str]]:
    """Something is logged whose words match."""
    with logged() as messages:
        yield messages
    assert any(re.search(match, message) for message in messages), messages
