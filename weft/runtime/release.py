"""What happens on a GPU after a failure: results become NaN, waits are released, and collectives that never end are aborted.

A released stream goes on without what it waited for, so what it computes and sends is invalid. Invalid is every call that has
not ended when the failure is seen, whether the device has come to it or not. Its results become NaN twice over. Before the
release, the memory in which peers' data arrive is set to NaN, so that whatever the released streams compute from it is NaN too,
in the order of the streams. Once the call has ended, its results themselves are set to NaN, on a stream that waits for the end
of the call: the call has returned before the failure, so it cannot raise it, and a program may read its results before the next
call or `weft.synchronize` does.

    caller's stream          call 7: waits for a peer ... released ... done 7
    invalidating stream                                                      wait done 7, write NaN into what call 7 returned

The watchdog does not see the calls that a CUDA graph of the caller's replays. In its replays only the memory in which peers'
data arrive is NaN. After a failure each replay would wait again, so the watchdog releases again and again until it is closed.

A collective of NCCL waits for its peers by itself, and no flag of weft's ends it: its communicator has to be aborted, which
belongs to the caller. It is aborted where a program has such a collective and the calls in flight have not ended a while after
all else was released, or a captured call may be replayed. The process group serves nobody any more then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from weft.comm.rank_group import RankGroup
from weft.compat.c10d import backend_of
from weft.compat.streams import Driver
from weft.core.logs import LOGGER
from weft.runtime.order import Order, PendingCall
from weft.runtime.peer_waits import Abort

INVALID_BYTE = 0xFF
"""What invalid memory is filled with: NaN in float8_e4m3, float16, bfloat16, float32 and float64. Integers have no NaN, so
integer results stay as they are. The driver's memset runs on SMs, so it may wait behind a kernel that spins; but its code is
loaded already, which CUDA would not do while a stream waits."""
POLL_S = 1e-3
"""How often waits are released after a failure, while calls still end."""
_INVALID_S, _DRAINED_S = 0.05, 5.0
"""How long the release waits until the memory in which peers' data arrive is NaN, and how long `close` waits until all results
are."""

Release = Callable[[], None]
Invalidate = Callable[[int], None]


class Releaser:
    """Releases the programs of one process group on one GPU. rescue: the stream on which programs are released. invalidating:
    the stream on which memory is set to NaN. has_collectives: whether a program, or other work that is watched, has collectives
    of NCCL."""

    def __init__(
        self,
        rank_group: RankGroup,
        device: torch.device,
        *,
        driver: Driver,
        order: Order,
        rescue: torch.cuda.Stream,
        invalidating: torch.cuda.Stream,
    ) -> None:
        self._rank_group, self._device, self._driver, self._order = rank_group, device, driver, order
        self._rescue, self._invalidating = rescue, invalidating
        self.has_collectives = False
        self._alive: list[Any] = []
        """Keeps the memory of invalid results alive while it is written."""
        self._abort: Abort | None = None
        self._programs: dict[int, tuple[Release, Invalidate | None]] = {}
        self._lock = threading.Lock()

    def add(self, key: int, release: Release, invalidate: Invalidate | None = None) -> None:
        """After a failure, call `invalidate` with a stream once, and then `release` again and again, also when no call is in
        flight: a graph may be replaying."""
        with self._lock:
            self._programs[key] = release, invalidate

    def remove(self, key: int) -> None:
        with self._lock:
            self._programs.pop(key, None)

    def invalidate(self, calls: Sequence[PendingCall]) -> None:
        """Before anything is released: write NaN where peers' data arrive, and, behind the end of each call, into its results.

        A memset runs on SMs, and there is no room for it while a kernel that spins holds them. So it is on no stream that
        releases anything, and is waited for only so long.
        """
        stream = self._invalidating.cuda_stream
        with self._lock:
            for _, invalidate in self._programs.values():
                if invalidate is not None:
                    invalidate(stream)
        self._await_invalid(_INVALID_S)
        for call in calls:
            self._alive += self._order.invalidate(call, stream, self._make_nan)

    def release_all(self) -> None:
        """Let everything that waits go on, unless what was enqueued for that last time is still in flight."""
        with self._lock:
            if self._rescue.query():
                for release, _ in self._programs.values():
                    release()

    def abort_collectives(self) -> None:
        """End the collectives of NCCL whose peers do not come."""
        if self.has_collectives:
            self.has_collectives = False
            LOGGER.error("aborts the process group, in whose collective a call waits: destroy it")
            self._abort = Abort(backend_of(self._rank_group.group, self._device).abort, str(self._rank_group.rank))

    def close(self) -> None:
        """Wait, bounded, until a communicator has been aborted and results are NaN."""
        if self._abort:
            self._abort.ended()
        with suppress(RuntimeError):  # a device that is lost writes nothing
            self._await_invalid(_DRAINED_S)
        self._alive.clear()
        self._programs = {}

    def _await_invalid(self, within_s: float) -> None:
        """Wait until what has been made invalid so far is NaN, for so long at most."""
        deadline = time.monotonic() + within_s
        while not self._invalidating.query() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _make_nan(self, address: int, nbytes: int) -> None:
        self._driver.fill(address, INVALID_BYTE, nbytes, self._invalidating.cuda_stream)
