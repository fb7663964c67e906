"""Profiles: values whose every number has a path and a source, as of simulated systems; copies with some numbers changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from weft.core import codec
from weft.core.machine import LEAST, MOST, numbers
from weft.core.settings import numbers_of, replaced
from weft.core.what_if import RESCALED

Progress = Callable[[str, int, int], None]
"""Called with the current item, the items done and the total."""
_ON_OFF = {"true": True, "1": True, "false": False, "0": False}


class StudyProfile(Protocol):
    """A frozen dataclass of weft.core.codec's kind. sources: where each number is from, by its path."""

    @property
    def name(self) -> str: ...

    @property
    def sources(self) -> Mapping[str, str]: ...


P = TypeVar("P", bound=StudyProfile)


def check(profile: StudyProfile, zero: frozenset[str] = frozenset()) -> None:
    """Raises ValueError unless every number is above zero (those of `zero`: or zero), as small and as large as a machine's may
    be, and has a source, and every source a number."""
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
    """Paths of the numbers that no source gives."""
    return tuple(path for path, source in profile.sources.items() if source.startswith("assumed"))


def uncertain(profile: StudyProfile) -> tuple[str, ...]:
    """Paths of the numbers that no source gives: those assumed, and those derived from what sources give."""
    sources = ((path, source.removeprefix(RESCALED)) for path, source in profile.sources.items())
    return tuple(path for path, source in sources if source.startswith(("assumed", "derived")) or ", derived:" in source)


def changed(profile: P, path: str, value: Any) -> P:
    """`profile` with one number, one row of numbers, or one field of choices replaced.

    value: as JSON text, or as what JSON would give; one value stands for a row of one, and choices are words with commas
    between. Switches are true or false, and 1 and 0 stand for these. Raises ValueError that names the path and says which there
    are, or what the value must be.
    """
    choices = [part.name for part in dataclasses.fields(profile) if part.metadata.get("about") == "choices"]  # type: ignore[arg-type]
    on_off = tuple(switches(profile))
    known = dict.fromkeys([*(name for name, _ in numbers(profile)), *choices, *on_off])
    if path not in known:
        raise ValueError(f"{path!r} is no number of system {profile.name}; it has {', '.join(known)}")
    if path in on_off:
        value = _ON_OFF.get(str(value).lower(), value)
    elif isinstance(value, str):
        value = [word.strip() for word in value.split(",")] if path in choices else numbers_of(path, value)
    one = not isinstance(value, (list, tuple))
    return replaced(profile, path, lambda before: [value] if one and isinstance(before, list) else value)


def changed_by(profile: P, settings: Mapping[str, str]) -> P:
    """`profile` with each setting applied in turn; see `changed`."""
    for path, value in settings.items():
        profile = changed(profile, path, value)
    return profile


def switches(value: Any, path: str = "") -> Iterator[str]:
    """Paths of the booleans of a profile."""
    if isinstance(value, bool):
        yield path
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from switches(getattr(value, part.name), f"{path}.{part.name}" if path else part.name)


def scaled(profile: P, path: str, factor: float) -> P:
    """`profile` with the number at `path` times `factor`; see `moved`."""
    return moved(profile, {path: factor})


def moved(profile: P, factors: Mapping[str, float], *, reach: float = 0.0) -> P:
    """`profile` with the number at each path times its factor.

    A whole number is rounded, and moves by at least 1 in the direction of its factor. reach: how far the factors may be from 1,
    if they were drawn; a whole number then moves by the same share of its own reach, which is at least 1, and may stay. All
    values of a row are moved; of a row of pairs or of tiles only those that are no whole numbers. Raises ValueError for a
    profile that cannot be.
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
    """A pair of a table, or a tile: what is no whole number times the factor."""
    if isinstance(item, dict):
        return {name: value * factor if isinstance(value, float) else value for name, value in item.items()}
    return [value * factor if isinstance(value, float) else value for value in item]
