"""The tuner decides which schedule "auto" runs in a process group.

A choice comes from an autotuning run in this group, from an earlier process, or from another row count.

    specs            returns the candidates for a problem: one if the choice is known, several if they must be measured
    prepare_run      sets up the autotuning run of those (weft.runtime.autotune)
    record_choice    records the winner; rank 0 writes it to the user's plan cache on disk (weft.runtime.plan_cache)

All ranks run what rank 0 has read from its cache. If rank 0 finds nothing there, all ranks measure. What another rank finds
adds only measured times to its own report. Everything else here depends only on calls that the ranks have agreed on, so all
ranks come to the same result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache

import torch

from weft import schedules
from weft.comm.rank_group import RankGroup
from weft.compat.device import gpu_number
from weft.core.problem import Problem
from weft.runtime import plan_cache as plans
from weft.runtime.autotune import AutotuningRun, Choice, Measurement, queued_timer_for, timer_for
from weft.runtime.bound import BoundProgram
from weft.runtime.buckets import RowCounts
from weft.runtime.calls import Call
from weft.runtime.choose import MODES, auto_candidates, planned, profile_for
from weft.runtime.versions import links_between, machine_of, versions

CHOICES = 4096
"""A group remembers the choices of this many problems. The oldest is dropped, and then read from disk or measured again."""

Key = tuple[Problem, str, torch.device]
"""A program is looked up by its problem, the caller's `schedule=`, and the device."""


class Tuner:
    """A Tuner holds the choices of one process group, and finds new ones."""

    def __init__(self, rank_group: RankGroup, row_counts: RowCounts) -> None:
        self._rank_group, self._row_counts = rank_group, row_counts
        self._choices: OrderedDict[tuple[Problem, torch.device], Choice] = OrderedDict()
        self._planned: OrderedDict[tuple[Problem, torch.device], Choice] = OrderedDict()
        """What the planner has chosen for calls with "planned". Calls with "auto" may measure the same problems."""
        self._plan_cache = GroupPlanCache(rank_group)

    def choices(self) -> list[Choice]:
        return [*self._choices.values(), *self._planned.values()]

    def specs(self, problem: Problem, call: Call) -> tuple[str, ...]:
        """Return the candidates for a call: one schedule, or several at the first call of a problem that must be measured.

        Collective. Raises ValueError on all ranks if one of them cannot read its machine profile.
        """
        device = call.device
        if call.schedule in MODES:
            agree(self._rank_group, device)
        if call.schedule != "auto":
            return (call.schedule,)
        known = self._choices.get((problem, device))
        if known is None and not (call.tried and timer_for(device)):
            return (planned(problem, device),)
        known = known or self._plan_cache.find(problem, device) or self._row_counts.like(problem, device)
        if known is None:
            return auto_candidates(problem, device)
        _remember(known, device, self._choices)
        if known.from_cache:
            self._row_counts.measured(known, device)
        return (known.spec,)

    def measures(self, problem: Problem, call: Call) -> bool:
        """Return whether a program that is bound without an autotuning run may time its matmul algorithms.

        It may not with "planned", which measures nothing, nor if the schedule was taken over from another row count.
        """
        known = self._choices.get((problem, call.device)) if call.schedule == "auto" else None
        return call.schedule != "planned" and not (known and known.like)

    def prepare_run(
        self, call: Call, bind: Callable[[str], BoundProgram], drop: Callable[[BoundProgram], None]
    ) -> AutotuningRun[BoundProgram]:
        """Set up an autotuning run that makes calls like this one."""
        timer = timer_for(call.device)
        assert timer is not None, "schedules are measured only where calls can be timed"
        return AutotuningRun(
            bind=bind,
            drop=drop,
            call=lambda program: program.run(call.inputs),
            timer=timer,
            queued=queued_timer_for(call.device),
            exchange=self._rank_group.agree_on_call,
        )

    def record_choice(self, program: BoundProgram, key: Key, measurements: tuple[Measurement, ...]) -> None:
        """Record which program was bound for a call. measurements: what was measured; empty if there was one candidate."""
        problem, asked, device = key
        choices = self._planned if asked == "planned" else self._choices
        if asked not in MODES or (problem, device) in choices:
            return
        chosen, profile = program.schedule, ""
        if asked == "planned" or timer_for(device) is None:
            profile = profile_for(device, self._rank_group.world_size).name
        spec = schedules.spec(chosen.name, chosen.chunks)
        _remember(Choice(problem=problem, spec=spec, measurements=measurements, predicted_for=profile), device, choices)
        if measurements:
            self._row_counts.measured(choices[problem, device], device)
            self._plan_cache.keep(choices[problem, device], device)


