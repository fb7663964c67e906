"""`concurrent`: independent computation beside collectives, as a call or as a context."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from weft.beside.collectives import Collective
from weft.beside.device import Device
from weft.beside.kernels import Kernels
from weft.beside.sites import Site, Sites, Use, sites_of
from weft.beside.trials import Settled
from weft.execute.groups import GROUPS
from weft.ops.checks import group_of
from weft.planner.ways import Way, parse

T = TypeVar("T")
AUTO = "auto"


@overload
def concurrent(
    compute: Callable[..., T],
    collectives: Collective | Sequence[Collective],
    *,
    key: str | None = None,
    repeatable: bool = False,
    way: str | Way = AUTO,
    kernels: Sequence[Any] = (),
    residents: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> T: ...


@overload
def concurrent(
    *,
    collectives: Collective | Sequence[Collective],
    key: str,
    way: str | Way = AUTO,
    kernels: Sequence[Any] = (),
    residents: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Concurrent: ...


def concurrent(
    compute: Callable[..., Any] | None = None,
    collectives: Collective | Sequence[Collective] = (),
    *,
    key: str | None = None,
    repeatable: bool = False,
    way: str | Way = AUTO,
    kernels: Sequence[Any] = (),
    residents: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Run collectives beside a computation that is independent of them, in the fastest way found; sequential among them.

        # before                              # after
        dist.all_reduce(grad)                 out = weft.concurrent(lambda: x @ w, [weft.AllReduce(grad)])
        out = x @ w
                                              with weft.concurrent(collectives=[weft.AllReduce(grad)], key="mlp"):
                                                  out = x @ w

    compute: a callable, whose result is returned, or a torch.cuda.CUDAGraph, which is replayed. Without it the result is a context,
    around the computation; the collectives start at its entry, after what was enqueued before. At the end all is joined, on CUDA by
    streams, without a wait on the host. The results are those of the sequential program, within the rounding of a vendor GEMM that
    has fewer SMs; the collectives are the vendor's, or with copy_engine those of weft.collectives.

    key: what uses have in common, besides the collectives' sizes: uses whose computation differs in size need keys that differ. The
    same on every rank; default: where compute is defined. repeatable: compute may be run many times, with no other effect than one
    run: then the first use finds the way. Else uses take ways in turn, until some 23 of them tell which is fastest
    (weft.beside.trials). way: auto, or one that is used without a trial: sequential, vendor or copy_engine, with +late, +priority,
    +ctas=N, +left=N, +resident=N (weft.planner.ways). kernels: those of the computation whose residency may be capped; compute
    gets them, or capped ones, as arguments, a context has them as `kernels`; residents: blocks an SM to try, default: two below what
    fits. group: the ranks that agree on the way; default: the collectives' group, the default group where they have several.

    Raises ValueError that names the argument, and RankMismatch where ranks mean different things by a key.
    """
    mine = _checked(collectives)
    if isinstance(compute, torch.cuda.CUDAGraph):
        compute = compute.replay
    elif compute is not None and not callable(compute):
        raise ValueError(f"compute is a {type(compute).__name__}; pass a callable, or a torch.cuda.CUDAGraph")
    if repeatable and compute is None:
        raise ValueError("repeatable is for a callable: a context's computation runs once; pass compute")
    chosen = way if isinstance(way, Way) else None if way == AUTO else parse(way)
    named = key if key is not None or chosen else _key_of(compute)
    context = Concurrent(mine, _sites(mine, group), named, chosen, Kernels(kernels, residents))
    return context if compute is None else context.run(compute, repeatable=repeatable)


def concurrent_choices(group: dist.ProcessGroup | None = None) -> list[Settled]:
    """What `concurrent` and the hooks have settled on in a group of ranks that agree: for each key its way, the measured times in us,
    and why. The same on every rank. Empty where nothing has. Not collective."""
    name = group_of(group)[0]
    state = GROUPS.known(name)
    return sites_of(state).settled() if state else []


class Concurrent:
    """Collectives that run beside what is in the context; made by `concurrent`. way: what this use takes, once entered.

    kernels: what to launch for the kernels that were named."""

    def __init__(
        self, collectives: Sequence[Collective], sites: Sites, key: str | None, way: Way | None, kernels: Kernels
    ) -> None:
        self._collectives, self._sites, self._kernels = tuple(collectives), sites, kernels
        self._site = None if way else sites.site(str(key), collectives, kernels)
        self._way, self._stack = way, ExitStack()
        self._entered = False
        self.kernels: tuple[Any, ...] = kernels.of(0)

    @property
    def way(self) -> str:
        """The way of this use; before it is entered, of the last one."""
        return str(self._way or (self._site.way if self._site else ""))
