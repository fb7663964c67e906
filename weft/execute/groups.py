"""What weft keeps for each process group: its team, its programs by problem, and the schedules chosen.

State of a group lives from its first call to `close`. GROUPS is the one registry: torch's custom operators name a group by
a string, so the way from that string to the state has to be global.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from weft import codec, machine, schedules
from weft.checker import check
from weft.execute.bound import BoundProgram
from weft.execute.cuda import CudaProgram
from weft.execute.cuda_space import CudaSpace
from weft.execute.host import HostProgram, HostSpace
from weft.problem import Op, Problem, split
from weft.schedule import Schedule
from weft.span import Span
from weft.team import Team
from weft.version import __version__

PROGRAMS_PER_GROUP = 128
"""Programs kept; the least recently used goes first. Each holds a few KiB of flags, and on GPUs its data area and scratch."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One operator call on this rank, before ranks have agreed. rows: of the whole M."""

    op: Op
    a: torch.Tensor
    bs: Sequence[torch.Tensor]
    rows: int
    row_multiple: int
    schedule: str
    return_gathered: bool = False
    reduce_op: Literal["sum", "avg"] = "sum"
    spans: list[Span] | None = field(default=None, compare=False)

    @property
    def b_size(self) -> int:
        """This rank's part of b's sharded dimension."""
        return sum(b.shape[1] for b in self.bs) if self.op == "all_gather_matmul" else int(self.bs[0].shape[0])

    @property
    def key(self) -> tuple[object, ...]:
        """What calls alike have in common, on this rank."""
        a, shapes = self.a, tuple(b.shape for b in self.bs)
        fixed = (self.op, self.rows, self.row_multiple, self.schedule, self.return_gathered, self.reduce_op)
        return (*fixed, a.shape, a.dtype, a.device, *shapes)

    def describe(self) -> str:
        """What every rank must have in common, a line each."""
        common = f"K: {self.a.shape[1]}" if self.op == "all_gather_matmul" else f"N: {self.bs[0].shape[1]}"
        lines = (
            f"op: {self.op}",
            f"M: {self.rows}",
            f"row_multiple: {self.row_multiple}",
            common,
            f"number of b: {len(self.bs)}",
            f"dtype: {self.a.dtype}",
            f"device: {self.a.device.type}",
            f"schedule: {self.schedule}",
            f"return_gathered: {self.return_gathered}",
            f"reduce_op: {self.reduce_op}",
            f"weft: {__version__}",
        )
        return "\n".join(lines)

    def problem(self, b_sizes: tuple[int, ...]) -> Problem:
        total = sum(b_sizes)
        regular = tuple(high - low for low, high in split(total, len(b_sizes))) == b_sizes
        gather = self.op == "all_gather_matmul"
        return Problem(
            op=self.op,
            m=self.rows,
            n=total if gather else int(self.bs[0].shape[1]),
            k=int(self.a.shape[1]) if gather else total,
            world_size=len(b_sizes),
            dtype=str(self.a.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            return_gathered=self.return_gathered,
            reduce_op=self.reduce_op,
            row_multiple=self.row_multiple,
            b_sizes=() if regular else b_sizes,
        )


@dataclass(frozen=True, kw_only=True)
class Site:
    """What calls alike share: the number by which ranks compare them, and the program that runs them."""

    number: int
    program: BoundProgram


class GroupState:
    """One group's team, space and programs on this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.team = Team(group)
        self._spaces: dict[torch.device, HostSpace | CudaSpace] = {}
        self.lock = threading.Lock()
        self._sites: dict[tuple[object, ...], Site] = {}
        self._programs: OrderedDict[BoundProgram, tuple[Problem, str, torch.device]] = OrderedDict()

    def run(self, call: Call, kept: dict[str, Schedule]) -> dict[str, list[torch.Tensor]]:
        """One call. Its tensors are plain ones whatever mode the caller is in: lanes on other threads write to them, and
        scratch outlives the mode."""
        with self.lock, torch.inference_mode(False), torch.no_grad():
            # CPU ranks meet in every call: their buffers are shared by all programs (weft.execute.host).
            site = self._sites.get(call.key) if call.a.is_cuda else None
            if site is None:
                site = self._meet(call, kept)
            elif not torch.cuda.is_current_stream_capturing():
                self.team.repeat(site.number)
            self._programs.move_to_end(site.program)
            try:
                return site.program.run(call.a, call.bs, spans=call.spans)
            except BaseException as error:
                raise self._failed(error) from error.__cause__

    def _failed(self, error: BaseException) -> BaseException:
        """Peers wait for this rank: whatever ends its call must end theirs, with the reason."""
        return self.team.fail(error)

    def _meet(self, call: Call, kept: dict[str, Schedule]) -> Site:
        """Agree with the other ranks on a call; choose, check and bind its schedule if none of the kept ones is for it."""
        if call.a.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{call.op}: call it once with these sizes before capturing a graph")
        text = call.describe()
        sizes = self.team.enter(text, call.b_size)
        problem = call.problem(sizes)
        bound = (problem, call.schedule, call.a.device)
        program = next((program for program, key in self._programs.items() if key == bound), None)
        if program is None:
            # All ranks choose from the same agreed values: an error here is the same on all, and leaves the team whole.
            chosen = self._checked(problem, call, kept)
            try:
                program = self._bind(chosen, call.a.device)
                self._programs[program] = bound
                self._drop_oldest()
            except BaseException as error:
                raise self._failed(error) from error.__cause__
        site = Site(number=0, program=program)
        if call.a.is_cuda:
            site = Site(number=self.team.remember(f"{text}\nsizes of b: {sizes}"), program=program)
            self._sites[call.key] = site
        return site

    @staticmethod
    def _checked(problem: Problem, call: Call, kept: dict[str, Schedule]) -> Schedule:
        schedule = choose(problem, call.schedule, call.a.device, kept)
        check(schedule)
        return schedule

    def _drop_oldest(self) -> None:
        if len(self._programs) > PROGRAMS_PER_GROUP:
            oldest, _ = self._programs.popitem(last=False)
            self._sites = {key: site for key, site in self._sites.items() if site.program is not oldest}
            oldest.close()

    def _bind(self, schedule: Schedule, device: torch.device) -> BoundProgram:
        if device not in self._spaces:
            self._spaces[device] = HostSpace(self.team) if device.type == "cpu" else CudaSpace(self.team, device)
        space = self._spaces[device]
        return HostProgram(space, schedule) if isinstance(space, HostSpace) else CudaProgram(space, schedule)

    def schedules(self) -> list[Schedule]:
        """What has been chosen so far, oldest use first."""
        return [program.schedule for program in self._programs]

    def close(self) -> None:
        for program in self._programs:
            program.close()
        for space in self._spaces.values():
            space.close()
        self.team.close()


class Groups:
    """Every group's state, by the group's name."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[dist.ProcessGroup, GroupState]] = {}
        self._kept: dict[str, Schedule] = {}
        self._lock = threading.Lock()
        # No process group may be held until the interpreter ends: its threads would still run (docs/log.md).
        atexit.register(self.close_all)

    def run(self, name: str, call: Call) -> dict[str, list[torch.Tensor]]:
        return self.state(name).run(call, self._kept)

    def state(self, name: str) -> GroupState:
        """The group's state, made at its first use. Collective then."""
        group = _resolve_process_group(name)  # type: ignore[arg-type]
        with self._lock:
            known = self._states.get(name)
            if known is not None and known[0] is not group:
                # The process group was destroyed and another one got its name.
                known[1].close()
                known = None
            if known is None:
                known = self._states[name] = (group, GroupState(group))
            return known[1]

    def keep(self, schedule: Schedule) -> str:
        """Remember a Schedule value; the string that names it in calls, the same on every rank."""
        digest = hashlib.sha256(codec.dumps(schedule).encode()).hexdigest()[:16]
        spec = f"value:{schedule.name}:{digest}"
        self._kept[spec] = schedule
        return spec

    def close_all(self) -> None:
        for name in list(self._states):
            self.close(name)

    def close(self, name: str) -> None:
        known = self._states.pop(name, None)
        if known is not None:
            known[1].close()


GROUPS = Groups()


def choose(problem: Problem, spec: str, device: torch.device, kept: dict[str, Schedule]) -> Schedule:
    """The schedule that `spec` asks for; sequential, with a warning, where "auto" has no profile with so many GPUs.

    Raises ValueError if a kept value is for another problem.
    """
    if spec in kept:
        schedule = kept[spec]
        if schedule.problem != problem:
            raise ValueError(f"schedule is for {schedule.problem}; this call is {problem}")
        return schedule
    if spec != "auto":
        return schedules.build(problem, *schedules.parse(spec))
    # Only "auto" needs the simulator and its packages: a stock PyTorch container runs every schedule that is named.
    from weft.planner import plan

    profile = machine.load(machine_for(device))
    if problem.world_size > profile.world_size:
        warnings.warn(
            f"no machine profile has {problem.world_size} GPUs ({profile.name} has {profile.world_size}): sequential",
            stacklevel=2,
        )
        return schedules.build(problem, "sequential")
    best = plan(problem, profile).chosen
    return schedules.build(problem, best.schedule, best.chunks)


def machine_for(device: torch.device) -> str:
    """The shipped profile that is nearest to a device; h200x8 where none is."""
    name = torch.cuda.get_device_name(device).lower().replace(" ", "") if device.type == "cuda" else ""
    return next((m for m in machine.names() if m.split("x8")[0] and m.split("x8")[0] in name), "h200x8")
