"""The CUDA driver's functions (cuda-bindings), and what they return."""

from __future__ import annotations

from typing import Any

from weft.core.errors import WeftError


def driver_api() -> Any:
    """cuda-bindings' driver API. Raises ValueError if it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise ValueError("device is cuda: the driver is called through cuda-bindings; pip install cuda-bindings") from None
    return driver


def checked(result: tuple[Any, ...]) -> Any:
    """What a driver call returned. Raises WeftError if it failed."""
    if result[0]:
        raise WeftError(f"CUDA driver: {result[0]}")
    return result[1] if len(result) > 1 else None
