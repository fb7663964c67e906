"""Programs whose kernels wait on SMs take turns on a GPU, in the order in which they are called.

Such a kernel may fill the SMs with blocks that wait for a peer. Two of them at once, on two streams, could hold each other up
across ranks for good:

    rank 0    A fills most SMs and waits for rank 1's A | B has the rest: what rank 0 is to send for A or B finds no SM
    rank 1    B fills most SMs and waits for rank 0's B | A has the rest: the same

So the second begins where the first has ended, whatever streams and groups they are called on. Ranks must therefore call such
programs in an order that would be right on one stream. On one stream this costs nothing. What a caller's own CUDA graphs
replay is ordered within each graph alone.
"""

from __future__ import annotations

from typing import Any

from weft.compat.streams import Driver


class Turn:
    """Whose turn it is on one GPU."""

    def __init__(self) -> None:
        self._stream: int | None = None
        self._driver: Driver | None = None
        self._event: Any = None

    def take(self, stream: int) -> None:
        """What is enqueued on `stream` from here on comes after the program whose turn it was."""
        if self._stream not in (None, stream):
            if self._driver is None:
                self._driver = Driver()
                self._event = self._driver.event()
            assert self._stream is not None
            self._driver.after(stream, self._stream, self._event)
        self._stream = stream
