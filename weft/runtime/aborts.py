"""Aborting a communicator of NCCL in which this rank waits for others in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weft.core.logs import LOGGER


class Abort:
    """The abort of one communicator, on a thread of its own. Its kernels end at once, but NCCL does not return while a CUDA
    graph holds collectives of that communicator."""

    _WAITS_S = 5.0

    def __init__(self, abort: Callable[[], object], name: str) -> None:
        self._abort, self._ended = abort, False
        self._thread = threading.Thread(target=self._run, name=f"weft-abort-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._abort()
            self._ended = True
        except Exception as error:  # of torch's and NCCL's
            LOGGER.error("the process group cannot be aborted (%s): end this process", str(error).splitlines()[0])

    def ended(self) -> bool:
        """Whether NCCL has returned, after waiting a while for it."""
        self._thread.join(self._WAITS_S)
        return self._ended
