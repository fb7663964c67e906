"""How a rank joins a process group: who the others are, on which nodes, and how long it waits for them.

A node is a host, or a container: ranks that share its memory and see each other's processes. WEFT_RANKS_PER_NODE cuts a
host's ranks into nodes of so many, which then treat each other as if they were on different hosts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from weft.comm.control import CONTROL_BYTES
from weft.comm.handshake import handshake
from weft.comm.processes import died, node_label, process_start
from weft.comm.shared_memory import SHM, SharedSegment, reap_stale, unlink
from weft.core.errors import PeerLost

DEFAULT_TIMEOUT_S = 60.0
_MOST_TIMEOUT_S = 1e9
"""What waits of threads and stores can count."""
_Member = tuple[str, str, int, int | None, str]
"""A rank, as the others know it: its host, its node, its process and when that began, its control segment."""
_PROCESSES: WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[int, int | None]]] = WeakKeyDictionary()
"""By default process group and global rank, the processes of this node that this process has met: a rank that died does not
come to the first call of another group, which has never seen its process."""


def timeout_from_environment() -> float:
    """WEFT_TIMEOUT_S, or 60 s. Raises ValueError if it is not a positive number, or is too large to be waited for."""
    text = os.environ.get("WEFT_TIMEOUT_S", str(DEFAULT_TIMEOUT_S))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST_TIMEOUT_S:
        raise ValueError(f"WEFT_TIMEOUT_S is {text!r}; it must be a number of seconds above 0, and at most {_MOST_TIMEOUT_S:g}")
    return value


def ranks_per_node() -> int | None:
    """WEFT_RANKS_PER_NODE, if it is set. Raises ValueError if it is not a whole number of at least 1."""
    text = os.environ.get("WEFT_RANKS_PER_NODE")
    if text is not None and not (text.isdecimal() and int(text)):
        raise ValueError(f"WEFT_RANKS_PER_NODE is {text!r}; it must be a whole number of at least 1")
    return int(text) if text else None


def cut(ranks: int) -> tuple[int, ...]:
    """How many ranks each node of this host has, of so many on it; () for one node. Raises ValueError as `ranks_per_node`."""
    size = ranks_per_node() or ranks
    return nodes_of([str(rank // size) for rank in range(ranks)])


def nodes_of(hosts: Sequence[str]) -> tuple[int, ...]:
    """How many ranks each node has, by the hosts of all ranks; () for one node.

    Raises ValueError if the ranks of a host are no neighbours.
    """
    found = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    apart = sorted({host for host, _ in found if sum(host == other for other, _ in found) > 1})
    if apart:
        raise ValueError(
            f"group has ranks of {', '.join(apart)} among those of other hosts ({', '.join(hosts)}); order them host by host, "
            "as torchrun does"
        )
    return tuple(count for _, count in found) if len(found) > 1 else ()


@dataclass(frozen=True, kw_only=True)
class Members:
    """The ranks of a group. nodes: how many ranks each node has, () for one node. one_host: whether all are of one host. near:
    the ranks of this one's node. pids, starts: the process of each rank, and when it began. names: the control segment of each
    rank. control: that of this rank. timeout_s: the bound of waits."""

    nodes: tuple[int, ...]
    one_host: bool
    near: range
    pids: list[int]
    starts: list[int | None]
    names: list[str]
    control: SharedSegment
    timeout_s: float


def join(group: dist.ProcessGroup, timeout_s: float | None) -> Members:
    """Join a group. Collective. timeout_s: default, that of the environment. What keeps one of the ranks from it, a setting or
    a full /dev/shm, is raised on all of them; so is the ValueError of ranks of one host that are no neighbours."""
    own: SharedSegment | None = None
    bound_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        bound_s = timeout_from_environment() if timeout_s is None else timeout_s
        per_node, host = ranks_per_node(), f"{socket.gethostname()} {node_label(SHM)}"
        label = f"{host} (node {dist.get_rank() // per_node})" if per_node else host
        reap_stale()
        own = SharedSegment.create("control", CONTROL_BYTES)
        me: _Member | str = (host, label, os.getpid(), process_start(os.getpid()), own.name)
    except (ValueError, OSError) as error:
        wrong, me = error, str(error)
    try:
        everyone: list[Any] = handshake(group, me, timeout_s=bound_s, lost=partial(_dead, group))
        if own is None:
            raise wrong
        for rank, one in enumerate(everyone):
            if isinstance(one, str):
                raise PeerLost(f"rank {rank} failed: {one}")
        members = _members(everyone, group.rank(), own, bound_s)
        for rank in members.near:
            _processes()[dist.get_global_rank(group, rank)] = members.pids[rank], members.starts[rank]
        return members
    except BaseException:
        if own is not None:
            unlink(own.name)
        raise


def _processes() -> dict[int, tuple[int, int | None]]:
    """The processes of this node that this process has met, by global rank."""
    world = dist.group.WORLD
    return {} if world is None else _PROCESSES.setdefault(world, {})


def _dead(group: dist.ProcessGroup) -> str:
    """Which rank of a group is known to have died, in words; nothing if none is."""
    for rank, place in enumerate(dist.get_process_group_ranks(group)):
        pid, start = _processes().get(place, (0, None))
        if pid and died(pid, start):
            return f"rank {rank} (process {pid}) died"
    return ""


def _members(everyone: list[Any], rank: int, own: SharedSegment, timeout_s: float) -> Members:
    labels = [label for _, label, *_ in everyone]
    first = labels.index(labels[rank])
    return Members(
        nodes=nodes_of(labels),
        one_host=len({host for host, *_ in everyone}) == 1,
        near=range(first, first + labels.count(labels[rank])),
        pids=[pid for *_, pid, _, _ in everyone],
        starts=[start for *_, start, _ in everyone],
        names=[name for *_, name in everyone],
        control=own,
        timeout_s=timeout_s,
    )
