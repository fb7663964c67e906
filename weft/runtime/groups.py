"""What weft keeps for each process group: its ranks, its programs by problem, and the schedules chosen.

State of a group lives from its first call to `close`. GROUPS is the one registry: torch's custom operators name a group by
a string, so the way from that string to the state has to be global.
"""

from __future__ import annotations

import atexit
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from weft import schedules
from weft.checker import check
from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import Allocation, SymmetricPlace
from weft.compat.comm_streams import comm_stream, give_back
from weft.compat.symmetric_memory import free_unused
from weft.compat.versions import warn_of_untested_versions
from weft.core.logs import warn_once
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.runtime import unscheduled
from weft.runtime.bound import BoundProgram, Closes, MayBeHeld
from weft.runtime.bounded import bounded
from weft.runtime.calls import Call, MatmulCall, Site
from weft.runtime.choose import MODES, choose, contenders, fans_out, planned
from weft.runtime.cuda import CudaProgram
from weft.runtime.cuda_space import CudaSpace
from weft.runtime.host import HostProgram
from weft.runtime.host_space import HostSpace
from weft.runtime.host_wire import HostWire
from weft.runtime.kept import PROVED_AFTER, KeptPlans, Unproved, agree
from weft.runtime.plain import PLAIN
from weft.runtime.ragged_programs import RaggedPrograms
from weft.runtime.trial import BASE, Choice, Contest, Timer, Trial, queued_timer_for, timer_for
from weft.runtime.turn import Turn
from weft.runtime.unscheduled import AllToAll
from weft.runtime.widened import Widened, narrowed, widened

if TYPE_CHECKING:
    from weft.runtime.ragged import Arrived, RaggedCall


A = TypeVar("A", bound=Closes)
Held = TypeVar("Held", bound=MayBeHeld)
T = TypeVar("T")
_SIDE_PRIORITY = -2
PROGRAMS_PER_GROUP = 128
"""Kept beside those in graphs; the least recently used goes first. Each holds some KiB of flags; on GPUs data, too."""
SITES_PER_GROUP = 2048
"""Calls that are known without a meeting. Fewer than the texts that a group remembers, so that each can be told of."""
_TOLD_AT_ONCE = 48  # programs that a rank tells the others of in one number


Key = tuple[Problem, str, torch.device]
"""What a program is for: the problem, what the caller asked for, and where."""


