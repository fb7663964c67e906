"""A Relay exchanges control segments between nodes through the process group's store.

Ranks of one node map each other's control segments (weft.comm.rank_group). For each rank of another node, this process has a
private copy of its segment: `publish` puts this rank's segment into the store, and `refresh` updates the copies. So code that
reads a control segment need not know on which node its rank runs.

    rank 0, node 0                    store                 rank 2, node 1
    own segment --publish-->          "0": snapshot         --refresh--> copy of rank 0's
    copy of rank 2's <--refresh--     "2": snapshot         <--publish-- own segment

A thread publishes four times a second, whatever its rank does. So a rank that publishes nothing new for many seconds
(`silent_s`) is lost. If a rank of this node dies, the thread publishes that in its place.

The relay has its own connection to the store, and only reads keys that exist, so no request waits for long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from weft.comm.control import ENDED_BADLY, ControlSegment

_BEAT_S = 0.25
_LEAST_S = 1e-3
"""The shortest time between two reads of the store."""
_BEAT_BYTES = 8
_LAST_BEAT = 2**63
"""The beat count in the snapshot that is published for a dead rank."""


class Relay:
    """A Relay publishes one rank's control segment and reads those of other nodes. Collective.

    store: a store that only this relay uses.
    own: this rank's segment.
    copies: for each rank of another node, the copy of its segment.
    death_notices: for each other rank of this node, a function that returns the segment to publish once its process has died.
    timeout_s: the bound of the start, and of each request to the store.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        own: ControlSegment,
        copies: Mapping[int, ControlSegment],
        death_notices: Mapping[int, Callable[[], ControlSegment | None]],
        timeout_s: float,
    ) -> None:
        self._rank, self._own = rank, own
        self._copies, self._death_notices = copies, dict(death_notices)
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
        """Publish the current content of this rank's segment to other nodes."""
        with self._publishing:
            self._beat += 1
            self._put(self._rank, self._beat, self._own)

    def _put(self, rank: int, beat: int, control: ControlSegment) -> None:
        self._store.set(str(rank), beat.to_bytes(_BEAT_BYTES, "little") + control.snapshot())

    def refresh(self) -> None:
        """Update the copies, unless they were updated just now, or another thread is updating them."""
        if time.monotonic() - self._looked < _LEAST_S or not self._refreshing.acquire(blocking=False):
            return
        try:
            for far, snapshot in zip(self._copies, self._get([str(far) for far in self._copies]), strict=True):
                if snapshot != self._seen[far][0]:
                    self._seen[far] = snapshot, time.monotonic()
                    self._copies[far].restore(snapshot[_BEAT_BYTES:])
                    if self._copies[far].state in ENDED_BADLY:  # a rank of another node cannot raise this rank's alarm
                        self._own.alarm = 1
            self._looked = time.monotonic()
        finally:
            self._refreshing.release()

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return list(self._store.multi_get(list(keys)))
        return [self._store.get(key) for key in keys]

    def silent_s(self, far: int) -> float:
        """Return for how many seconds a rank has published nothing new, as of the last read."""
        return self._looked - self._seen[far][1]

    def _keep_publishing(self) -> None:
        while not self._stop.wait(_BEAT_S):
            try:
                self.publish()
                self._publish_deaths()
            except RuntimeError:
                # A group whose store is lost cannot continue. A rank that waits for a peer gets the error from `refresh`.
                return

    def _publish_deaths(self) -> None:
        for rank, make_notice in list(self._death_notices.items()):
            notice = make_notice()
            if notice is not None:
                self._put(rank, _LAST_BEAT, notice)
                del self._death_notices[rank]

    def close(self) -> None:
        """End the thread, and publish for the last time."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        try:
            self.publish()
        except RuntimeError:
            return  # the store is gone already, with its process
