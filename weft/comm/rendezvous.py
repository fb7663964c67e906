"""torch's rendezvous of symmetric memory, for groups that share only some of their ranks.

There, ranks find what the others tell them by a number that torch counts for the process and not for the group (2.11 to 2.13;
https://github.com/pytorch/pytorch/issues/196082): once a group has met that leaves a rank out, one with that rank waits for
good, each under another number. So here ranks meet in a store of their own, which counts anew:

    torch on ranks 0 and 1    set CUDASymmetricMemory/7/0    get CUDASymmetricMemory/7/2
    torch on rank 2           set CUDASymmetricMemory/5/2
    in the store, of all      meeting 3/CUDASymmetricMemory/0/0, meeting 3/CUDASymmetricMemory/0/2

Bad interleaving: two threads meet in two groups at once. torch's numbers of either have gaps then; what counts is the order in
which a group's store sees them, the same on its ranks. But torch has one socket for handles in a process, by its number: the
second thread could not have it, or handles would go astray. So one thread is in a rendezvous at a time, which the ranks of a
meeting agree on.
"""

from __future__ import annotations

import itertools
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.comm.handshake import handshake
from weft.compat.c10d import store_of
from weft.core.errors import WaitTimeout

BOUND_S = 60.0
"""Of a wait in a rendezvous, to which all ranks have come: for what dies on the way."""
_ALONE = threading.Lock()
_PATIENCE_S = 0.2
"""How long a thread waits at most for another one before it lets the ranks of its meeting try again."""
_NUMBERED = re.compile(r"(.*?/)(\d+)(/.*)?")


class _Counting(Store):
    """A store in which the numbers of keys, `words/number/words`, are counted from 0 as they come. lost: what a wait ended by,
    if not by what it was for."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}
        self.lost: RuntimeError | None = None

    def _key(self, key: str) -> str:
        found = _NUMBERED.fullmatch(key)
        if not found:
            return key
        before, number, behind = found.groups(default="")
        return f"{before}{self._numbers.setdefault(number, len(self._numbers))}{behind}"

    def set(self, key: str, value: Any) -> None:
        self._waits(self._store.set, self._key(key), value)

    def get(self, key: str) -> bytes:
        value: bytes = self._waits(self._store.get, self._key(key))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._waits(self._store.multi_get, [self._key(key) for key in keys])
        return values

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(self._key(key), value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._key(key) for key in keys]))

    def wait(self, keys: Sequence[str], *within: timedelta) -> None:
        self._waits(self._store.wait, [self._key(key) for key in keys], *within)

    def _waits(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except RuntimeError as error:
            self.lost = error
            raise


class Meetings:
    """Of ranks that take symmetric memory together. store: that they alone have, on a connection of its own, and nobody had
    before: keys stay. rank, size: of them."""

    def __init__(self, store: Any, *, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._count = 0

    def rendezvous(self, area: torch.Tensor) -> Any:
        """torch's handle of their symmetric memory. Collective. In one process, threads come one after the other.

        Raises WaitTimeout if a rank does not hear of another in BOUND_S, or the store is gone.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        self._count += 1
        own: Any = PrefixStore(f"meeting {self._count}", self._store)
        own.set_timeout(timedelta(seconds=BOUND_S))
        counting = _Counting(own)  # held here: of what is Python's of it, and of groups by name, torch keeps nothing
        stand_in = dist.ProcessGroup(counting, self.rank, self.size)
        name: Any = f"weft/{id(self)}/{self._count}"
        try:
            with self._alone(counting):
                _register_process_group(name, stand_in)
                try:
                    return symmetric_memory.rendezvous(area, name)
                finally:
                    _unregister_process_group(name)
        except RuntimeError:
            if counting.lost is None:
                raise
            raise WaitTimeout(
                f"rank {self.rank} has waited for {BOUND_S:g} s at most in torch's rendezvous of symmetric memory, to which "
                f"all {self.size} ranks had come: {counting.lost}"
            ) from counting.lost

    @contextmanager
    def _alone(self, store: _Counting) -> Iterator[None]:
        """No other thread of any of the processes is in a rendezvous: torch has one socket for it in a process.

        Whoever cannot be the one gives all others of the meeting another try: two meetings that are waited for by different
        ranks would else wait for each other.
        """
        deadline = time.monotonic() + BOUND_S
        for turn in itertools.count():
            mine = _ALONE.acquire(timeout=random.uniform(0.01, _PATIENCE_S))
            try:
                store.set(f"alone in turn {turn}, rank {self.rank}", str(int(mine)))
                if all(map(int, store.multi_get([f"alone in turn {turn}, rank {rank}" for rank in range(self.size)]))):
                    yield
                    return
            finally:
                if mine:
                    _ALONE.release()
            if time.monotonic() > deadline:
                store.lost = RuntimeError("threads of one process keep each other from it")
                raise store.lost
            time.sleep(random.uniform(0.0, _PATIENCE_S))


def meetings(group: dist.ProcessGroup) -> Meetings:
    """Of a whole group. Collective."""
    tokens = handshake(group, secrets.token_hex(8), timeout_s=BOUND_S, purpose="symmetric memory")
    return Meetings(store_of(group, f"weft/{tokens[0]}"), rank=group.rank(), size=group.size())
