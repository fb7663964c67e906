"""A BoundCall makes a call that was made before: the same operator, shapes, strides, dtypes, schedule, group and settings.

It owns all that such a call needs again: the number that ranks compare, the shapes of the outputs, the CUDA graphs by
addresses, and the place in the order of the GPU. A warm call on a GPU is

    weft/ops/front.py            find the BoundCall by what the call is
    weft/runtime/bound_call.py   allocate the outputs, find the graph by the addresses, log the call, launch
    weft/runtime/order.py        begin and end: what is in flight, and what comes after what

Everything else is the slow path, which also makes the BoundCall (weft.runtime.programs). A BoundCall returns None if it cannot
make the call, and then the slow path makes it: the addresses should get a graph now, they have none and the call cannot be
enqueued step by step (weft.runtime.straight), the caller captures a graph, the current device is another one, the group has
failed, the ranks have forgotten the call, another thread holds a lock, or too many calls are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
import torch.distributed as dist

from weft.compat.c10d import LIVING_GROUPS
from weft.compat.device import current_device, reference_of
from weft.compat.dispatch import address_of, layout_check, make_empty, thread_state, without_inference_mode
from weft.compat.streams import capturing, raw_stream, replay_graph
from weft.core.schedule import Schedule
from weft.runtime.bindings import Outputs
from weft.runtime.calls import Call
from weft.runtime.cuda import CudaProgram
from weft.runtime.order import MOST_IN_FLIGHT, PendingCall
from weft.runtime.programs import KnownCall
from weft.runtime.replay import addresses_of
from weft.runtime.straight import Straight, is_aligned

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of ordinary tensors. Other tensors need torch's dispatcher."""
_BY_VALUE = frozenset(
    (str, int, bool, float, type(None), torch.dtype, dist.ReduceOp.RedOpType, type(torch.nn.functional.ScalingType.RowWise))
)
"""The types of arguments that are compared by value."""
_MOST, _MOST_LAYOUTS = 4096, 32
"""The most identities that are remembered, and the most layouts of one identity. The oldest is dropped first."""


class RememberedCall:
    """A RememberedCall is what a call needs that is the same as an earlier one.

    group, name: the process group, as a weak reference, and its name.
    bound: the BoundCall. None if such a call cannot be replayed.
    picks: for each result, its number among the outputs of the BoundCall.
    view: how the BoundCall's outputs are viewed (weft.ops.common.RowsOf). None if it allocates them in the caller's shape.
    values: weak references to the Schedule values among the arguments. They are compared by id, and another object may
        get the id of a dead one.
    request: the weft.ops.front.OperatorRequest without its group. Its `tensors` are the structure of the tensors, and their
        numbers among the tensors of a call. They are empty if the public function passes the operator a view (b[None], a
        reshaped scale), so that later calls need the BoundCall or the function. None if the operator itself remembers the call.
    recording: the weft.ops.operator.Recording of such calls, if autograd records them. Else None.
    """

    __slots__ = ("__weakref__", "bound", "group", "name", "picks", "recording", "request", "values", "view")

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        bound: BoundCall | None = None,
        picks: Sequence[int] = (),
        values: Sequence[Schedule] = (),
        request: Any = None,
        view: Any = None,
    ) -> None:
        self.recording: Any
        self.group: Callable[[], dist.ProcessGroup | None] = ref(group) if group is not None else lambda: None
        self.name = "" if group is None else group.group_name
        self.keep(bound, picks, view)
        self.values, self.request, self.recording = [ref(value) for value in values], request, None

    def keep(self, bound: BoundCall | None, picks: Sequence[int], view: Any = None) -> None:
        """Keep a BoundCall, whose outputs are matrices. view: how they are viewed."""
        self.bound, self.picks, self.view = bound, picks, view
        if bound is not None and view is not None and not view.moved:
            self.bound, self.view = bound.of_shape(view.extents), None

    def is_outdated(self) -> bool:
        """Return whether one of the Schedule values is dead."""
        return any(value() is None for value in self.values)


