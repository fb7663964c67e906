"""The names of ways that hooks take."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.errors import require
from weft.runtime.choose import automatic
from weft.schedules.concurrent import parse


def named(way: str, *, plain: str, without: Sequence[str], like: Sequence[str]) -> str:
    """`way` as it is, or `plain`, what PyTorch does by itself, for auto where WEFT_SCHEDULE is sequential. without: what the
    framework decides itself. like: examples for the error. Raises ValueError for a way that says what the framework decides."""
    require("way", way, str, "use auto, or a way such as vendor+keep under fully_shard, or vendor+priority")
    if way == "auto":
        return plain if automatic() == "sequential" else way
    for name in without:
        if getattr(parse(way), name):
            raise ValueError(f"way is {way!r}; {name} is not to be had here: use auto, or one like {', '.join(like)}")
    return way
