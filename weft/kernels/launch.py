"""Launching a kernel again without binding its arguments again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any


class Launcher:
    """Launches of one kernel on one device. From the second launch with the same key on, straight to what was compiled.

    Triton's own way binds and specialises every argument at each launch. key: all that Triton specialises on and that may
    differ between launches (alignment of pointers, integers that it folds in, constants).
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
        """Run it on `blocks` blocks. constants: the constexpr arguments, in the kernel's order. stream: default, torch's
        current one; a first launch takes only that."""
        compiled = self._compiled.get(key)
        if compiled is None:
            # The interpreter compiles nothing, and returns nothing.
            self._compiled[key] = self._kernel[(blocks,)](*arguments, **constants, **options)
        else:
            compiled[(blocks, 1, 1)](*arguments, *constants.values(), stream=stream)
