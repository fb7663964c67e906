"""Kernels of the computation whose residency may be capped: what the caller names, and what it launches in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.core.logs import warn_once


class ShapedKernels:
    """named: kernels, as weft.overlap.controls.shape takes them. caps: blocks an SM to try; None: one less than fit, and half
    of them."""

    def __init__(self, named: Sequence[Any] = (), caps: Sequence[int] | None = None) -> None:
        for cap in caps or ():
            if not isinstance(cap, int) or cap < 1:
                raise ValueError(f"residents has {cap!r}; at least one block an SM has to run")
        if caps and not named:
            raise ValueError("residents is given without kernels; name the kernels that it is for")
        self._named, self._caps = tuple(named), caps
        self._shaped: dict[int, tuple[Any, ...]] = {}

    def residents(self) -> tuple[int, ...]:
        """The caps to try, most blocks first, after a first launch of the kernels. If the residency of a kernel is
        unknown and no caps were given, the result is empty and a warning is logged."""
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
        """Blocks an SM of the kernel of which fewest fit. Raises ValueError if that is unknown."""
        from weft.overlap.controls import occupancy

        return min(occupancy(kernel).blocks for kernel in self._named)

    def of(self, resident: int) -> tuple[Any, ...]:
        """What to launch: the kernels as they are for 0, else with that many blocks an SM."""
        if not resident:
            return self._named
        if resident not in self._shaped:
            from weft.overlap.controls import shape

            self._shaped[resident] = tuple(shape(kernel, blocks_per_sm=resident) for kernel in self._named)
        return self._shaped[resident]

    def close(self) -> None:
        """Undo what caps have set."""
        shaped, self._shaped = self._shaped, {}
        for kernels in shaped.values():
            for kernel in kernels:
                kernel.close()
