"""What the lanes of a rank really did: every tensor operation's reads and writes, the flags stored, and the waits that ended.

    with Recorder(delay) as recorder: calls of an operator on CPUs
    recorder.log      lane -> events, in the order in which that lane did them

Steps are recorded where their launches are issued. Within a launch, a torch dispatch mode sees each operation on a tensor, and
the operation's schema says what it writes. So the log has what ran, not what a schedule says. A flag is signalled once per
call: the n-th signal has value n, and a wait in call n has seen signal n of its own call, or signal n - 1 of the call before.

A place in shared memory is named by its owner and its byte in the segment, a place in a rank's own memory by the start of its
storage. Memory that is in neither a segment nor a buffer of the call is a temporary of one step, and is not recorded. Each step
also has the rectangles that its schedule says it touches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.core.schedule import Collective, Copy, Flag, Gemm, Lookup, Norm, Push, Reduce, Region, Step, waits
from weft.runtime.bindings import Bindings, Where
from weft.runtime.host import HostProgram
from weft.runtime.launches import IssuedCall, Launch

CALLER = "caller"
Delay = Callable[[Where], None]
"""Called before each launch of a step, on its lane."""
_ONLY_WRITTEN = ("copy_", "fill_", "zero_")


@dataclass(frozen=True, slots=True)
class Place:
    """Elements in memory. space: ("shared", rank) or ("own", rank, storage). start: bytes from its begin; stride: bytes."""

    space: tuple[Any, ...]
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a lane did. call: which, from 0.

    kind: "step" (text: the step; declared: what its schedule says that it reads and writes), "read" and "write" (place),
    "store" and "seen" (flag, value: stored; or what a wait needed, once it had come true), "begin" and "end" of a call (the
    caller's).
    """

    kind: str
    call: int
    text: str = ""
    place: Place | None = None
    flag: tuple[str, int, int] | None = None
    value: int = 0
    declared: tuple[tuple[Place, ...], tuple[Place, ...]] = ((), ())


