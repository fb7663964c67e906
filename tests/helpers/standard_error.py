"""What weft itself writes to standard error, in tests that read the output of a whole process."""

from __future__ import annotations


def words_without_torchao(text: str) -> list[str]:
    """The lines of `text`, less those of torchao: transformers loads it where it is installed, and it says what it lacks."""
    return [line for line in text.splitlines() if "torchao" not in line and "_pytree.py" not in line]
