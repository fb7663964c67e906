"""Profiles: values whose every number has a path and a source, as of simulated systems; copies with one number changed, and
what a result makes of that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from weft.core import codec
from weft.core.machine import LEAST, MOST, numbers
from weft.core.settings import numbers_of, replaced

STEP = 0.25
"""By how much `swept` takes a number lower and higher."""
Progress = Callable[[str, int, int], None]
"""Told what is done now, how much is done, and of how much."""
_ON_OFF = {"true": True, "1": True, "false": False, "0": False}
T = TypeVar("T")


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


def switches(value: Any, path: str = "") -> Iterator[str]:
    """Paths of the booleans of a profile."""
    if isinstance(value, bool):
        yield path
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from switches(getattr(value, part.name), f"{path}.{part.name}" if path else part.name)


def scaled(profile: P, path: str, factor: float) -> P:
    """`profile` with the number at `path` times `factor`; whole numbers are rounded. A row's values all, but of rows that have
    names (a GEMM's tiles) those alone that are no whole numbers."""
    at: Any = profile
    for key in path.split("."):
        at = at[key] if isinstance(at, Mapping) else getattr(at, key)
    return changed(profile, path, codec.dump(_times(at, factor)))


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, tuple):
        return tuple(_times(item, factor) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rates = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if isinstance(getattr(value, f.name), float)}
        return dataclasses.replace(value, **{name: rate * factor for name, rate in rates.items()})
    return round(value * factor) if isinstance(value, int) else value * factor


def swept(paths: Iterable[str], headline: Callable[[str | None, float], T], progress: Progress) -> Iterator[T]:
    """headline(path, factor) of no path and 1, then of each path a STEP lower and higher."""
    cases = [(path, factor) for path in paths for factor in (1 - STEP, 1 + STEP)]
    yield headline(None, 1.0)
    for done, (path, factor) in enumerate(cases):
        progress(f"{path} times {factor:g}", done, len(cases))
        yield headline(path, factor)
