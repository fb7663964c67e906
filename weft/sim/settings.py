"""Settings: a value of numbers (a Machine, a System) with one of them replaced, by the path that `weft.machine.numbers` has."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

from weft import codec
from weft.machine import numbers

Value = TypeVar("Value")


def changed(value: Value, path: str, given: str | float) -> Value:
    """`value` with one number, or one row of numbers, replaced; given: as JSON text or as the number.

    Raises ValueError that names the path and says which there are, or what the number must be.
    """
    known = dict.fromkeys(name for name, _ in numbers(value))
    if path not in known:
        kind, name = type(value).__name__.lower(), getattr(value, "name", "")
        raise ValueError(f"{path!r} is no number of {kind} {name}; it has {', '.join(known)}")
    data = codec.dump(value)
    *parents, last = path.split(".")
    at: Any = data
    for key in parents:
        at = at[key]
    at[last] = _parsed(path, given) if isinstance(given, str) else given
    made: Value = codec.load(type(value), data)
    return made


def assigned(value: Value, setting: str) -> Value:
    """`value` with a number replaced by "path=number". Raises ValueError as `changed` does, or where there is no "="."""
    key, equals, given = setting.partition("=")
    if not equals:
        raise ValueError(f"--set {setting}: it must be KEY=VALUE, such as hbm.gbps=2000")
    return changed(value, key.strip(), given)


def _parsed(path: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} is {text!r}; it must be a number, or a list such as [30, 10, 5]") from None


def scaled(value: Value, path: str, factor: float) -> Value:
    """`value` with the number at `path` times `factor`; whole numbers are rounded."""
    values = [number for name, number in numbers(value) if name == path]
    made = [round(number * factor) if isinstance(number, int) else number * factor for number in values]
    at: Any = dataclasses.asdict(value)  # type: ignore[call-overload]
    for key in path.split("."):
        at = at[key]
    return changed(value, path, codec.dumps(tuple(made)) if isinstance(at, tuple) else made[0])
