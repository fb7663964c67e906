"""Convert frozen dataclasses to JSON and back, by their type hints.

Contract: `load(cls, dump(value)) == value` for every value class of weft. Reading is strict: an unknown key, a missing
one, or a value of the wrong type raises `ValueError` that names the path ("steps[3].src.rows") and what would work.
Reading evaluates no text and imports nothing by name, so a file from an untrusted source cannot run code.

Supported hints: int, float, str, bool, None, unions, tuple[X, ...], tuple[X, Y], Mapping[str, X], Literal, and frozen
dataclasses. The members of a union of dataclasses are distinguished by a "type" key with the class name, which one of them
may omit. A class with a true attribute TAGGED always writes this key.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
MAX_FILE_BYTES = 32 << 20
"""The largest file that is read. A schedule of 8 ranks and 512 chunks takes 2 MB; 32 MiB are parsed in a few seconds."""
MAX_TEXT_CHARACTERS = 1000
"""The longest text in a file, such as a name or the source of a number. It may be printed in messages, pages and tables."""


@functools.cache
def _get_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def dump(value: Any) -> Any:
    """Convert `value` to plain JSON data. Fields that equal their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out: dict[str, Any] = {"type": type(value).__name__} if getattr(value, "TAGGED", False) else {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if item != field.default:
                out[field.name] = dump(item)
        return out
    if isinstance(value, Mapping):
        return {str(key): dump(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [dump(item) for item in value]
    return value


def load(hint: Any, data: Any, where: str = "") -> Any:
    """Return the value of type `hint` that JSON `data` describes. Raises ValueError that names the path `where` in the data."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return _load_dataclass(typing.cast(type, hint), data, where)
    if origin in (typing.Union, types.UnionType):
        return _load_union(typing.get_args(hint), data, where)
    if origin is tuple:
        return _load_tuple(typing.get_args(hint), data, where)
    if origin is typing.Literal:
        if data not in typing.get_args(hint):
            raise ValueError(
                f"{where or 'value'} is {data!r:.80}; it must be one of {', '.join(map(repr, typing.get_args(hint)))}"
            )
        return data
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(data, dict), data, "an object", where)
        item_hint = typing.get_args(hint)[1]
        for key in data:
            _expect_printable(key, f"a key of {where or 'value'}")
        return {key: load(item_hint, item, f"{where}.{key}") for key, item in data.items()}
    return _load_scalar(hint, data, where)


def loads(cls: type[T], text: str, where: str = "JSON") -> T:
    """Parse `text` as a `cls`. Raises ValueError that begins with `where`, for example a file name."""
    data = _parse(text, where)
    try:
        return typing.cast(T, load(cls, data))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    except RecursionError:
        raise ValueError(f"{where}: a {cls.__name__} is nested too deeply; use fewer levels") from None


def read(cls: type[T], path: str | Path) -> T:
    """Read a `cls` from a JSON file. Raises ValueError that names the file."""
    return loads(cls, _read_text(path), str(path))


def read_data(path: str | Path) -> Any:
    """Return the content of a JSON file as plain JSON data. Raises ValueError that names the file."""
    return _parse(_read_text(path), str(path))


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None


def _read_text(path: str | Path) -> str:
    try:
        with Path(path).open("rb") as file:  # the size is bounded below, because a device file has no end
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"cannot read {path}: it has more than {MAX_FILE_BYTES >> 20} MiB")
        return data.decode("utf-8-sig")  # skips a byte order mark
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Convert `value` to JSON text."""
    return json.dumps(dump(value), indent=indent, allow_nan=False)


def _expect(is_valid: bool, data: Any, what: str, where: str) -> None:
    """Raise ValueError unless `is_valid`. `what` says in words what `data` must be."""
    if not is_valid:
        raise ValueError(f"{where or 'value'} is {data!r:.80}; it must be {what}")


def _expect_printable(text: str, where: str) -> None:
    """Raise ValueError for a text that is too long or has unprintable characters.

    A terminal would execute the escape sequences of a text from an untrusted source.
    """
    if len(text) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"{where or 'value'} has {len(text)} characters; it must have at most {MAX_TEXT_CHARACTERS}")
    _expect(text.isprintable(), text, "one line of letters that print", where)


def _load_scalar(hint: Any, data: Any, where: str) -> Any:
    if hint is Any:
        return data
    if hint in (None, type(None)):
        _expect(data is None, data, "null", where)
    elif hint is float:
        is_number = isinstance(data, (int, float)) and not isinstance(data, bool)
        _expect(is_number, data, "a number", where)
        _expect(abs(data) < 1e300 and math.isfinite(data), data, "a finite number", where)
        return float(data)
    elif hint is int:
        _expect(isinstance(data, int) and not isinstance(data, bool), data, "a whole number", where)
    elif hint is str:
        _expect(isinstance(data, str), data, "text", where)
        _expect_printable(data, where)
    elif hint is bool:
        _expect(isinstance(data, bool), data, "true or false", where)
    else:
        raise AssertionError(f"codec: no rule for {hint!r} at {where}")
    return data


def _load_tuple(args: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(data, (list, tuple)), data, "a list", where)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(load(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    _expect(len(data) == len(args), data, f"a list of {len(args)}", where)
    return tuple(load(hint, item, f"{where}[{i}]") for i, (hint, item) in enumerate(zip(args, data, strict=True)))


def _load_union(args: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in args:
        return None
    classes: dict[str, Any] = {a.__name__: a for a in args if isinstance(a, type) and dataclasses.is_dataclass(a)}
    if isinstance(data, dict) and classes:
        untagged = [c for c in classes.values() if len(classes) == 1 or not getattr(c, "TAGGED", False)]
        if len(untagged) == 1 and "type" not in data:
            return load(untagged[0], data, where)
        tag = data.get("type")
        _expect(isinstance(tag, str) and tag in classes, tag, f"one of {', '.join(classes)}", f"{where}.type")
        return load(classes[data["type"]], data, where)
    plain = [a for a in args if a is not type(None) and not dataclasses.is_dataclass(a)]
    for hint in plain[:-1]:  # the error for the last of them is raised
        try:
            return load(hint, data, where)
        except ValueError:
            continue
    if not plain:
        raise ValueError(f"{where or 'value'} is {data!r:.80}; it must be an object with a type of {', '.join(classes)}")
    return load(plain[-1], data, where)


def _load_dataclass(cls: type, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), data, "an object", where)
    prefix = f"{where}." if where else ""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields and not (key == "type" and getattr(cls, "TAGGED", False)):
            _expect_printable(key, f"a key of {where or cls.__name__}")
            raise ValueError(f"{prefix}{key} is not a field of {cls.__name__}; it has {', '.join(fields)}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise ValueError(f"{prefix}{name} is missing from {cls.__name__}")
    values = {n: load(_get_hints(cls)[n], data[n], f"{prefix}{n}") for n in fields if n in data}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None
