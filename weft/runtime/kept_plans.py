"""Plans that were measured once, kept as files for the next process: what `auto` chose for a problem, and its trial's times.

Contract: an entry is data (JSON), read strictly and trusted for nothing but a schedule's name. It is found by a digest of
all that it depends on, and holds that in full: the machine, the versions of all that takes part, the problem, and which
schedules there were to choose from. An entry that is broken, of another key, or writable by others is skipped with a warning
that says why; it never raises. Writers replace whole files, so that a reader sees an old entry or a new one, whoever
writes at the same time, and whoever is killed while he does.

Folder: WEFT_CACHE_DIR, or weft/ in XDG_CACHE_HOME, or ~/.cache/weft; an empty WEFT_CACHE_DIR keeps nothing, nor does a
user without a home, who is told. Folders are made for their user alone (0700), and so are files (0600).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.core import codec
from weft.core.logs import warn_once
from weft.core.problem import CollectiveProblem, ColumnProblem, LookupProblem, Problem
from weft.schedules import FAMILIES, check_chunks, check_op, parse, spec

_FORMAT = 2
_MOST_BYTES = 1 << 20
_STALE_S = 3600.0
"""After so long an unfinished file is nobody's any more."""
_CHUNKS = 1 << 20
"""More than a spec can have: see `encode`."""


def space() -> str:
    """A digest of the schedules that there are to choose from: what was measured among others may no longer be the best."""
    families = [[f.name, f.chunked, sorted(f.builders), f.summary] for f in FAMILIES.values()]
    return hashlib.sha256(json.dumps([_FORMAT, families]).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Key:
    """machine: what tells this machine's speed from another's. versions: of weft and of what it calls."""

    machine: Mapping[str, str]
    versions: Mapping[str, str]
    problem: Problem | LookupProblem | CollectiveProblem | ColumnProblem
    space: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(codec.dump(self), sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """spec: what was chosen. us: what was measured, by spec. Raises ValueError for a schedule that the operator lacks, or that
    is not built in so many chunks."""

    key: Key
    spec: str
    us: Mapping[str, float]

    def __post_init__(self) -> None:
        name, chunks = parse(self.spec)
        check_op(name, self.key.problem.op)
        check_chunks(chunks or 1, self.key.problem.world_size)


def encode(spec: str | None) -> int:
    """A spec as a number above 0, so that ranks can tell each other; 0 for none.

    >>> decode(encode("flag_gated:4")), decode(encode("sequential")), decode(encode(None))
    ('flag_gated:4', 'sequential', None)
    """
    if spec is None:
        return 0
    name, chunks = parse(spec)
    return 1 + list(FAMILIES).index(name) * _CHUNKS + (chunks or 1)


def decode(number: int) -> str | None:
    """The inverse of `encode`, of a rank with the same families."""
    if number == 0:
        return None
    family, chunks = divmod(number - 1, _CHUNKS)
    return spec(list(FAMILIES)[family], chunks)


def from_environment() -> Cache | None:
    """The user's cache; None where WEFT_CACHE_DIR is empty, and, with a warning, where the user has no home."""
    named = os.environ.get("WEFT_CACHE_DIR")
    if named is not None:
        return Cache(Path(named)) if named else None
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        warn_once(f"measured plans are not kept: {error} Set WEFT_CACHE_DIR to a folder of yours, or to nothing")
        return None
    return Cache(Path(base) / "weft")


class Cache:
    """Entries in `folder`/plans, a file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "plans"

    def path(self, key: Key) -> Path:
        return self.folder / f"{key.digest}.json"

    def read(self, key: Key) -> Entry | None:
        """The entry for `key`; None where there is none, or, with a warning, none to be trusted."""
        path = self.path(key)
        try:
            entry = codec.loads(Entry, _private_text(path), str(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            reason = str(error)
        else:
            if entry.key == key:
                return entry
            reason = f"it is for {entry.key.problem} on {dict(entry.key.machine)}"
        warn_once(f"a kept plan is skipped, {path}: {reason}")
        return None

    def write(self, entry: Entry) -> None:
        """Keep an entry, in the place of an older one. What cannot be written is not kept, with a warning that says why."""
        path = self.path(entry.key)
        try:
            for folder in (*reversed(self.folder.parents), self.folder):  # mkdir's own parents have the mode of the umask
                if not folder.exists():
                    folder.mkdir(mode=0o700, exist_ok=True)
            self._remove_stale()
            _replace(path, codec.dumps(entry))
        except OSError as error:
            warn_once(f"a measured plan is not kept: {error}; set WEFT_CACHE_DIR to a folder of yours")

    def _remove_stale(self) -> None:
        for path in self.folder.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()


def _private_text(path: Path) -> str:
    """A file's text. Raises OSError where it cannot be read, ValueError where it is no regular file, or where others could have
    written it."""
    # O_NONBLOCK, because opening a FIFO otherwise waits until somebody writes to it. os.fdopen refuses a directory without
    # closing its descriptor, so the kind of file is looked at before.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file; remove it")
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise ValueError("other users could have written it; remove it, or chmod 600 it")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    """Write a file whole, readable by its user alone, or not at all."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
