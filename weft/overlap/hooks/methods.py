"""Checks the method that a hook is given."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.errors import require
from weft.runtime.choose import automatic
from weft.schedules.concurrent import parse


def check_method(method: str, *, plain: str, without: Sequence[str], like: Sequence[str]) -> str:
    """Return `method`, or `plain` for auto if WEFT_SCHEDULE is sequential.

    plain: the method that PyTorch uses by itself.
    without: the options that the framework decides. A method with one of them is a ValueError.
    like: examples for the error.
    """
    require("method", method, str, "use auto, or a method such as nccl+unsharded under fully_shard, or nccl+priority")
    if method == "auto":
        return plain if automatic() == "sequential" else method
    for name in without:
        if getattr(parse(method), name):
            raise ValueError(f"method is {method!r}; {name} is not supported here: use auto, or one like {', '.join(like)}")
    return method
