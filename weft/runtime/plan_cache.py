"""The plan cache stores in files what `auto` chose for a problem, with the measured times, for later processes.

An entry is JSON. Only the name of a schedule is taken from it. The file is found by a digest of the key, and contains the key
in
full: the machine, the versions of weft and of the libraries it calls, the problem, and the schedules that could be chosen. An
entry that is damaged, has another key, or is writable by other users is skipped with a warning that says why; reading never
raises. Writers replace whole files, so a reader sees the old entry or the new one, even if a writer is killed.

The folder is WEFT_CACHE_DIR, or weft/ in XDG_CACHE_HOME, or ~/.cache/weft. Nothing is stored if WEFT_CACHE_DIR is empty, or if
the user has no home folder, which gives a warning. Folders and files are accessible to their user only (0700 and 0600).

This module finds the versions of the libraries and the properties of the machine, for stored results.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch

from weft.compat.device import gpu_number
from weft.compat.streams import checked, driver_api
from weft.core import __version__, codec
from weft.core.errors import warn_once
from weft.core.problem import CollectiveProblem, ColumnProblem, LookupProblem, Problem
from weft.schedules import FAMILIES, build, check_chunks, check_op, parse, spec, specs

_FORMAT = 2
_MOST_BYTES = 1 << 20
_STALE_S = 3600.0
"""A temporary file that is older than an hour was left behind by a writer that was killed."""
_CHUNKS = 1 << 20
"""`encode` uses this as a base: no spec has as many chunks."""


def digest_of_families(problem: Problem) -> str:
    """Return a digest of all schedule families. A choice that was made among other families may not be the best any more.

    Of registered families it has the schedules that are candidates for the problem, because their builders may have changed.
    """
    families = [[f.name, f.chunked, sorted(f.builders), f.summary] for f in FAMILIES.values() if not f.registered]
    added = [name for name, family in FAMILIES.items() if family.registered and problem.op in family.builders]
    parsed = ((spec, parse(spec)) for spec in (specs(problem) if added else ()))
    built = [[spec, build(problem, *named).digest] for spec, named in parsed if named[0] in added]
    return hashlib.sha256(json.dumps([_FORMAT, families, *built]).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Key:
    """A Key holds all that a measured choice depends on.

    machine: what distinguishes the speed of this machine from that of another.
    versions: the versions of weft and of the libraries that it calls.
    families: the digest of the schedule families.
    """

    machine: Mapping[str, str]
    versions: Mapping[str, str]
    problem: Problem | LookupProblem | CollectiveProblem | ColumnProblem
    families: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(codec.dump(self), sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An Entry is one stored choice. Raises ValueError if the operator has no such schedule, or not with so many chunks.

    spec: the schedule that was chosen.
    us: the measured times in us, by spec.
    """

    key: Key
    spec: str
    us: Mapping[str, float]

    def __post_init__(self) -> None:
        name, chunks = parse(self.spec)
        check_op(name, self.key.problem.op)
        check_chunks(chunks or 1, self.key.problem.world_size)


def encode(spec: str | None) -> int:
    """Return a number above 0 for a spec, which ranks can exchange, and 0 for None.

    >>> decode(encode("flag_gated:4")), decode(encode("sequential")), decode(encode(None))
    ('flag_gated:4', 'sequential', None)
    """
    if spec is None:
        return 0
    name, chunks = parse(spec)
    return 1 + list(FAMILIES).index(name) * _CHUNKS + (chunks or 1)


def decode(number: int) -> str | None:
    """Return the spec for a number of `encode`. Both ranks must have the same families."""
    if number == 0:
        return None
    family, chunks = divmod(number - 1, _CHUNKS)
    return spec(list(FAMILIES)[family], chunks)


def from_environment() -> Cache | None:
    """Return the user's cache. Return None if WEFT_CACHE_DIR is empty, or, with a warning, if the user has no home folder."""
    named = os.environ.get("WEFT_CACHE_DIR")
    if named is not None:
        return Cache(Path(named)) if named else None
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        warn_once(f"measured plans are not stored: {error} Set WEFT_CACHE_DIR to a folder that you own, or to an empty string")
        return None
    return Cache(Path(base) / "weft")


class Cache:
    """A Cache reads and writes entries, each a file in `folder`/plans."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "plans"

    def path(self, key: Key) -> Path:
        return self.folder / f"{key.digest}.json"

    def read(self, key: Key) -> Entry | None:
        """Return the entry for `key`. Return None if there is none, or, with a warning, if it is not trustworthy."""
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
        warn_once(f"a cached plan is skipped, {path}: {reason}")
        return None

    def write(self, entry: Entry) -> None:
        """Store an entry, and replace an older one. If it cannot be written, a warning says why."""
        path = self.path(entry.key)
        try:
            for folder in (*reversed(self.folder.parents), self.folder):  # mkdir's own parents have the mode of the umask
                if not folder.exists():
                    folder.mkdir(mode=0o700, exist_ok=True)
            self._remove_stale()
            _replace(path, codec.dumps(entry))
        except OSError as error:
            warn_once(f"a measured plan is not stored: {error}; set WEFT_CACHE_DIR to a folder that you own")

    def _remove_stale(self) -> None:
        for path in self.folder.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()


def _private_text(path: Path) -> str:
    """Return a file's text. Raises OSError if it cannot be read. Raises ValueError if it is no regular file, or if other users
    could have written it."""
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
    """Write a complete file that only its user can read. If writing fails, the old file is unchanged."""
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


def versions(device: str) -> dict[str, str]:
    """Return the versions of the libraries that a run uses, and its device."""
    found = {"weft": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found["gpu"] = torch.cuda.get_device_name(0)
    else:
        found["cpu"] = f"{os.cpu_count()} cores, {platform.machine()}"
    return found


def machine_of(device: torch.device, world_size: int) -> dict[str, str]:
    """Return the properties that distinguish this machine's speed from another's, for the key of stored plans."""
    if device.type != "cuda":
        return {"cpu": f"{os.cpu_count()} cores, {platform.machine()}", "ranks": str(world_size)}
    found = torch.cuda.get_device_properties(device)
    others = (peer for peer in range(torch.cuda.device_count()) if peer != device.index)
    reached = sum(torch.cuda.can_device_access_peer(device, peer) for peer in others)
    return {
        "gpu": found.name,
        "sms": str(found.multi_processor_count),
        "memory": str(found.total_memory >> 30),
        "gpus": str(torch.cuda.device_count()),
        "peers in reach": str(reached),
        "ranks": str(world_size),
    }


def links_between(numbers: Sequence[int]) -> str:
    """Return a text with the kinds of links between GPUs with these numbers, and the number of pairs of each kind.

    A kind is the driver's performance rank. Pairs that this process does not see, and pairs that cannot access each other, are
    separate kinds.
    """
    driver, seen = driver_api(), {gpu_number(torch.device("cuda", at)): at for at in range(torch.cuda.device_count())}
    kinds: Counter[str] = Counter()
    for pair in combinations(numbers, 2):
        if len(set(pair)) == 1:
            kinds["the same"] += 1
            continue
        if not all(number in seen for number in pair):
            kinds["not seen"] += 1
            continue
        one, other = (seen[number] for number in pair)
        asked = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK
        reached = torch.cuda.can_device_access_peer(one, other)
        kinds[f"rank {checked(driver.cuDeviceGetP2PAttribute(asked, one, other))}" if reached else "none"] += 1
    return ", ".join(f"{kind} x {count}" for kind, count in sorted(kinds.items()))