class GroupState:
    """One group's ranks, space and programs on this rank, and what "auto" stands for."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        warn_of_untested_versions()
        self.rank_group = RankGroup.of(group)
        self._spaces: dict[torch.device, HostSpace | CudaSpace] = {}
        self.lock = self.rank_group.lock
        self._sites: dict[Hashable, Site] = {}
        self._programs: OrderedDict[BoundProgram, Key] = OrderedDict()
        self._choices: dict[tuple[Problem, torch.device], Choice] = {}
        self._earlier = KeptPlans(self.rank_group)
        self._unproved, self._widened = Unproved(), Widened(self._choices, self._earlier.around)
        self._attached: dict[type, Any] = {}
        self._ragged = RaggedPrograms(self.rank_group, self._in_graphs, lambda device: GROUPS.turn(device), self.wire)
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        self._handed_out: list[Allocation] = []

    def run(self, call: Call, kept: Mapping[str, Schedule]) -> dict[str, list[torch.Tensor]]:
        """One call. Its tensors are plain ones whatever mode the caller is in: lanes on other threads write to them, and
        scratch outlives the mode."""
        with self.lock, PLAIN:
            # CPU ranks meet in every call: their buffers are shared by all programs (weft.runtime.host).
            on_gpu, known_by = call.device.type == "cuda", call.key
            site = self._sites.get(known_by) if on_gpu else None
            capturing = on_gpu and torch.cuda.is_current_stream_capturing()
            stays = site is not None and site.wide and not capturing and not self._widened.may(known_by)
            if site is None or stays:
                site = self._meet(call, kept)
            elif capturing:
                self.rank_group.check_usable()
            else:
                self.rank_group.repeat(site.number)
            asked, call = call, self._as_bound(call, site)
            if site.wide and not capturing:
                assert isinstance(asked, MatmulCall)
                self._widened.used(known_by, asked.but_rows)
            if not capturing and call.tried and self._unproved.due(site.program):
                site = self._proved(call, site)
            if not capturing:
                # What one rank captures, others may not: the order must stay that of all.
                self._programs.move_to_end(site.program)
            with self.rank_group.failing():
                found = site.program.run(
                    call.inputs, outputs=call.outputs, reached=call.reached, invalidated=call.invalidated, spans=call.spans
                )
            if site.wide:
                assert isinstance(asked, MatmulCall)
                found = narrowed(found, asked, self.rank_group.rank, self.rank_group.world_size)
            return {**found, "gathered": [each[:, :0] for each in found.get("gathered", [])]} if site.empty else found

    def _as_bound(self, call: Call, site: Site) -> Call:
        """The call as the site's program is for it. Peers are in the call: what is raised on the way ends theirs."""
        with self.rank_group.failing():
            call = call.filled(self.rank_group.world_size) if site.empty else call
            if not site.wide:
                return call
            assert isinstance(call, MatmulCall)
            return widened(call, site.wide, self.rank_group.rank, self.rank_group.world_size)

    def run_ragged(self, call: RaggedCall) -> Arrived:
        """One call whose rows go in numbers that its device knows. As `run`, but without a schedule."""
        with self.lock, torch.inference_mode(False), torch.no_grad():
            return self._ragged.run(call)

    def _meet(self, call: Call, kept: Mapping[str, Schedule]) -> Site:
        """Agree with the other ranks on a call; choose, check and bind its schedule if none of the kept ones is for it."""
        if call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{call.op}: call it once with these sizes before capturing a graph")
        if (found := self._widened.served(call)) is not None:  # ranks have nothing to tell each other
            text, site = found
            return self._known_by(call.key, replace(site, number=self.rank_group.begin(text)))
        sizes = self.rank_group.enter(call.describe(), call.share)
        empty = call.sums_nothing(sizes)
        as_bound = call.filled(len(sizes)) if empty else call
        problem = as_bound.problem(sizes)
        problem = replace(problem, nodes=self.rank_group.nodes) if self.rank_group.nodes else problem
        key = (problem, call.schedule, call.device)
        program, wide = self._bound(key), 0
        if program is None and self._widened.may(call.key) and (more := self._widened.wider(call, problem)):
            wide, key = more.m, (more, call.schedule, call.device)
            program = self._bound(key)
        try:
            program = program or self._made(as_bound, key, kept)
        except Exception:
            raise  # of what ranks have agreed on, and so on all; what is one rank's alone has ended the group
        except BaseException as interrupt:
            raise self.rank_group.fail(interrupt) from interrupt.__cause__
        program.refuse_several_results(call.results)
        site = Site(number=0, program=program, empty=empty, wide=wide)
        if call.device.type == "cuda":
            site = self._known_by(call.key, replace(site, number=self.rank_group.remember(call.agreed(sizes))))
            if self._widened.met(call, sizes) and wide:
                self._widened.learn(call, problem, sizes, site)
        return site

    def _known_by(self, key: Hashable, site: Site) -> Site:
        """From here on, calls of this key are the site's; the oldest of too many are met in anew, if they come again. As many
        calls are made on all ranks, so that they are the same."""
        self._sites.pop(key, None)
        self._sites[key] = site
        if len(self._sites) > SITES_PER_GROUP:
            del self._sites[next(iter(self._sites))]
        return site

    def _bound(self, key: Key) -> BoundProgram | None:
        rows = key[0].m  # told apart at once: there may be a hundred
        return next((program for program, known in self._programs.items() if known[0].m == rows and known == key), None)

    def _made(self, call: Call, key: Key, kept: Mapping[str, Schedule]) -> BoundProgram:
        """A program for a call. What was not measured here, and is no sequential program, is to be proved in use."""
        problem, spec, device = key
        if spec in MODES:
            agree(self.rank_group, device)
        # Of agreed values: an error is the same on all ranks, and leaves the group whole. Profiles may differ.
        timer = timer_for(device) if spec == "auto" and call.tried else None
        specs = self._specs(key, timer)
        schedule = _checked(problem, specs[0], device, kept)
        named, blocks = schedules.spec(schedule.name, schedule.chunks), self._space(device).blocks
        lanes = "one for each peer" if fans_out(device) else "one"
        self.rank_group.enter(
            f"op: {problem.op}\nchosen: {named}\nto try: {', '.join(specs)}\nSMs: {blocks}\ncopy lanes: {lanes}"
        )
        trials: tuple[Trial, ...] = ()
        try:
            if timer is None or len(specs) == 1:
                program = self._keep(schedule, key)
                known = self._choices.get((problem, device)) if spec == "auto" else None
                program.times_products = spec != "planned" and not (known and known.like)
            else:
                program, trials = self._contest(call, key, timer).fastest(specs)
            self._drop_oldest()
        except BaseException as error:
            raise self.rank_group.fail(error) from error.__cause__
        if spec == "auto" and (problem, device) not in self._choices:
            chosen = program.schedule
            choice = Choice(problem=problem, spec=schedules.spec(chosen.name, chosen.chunks), trials=trials)
            self._choices[problem, device] = choice
            self._earlier.keep(choice, device)
        elif timer is not None and self._choices[problem, device].taken_over:
            self._unproved.add(program, key, PROVED_AFTER)
        return program

    def _proved(self, call: Call, site: Site) -> Site:
        """Hold a choice that was not measured here against the sequential program; if it does not win, put that back, aloud.

        The program that lost stays bound, as what its own name stands for: a graph of the caller's may be replaying it.
        """
        problem, _, device = key = self._programs[site.program]
        schedule, timer = site.program.schedule, timer_for(device)
        spec = schedules.spec(schedule.name, schedule.chunks)
        assert timer is not None, "only where calls are timed are choices proved"
        try:
            program, trials = self._contest(call, key, timer).fastest((BASE, spec))
        except BaseException as error:
            raise self.rank_group.fail(error) from error.__cause__
        self._unproved.proved.add(key)
        if program.schedule.name != BASE:
            self._drop(program)
            return site
        choice = Choice(problem=problem, spec=BASE, trials=trials)
        warn_once(f"{choice}: {spec} was taken over, but is no faster here; sequential is put back")
        self._programs[site.program] = (problem, spec, device)
        self._choices[problem, device] = choice
        self._earlier.keep(choice, device)
        moved = {k: replace(s, program=program) for k, s in self._sites.items() if s.program is site.program}
        self._sites |= moved
        return replace(site, program=program)

    def _specs(self, key: Key, timer: Timer | None) -> tuple[str, ...]:
        """What could run a call: one spec, unless it is to be measured, as a problem is once."""
        problem, spec, device = key
        if spec != "auto":
            return (spec,)
        if timer is None and (problem, device) not in self._choices:
            return (planned(problem, device),)
        known = self._choices.get((problem, device)) or self._earlier.find(problem, device)
        if known is None:
            return contenders(problem, device)
        self._choices[problem, device] = known
        return (known.spec,)

    def _contest(self, call: Call, key: Key, timer: Timer) -> Contest[BoundProgram]:
        """Programs under trial are kept like others: if it fails, `close` gives them back."""
        problem, _, device = key
        return Contest(
            bind=lambda spec: self._keep(_checked(problem, spec, device, {}), key),
            drop=self._drop,
            call=lambda program: program.run(call.inputs),
            timer=timer,
            queued=queued_timer_for(device),
            meet=self.rank_group.enter,
        )

    def _keep(self, schedule: Schedule, key: Key) -> BoundProgram:
        program = self._bind(schedule, key[2])
        self._widened.unlearn()
        self._programs[program] = key
        return program

    def _drop(self, program: BoundProgram) -> None:
        self._widened.unlearn()
        del self._programs[program]
        self._unproved.forget(program)
        program.close()

    def _drop_oldest(self) -> None:
        """Give back the programs, but for the last one, that were not used for the longest, where there are too many of those
        that no graph holds. Collective."""
        if len(self._programs) <= PROGRAMS_PER_GROUP:
            return
        *older, _ = self._programs
        held = self._in_graphs(older)
        free = [program for program in older if program not in held]
        for program in free[: max(0, len(self._programs) - len(held) - PROGRAMS_PER_GROUP)]:
            self._forget(program)

    def _in_graphs(self, programs: Sequence[Held]) -> set[Held]:
        """Those that any rank has captured: its graphs go on using them, and all ranks keep theirs. Collective."""
        held: set[Held] = set()
        for first in range(0, len(programs), _TOLD_AT_ONCE):
            some = programs[first : first + _TOLD_AT_ONCE]
            mine = sum(1 << at for at, program in enumerate(some) if program.captured)
            told = self.rank_group.enter(f"programs in graphs, of {len(programs)}, from {first} on", mine)
            held |= {program for at, program in enumerate(some) if any(number >> at & 1 for number in told)}
        return held

    def _forget(self, program: BoundProgram) -> None:
        self._sites = {key: site for key, site in self._sites.items() if site.program is not program}
        problem, _, device = self._programs[program]
        if (choice := self._choices.get((problem, device))) and choice.like:
            del self._choices[problem, device]  # the program of more rows serves such calls until they stay again
        self._drop(program)

    def programs(self) -> set[BoundProgram]:
        """What is bound now."""
        return set(self._programs)

    def forget(self, programs: Collection[BoundProgram]) -> None:
        """Give programs back, with their memory, but for those in graphs. Collective: the same on every rank."""
        with self.lock:
            mine = [program for program in self._programs if program in programs]
            held = self._in_graphs(mine)
            for program in mine:
                if program not in held:
                    self._forget(program)

    def _space(self, device: torch.device) -> HostSpace | CudaSpace:
        if device not in self._spaces:
            self._spaces[device] = (
                HostSpace(self.rank_group) if device.type == "cpu" else CudaSpace(self.rank_group, device, GROUPS.turn(device))
            )
        return self._spaces[device]

    def symmetric(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Bytes of this rank that its peers can reach, until `close`. Collective. Raises ValueError on several nodes."""
        if self.rank_group.nodes:
            raise ValueError(
                f"group is on nodes of {self.rank_group.nodes} ranks; peers write memory within one node alone: "
                "use torch.empty, or pass a group within one"
            )
        with self.lock, PLAIN:
            self.rank_group.enter(f"op: symmetric memory\nbytes: {nbytes}\ndevice: {device.type}")
            space = self._space(device)
            if isinstance(space, CudaSpace):
                space.watchdog.raise_if_failed()
            self._handed_out.append(space.heap.allocate(nbytes))
            return self._handed_out[-1].local

    def place(self, tensor: torch.Tensor) -> SymmetricPlace | None:
        """Where a contiguous tensor lies in memory that `symmetric` has handed out; None if it does not."""
        return next((place for piece in self._handed_out if (place := piece.find(tensor)) is not None), None)

    def numbers(self, what: str, mine: int) -> tuple[int, ...]:
        """What each rank gives, by rank. Collective: hosts meet."""
        with self.lock:
            return self.rank_group.enter(what, mine)

    def watched(self, what: str, alike: str, device: torch.device, work: Callable[[], T]) -> T:
        """As weft.runtime.unscheduled.watched."""
        with self.lock:
            return unscheduled.watched(self.rank_group, self._spaces.get(device), what, alike, work)

    def begun(self, what: str, collective: Callable[[dist.ProcessGroup], dist.Work | None]) -> Callable[[], None]:
        """Begin a collective of gloo's on CPUs, once ranks have met; a function that waits for it. It is given a group of the
        same ranks, which is abandoned after a failure. Raises PeerLost or WaitTimeout."""
        work = self.watched(what, "", torch.device("cpu"), lambda: collective(self.wire().group))
        return lambda: self.await_work(what, work)

    def await_work(self, what: str, work: dist.Work | None) -> None:
        """Wait for a collective of gloo's on CPUs, within the bound. Raises PeerLost or WaitTimeout."""
        if work is not None:
            with self.rank_group.failing():
                bounded(
                    self.rank_group, lambda: f"rank {self.rank_group.rank}: {what}: not all ranks have taken part", work.wait
                )

    def wire(self) -> HostWire:
        """Messages between the hosts of this group's ranks. Collective at its first use."""
        space = self._space(torch.device("cpu"))
        assert isinstance(space, HostSpace)
        return space.wire

    def synchronize(self) -> None:
        """Wait until all calls of this rank have ended, and raise what has failed. Bounded, and not collective."""
        with self.rank_group.failing():
            for space in list(self._spaces.values()):
                if isinstance(space, CudaSpace):
                    space.watchdog.synchronize()
            self._ragged.synchronize()
            self.rank_group.check_peers(may_leave=True)

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Where calls run that the caller's stream does not wait for: of another priority than the lanes, and than streams
        that callers have without asking for one."""
        if device not in self._side:
            self._side[device] = comm_stream(priority=_SIDE_PRIORITY, device=device)
        return self._side[device]

    def _bind(self, schedule: Schedule, device: torch.device) -> BoundProgram:
        space = self._space(device)
        return HostProgram(space, schedule) if isinstance(space, HostSpace) else CudaProgram(space, schedule)

    def schedules(self) -> list[Schedule]:
        """What has been chosen so far, oldest use first."""
        return [program.schedule for program in list(self._programs)]

    def asked(self) -> list[tuple[Schedule, str]]:
        """As `schedules`, each with what the callers asked for that run it."""
        return [(program.schedule, spec) for program, (_, spec, _) in list(self._programs.items())]

    def runs(self, asked: str) -> Schedule:
        """What calls that asked for `asked` run, for the problem called last by it. KeyError if there was none."""
        for program, (_, spec, _) in reversed(list(self._programs.items())):
            if spec == asked:
                return program.schedule
        raise KeyError(asked)

    def attached(self, kind: type[A], make: Callable[[], A]) -> A:
        """What another module keeps for this group, made when first asked for, and closed with it."""
        with self.lock:
            if kind not in self._attached:
                self._attached[kind] = make()
            found: A = self._attached[kind]
            return found

    def choices(self) -> list[Choice]:
        """What "auto" has stood for so far, a problem each."""
        return list(self._choices.values())

    def close(self) -> None:
        """Give everything back, whatever is raised on the way. Raises what has made results of earlier calls invalid, if no
        call has raised it."""
        spaces = [space.close for space in self._spaces.values()]
        first = [closes.close for closes in (*self._attached.values(), *self._programs)]
        with ExitStack() as rest:
            if any(isinstance(space, CudaSpace) for space in self._spaces.values()):
                # What closed programs and their closures hold of each other holds symmetric memory, too.
                rest.callback(free_unused)
                rest.callback(gc.collect)
            for close in reversed(
                (*first, *spaces, self._close_side_streams, self._free_handed_out, self._ragged.close, self._leave)
            ):
                rest.callback(close)
        if self.rank_group.unraised is not None:
            raise self.rank_group.unraised

    def _free_handed_out(self) -> None:
        while self._handed_out:
            piece = self._handed_out.pop()
            self.rank_group.heap(piece.local.device).free(piece)

    def _leave(self) -> None:
        """What has failed is closed for all who use it, Peers too, so that the group can be used anew."""
        if self.rank_group.broken is None:
            self.rank_group.release()
        else:
            self.rank_group.close()

    def _close_side_streams(self) -> None:
        while self._side:
            give_back(self._side.popitem()[1])


class Groups:
    """Every group's state, by the group's name."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[dist.ProcessGroup, GroupState]] = {}
        self._kept: WeakValueDictionary[str, Schedule] = WeakValueDictionary()
        self._making: dict[str, threading.Lock] = {}
        self._turns: dict[torch.device, Turn] = {}
        # No process group may be held until the interpreter ends: its threads would still run (docs/log.md).
        atexit.register(self.close_all)

    def run(self, name: str, call: Call) -> dict[str, list[torch.Tensor]]:
        return self.state(name).run(call, self._kept)

    def run_ragged(self, name: str, call: RaggedCall) -> Arrived:
        return self.state(name).run_ragged(call)

    def state(self, name: str) -> GroupState:
        """The group's state, made at its first use. Collective then; ranks may come to two groups in orders of their own."""
        if (group := _living(name)) is None:
            raise ValueError("group: its process group was destroyed, or never was in this process; use one that lives")
        with self._making.setdefault(name, threading.Lock()):
            known = self._states.get(name)
            if known is None or known[0] is not group:
                # What is held of groups that were destroyed, one of which may have had this name, is of no use any more.
                for other in [other for other, (held, _) in list(self._states.items()) if _living(other) is not held]:
                    self.close(other)
                known = self._states[name] = (group, GroupState(group))
            return known[1]

    def turn(self, device: torch.device) -> Turn:
        """Whose turn it is on a GPU, of all groups' programs that wait on SMs."""
        return self._turns.setdefault(device, Turn())

    def known(self, name: str) -> GroupState | None:
        """The group's state, if it has been used. Not collective."""
        return self._states[name][1] if name in self._states else None

    def watched(self, name: str, what: str, alike: str, device: torch.device, work: Callable[[], T]) -> T:
        """As GroupState.watched; as it is in a group that has been closed."""
        return known.watched(what, alike, device, work) if (known := self.known(name)) else work()

    def all_to_all(self, name: str, what: str, device: torch.device) -> AllToAll:
        """How a group's ranks exchange elements of a device's. In a group that has been closed, by the process group."""
        if device.type == "cpu" and (known := self.known(name)):
            return unscheduled.by_messages(known.wire, what)
        return unscheduled.by_group(_resolve_process_group(name))  # type: ignore[arg-type]

    def synchronize(self, name: str) -> None:
        """As GroupState.synchronize; nothing in a group that has made no call."""
        if known := self.known(name):
            known.synchronize()

    def failing(self, name: str) -> AbstractContextManager[None]:
        """A context in which the group's other ranks may wait for this one: what is raised in it ends their waits."""
        return known.rank_group.failing() if (known := self.known(name)) else nullcontext()

    def reach(self, name: str, tensor: torch.Tensor) -> SymmetricPlace | None:
        """Where a tensor lies in a group's symmetric memory; None if nowhere."""
        return known.place(tensor) if (known := self.known(name)) else None

    def choices(self, name: str) -> list[Choice]:
        """What "auto" has stood for in a group; nothing where it has made no call."""
        return known.choices() if (known := self.known(name)) else []

    def keep(self, schedule: Schedule) -> str:
        """The string that names a Schedule value in calls, the same on every rank. The value is remembered while its owner,
        or a program that was bound for it, has it."""
        spec = f"value:{schedule.name}:{schedule.digest}"
        self._kept.setdefault(spec, schedule)
        return spec

    def close_all(self) -> None:
        with ExitStack() as all_of_them:
            for name in reversed(self._states):
                all_of_them.callback(self.close, name)

    def close(self, name: str) -> None:
        known = self.known(name)
        if known and not known.rank_group.forked:  # else to close it is the rank's, which has its threads and its peers
            self._states.pop(name, None)
            known.close()


def _living(name: str) -> dist.ProcessGroup | None:
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        return None


def _checked(problem: Problem, spec: str, device: torch.device, kept: Mapping[str, Schedule]) -> Schedule:
    schedule = choose(problem, spec, device, kept)
    check(schedule)
    return schedule


GROUPS = Groups()
