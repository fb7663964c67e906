"""A rank on a GPU that raises no flags of its peers, for tests of what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

import weft
from weft.core.errors import WeftError


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


def told_of(call: Callable[[], object]) -> str:
    """What this rank is told of a call: "right", or the error that the call or weft.synchronize raises. A result that the call
    itself finds to be wrong must come with such an error."""
    wrong: AssertionError | None = None
    try:
        try:
            call()
        except AssertionError as error:
            wrong = error
        weft.synchronize()
        torch.cuda.synchronize()
    except (WeftError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    if wrong is not None:
        raise wrong
    return "right"


def told_without(rank: int, call: Callable[[], object]) -> str:
    """What this rank is told of a call in which `rank` is muted."""
    with muted(rank):
        return told_of(call)