@dataclass
class Recorder:
    """Watches all host programs of this process while it is entered. delay: called before each launch."""

    delay: Delay = lambda where: None
    log: dict[str, list[Event]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._call, self._thread = -1, threading.local()
        self._bindings = Bindings()
        self._program: HostProgram | None = None
        self._patches = ExitStack()

    def __enter__(self) -> Recorder:
        recorder = self
        originals = {name: getattr(HostProgram, name) for name in ("play", "bind", "wait", "signal", "_barrier")}

        def play(program: HostProgram, *arguments: Any) -> None:
            recorder._begin(program)
            originals["play"](program, *arguments)
            recorder._tell(CALLER, Event("end", recorder._call))

        def bind(program: HostProgram, *arguments: Any) -> Bindings:
            recorder._bindings = originals["bind"](program, *arguments)
            return recorder._bindings

        def issuing(issue: Callable[..., None]) -> Callable[..., None]:
            def issued(launch: Launch, call: IssuedCall, stream: int) -> None:
                recorder._step(launch.where, lambda: issue(launch, call, stream))

            return issued

        def wait(program: HostProgram, slot: int, value: int) -> None:
            originals["wait"](program, slot, value)
            flag, lane, position = program._waiter[slot]
            steps = next(one.steps for one in program.schedule.ranks[program.rank] if one.name == lane)
            in_this_call = any(not one.on_previous_call for one in waits(steps[position]) if one.flag == flag)
            if recorder._call + in_this_call:
                recorder._here(Event("seen", recorder._call, flag=_key(flag), value=recorder._call + in_this_call))

        def signal(program: HostProgram, rank: int, slot: int, value: int) -> None:
            (flag,) = (flag for flag, slots in program.flags.slots.items() if flag.rank == rank and slot in slots)
            recorder._here(Event("store", recorder._call, flag=_key(flag), value=recorder._call + 1))
            originals["signal"](program, rank, slot, value)

        def barrier(program: HostProgram, where: Where) -> None:
            value = program._barriers + 1
            recorder._here(Event("store", recorder._call, flag=("meet", program.rank, 0), value=value))
            originals["_barrier"](program, where)
            for rank in program.rank_group.ranks_on_node:
                recorder._here(Event("seen", recorder._call, flag=("meet", rank, 0), value=value))

        patched = mock.patch.multiple(HostProgram, play=play, bind=bind, wait=wait, signal=signal, _barrier=barrier)
        self._patches.enter_context(patched)
        for kind in Launch.__subclasses__():
            self._patches.enter_context(mock.patch.object(kind, "issue", issuing(kind.issue)))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patches.close()

    def _begin(self, program: HostProgram) -> None:
        self._call, self._program = self._call + 1, program
        self._tell(CALLER, Event("begin", self._call))

    def _tell(self, lane: str, event: Event) -> None:
        self.log.setdefault(lane, []).append(event)

    def _here(self, event: Event) -> None:
        self._tell(self._thread.lane, event)

    def _step(self, where: Where, work: Callable[[], None]) -> None:
        assert self._program is not None
        self._thread.lane = where.lane
        self.delay(where)
        self._here(Event("step", self._call, text=str(where), declared=self._declared(self._program, where.step)))
        with _Watch(self):
            work()

    def _declared(self, program: HostProgram, step: Step) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
        reads, writes = declared(step)

        def places(regions: list[Region]) -> tuple[Place, ...]:
            found = [self.place(view) for region in regions for view, _ in self._bindings.pieces(region)]
            return tuple(place for place in found if place)

        if isinstance(step, Lookup):
            loose = [tensor for several in self._bindings.loose.values() for tensor in several]
            return tuple(place for tensor in loose if (place := self.place(tensor))), places(writes)
        if not isinstance(step, Collective):
            return places(reads), places(writes)
        # Sources are staged in shared memory, where all ranks read them.
        source = self._bindings.view(step.src)
        staged = [program._stage(step, rank, source) for rank in program.rank_group.ranks_on_node]
        stages = [place for tensor in staged if tensor.numel() and (place := self.place(tensor))]
        return (*places(reads), *stages), (*places(writes), *stages)

    def operation(self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """An operation has run on this thread."""
        for tensor, writes, reads in accesses(func, args, options):
            place = self.place(tensor) if tensor.numel() else None
            if place is not None and reads:
                self._here(Event("read", self._call, place=place))
            if place is not None and writes:
                self._here(Event("write", self._call, place=place))

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies; None for a temporary."""
        if not tensor.numel():
            return None
        program, at = self._program, tensor.data_ptr()
        assert program is not None
        size = tensor.element_size()
        shape, stride = tuple(tensor.shape), tuple(size * step for step in tensor.stride())
        data = program.resources.data
        for rank, address in zip(data.ranks, data.addresses, strict=True):
            if address <= at < address + data.nbytes:
                return Place(("shared", rank), at - address, shape, stride, size)
        base = tensor.untyped_storage().data_ptr()
        if base not in self._kept_storages():
            return None
        return Place(("own", program.rank, base), at - base, shape, stride, size)

    def _kept_storages(self) -> set[int]:
        bound = [tensor for columns in self._bindings.tensors.values() for tensor, _ in columns]
        loose = [one for several in self._bindings.loose.values() for one in several if isinstance(one, torch.Tensor)]
        return {tensor.untyped_storage().data_ptr() for tensor in (*bound, *loose)}


def _key(flag: Flag) -> tuple[str, int, int]:
    return flag.name, flag.rank, flag.index


class _Watch(TorchDispatchMode):
    """Shows a recorder each operation of this thread."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._recorder.operation(func, args, kwargs or {})
        return out


def accesses(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, bool, bool]]:
    """(tensor, written, read) of an operation's arguments, by its schema; nothing of one that only makes a view."""
    schema = func._schema
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        return
    only_written = schema.name.partition("::")[2] in _ONLY_WRITTEN
    for number, argument in enumerate(schema.arguments):
        given = args[number] if number < len(args) else options.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = not writes or not (only_written or argument.kwarg_only)
        for tensor in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(tensor, torch.Tensor):
                yield tensor, writes, reads


def declared(step: Step) -> tuple[list[Region], list[Region]]:
    """What a schedule says that a step reads, and writes; of a lookup, which reads tensors that are no buffer, the latter."""
    if isinstance(step, (Copy, Collective)):
        return [step.src], [step.dst]
    if isinstance(step, Push):
        return [part.src for part in step.parts], [part.dst for part in step.parts]
    if isinstance(step, Gemm):
        outs = [part.out for part in step.parts]
        reads = [step.b, *(part.a for part in step.parts), *(add for part in step.parts for add in part.adds)]
        return reads + (outs if step.accumulate else []), outs
    if isinstance(step, Norm):
        return [step.src, step.weight], [step.out]
    if isinstance(step, Reduce):
        return [src for part in step.parts for src in part.srcs], [part.out for part in step.parts]
    return [], [part.out for part in step.parts] if isinstance(step, Lookup) else []
