"""Collectives by copy engines: what `weft.collectives` does with a collective's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft import collectives
from weft.beside.collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from weft.ops.checks import DTYPES

SCHEDULE = "copy_engine"


def moves(collective: Collective) -> bool:
    """Whether copy engines can run it: sums only of the dtypes that weft adds."""
    return collective.by_copy_engine and (not collective.reduces or collective.tensors[0].dtype in DTYPES)


def moved(collective: Collective, sms: int) -> None:
    """Run it, on CUDA on torch's current stream. sms: what sums may take, 0 for their own choice. Raises ValueError where copy
    engines cannot."""
    if type(collective) not in _RUN or not moves(collective):
        raise ValueError(f"way has copy_engine, which does not run {collective.describe()}; use vendor")
    options: dict[str, Any] = {"group": collective.group, "schedule": SCHEDULE}
    if collective.reduces and sms:
        options["sms"] = sms
    _RUN[type(collective)](collective, options)


def _all_reduce(collective: Any, options: dict[str, Any]) -> None:
    collectives.all_reduce(collective.tensor, op=collective.reduction, **options)


def _all_gather(collective: Any, options: dict[str, Any]) -> None:
    collectives.all_gather_into_tensor(collective.output, collective.input, **options)


def _reduce_scatter(collective: Any, options: dict[str, Any]) -> None:
    collectives.reduce_scatter_tensor(collective.output, collective.input, op=collective.reduction, **options)


def _all_to_all(collective: Any, options: dict[str, Any]) -> None:
    collectives.all_to_all_single(collective.output, collective.input, **options)


_RUN: dict[type[Collective], Callable[[Any, dict[str, Any]], None]] = {
    AllReduce: _all_reduce,
    AllGather: _all_gather,
    ReduceScatter: _reduce_scatter,
    AllToAll: _all_to_all,
}
