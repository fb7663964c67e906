"""Kernels of the computation whose residency may be capped. The caller names them, and launches what replaces them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.core.logs import warn_once


class ShapedKernels:
    """The named kernels, and their capped versions.

    named: kernels that weft.overlap.controls.shape accepts.
    caps: the numbers of blocks per SM to try. None tries one block less than fits, and half as many as fit.
    """

    def __init__(self, named: Sequence[Any] = (), caps: Sequence[int] | None = None) -> None:
        for cap in caps or ():
            if not isinstance(cap, int) or cap < 1:
                raise ValueError(f"residents has {cap!r}; at least one block an SM has to run")
        if caps and not named:
            raise ValueError("residents is given without kernels; name the kernels that it is for")
        self._named, self._caps = tuple(named), caps
        self._shaped: dict[int, tuple[Any, ...]] = {}

    def residents(self) -> tuple[int, ...]:
        """Return the caps to try, most blocks first, after a first launch of the kernels.

        The result is empty, and a warning is logged, if the residency of a kernel is unknown and no caps were given.
        """
        if not self._named:
            return ()
        try:
            fits = self._fits()
        except ValueError as error:
            if self._caps is None:
                warn_once(f"kernels are not capped: {error}; or pass residents")
            return tuple(self._caps or ())
        caps = self._caps if self._caps is not None else (fits - 1, fits // 2)
        return tuple(sorted({cap for cap in caps if 0 < cap < fits}, reverse=True))

    def _fits(self) -> int:
        """Return the smallest number of blocks per SM over all kernels. Raises ValueError if a kernel's number is unknown."""
        from weft.overlap.controls import occupancy

        return min(occupancy(kernel).blocks for kernel in self._named)

    def of(self, resident: int) -> tuple[Any, ...]:
        """Return the kernels to launch: the original ones for 0, else kernels capped at `resident` blocks per SM."""
        if not resident:
            return self._named
        if resident not in self._shaped:
            from weft.overlap.controls import shape

            self._shaped[resident] = tuple(shape(kernel, blocks_per_sm=resident) for kernel in self._named)
        return self._shaped[resident]

    def close(self) -> None:
        """Undo the settings of all caps."""
        shaped, self._shaped = self._shaped, {}
        for kernels in shaped.values():
            for kernel in kernels:
                kernel.close()
