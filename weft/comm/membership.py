"""A rank joins a process group: it learns which processes the other ranks are, and on which nodes they run.

A node is a host, or a container, whose ranks share memory and see each other's processes. WEFT_RANKS_PER_NODE divides the ranks
of a host into nodes of that many ranks, which then treat each other as if they were on different hosts.
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
from weft.comm.shared_memory import SHM, SharedSegment, died, node_label, process_start, remove_stale_segments, unlink
from weft.core.errors import PeerLost

DEFAULT_TIMEOUT_S = 60.0
_MOST_TIMEOUT_S = 1e9
"""The longest timeout in s that the waits of threads and stores accept."""
_Member = tuple[str, str, int, int | None, str]
"""A rank as the other ranks know it: its host, node, process id, start time of the process, and control segment."""
_PROCESSES: WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[int, int | None]]] = WeakKeyDictionary()
"""The processes of this node that this process knows, by default process group and global rank. If a rank has died, the first
call of another group, which does not know its process yet, finds that out here."""


def timeout_from_environment() -> float:
    """Return WEFT_TIMEOUT_S, or 60 s if it is unset. Raises ValueError if it is not a positive number, or is too large."""
    text = os.environ.get("WEFT_TIMEOUT_S", str(DEFAULT_TIMEOUT_S))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST_TIMEOUT_S:
        raise ValueError(f"WEFT_TIMEOUT_S is {text!r}; it must be a number of seconds above 0, and at most {_MOST_TIMEOUT_S:g}")
    return value


def ranks_per_node() -> int | None:
    """Return WEFT_RANKS_PER_NODE, if it is set. Raises ValueError if it is not a whole number of at least 1."""
    text = os.environ.get("WEFT_RANKS_PER_NODE")
    if text is not None and not (text.isdecimal() and int(text)):
        raise ValueError(f"WEFT_RANKS_PER_NODE is {text!r}; it must be a whole number of at least 1")
    return int(text) if text else None


def cut(ranks: int) -> tuple[int, ...]:
    """Return the number of ranks of each node if this host has `ranks` ranks. Return () for one node.

    Raises ValueError as `ranks_per_node` does.
    """
    size = ranks_per_node() or ranks
    return nodes_of([str(rank // size) for rank in range(ranks)])


def nodes_of(hosts: Sequence[str]) -> tuple[int, ...]:
    """Return the number of ranks of each node, from the hosts of all ranks. Return () for one node.

    Raises ValueError if the ranks of a host are not consecutive.
    """
    found = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    scattered = sorted({host for host, _ in found if sum(host == other for other, _ in found) > 1})
    if scattered:
        raise ValueError(
            f"group has ranks of {', '.join(scattered)} among those of other hosts ({', '.join(hosts)}); "
            "order them host by host, as torchrun does"
        )
    return tuple(count for _, count in found) if len(found) > 1 else ()


@dataclass(frozen=True, kw_only=True)
class Members:
    """Members describes the ranks of a group.

    nodes: the number of ranks of each node, or () for one node.
    one_host: whether all ranks are on one host.
    ranks_on_node: the ranks of this rank's node.
    pids: the process id of each rank.
    starts: the start time of each rank's process.
    names: the name of each rank's control segment.
    control: the control segment of this rank.
    timeout_s: the bound of waits.
    """

    nodes: tuple[int, ...]
    one_host: bool
    ranks_on_node: range
    pids: list[int]
    starts: list[int | None]
    names: list[str]
    control: SharedSegment
    timeout_s: float


def join(group: dist.ProcessGroup, timeout_s: float | None) -> Members:
    """Join a group. Collective.

    If one rank fails, because of a setting or a full /dev/shm, all ranks raise an error. All ranks also raise the ValueError if
    the ranks of a host are not consecutive.

    timeout_s: the bound of waits. By default it is WEFT_TIMEOUT_S.
    """
    own: SharedSegment | None = None
    bound_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        bound_s = timeout_from_environment() if timeout_s is None else timeout_s
        per_node, host = ranks_per_node(), f"{socket.gethostname()} {node_label(SHM)}"
        label = f"{host} (node {dist.get_rank() // per_node})" if per_node else host
        remove_stale_segments()
        own = SharedSegment.create("control", CONTROL_BYTES)
        me: _Member | str = (host, label, os.getpid(), process_start(os.getpid()), own.name)
    except (ValueError, OSError) as error:
        wrong, me = error, str(error)
    try:
        everyone: list[Any] = handshake(group, me, timeout_s=bound_s, lost=partial(_find_dead_rank, group))
        if own is None:
            raise wrong
        for rank, one in enumerate(everyone):
            if isinstance(one, str):
                raise PeerLost(f"rank {rank} failed: {one}")
        labels = [label for _, label, *_ in everyone]
        first = labels.index(labels[group.rank()])
        members = Members(
            nodes=nodes_of(labels),
            one_host=len({host for host, *_ in everyone}) == 1,
            ranks_on_node=range(first, first + labels.count(labels[first])),
            pids=[pid for *_, pid, _, _ in everyone],
            starts=[start for *_, start, _ in everyone],
            names=[name for *_, name in everyone],
            control=own,
            timeout_s=bound_s,
        )
        for rank in members.ranks_on_node:
            _processes()[dist.get_global_rank(group, rank)] = members.pids[rank], members.starts[rank]
        return members
    except BaseException:
        if own is not None:
            unlink(own.name)
        raise


def _processes() -> dict[int, tuple[int, int | None]]:
    """Return the processes of this node that this process knows, by global rank."""
    world = dist.group.WORLD
    return {} if world is None else _PROCESSES.setdefault(world, {})


def _find_dead_rank(group: dist.ProcessGroup) -> str:
    """Return a sentence that names a rank of the group that is known to have died, or "" if there is none."""
    for rank, place in enumerate(dist.get_process_group_ranks(group)):
        pid, start = _processes().get(place, (0, None))
        if pid and died(pid, start):
            return f"rank {rank} (process {pid}) died"
    return ""
