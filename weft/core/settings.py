"""Settings apply KEY=VALUE from a command line to a frozen value that has numbers by path, for what-if questions.

The value is rebuilt through its JSON form, so that it checks itself as if it had been read from a file.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from weft.core import codec

T = TypeVar("T")


def parse(setting: str, example: str) -> tuple[str, str]:
    """Split KEY=VALUE into (key, value). Raises ValueError, with the example, for anything else.

    >>> parse("hbm.gbps = 2000", "")
    ('hbm.gbps', '2000')
    """
    key, equals, value = setting.partition("=")
    if not equals:
        raise ValueError(f"--set {setting}: it must be KEY=VALUE, such as {example}")
    return key.strip(), value.strip()


def changed(value: T, path: str, text: str, *, known: Collection[str], what: str) -> T:
    """Return `value` with the field at `path` set to `text`, which is read as JSON unless the field is a string.

    known: the existing paths. what: a description of the value. Raises ValueError as `unknown_path`, or one that says what the
    value must be.
    """
    if path not in known:
        raise unknown_path(path, known, what)
    return replaced(value, path, lambda before: text if isinstance(before, str) else numbers_of(path, text))


def unknown_path(path: str, known: Collection[str], what: str) -> ValueError:
    """Return the error for a path that a value does not have, with the nearest ones, or with all if none is near.

    >>> str(unknown_path("link.gbps", ("links.gbps", "gpu.sms"), "machine m"))
    "'link.gbps' is no number of machine m; did you mean links.gbps?"
    """
    last = path.rpartition(".")[2]
    close = difflib.get_close_matches(path, known, n=3, cutoff=0.7)
    close = close or difflib.get_close_matches(path, [key for key in known if key.endswith(f".{last}")], n=3, cutoff=0)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(known)}"
    return ValueError(f"{path!r} is no number of {what}; {hint}")


def replaced(value: T, path: str, make: Callable[[Any], Any]) -> T:
    """Return `value` with the field at `path` replaced by `make` of its old value, both as JSON data. Raises what the value
    raises."""
    data = codec.dump(value)
    put(data, path, make)
    return cast(T, codec.load(type(value), data))


def put(data: dict[str, Any], path: str, make: Callable[[Any], Any]) -> None:
    """Replace what is at a path of nested dicts by `make` of it, or of None if there is nothing."""
    *parents, last = path.split(".")
    for parent in parents:
        data = data[parent]
    data[last] = make(data.get(last))


def numbers_of(path: str, text: str) -> Any:
    """Parse the text of a field as JSON. Raises ValueError that says what it must be."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} is {text!r}; it must be a number, or a list such as [30, 10, 5]") from None
