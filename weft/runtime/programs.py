"""Programs makes the operator calls of one process group, and holds the programs that are bound for them.

    make_call         first call of its kind: agree with the other ranks, choose (weft.runtime.tuner), bind, run
                      later calls: find the program, leave the call's number for the other ranks, run. CPU ranks also wait
                      until all have left the same number
    bound programs    the least recently used are closed where their memory passes WEFT_PROGRAM_MEMORY_GB

A warm call on a GPU does not come here (weft.runtime.bound_call).

Ranks make the same calls in the same order, so the programs and the order of their last use are the same on every rank.
Therefore all ranks close the same programs at the same call. Known calls are found by this rank's own shapes. Where they differ
between ranks, CPU ranks agree anew, and GPU ranks raise RankMismatch.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft import schedules
from weft.checker import check
from weft.comm.rank_group import RankGroup
from weft.compat.c10d import free_unused
from weft.compat.device import on_device, outside_graph_trees
from weft.core.errors import PeerLost, warn_once
from weft.core.problem import Problem, RaggedProblem
from weft.core.schedule import Schedule
from weft.runtime.autotune import Measurement
from weft.runtime.bindings import Outputs
from weft.runtime.bound import BoundProgram
from weft.runtime.calls import PLAIN, Call, MatmulCall
from weft.runtime.choose import MODES, choose, fans_out
from weft.runtime.cuda import CudaProgram
from weft.runtime.cuda_resources import CudaResources, refuse_lanes
from weft.runtime.host import HostProgram
from weft.runtime.host_resources import HostResources
from weft.runtime.tuner import Key, RowCounts, Tuner, cut, pad

if TYPE_CHECKING:
    from weft.runtime.ragged_kernels import RaggedKernels

KNOWN_CALLS = 2048
"""A group remembers this many calls, which need no `agree_on_call`. It remembers more texts than calls, so every call can be
compared."""
OVERHEAD_BYTES = 8 << 20
"""The memory of a program besides its buffers: launch tables, CUDA graphs, Python objects. It also bounds the number of
programs, to 128 with the default of CPUs."""
_SHARE = 8
"""By default programs take an eighth of a GPU's memory: 17.6 GB of an H200's. By calculation the
shapes of a 70B model need 5 to 12 GiB. The other memory is left for the model."""
_CPU_BYTES = 1 << 30
"""The default on CPUs, where all programs of a group share their buffers, and each counts only its overhead."""
_MULTIPLIED = ("gathered", "received")
_AT_ONCE = 48
"""The number of programs whose captured state fits into one exchanged number."""


@dataclass(eq=False, kw_only=True)
class KnownCall:
    """A KnownCall is what the ranks have agreed on for calls with the same key.

    number: the number by which ranks compare the call.
    program: the program that runs it.
    empty: whether there is nothing to multiply. Then the program is for `Call.filled`.
    rows: the rows of the program if the call is padded to a bucket (weft.runtime.tuner), or else 0.
    forgotten: whether the ranks agree anew on the next such call, because there were too many, or its program was closed. All
        ranks forget a call at the same time, so none may make it without the others (weft.runtime.bound_call).
    """

    number: int
    program: BoundProgram
    empty: bool = False
    rows: int = 0
    forgotten: bool = False


def memory_from_environment() -> int | None:
    """WEFT_PROGRAM_MEMORY_GB in bytes, or None if it is unset. Raises ValueError if it is no number above 0."""
    text = os.environ.get("WEFT_PROGRAM_MEMORY_GB")
    if not text:
        return None
    try:
        gb = float(text)
    except ValueError:
        gb = 0.0
    if not 0 < gb < 1e6:
        raise ValueError(f"WEFT_PROGRAM_MEMORY_GB is {text!r}; it must be a number of gigabytes above 0")
    return int(gb * 1e9)


class Programs:
    """Programs makes the calls of one process group, and holds the programs that are bound for them.

    rank_group: the ranks. Calls are made under its lock.
    values: the Schedule values by the strings that name them in calls.
    drop_forgotten: drops what warm calls hold of calls that are forgotten now.
    """

    def __init__(
        self, rank_group: RankGroup, values: Mapping[str, Schedule], drop_forgotten: Callable[[], None] = lambda: None
    ) -> None:
        self.rank_group, self._values, self._drop_forgotten = rank_group, values, drop_forgotten
        self._known: OrderedDict[Hashable, KnownCall] = OrderedDict()
        self._programs: dict[BoundProgram, Key] = {}
        self._limits: dict[torch.device, int] = {}
        self._row_counts = RowCounts()
        self.tuner = Tuner(rank_group, self._row_counts)

    def _resources_of(self, device: torch.device) -> HostResources | CudaResources:
        """Return what all programs on a device share: memory, streams or threads."""
        raise NotImplementedError

    def make_call(self, call: Call) -> tuple[KnownCall, Outputs]:
        """Make a call. Return what the ranks have agreed on, and the outputs.

        It runs in PLAIN mode whatever mode the caller is in, because lanes on other threads write to the tensors, and scratch
        outlives the mode. The tensors' GPU need not be the current device.
        """
        lock = self.rank_group.lock  # taken as by `calling`, which would be two more frames in each call
        if not lock.acquire(blocking=False):
            raise self.rank_group.refuse_thread()
        try:
            with on_device(call.device) if call.device.type == "cuda" else nullcontext():
                return self._make_call(call)
        except PeerLost:
            self.raise_cut()
            raise
        finally:
            lock.release()

    def _make_call(self, call: Call) -> tuple[KnownCall, Outputs]:
        with PLAIN:
            device = call.device
            on_gpu = device.type == "cuda"
            known = self._known.get(call.key)
            capturing = on_gpu and torch.cuda.is_current_stream_capturing()
            if known is None:
                with outside_graph_trees(device) if on_gpu else nullcontext():
                    known = self._agree(call)
            elif capturing:
                self.rank_group.count_captured_call()
            else:
                self.rank_group.begin_agreed_call(known.number, awaits_peers=not on_gpu)
                if not on_gpu:
                    known = self._agree_on_cpu(call, known)
                if refusal := call.refusal((call.share,)):
                    with self.rank_group.fail_group_on_error():
                        raise ValueError(refusal)
            changed = known.empty or known.rows
            given = self._pad_or_fill(call, empty=known.empty, rows=known.rows) if changed else call
            if not capturing:
                # Captures do not count as uses, because ranks may capture a call different numbers of times, and the order must
                # be equal.
                known.program.last_used = self.rank_group.calls
            with self.rank_group.fail_group_on_error():
                if known.program.ragged is not None:
                    for ragged in self._ragged():  # also of other programs than this call's
                        ragged.raise_noted()
                found = known.program.run(
                    given.inputs, outputs=given.outputs, reached=given.reached, invalidated=given.invalidated, spans=given.spans
                )
            if known.program.refused is not None:
                refused, known.program.refused = known.program.refused, None
                raise refused
            return known, self._remove_padding(found, call, known) if changed else found

    def _agree_on_cpu(self, call: Call, known: KnownCall) -> KnownCall:
        """Return the call that all CPU ranks agree on.

        They wait for each other, because all programs share their buffers (weft.runtime.host). A call that is known on this
        rank may have another shard size on a peer. Then the ranks agree again.
        """
        with self.rank_group.fail_group_on_error():
            same = self.rank_group.await_same_call(known.number)
        return known if same else self._agree(call)

    def _pad_or_fill(self, call: Call, *, empty: bool, rows: int) -> Call:
        """Return the call with padded rows, and with a column of zeros if there is nothing to multiply.

        An error fails the group, because peers may already run this call.
        """
        with self.rank_group.fail_group_on_error():
            call = call.filled(self.rank_group.world_size) if empty else call
            if not rows:
                return call
            assert isinstance(call, MatmulCall)
            return pad(call, rows, self.rank_group.rank, self.rank_group.world_size)

    def _remove_padding(self, found: Outputs, call: Call, known: KnownCall) -> dict[str, list[torch.Tensor]]:
        if known.rows:
            assert isinstance(call, MatmulCall)
            found = cut(found, call, self.rank_group.rank, self.rank_group.world_size)
        if known.empty:  # matrices of the rows that were multiplied have no columns, and gradients of weights no rows
            if "gradients" in found:
                found = {**found, "gradients": [one[:0] for one in found["gradients"]]}
            return {name: [one[:, :0] for one in some] if name in _MULTIPLIED else some for name, some in found.items()}
        return found

    def _agree(self, call: Call) -> KnownCall:
        """Agree with the other ranks on a call; choose, check and bind its schedule unless a program is bound for it."""
        on_gpu = call.device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{call.op}: call it once with these sizes before capturing a graph")
        sizes = self.rank_group.agree_on_call(call.describe(), call.share, peers_may_repeat=not on_gpu)
        # From here on all ranks use the same values. Only their environments and their memory may differ.
        with self.rank_group.agree_on_value_errors():
            if refusal := call.refusal(sizes):
                raise ValueError(refusal)
            empty = call.sums_nothing(sizes)
            problem = (call.filled(len(sizes)) if empty else call).problem(sizes)
            if self.rank_group.nodes:
                problem = replace(problem, nodes=self.rank_group.nodes)
            runs = self._row_counts.padded(call, problem) if call.schedule == "auto" else problem
            rows = runs.m if runs is not problem else 0
            program = self._find((runs, call.schedule, call.device))
            program = program or self._bind_for(call, runs, empty=empty, rows=rows)
            program.refuse_several_results(call.results)
        number = self.rank_group.number_agreed_text(call.describe_with_shares(sizes))
        known = KnownCall(number=number, program=program, empty=empty, rows=rows)
        if call.key in self._known:
            self._forget_call(call.key)
        self._known[call.key] = known
        if len(self._known) > KNOWN_CALLS:
            self._forget_call(next(iter(self._known)))
        return known

    def _forget_call(self, key: Hashable) -> None:
        self._known.pop(key).forgotten = True

    def _find(self, key: Key) -> BoundProgram | None:
        rows = key[0].m  # compared first, because there may be hundreds
        return next((program for program, known in self._programs.items() if known[0].m == rows and known == key), None)

    def _bind_for(self, call: Call, problem: Problem, *, empty: bool, rows: int) -> BoundProgram:
        """Bind the schedule that a call asks for, or the fastest of several candidates, and return the program."""
        key = problem, call.schedule, call.device
        self._resources_of(call.device)  # makes the heap, on which `_cannot_overlap` depends
        specs = (
            self._candidates_without_overlap(problem, call) if self._cannot_overlap(call) else self.tuner.specs(problem, call)
        )
        schedule = _choose_and_check(problem, specs[0], call.device, self._values)
        named, blocks = schedules.spec(schedule.name, schedule.chunks), self._resources_of(call.device).blocks
        tried = [_with_digest(problem, spec, call.device) for spec in specs]
        lanes = "one for each peer" if fans_out(call.device) else "one"
        self.rank_group.agree_on_call(
            f"op: {problem.op}\nchosen: {named}\nto try: {', '.join(tried)}\nSMs: {blocks}\ncopy lanes: {lanes}"
        )
        measurements: tuple[Measurement, ...] = ()
        with self.rank_group.fail_group_on_error():
            if len(specs) == 1:
                program = self._bind_and_register(schedule, key)
                program.times_products = self.tuner.measures(problem, call)
            else:
                given = self._pad_or_fill(call, empty=empty, rows=rows)
                run = self.tuner.prepare_run(given, partial(self._bind_candidate, key), self._drop)
                program, measurements = run.fastest(specs)
            self._make_room(call.device)
            self.tuner.record_choice(program, key, measurements)
        return program

    def _cannot_overlap(self, call: Call) -> bool:
        return bool(self.rank_group.cannot_overlap) and call.device.type == "cuda"

    def _candidates_without_overlap(self, problem: Problem, call: Call) -> tuple[str, ...]:
        """Return sequential, for GPUs on which schedules that overlap cannot run. Raises ValueError if the call asks for
        another one."""
        why, ragged = self.rank_group.cannot_overlap, isinstance(problem, RaggedProblem)
        if call.schedule in MODES and not ragged:
            warn_once(f"nothing is overlapped, {call.schedule} is sequential: {why}")
        elif call.schedule != "sequential":
            remedy = "" if ragged else ', or use schedule="sequential"'
            raise ValueError(f"schedule is {call.schedule}, but {why}{remedy}")
        return ("sequential",)

    def _bind_candidate(self, key: Key, spec: str) -> BoundProgram:
        """Bind a spec. Candidates are registered like other programs, so `close` also releases them."""
        return self._bind_and_register(_choose_and_check(key[0], spec, key[2], {}), key)

    def _bind_and_register(self, schedule: Schedule, key: Key) -> BoundProgram:
        program = self._bind(schedule, key[2])
        program.last_used = self.rank_group.calls
        self._programs[program] = key
        return program

    def _bind(self, schedule: Schedule, device: torch.device) -> BoundProgram:
        resources = self._resources_of(device)
        return HostProgram(resources, schedule) if isinstance(resources, HostResources) else CudaProgram(resources, schedule)

    def _drop(self, program: BoundProgram) -> None:
        del self._programs[program]
        program.close()

    def _ragged(self) -> list[RaggedKernels]:
        """Return what notes the errors of calls with splits on this rank's device."""
        return [program.ragged for program in self._programs if program.ragged is not None]

    def raise_cut(self) -> None:
        """After a peer has failed, raise its error if it failed because of wrong splits, which this rank also knows."""
        for ragged in self._ragged():
            ragged.raise_cut()

    def raise_noted(self) -> None:
        """Raise the errors that calls with splits have noted on this rank's device. The calls must have ended."""
        for ragged in self._ragged():
            ragged.raise_noted(ended=True)

    def _forget(self, program: BoundProgram) -> None:
        """Close a program, and raise the errors that its last calls have noted."""
        ragged = program.ragged
        for key in [key for key, known in self._known.items() if known.program is program]:
            self._forget_call(key)
        self._drop_forgotten()
        self._drop(program)
        if ragged is not None:
            ragged.raise_noted(ended=True)

    def _make_room(self, device: torch.device) -> None:
        """Close the least recently used programs of a device until the others fit into the limit, but never the newest one.
        Collective.

        Then free the heap's cached pieces if they and the programs do not fit. Programs that a rank has captured are not closed
        and do not count.
        """
        limit, resources = self._limit(device), self._resources_of(device)
        heap = resources.heap if isinstance(resources, CudaResources) else None
        bytes_of = {each: OVERHEAD_BYTES + each.nbytes for each in self.bound() if self._programs[each][2] == device}
        if sum(bytes_of.values()) + (heap.cached_bytes if heap else 0) <= limit:
            return
        *older, _ = bytes_of
        held = self.in_graphs(older)
        used = sum(size for program, size in bytes_of.items() if program not in held)
        for program in older:
            if used > limit and program not in held:
                used -= bytes_of[program]
                self._forget(program)
        if heap and used + heap.cached_bytes > limit:
            heap.settle()  # no rank's GPU uses the freed pieces any more
            heap.free_cached()
            free_unused()

    def _limit(self, device: torch.device) -> int:
        """Return the bytes that programs of a device may use, the least of all ranks. Collective at its first use."""
        if device not in self._limits:
            mine = memory_from_environment()
            if mine is None:
                mine = torch.cuda.mem_get_info(device)[1] // _SHARE if device.type == "cuda" else _CPU_BYTES
            self._limits[device] = min(self.rank_group.agree_on_call("bytes for programs (WEFT_PROGRAM_MEMORY_GB)", mine))
        return self._limits[device]

    def in_graphs(self, programs: Sequence[BoundProgram]) -> set[BoundProgram]:
        """Return the programs that any rank has captured. Its graphs still use them, so no rank may close them. Collective."""
        held: set[BoundProgram] = set()
        for first in range(0, len(programs), _AT_ONCE):
            some = programs[first : first + _AT_ONCE]
            mine = sum(1 << at for at, program in enumerate(some) if program.captured)
            captured = self.rank_group.agree_on_call(f"programs in graphs, of {len(programs)}, from {first} on", mine)
            held |= {program for at, program in enumerate(some) if any(number >> at & 1 for number in captured)}
        return held

    def bound(self) -> list[BoundProgram]:
        """Return the bound programs, the least recently used first."""
        return sorted(self._programs, key=lambda program: program.last_used)

    def schedules(self) -> list[Schedule]:
        """Return the bound schedules, the least recently used first."""
        return [program.schedule for program in self.bound()]

    def forget(self, programs: Collection[BoundProgram]) -> None:
        """Close programs that are not in graphs, and free their memory. Collective, with the same programs on every rank."""
        with self.rank_group.calling:
            mine = [program for program in self.bound() if program in programs]
            held = self.in_graphs(mine)
            for program in mine:
                if program not in held:
                    self._forget(program)

    def schedules_and_specs(self) -> list[tuple[Schedule, str]]:
        """Return the bound schedules, each with the `schedule=` of the calls that run it."""
        return [(program.schedule, self._programs[program][1]) for program in self.bound()]


def _choose_and_check(problem: Problem, spec: str, device: torch.device, values: Mapping[str, Schedule]) -> Schedule:
    schedule = choose(problem, spec, device, values)
    check(schedule)
    if device.type == "cuda":
        refuse_lanes(schedule)
    return schedule


def _with_digest(problem: Problem, spec: str, device: torch.device) -> str:
    """Return the spec of a registered family with the digest of its schedule, since its builder may differ between ranks."""
    family = schedules.FAMILIES.get(spec.partition(":")[0])
    return f"{spec} ({choose(problem, spec, device, {}).digest})" if family and family.registered else spec
