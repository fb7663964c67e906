"""A Launcher launches a kernel again without Triton's argument binding."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from weft.compat.triton_kernels import finished, relaunch


class Launcher:
    """A Launcher launches one kernel on one device.

    From the second launch with the same key on, it calls the compiled kernel directly. Triton's own launch binds and
    specialises every argument each time.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        blocks: int,
        arguments: Sequence[object],
        constants: Mapping[str, object],
        *,
        key: Hashable,
        stream: int | None = None,
        **options: int,
    ) -> None:
        """Launch `blocks` blocks.

        constants: the constexpr arguments, in the kernel's order.
        key: everything that Triton specialises on and that may differ between launches: the alignment of pointers, the integers
            that it folds in, the constants.
        stream: by default torch's current stream. A first launch accepts no other.
        """
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = finished(self._kernel[(blocks,)](*arguments, **constants, **options))
        else:
            relaunch(compiled, blocks, (*arguments, *constants.values()), stream)
