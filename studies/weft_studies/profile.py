"""A profile describes a simulated system. Each of its numbers has a path and a source. Functions here change some numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from weft.core import codec
from weft.core.hardware import LEAST, MOST, numbers
from weft.core.machine import RESCALED
from weft.core.settings import numbers_of, replaced, unknown_path

Progress = Callable[[str, int, int], None]
"""Called with the current item, the items done and the total."""
_ON_OFF = {"true": True, "1": True, "false": False, "0": False}


class StudyProfile(Protocol):
    """StudyProfile is a frozen dataclass that weft.core.codec can read. `sources` has the source of each number by its path."""

    @property
    def name(self) -> str: ...

    @property
    def sources(self) -> Mapping[str, str]: ...


P = TypeVar("P", bound=StudyProfile)


def check(profile: StudyProfile, zero: frozenset[str] = frozenset()) -> None:
    """Raise ValueError unless every number is valid and has a source, and every source belongs to a number.

    A number is valid if it is from LEAST to MOST, or zero if its path is in `zero`."""
    found = dict(numbers(profile))
    for path, value in numbers(profile):
        if not value > 0 and not (path in zero and value == 0):
            raise ValueError(f"{path} is {value!r}; it must be above zero")
        if value and not LEAST <= value <= MOST:
            raise ValueError(f"{path} is {value!r}; it must be from {LEAST:g} to {MOST:g}")
    for path in sorted(found.keys() ^ profile.sources.keys()):
        what = "is missing; say where the number is from" if path in found else "is about no number of this system"
        raise ValueError(f"sources.{path} {what}")


def assumed(profile: StudyProfile) -> tuple[str, ...]:
    """Return the paths of the numbers that are assumed because no source gives them."""
    return tuple(path for path, source in profile.sources.items() if source.startswith("assumed"))


def uncertain(profile: StudyProfile) -> tuple[str, ...]:
    """Return the paths of the numbers that no source gives directly, because they are assumed or derived."""
    sources = ((path, source.removeprefix(RESCALED)) for path, source in profile.sources.items())
    return tuple(path for path, source in sources if source.startswith(("assumed", "derived")) or ", derived:" in source)


def changed(profile: P, path: str, value: Any) -> P:
    """Return `profile` with one number, one row of numbers, one switch or one field of choices replaced.

    value: JSON text or a Python value. A single value can replace a row of one. Choices are separated by commas. A switch is
        true, false, 1 or 0.

    Raises ValueError that names the path, and either the valid paths or the valid values.
    """
    choices = [part.name for part in dataclasses.fields(profile) if part.metadata.get("about") == "choices"]  # type: ignore[arg-type]
    on_off = tuple(switches(profile))
    known = dict.fromkeys([*(name for name, _ in numbers(profile)), *choices, *on_off])
    if path not in known:
        raise unknown_path(path, known, f"system {profile.name}")
    if path in on_off:
        value = _ON_OFF.get(str(value).lower(), value)
    elif isinstance(value, str):
        value = [word.strip() for word in value.split(",")] if path in choices else numbers_of(path, value)
    one = not isinstance(value, (list, tuple))
    return replaced(profile, path, lambda before: [value] if one and isinstance(before, list) else value)


def changed_by(profile: P, settings: Mapping[str, str]) -> P:
    """Return `profile` with each setting applied in turn. See `changed`."""
    for path, value in settings.items():
        profile = changed(profile, path, value)
    return profile


def switches(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the booleans of a profile."""
    if isinstance(value, bool):
        yield path
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from switches(getattr(value, part.name), f"{path}.{part.name}" if path else part.name)


def scaled(profile: P, path: str, factor: float) -> P:
    """Return `profile` with the number at `path` multiplied by `factor`. See `moved`."""
    return moved(profile, {path: factor})


def moved(profile: P, factors: Mapping[str, float], *, reach: float = 0.0) -> P:
    """Return `profile` with the number at each path multiplied by its factor.

    A whole number is rounded, and changes by at least 1 in the direction of its factor. All values of a row are multiplied, but
    in a row of pairs or of tiles the whole numbers are left unchanged.

    reach: for random factors, their largest distance from 1. A whole number then changes by up to `reach` times its value, but
        at least up to 1, in proportion to its factor. It may stay unchanged.

    Raises ValueError if the result is not a valid profile.
    """
    data = codec.dump(profile)
    for path, factor in factors.items():
        *parents, last = path.split(".")
        at: Any = data
        for key in parents:
            at = at[key]
        at[last] = _times(at[last], factor, reach)
    made: P = codec.load(type(profile), data)
    return made


def _times(value: Any, factor: float, reach: float) -> Any:
    if isinstance(value, list):
        return [_of_row(item, factor) if isinstance(item, (list, dict)) else _times(item, factor, reach) for item in value]
    if isinstance(value, float):
        return value * factor
    if reach:
        return round(value + (factor - 1) / reach * max(1.0, reach * value))
    moved = round(value * factor)
    return min(moved, value - 1) if factor < 1 else max(moved, value + 1) if factor > 1 else value


def _of_row(item: Any, factor: float) -> Any:
    """Return a pair or a tile with the values that are not whole numbers multiplied by the factor."""
    if isinstance(item, dict):
        return {name: value * factor if isinstance(value, float) else value for name, value in item.items()}
    return [value * factor if isinstance(value, float) else value for value in item]
