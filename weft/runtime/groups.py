"""GROUPS is the registry of process groups. It maps a group's name to its ranks, the memory of its devices, and its programs.

The state of a group lives from its first call to `close`. torch's custom operators name a group by a string, so the map from
that string to the state must be global. (comm/rank_group.py maps a ProcessGroup to
its RankGroup, which operators and Peers share.)
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from weft.comm.membership import timeout_from_environment
from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import Allocation, SymmetricPlace, heap_of
from weft.compat import warn_of_untested_versions
from weft.compat.c10d import free_unused, has_ended
from weft.compat.device import on_device
from weft.compat.dispatch import traced_graph
from weft.compat.streams import Driver, comm_stream, give_back
from weft.core.errors import PeerLost, WaitTimeout
from weft.core.schedule import Schedule
from weft.runtime.autotune import Choice
from weft.runtime.bindings import Outputs
from weft.runtime.bound import Closes
from weft.runtime.bound_call import RememberedCalls
from weft.runtime.calls import PLAIN, Call
from weft.runtime.choose import automatic
from weft.runtime.cuda_resources import CudaResources
from weft.runtime.host_resources import AllToAll, HostResources, HostWire
from weft.runtime.network import await_collective
from weft.runtime.order import Order
from weft.runtime.programs import KnownCall, Programs

A = TypeVar("A", bound=Closes)
T = TypeVar("T")
_SIDE_PRIORITY = -2


class GroupState(Programs):
    """A GroupState is one group on this rank: its ranks, devices and programs, and the objects that other modules attach."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        warn_of_untested_versions()
        super().__init__(RankGroup.acquire(group), GROUPS.values, GROUPS.remembered.drop_forgotten)
        self._resources_by_device: dict[torch.device, HostResources | CudaResources] = {}
        self._attached: dict[type, Any] = {}
        self._attaching = threading.Lock()
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        self.handed_out: list[Allocation] = []
        """The memory that `symmetric` has allocated."""

    def _resources_of(self, device: torch.device) -> HostResources | CudaResources:
        if device not in self._resources_by_device:
            self._resources_by_device[device] = (
                HostResources(self.rank_group)
                if device.type == "cpu"
                else CudaResources(self.rank_group, device, GROUPS.order(device))
            )
        return self._resources_by_device[device]

    def symmetric(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Allocate bytes of this rank that its peers can address, until `close`. Collective. Raises ValueError on several
        nodes."""
        if self.rank_group.nodes:
            raise ValueError(
                f"group is on nodes of {self.rank_group.nodes} ranks; peers can only write memory within one node; "
                "use torch.empty, or pass a group within one node"
            )
        with self.rank_group.calling, PLAIN, on_device(device):
            self.rank_group.agree_on_call(f"op: symmetric memory\nbytes: {nbytes}\ndevice: {device.type}")
            resources = self._resources_of(device)
            if isinstance(resources, CudaResources):
                resources.watchdog.raise_if_failed()
            self.handed_out.append(resources.heap.allocate(nbytes))
            return self.handed_out[-1].local

    def exchange_numbers(self, what: str, mine: int) -> tuple[int, ...]:
        """Return the number that each rank passes, by rank. Collective: hosts wait for each other."""
        with self.rank_group.calling:
            return self.rank_group.agree_on_call(what, mine)

    def watched(self, what: str, common: str, device: torch.device, work: Callable[[], T]) -> T:
        """Run work of all ranks that no schedule describes. An error ends it on all ranks.

        On GPUs it is an NCCL collective, which is watched like a first call. On CPUs the ranks first agree, as in calls, so
        that an error names a missing rank, and then exchange messages (weft.runtime.host_resources).

        what: the name of the work in errors.
        common: what must be equal on all ranks, one line each.
        work: the function to run.
        """
        with self.rank_group.calling, self.rank_group.fail_group_on_error():
            resources = self._resources_by_device.get(device)
            if isinstance(resources, CudaResources):
                return resources.watchdog.watch(what, resources.current_stream(), work)
            self.rank_group.agree_on_call(f"op: {what}\n{common}")
            return work()

    def begun(self, what: str, collective: Callable[[dist.ProcessGroup], dist.Work | None]) -> Callable[[], None]:
        """Agree with the other ranks, begin a gloo collective on CPUs, and return a function that waits for it.

        `collective` gets a separate process group with the same ranks, which is dropped after a failure. Raises PeerLost or
        WaitTimeout.
        """
        work = self.watched(what, "", torch.device("cpu"), lambda: collective(self.wire().group))
        return lambda: self.await_work(what, work)

    def await_work(self, what: str, work: dist.Work | None) -> None:
        """Wait for a gloo collective on CPUs. Bounded. Raises PeerLost or WaitTimeout."""
        if work is not None:
            with self.rank_group.fail_group_on_error():
                await_collective(
                    self.rank_group, lambda: f"rank {self.rank_group.rank}: {what}: not all ranks have taken part", work
                )

    def wire(self) -> HostWire:
        """Return the channel for messages between the hosts of this group's ranks. Collective at its first use."""
        self.rank_group.check_usable()
        resources = self._resources_of(torch.device("cpu"))
        assert isinstance(resources, HostResources)
        return resources.wire

    def synchronize(self) -> None:
        """Wait until all calls of this rank have ended, and raise the error of a failure. Bounded, and not collective."""
        with self.rank_group.fail_group_on_error():
            try:
                for resources in list(self._resources_by_device.values()):
                    if isinstance(resources, CudaResources):
                        resources.watchdog.synchronize()
            except PeerLost:
                self.raise_cut()
                raise
            self.raise_noted()
            self.rank_group.check_peers(may_leave=True)

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream for calls that the caller's stream does not wait for.

        Its priority differs from that of the lanes and from the default priority of callers' streams.
        """
        if device not in self._side:
            self._side[device] = comm_stream(priority=_SIDE_PRIORITY, device=device)
        return self._side[device]

    def renew_lock(self) -> None:
        """Make the lock of `attached` anew in a fork, in which no thread would release it."""
        self._attaching = threading.Lock()

    def attached(self, kind: type[A], make: Callable[[], A]) -> A:
        """Return the object that another module attaches to this group. It is made at the first use, and closed with the
        group."""
        with self._attaching:
            if kind not in self._attached:
                self._attached[kind] = make()
            found: A = self._attached[kind]
            return found

    def close(self) -> None:
        """Release everything, even if errors are raised. Raises the error that has invalidated earlier results, if no call
        has."""
        closes_devices = [resources.close for resources in self._resources_by_device.values()]
        first = [closes.close for closes in (*self._attached.values(), *self.bound())]
        with ExitStack() as rest:
            if any(isinstance(resources, CudaResources) for resources in self._resources_by_device.values()):
                # Reference cycles of closed programs and their closures hold symmetric memory.
                rest.callback(free_unused)
                rest.callback(gc.collect)
            for close in reversed((*first, *closes_devices, self._close_side_streams, self._free_handed_out, self._leave)):
                rest.callback(close)
        if self.rank_group.unraised is not None:
            raise self.rank_group.unraised

    def _free_handed_out(self) -> None:
        while self.handed_out:
            piece = self.handed_out.pop()
            heap_of(self.rank_group, piece.local.device).free(piece)

    def _leave(self) -> None:
        """Leave the rank group. After a failure close it for all users, also Peers, so that the group can be used again."""
        if self.rank_group.broken is None:
            self.rank_group.release()
        else:
            self.rank_group.close()

    def _close_side_streams(self) -> None:
        while self._side:
            give_back(self._side.popitem()[1])


class Groups:
    """Groups holds the state of every group by the group's name."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[dist.ProcessGroup, GroupState]] = {}
        self.values: WeakValueDictionary[str, Schedule] = WeakValueDictionary()
        """The Schedule values by the strings that name them in calls."""
        self.remembered = RememberedCalls()
        """The calls of all groups that the next equal call need not go through the slow path for."""
        os.register_at_fork(after_in_child=self._leave_to_parent)
        self._making: dict[str, threading.Lock] = {}
        self._orders: dict[torch.device, Order] = {}
        # No process group may be held until the interpreter ends: its threads would still run (docs/lab/log.md).
        atexit.register(self.close_all)

    def _leave_to_parent(self) -> None:
        """In a fork, forget the calls, which write into shared memory, and the locks, which threads of the parent may hold."""
        self.remembered.clear()
        self._making.clear()
        for _, state in self._states.values():
            state.renew_lock()

    def make_call(self, name: str, call: Call) -> tuple[KnownCall, Outputs]:
        """Make a call as Programs.make_call does. This is the slow path, which makes any call.

        WEFT_SCHEDULE replaces "auto", also in graphs that were compiled without it. All ranks raise the ValueError for an
        invalid value.
        """
        if traced_graph() is not None:
            raise ValueError(
                f"{call.op}: torch.jit.trace cannot record weft's operators; use torch.export.export, or torch.compile"
            )
        state = self.state(name)
        if call.schedule == "auto":
            try:
                call.schedule = automatic()
            except ValueError:
                with state.rank_group.calling, state.rank_group.agree_on_value_errors():
                    raise
        return state.make_call(call)

    def run(self, name: str, call: Call) -> Outputs:
        """Make a call, and return its outputs."""
        return self.make_call(name, call)[1]

    def state(self, name: str) -> GroupState:
        """Return the group's state. It is made at the first use, which is collective. Ranks may use two groups in different
        orders."""
        if (group := _resolve_living(name)) is None:
            raise ValueError(
                "group: its process group was destroyed, or was never made in this process; pass a process group that exists"
            )
        known = self._states.get(name)
        if known is not None and known[0] is group:
            return known[1]
        with self._making.setdefault(name, threading.Lock()):
            known = self._states.get(name)
            if known is None or known[0] is not group:
                # Close the states of groups that were destroyed. One of them may have had this name.
                for other in [other for other, (held, _) in list(self._states.items()) if _resolve_living(other) is not held]:
                    self.close(other)
                known = self._states[name] = (group, GroupState(group))
            return known[1]

    def order(self, device: torch.device) -> Order:
        """Return the Order of a GPU, which orders the calls of all groups."""
        if device not in self._orders:
            self._orders.setdefault(device, Order(Driver()))
        return self._orders[device]

    def known(self, name: str) -> GroupState | None:
        """Return the group's state if it has been used, or else None. Not collective."""
        return self._states[name][1] if name in self._states else None

    def watched(self, name: str, what: str, common: str, device: torch.device, work: Callable[[], T]) -> T:
        """Run work as GroupState.watched does. In a group that has been closed, run it without the watchdog."""
        return known.watched(what, common, device, work) if (known := self.known(name)) else work()

    def await_work(self, name: str, what: str, work: dist.Work) -> None:
        """Wait for a collective of torch's on CPUs as GroupState.await_work does.

        In a group that has made no call, it raises WaitTimeout after WEFT_TIMEOUT_S, or torch's RuntimeError.
        """
        known = self.known(name)
        if known is not None and known.rank_group.broken is None:
            known.await_work(what, work)
        elif not has_ended(work, bound_s := timeout_from_environment()):
            raise WaitTimeout(f"{what}: not all ranks have taken part after {bound_s:g} s (WEFT_TIMEOUT_S)")

    def all_to_all(self, name: str, what: str, device: torch.device) -> AllToAll:
        """Return the function by which ranks exchange elements.

        It uses messages between CPUs. On GPUs, and in a group that has been closed, it uses the process group. On GPUs the
        current stream waits, and the host does not.
        """
        known = self.known(name)

        def begin(taken: torch.Tensor, given: torch.Tensor, takes: Sequence[int], gives: Sequence[int]) -> Callable[[], None]:
            if known is not None and device.type == "cpu":
                return known.wire().all_to_all(torch.split(given, list(gives)), torch.split(taken, list(takes)), what)
            group: Any = _resolve_process_group(name)  # type: ignore[arg-type]
            work = dist.all_to_all_single(taken, given, list(takes), list(gives), group=group, async_op=True)
            return lambda: None if work is None else work.wait()  # type: ignore[func-returns-value, unused-ignore]

        return begin

    def synchronize(self, name: str) -> None:
        """Wait for a group's calls as GroupState.synchronize does. It does nothing if the group has made no call."""
        if known := self.known(name):
            known.synchronize()

    def fail_group_on_error(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which other ranks may wait for this one. An error that is raised in it ends their waits."""
        return known.rank_group.fail_group_on_error() if (known := self.known(name)) else nullcontext()

    def publish_error_instead(self, name: str, error: Exception) -> None:
        """Publish an error as RankGroup.publish_error_instead does, or as RankGroup.publish_error_before_first_call if the
        group has made no call."""
        group, known = _resolve_living(name), self.known(name)
        if known is not None:
            known.rank_group.publish_error_instead(error)
        elif group is not None:
            RankGroup.publish_error_before_first_call(group, error)

    def reach(self, name: str, tensor: torch.Tensor) -> SymmetricPlace | None:
        """Return where a contiguous tensor is stored in a group's symmetric memory. Return None if it is stored elsewhere."""
        for piece in self._states[name][1].handed_out if name in self._states else ():  # warm calls come here
            if (place := piece.find(tensor)) is not None:
                return place
        return None

    def choices(self, name: str) -> list[Choice]:
        """Return the choices of "auto" in a group. It is empty if the group has made no call."""
        return known.tuner.choices() if (known := self.known(name)) else []

    def keep(self, schedule: Schedule) -> str:
        """Return the string that names a Schedule value in calls. It is the same on every rank.

        The value is remembered while its owner, or a program that was bound for it, refers to it.
        """
        spec = f"value:{schedule.name}:{schedule.digest}"
        self.values.setdefault(spec, schedule)
        return spec

    def close_all(self) -> None:
        with ExitStack() as all_of_them:
            for name in reversed(self._states):
                all_of_them.callback(self.close, name)

    def close(self, name: str) -> None:
        known = self.known(name)
        if known and not known.rank_group.forked:  # the parent process of a fork has the threads, and closes the group
            self._states.pop(name, None)
            self.remembered.forget(name)
            known.close()


def _resolve_living(name: str) -> dist.ProcessGroup | None:
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        return None


GROUPS = Groups()
