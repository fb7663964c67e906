"""One kernel of one warp that does memory operations on flags: what a stream does itself elsewhere, at less latency.

A stream that waits for a word looks at it again only after tens of microseconds, and each write of a word takes some two. This
kernel looks all the time. It needs room for one warp on one SM, so it is for lanes that hold no SM while they wait.

Order: operations are done one after the other; a wait acquires and a signal releases, at system scope, what this stream and
the operations before it have done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from weft.kernels.flags import table
from weft.kernels.launch import Launcher

WAIT, WRITE, SIGNAL = range(3)
"""Until the word holds at least the value; set it; set it after all before is visible to every GPU and the host."""
_FIELDS = 3


def words_table(operations: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    """(WAIT, WRITE or SIGNAL, address, value) on the device."""
    return table(operations, torch.int64, device)


def launcher() -> Launcher:
    """For `do_words`, call after call."""
    return Launcher(_words_kernel)


def do_words(
    operations: torch.Tensor, count: int, *, tries: int, launched_by: Launcher | None = None, stream: int | None = None
) -> None:
    """Do `count` operations of a table. tries: how often a wait looks before it gives up, and the next operation is done.

    launched_by, stream: as for weft.kernels.gemm.gemm.
    """
    constants = {"FIELDS": _FIELDS, "WAIT": WAIT, "WRITE": WRITE}
    (launched_by or launcher())(1, (operations, count, tries), constants, key=(), stream=stream, num_warps=1)


@triton.jit(do_not_specialize=["count", "tries"])
def _words_kernel(operations_ptr, count, tries, FIELDS: tl.constexpr, WAIT: tl.constexpr, WRITE: tl.constexpr):
    for operation in range(count):
        fields = operations_ptr + FIELDS * operation
        kind = tl.load(fields)
        word_ptr = tl.load(fields + 1).to(tl.pointer_type(tl.int32))
        value = tl.load(fields + 2).to(tl.int32)
        if kind == WAIT:
            seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")
            looks = 0
            while (seen < value) & (looks < tries):
                seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")
                looks += 1
        elif kind == WRITE:
            tl.store(word_ptr, value)
        else:
            tl.atomic_xchg(word_ptr, value, sem="release", scope="sys")
