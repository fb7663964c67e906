"""Shared memory between ranks: order of flags, who is dead, what is left behind, and why there is none."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import atomicshm
import pytest
from single_process_ranks import rank_groups, wait_for

from weft.comm import shared_memory
from weft.comm.shared_memory import SharedSegment, died, process_namespace, process_start, remove_stale_segments
from weft.core.errors import PeerLost


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /dev/shm of the test's own."""
    monkeypatch.setattr(shared_memory, "SHM", tmp_path)
    return tmp_path


@pytest.fixture
def zombie() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended and was not waited for."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert wait_for(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        yield process


def test_flags_are_stored_with_release_and_loaded_with_acquire(monkeypatch: pytest.MonkeyPatch) -> None:
    orders, real = list[tuple[str, Any]](), atomicshm.AtomicView

    class View:
        def __init__(self, mapping: Any) -> None:
            self._view = real(mapping)

        def load_u64(self, at: int, order: Any) -> int:
            orders.append(("load", order))
            return int(self._view.load_u64(at, order))

        def store_u64(self, at: int, value: int, order: Any) -> None:
            orders.append(("store", order))
            self._view.store_u64(at, value, order)

    monkeypatch.setattr(atomicshm, "AtomicView", View)
    segment = SharedSegment.create("test", 64)
    shared_memory.unlink(segment.name)
    words = segment.view_words(8, 2)
    words.store(1, 7)
    assert words.load(1) == 7
    assert orders == [("store", atomicshm.RELEASE), ("load", atomicshm.ACQUIRE)]


def test_a_zombie_is_dead(zombie: subprocess.Popen[bytes]) -> None:
    assert process_start(zombie.pid) is None
    assert died(zombie.pid, 1)


def test_a_process_of_the_same_number_is_another_one() -> None:
    start = process_start(os.getpid())
    assert start is not None
    assert not died(os.getpid(), start)
    assert died(os.getpid(), start - 1)


def test_a_rank_without_file_descriptors_takes_nobody_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    start, rank_group = process_start(os.getpid()), rank_groups()[0]
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)

    def full(self: Path, *_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", full)
    assert not died(os.getpid(), start)
    assert died(int(gone.stdout), 1)
    rank_group.check_peers()


def test_what_a_dead_creator_left_is_removed_also_where_its_number_is_used_again(shm: Path) -> None:
    start = process_start(os.getpid())
    names = {f"weft-{process_namespace()}-{os.getpid()}-{at}-x-data" for at in (start, 1)}
    for name in names:
        (shm / name).touch()
    assert remove_stale_segments() == [f"weft-{process_namespace()}-{os.getpid()}-1-x-data"]
    assert [path.name for path in shm.iterdir()] == [f"weft-{process_namespace()}-{os.getpid()}-{start}-x-data"]


def test_links_are_not_followed_and_what_cannot_be_removed_stays(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of the host may put anything into /dev/shm, and owns it."""
    target = shm / "mine"
    target.touch()
    link = shm / f"weft-{process_namespace()}-999999999-1-dead-x"
    link.symlink_to(target)
    lstat, me = Path.lstat, os.getuid()

    def of_another(self: Path) -> Any:
        found = lstat(self)
        return os.stat_result([*found[:4], me + 1, *found[5:]]) if self == link else found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", of_another)
        assert remove_stale_segments() == []
        assert link.is_symlink()

    def refused(self: Path, **_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        assert remove_stale_segments() == []
    assert target.exists()


@pytest.mark.parametrize(
    ("function", "code", "says", "not_says"),
    [
        ("open", errno.EROFS, "Read-only file system", "enlarge"),
        ("posix_fallocate", errno.ENOMEM, "no memory left", "enlarge"),
        ("posix_fallocate", errno.ENOSPC, "enlarge", "no memory left"),
    ],
)
def test_why_there_is_no_segment_is_said(
    shm: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int, says: str, not_says: str
) -> None:
    real = getattr(os, function)

    def failing(*arguments: Any, **options: Any) -> Any:
        if function == "open" and not str(arguments[0]).startswith(str(shm)):
            return real(*arguments, **options)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing)
        with pytest.raises(ValueError, match="shared memory: ") as caught:
            SharedSegment.create("test", 64)
    assert says in str(caught.value)
    assert not_says not in str(caught.value)
    assert list(shm.iterdir()) == []


def test_the_dead_rank_is_named_before_those_that_failed_of_it() -> None:
    rank_group = rank_groups(3)[0]
    rank_group._control[1].fail("rank 2 is lost")
    rank_group._starts[2] = 1
    with pytest.raises(PeerLost, match=r"rank 2 \(process \d+\) died"):
        rank_group.check_peers()
