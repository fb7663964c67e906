"""Kernels of the computation whose residency a way may cap: what the caller names, and what it launches in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CAPS = 2
"""Residencies of named kernels that are tried, where the caller does not say which."""


class Kernels:
    """named: kernels, as weft.controls.shape takes them. caps: blocks an SM to try; None: below what fits, as is seen once they
    are compiled."""

    def __init__(self, named: Sequence[Any] = (), caps: Sequence[int] | None = None) -> None:
        for cap in caps or ():
            if cap < 1:
                raise ValueError(f"residents has {cap}; at least one block an SM has to run")
        if caps and not named:
            raise ValueError("residents is given without kernels; name the kernels that it is for")
        self._named, self._caps = tuple(named), caps
        self._shaped: dict[int, tuple[Any, ...]] = {}

    def residents(self) -> tuple[int, ...]:
        """The caps to try, after a first launch of the kernels."""
        if self._caps is not None:
            return tuple(self._caps)
        from weft.controls import occupancy

        fits = min((occupancy(kernel).blocks for kernel in self._named), default=0)
        return tuple(range(fits - 1, 0, -1))[:CAPS]

    def of(self, resident: int) -> tuple[Any, ...]:
        """What to launch: the kernels as they are for 0, else with that many blocks an SM."""
        if not resident:
            return self._named
        if resident not in self._shaped:
            from weft.controls import shape

            self._shaped[resident] = tuple(shape(kernel, blocks_per_sm=resident) for kernel in self._named)
        return self._shaped[resident]

    def close(self) -> None:
        shaped, self._shaped = self._shaped, {}
        for kernels in shaped.values():
            for kernel in kernels:
                kernel.close()