def _remember(choice: Choice, device: torch.device, choices: OrderedDict[tuple[Problem, torch.device], Choice]) -> None:
    choices[choice.problem, device] = choice
    if len(choices) > CHOICES:
        choices.popitem(last=False)


def agree(rank_group: RankGroup, device: torch.device) -> None:
    """Check that every rank can read its machine profile, that all profiles have the same number of copy lanes, and that all
    ranks have registered the same families, because they exchange the number of a family (weft.runtime.plan_cache).

    Collective. Raises RankMismatch for different families. Otherwise it raises ValueError on all ranks, and the group stays
    usable.
    """
    wrong: ValueError | None = None
    mine = 0
    try:
        mine = 2 if profile_for(device, rank_group.world_size).fans_out else 1
    except ValueError as error:
        wrong = error
    registered = ", ".join(family.name for family in schedules.FAMILIES.values() if family.registered)
    families = f"\nregistered families: {registered or 'none'}"
    found = rank_group.agree_on_call(f"the machine profile can be read{families}", mine)
    if wrong is not None:
        raise wrong
    if 0 in found:
        raise ValueError(f"rank {found.index(0)} cannot read its machine profile (WEFT_MACHINE): see the error there")
    if len(set(found)) > 1:
        one, each = found.index(1), found.index(2)
        raise ValueError(
            f"machine profiles differ: rank {one} has one copy lane by its own, rank {each} one for each peer "
            "(copies.engines); set WEFT_MACHINE to the same profile on all ranks"
        )


class GroupPlanCache:
    """GroupPlanCache reads and writes the user's plan cache, which holds what earlier processes have measured."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._cache = plans.from_environment()
        self._links: dict[torch.device, str] = {}

    def find(self, problem: Problem, device: torch.device) -> Choice | None:
        """Return what an earlier process measured and chose. Return None if the problem must be measured. Collective."""
        if device.type == "cuda":
            numbers = self._rank_group.agree_on_call("GPUs of the group", gpu_number(device))
            self._links[device] = links_between([numbers[rank] for rank in self._rank_group.ranks_on_node])
        with self._rank_group.fail_group_on_error():
            entry = self._cache.read(self._key(problem, device)) if self._cache else None
        mine = plans.encode(entry.spec) if entry else 0
        chosen = plans.decode(self._rank_group.agree_on_call(f"cached plan of {problem}", mine)[0])
        if chosen is None:
            return None
        us = entry.us if entry and entry.spec == chosen else {}
        return Choice(
            problem=problem, spec=chosen, measurements=tuple(Measurement(spec=s, us=t) for s, t in us.items()), from_cache=True
        )

    def keep(self, choice: Choice, device: torch.device) -> None:
        """On rank 0, write a choice for later processes."""
        if self._cache and self._rank_group.rank == 0:
            with self._rank_group.fail_group_on_error():
                self._cache.write(plans.Entry(key=self._key(choice.problem, device), spec=choice.spec, us=choice.us))

    def _key(self, problem: Problem, device: torch.device) -> plans.Key:
        machine, known = _machine_and_versions(device, self._rank_group.world_size)
        if device in self._links:
            machine = machine | {"links": self._links[device]}
        machine = machine | {"profile": profile_for(device, self._rank_group.world_size).digest}  # the candidates depend on it
        return plans.Key(machine=machine, versions=known, problem=problem, families=plans.digest_of_families(problem))


@cache
def _machine_and_versions(device: torch.device, world_size: int) -> tuple[dict[str, str], dict[str, str]]:
    return machine_of(device, world_size), versions(device.type)