class RememberedCalls:
    """RememberedCalls is a table of RememberedCall, by what identifies a call and the layouts of its tensors."""

    def __init__(self) -> None:
        self._table: dict[tuple[Any, ...], list[tuple[Callable[..., bool], RememberedCall]]] = {}
        self._owned: WeakSet[RememberedCall] = WeakSet()

    def find(
        self, key: list[Any], values: list[Any], tensors: list[torch.Tensor]
    ) -> tuple[tuple[Any, ...] | None, RememberedCall | None]:
        """Return what identifies a call besides the layouts of its tensors, and what is remembered of it.

        key: the beginning of what identifies it.
        values: the arguments of the call. It is changed.
        tensors: a list to which the tensors among the arguments are appended: those of lists come last.

        Return (None, None) if the call cannot be remembered. What is remembered of a call counts only while its process group
        and its Schedule values live.
        """
        for value in values:
            kind = type(value)
            if kind in PLAIN:
                tensors.append(value)
                key.append(kind)
            elif kind in _BY_VALUE:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key.append(len(value))
                values += value  # this loop comes to them
            elif isinstance(value, (dist.ProcessGroup, Schedule)):
                key.append(id(value))
            else:
                return None, None
        state = thread_state(tensors[0].dtype) if tensors else None
        if state is None:
            return None, None
        try:
            identity = (*key, *state, tensors[0].shape)  # with the shape, few calls are left to compare
        except RuntimeError:  # a nested tensor has none
            return None, None
        for check, known in self._table.get(identity, ()):
            if check(*tensors):
                living = known.group() in LIVING_GROUPS and not (known.values and known.is_outdated())
                return identity, known if living else None
        return identity, None

    def get(self, identity: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> RememberedCall | None:
        """Return what is remembered of a call without Schedule values, of which it is known what identifies it."""
        for check, known in self._table.get(identity, ()):
            if check(*tensors):
                return known if known.group() in LIVING_GROUPS else None
        return None

    def add(self, identity: tuple[Any, ...], tensors: Sequence[torch.Tensor], made: RememberedCall) -> None:
        """Remember calls with tensors like these."""
        check = layout_check(tensors)
        if check is None:
            return
        if made.bound is not None and made.bound.fixed:
            check = partial(_is_at, check, made.bound.fixed)
        others = [one for one in self._table.pop(identity, ()) if not one[0](*tensors)]
        self._table[identity] = [*others[1 - _MOST_LAYOUTS :], (check, made)]
        if len(self._table) > _MOST:
            self._table.pop(next(iter(self._table)), None)

    def watch(self, known: RememberedCall) -> None:
        """Let a call that somebody else owns lose its BoundCall when calls like it are dropped here."""
        self._owned.add(known)

    def forget(self, name: str) -> None:
        """Drop the calls of a group."""
        self._keep(lambda found: found.name != name)

    def drop_forgotten(self) -> None:
        """Drop the calls that the ranks have forgotten. Their launches refer to the memory of programs that are closed."""
        self._keep(lambda found: found.bound is None or not found.bound.is_forgotten)

    def clear(self) -> None:
        self._keep(lambda found: False)

    def _keep(self, wanted: Callable[[RememberedCall], bool]) -> None:
        for known in list(self._owned):
            if not wanted(known):
                known.bound = None
        for identity, calls in list(self._table.items()):
            kept = [one for one in calls if wanted(one[1])]
            if kept:
                self._table[identity] = kept
            else:
                self._table.pop(identity, None)


def _is_at(check: Callable[..., bool], fixed: Sequence[tuple[int, int]], *tensors: torch.Tensor) -> bool:
    """Return whether tensors have a layout, and those at these numbers an address."""
    return check(*tensors) and all(tensors[number].data_ptr() == address for number, address in fixed)


class Output(NamedTuple):
    """An Output is a matrix that each call allocates.

    make: allocates it.
    like: an empty tensor of its dtype on its device.
    shape: its shape.
    floats: whether a failure makes it NaN.
    """

    make: Callable[[], torch.Tensor]
    like: torch.Tensor
    shape: torch.Size
    floats: bool

    @classmethod
    def of(cls, like: torch.Tensor, shape: torch.Size) -> Output:
        return cls(make_empty(shape, like), like, shape, like.is_floating_point())


class BoundCall:
    """A BoundCall replays the graphs of one program for calls whose tensors have one layout.

    known: what the ranks have agreed on for such calls. Once it is forgotten, this makes no call.
    program: its program.
    places: for each tensor of the program's inputs, and of outputs that the caller passes, its number among the tensors of
        a call.
    fixed: (number of a place, address) of each tensor whose address is in a table of a kernel. Another address needs the slow
        path, which makes the table.
    must_not_overlap: pairs of an input and an output of the caller: the place and the bytes of the input, then those of the
        output.
    place_in_symmetric_memory: tells whether an output that the caller passes can be written by peers. Such a call has another
        program. None if no output can be.
    outputs: the matrices that a call allocates.
    written: the numbers of the tensors that the call writes, and that a failure makes NaN.
    """

    __slots__ = (
        "_alarm",
        "_attribute",
        "_calls",
        "_describe",
        "_fixed",
        "_graphs",
        "_group",
        "_index",
        "_known",
        "_layout",
        "_memory_at",
        "_must_not_overlap",
        "_order",
        "_outputs",
        "_place_in_symmetric_memory",
        "_places",
        "_program",
        "_ragged",
        "_replay_uses",
        "_replays",
        "_straight",
        "_uses",
        "_what",
        "_written",
    )

    def __init__(
        self,
        known: KnownCall,
        program: CudaProgram,
        places: tuple[int, ...],
        layout: tuple[object, ...],
        outputs: list[Output],
        straight: Straight | None = None,
        written: tuple[int, ...] = (),
        fixed: tuple[tuple[int, int], ...] = (),
        must_not_overlap: tuple[tuple[int, int, int, int], ...] = (),
        place_in_symmetric_memory: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        resources = program.resources
        self._known, self._program, self._places, self._outputs = known, program, places, outputs
        self._group, self._order, self._calls = program.rank_group, resources.order, resources.watchdog.pending
        self._index, self._fixed, self._must_not_overlap = resources.index, fixed, must_not_overlap
        self._place_in_symmetric_memory = place_in_symmetric_memory
        self._ragged = resources.ragged if program.ragged is not None else ()
        self._layout, self._replays, self._straight, self._written = layout, program.replays, straight, written
        self._graphs = {} if program.replays is None else program.replays.of_layout(layout)
        self._alarm = program.rank_group.load_alarm()
        self._memory_at, self._attribute = program.driver.memory_number
        self._uses, self._replay_uses = program.uses, program.replay_uses
        self._what, self._describe = program.title, program.describe_call

    def of_tensors(self, mine: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> BoundCall | None:
        """Return a BoundCall like this one that takes other tensors, or None if they do not include those that it reads.

        mine, others: the tensors of one call, as this BoundCall and as the other one takes them.
        """
        if len(mine) == len(others) and all(map(is_, mine, others)):
            return self
        numbers = {tensor.data_ptr(): number for number, tensor in enumerate(others)}
        addresses = [mine[place].data_ptr() for place in self._places]
        if len(numbers) < len(others) or not numbers.keys() >= set(addresses):
            return None
        made = copy(self)
        made._places = tuple([numbers[address] for address in addresses])
        made._written = tuple([numbers[mine[number].data_ptr()] for number in self._written])
        return made

    def of_shape(self, extents: Sequence[int]) -> BoundCall:
        """Return a BoundCall like this one whose outputs have these extents in place of their rows."""
        made = copy(self)
        made._outputs = [Output.of(one.like, torch.Size((*extents, one.shape[-1]))) for one in self._outputs]
        return made

    @property
    def is_forgotten(self) -> bool:
        return self._known.forgotten

    def makes(self, known: KnownCall) -> bool:
        """Return whether this makes the calls on which the ranks have agreed. It does not after they have agreed anew."""
        return self._known is known

    @property
    def fixed(self) -> list[tuple[int, int]]:
        """(number among the tensors of a call, address) of each tensor whose address is in a table."""
        return [(self._places[number], address) for number, address in self._fixed]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Make a call, and return what it has allocated. Return None if the slow path must make it.

        tensors: those of a call, of the layout for which this was made.
        Raises PeerLost if a peer has failed.
        """
        group, order = self._group, self._order
        if not group.lock.acquire(False):
            return None
        try:
            if self._known.forgotten or group.broken is not None or current_device() != self._index or capturing():
                return None
            for ragged in self._ragged:  # also of other programs than this call's
                if ragged.has_error:
                    return None
            if self._place_in_symmetric_memory is not None:
                for number in self._written:
                    if self._place_in_symmetric_memory(tensors[number]) is not None:
                        return None
            if len(self._calls) >= MOST_IN_FLIGHT and not order.make_room(self._calls):
                return None
            outputs = self._allocate() if torch.is_inference_mode_enabled() else None
            if outputs is None:
                outputs = []
                for output in self._outputs:
                    outputs.append(output.make())
            addresses = list(map(address_of, tensors))
            key = list(map(addresses.__getitem__, self._places))
            results = []
            for number in self._written:
                results.append((tensors[number], addresses[number]))
            for out, output in zip(outputs, self._outputs, strict=True):
                address = out.data_ptr()
                key.append(address)
                if output.floats:
                    results.append((out, address))
            used = tuple(key)
            captured = self._graphs.get(used)
            if captured is not None:
                for address, number in captured.memory:
                    if self._memory_at(self._attribute, address)[1] != number:
                        captured = None
                        break
            if captured is None:
                if self._straight is None or not is_aligned(used):
                    return None
                for number, address in self._fixed:
                    if used[number] != address:
                        return None
                for one, size, other, length in self._must_not_overlap:
                    if used[one] < used[other] + length and used[other] < used[one] + size:
                        return None
                if self._replays is not None and self._replays.wants(self._layout, used):
                    return None  # the slow path captures the call
            if not order.lock.acquire(False):
                return None
            try:
                group.log_agreed_call(self._known.number)
                call = PendingCall()
                call.what, call.describe, call.stream = self._what, self._describe, raw_stream(self._index)
                memory = []
                for out, address in results:
                    memory.append((reference_of(out.untyped_storage()), address, out.nbytes))
                call.results = memory
                order.begin(call, self._calls, self._uses if captured is None else self._replay_uses)
                try:
                    if captured is not None:
                        replay_graph(captured.graph)
                    else:
                        assert self._straight is not None
                        self._straight.issue([*map(tensors.__getitem__, self._places), *outputs], call.stream)
                finally:
                    order.end(call)
            finally:
                order.lock.release()
            if captured is not None and self._replays is not None:
                self._replays.earn()
            self._program.last_used = group.calls
            if self._alarm():
                group.check_peers()
            return outputs
        except BaseException as error:
            # Peers run the call already, or will.
            group.mark_raised()
            group.fail(error)
            raise
        finally:
            group.lock.release()

    def _allocate(self) -> list[torch.Tensor]:
        """Allocate the outputs in inference mode. They are ordinary tensors, as in any other mode."""
        with without_inference_mode():
            return [output.make() for output in self._outputs]


def bind(known: KnownCall, call: Call, outputs: Outputs, tensors: Sequence[torch.Tensor]) -> BoundCall | None:
    """Return the BoundCall for calls like one that was just made. Return None if such calls cannot be replayed.

    known: what the ranks have agreed on for it.
    outputs: its outputs.
    tensors: those by which a BoundCall is called. The program must read and write their memory, and not that of copies.
    """
    program = known.program
    if not isinstance(program, CudaProgram) or not call.can_be_bound or known.rows or known.empty or call.reached:
        return None
    numbers = {tensor.data_ptr(): number for number, tensor in enumerate(tensors)}
    inputs = program.prepared(call.inputs)
    callers = {} if call.allocated else call.outputs or {}
    try:
        places = [numbers[address] for address in addresses_of(inputs, callers)]
    except KeyError:  # a copy
        return None
    if len(numbers) < len(tensors):  # two tensors share memory, so it is not known which one an address belongs to
        return None
    made = [one for some in outputs.values() for one in some] if call.outputs is None else call.allocated
    callers_invalid = () if call.allocated else call.invalidated
    written = [numbers[one.data_ptr()] for one in callers_invalid if one.data_ptr() in numbers]
    if [tensors[number].nbytes for number in written] != [one.nbytes for one in callers_invalid]:
        return None  # only a part of what the call writes becomes NaN
    kinds = [Output.of(one.new_empty(0), one.shape) for one in made]
    into = outputs if call.outputs is None else call.outputs
    addresses = addresses_of(inputs, into)
    given = [*map(tensors.__getitem__, places), *made]
    # The slow path has checked that the outputs which the caller passes overlap no input. In later calls they must not, either,
    # except where the caller passes the same tensor for both.
    must_not_overlap = _find_pairs(places, given, sum(map(len, inputs.values()))) if callers else ()
    straight = None
    if must_not_overlap is not None and is_aligned(addresses) and all(one.dim() for one in given):
        straight = Straight(program, inputs, into, given)
    layout = () if program.replays is None else program.replays.layout(inputs)
    if straight is None and program.replays is None:
        return None
    tabled = {name for kernel in program.kernels.values() for name in kernel.tabled}
    named = [(name, one.data_ptr()) for name, some in inputs.items() for one in some]
    fixed = tuple([(number, address) for number, (name, address) in enumerate(named) if name in tabled])
    pairs, place = must_not_overlap or (), call.place_in_symmetric_memory
    return BoundCall(known, program, tuple(places), layout, kinds, straight, tuple(written), fixed, pairs, place)


def _find_pairs(
    places: Sequence[int], given: Sequence[torch.Tensor], inputs: int
) -> tuple[tuple[int, int, int, int], ...] | None:
    """Return the pairs of an input and an output of the caller that must share no memory, as BoundCall takes them.

    Return None if two different tensors of this call share memory. inputs: the number of inputs.
    """
    found = []
    for one in range(inputs):
        for other in range(inputs, len(places)):
            if places[one] == places[other]:
                continue
            first, second = given[one], given[other]
            if first.data_ptr() < second.data_ptr() + second.nbytes and second.data_ptr() < first.data_ptr() + first.nbytes:
                return None
            found.append((one, first.nbytes, other, second.nbytes))
    return tuple(found)
