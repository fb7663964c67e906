"""A rank on a GPU that raises no flags of its peers, for tests of what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from weft.core.errors import PeerLost, WaitTimeout


@contextmanager
def muted(rank: int) -> Iterator[None]:
    """What the calls within raise at peers is left out on this rank."""
    from weft.runtime.cuda import CudaProgram
    from weft.runtime.tape import Words

    def mute(self: CudaProgram, item: object, bindings: object, stream: int) -> None:
        if not isinstance(item, Words):
            one(self, item, bindings, stream)  # type: ignore[arg-type]
            return
        peers = [base for peer, base in enumerate(self._addresses) if peer != self.rank]
        kept = [w for w in item.words if not any(base <= w.address < base + 4 * self.flags.words for base in peers)]
        self.driver.words(kept)(stream)

    one = CudaProgram._one
    if dist.get_rank() == rank:
        CudaProgram._one = mute  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        CudaProgram._one = one  # type: ignore[method-assign]


def told_without(rank: int, call: Callable[[], object]) -> str:
    """What this rank is told of a call in which `rank` is muted: "right", or the error."""
    try:
        with muted(rank):
            call()
            torch.cuda.synchronize()
    except (PeerLost, WaitTimeout) as error:
        return f"{type(error).__name__}: {error}"
    return "right"
