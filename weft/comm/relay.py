"""Relay: what ranks of other nodes see of this rank's control segment, carried by the process group's store.

Ranks of one node map each other's control segments (weft.comm.rank_group). Of a rank on another node there is a copy, in memory
of this process alone: `publish` puts what this rank's segment says into the store, `refresh` brings the copies up to date. So
whoever looks at a control segment need not know where its rank is.

    rank 0, node 0                    store                 rank 2, node 1
    own segment --publish-->          "0": snapshot         --refresh--> copy of rank 0's
    copy of rank 2's <--refresh--     "2": snapshot         <--publish-- own segment

A thread publishes four times a second, whatever its rank does: a rank of which nothing new is read for so long as `silent_s` is
lost. And it says so of a rank of its own node whose process has died, in that one's name.

The store is only asked for keys that are there, so that nothing waits for long, on a connection of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from weft.comm.control import ControlSegment

_BEAT_S = 0.25
_LEAST_S = 1e-3
"""Between two looks at the store."""
_BEAT_BYTES = 8
_LAST_BEAT = 2**63
"""What stands in the last snapshot of a rank that died."""


class Relay:
    """The copies of one rank. Collective.

    store: the group's own part of it, and connection. own: this rank's segment. copies: by rank of another node, where its
    segment is copied to. neighbours: by rank of this node, what gives a segment that says so once its process has died.
    timeout_s: bound of the start, and of any question to the store.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        own: ControlSegment,
        copies: Mapping[int, ControlSegment],
        neighbours: Mapping[int, Callable[[], ControlSegment | None]],
        timeout_s: float,
    ) -> None:
        self._rank, self._own = rank, own
        self._copies, self._neighbours = copies, dict(neighbours)
        self._store = store
        self._store.set_timeout(timedelta(seconds=timeout_s))
        self._beat = 0
        self._seen = {far: (b"", time.monotonic()) for far in copies}
        self._looked = 0.0
        self._publishing, self._refreshing = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self.publish()
        self._store.wait([str(far) for far in copies], timedelta(seconds=timeout_s))
        self.refresh()
        self._thread = threading.Thread(target=self._keep_publishing, name=f"weft-relay-{rank}", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Let ranks of other nodes see what this rank's segment says now."""
        with self._publishing:
            self._beat += 1
            self._put(self._rank, self._beat, self._own)

    def _put(self, rank: int, beat: int, control: ControlSegment) -> None:
        self._store.set(str(rank), beat.to_bytes(_BEAT_BYTES, "little") + control.snapshot())

    def refresh(self) -> None:
        """Bring the copies up to date, unless that was done just now, or is being done."""
        if time.monotonic() - self._looked < _LEAST_S or not self._refreshing.acquire(blocking=False):
            return
        try:
            for far, snapshot in zip(self._copies, self._get([str(far) for far in self._copies]), strict=True):
                if snapshot != self._seen[far][0]:
                    self._seen[far] = snapshot, time.monotonic()
                    self._copies[far].restore(snapshot[_BEAT_BYTES:])
            self._looked = time.monotonic()
        finally:
            self._refreshing.release()

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return list(self._store.multi_get(list(keys)))
        return [self._store.get(key) for key in keys]

    def silent_s(self, far: int) -> float:
        """For how long nothing new has been read of a rank."""
        return self._looked - self._seen[far][1]

    def _keep_publishing(self) -> None:
        while not self._stop.wait(_BEAT_S):
            try:
                self.publish()
                self._publish_deaths()
            except RuntimeError:
                # Without its store the group is at its end; whoever waits for a peer finds out by `refresh`.
                return

    def _publish_deaths(self) -> None:
        for rank, obituary in list(self._neighbours.items()):
            last = obituary()
            if last is not None:
                self._put(rank, _LAST_BEAT, last)
                del self._neighbours[rank]

    def close(self) -> None:
        """Publish once more, and end."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        try:
            self.publish()
        except RuntimeError:
            return  # the store is gone already, with its process
