"""Options that are looked at before a benchmark begins: what it would stumble over at its end is said at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

MODES = ("graph", "eager")


def modes_of(text: str, known: Sequence[str] = MODES) -> str:
    """--modes: of the known ones, with commas. Nothing: the benchmark's own."""
    for mode in text.split(",") if text else ():
        if mode not in known:
            raise argparse.ArgumentTypeError(f"{mode!r} is none of {', '.join(known)}")
    return text


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def appended(text: str) -> Path:
    """A file that lines can be appended to. Made now, if it is not there."""
    try:
        with open(text, "a", encoding="utf-8"):
            return Path(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot append to {text!r}: {error.strerror}") from None
