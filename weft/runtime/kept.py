"""What was measured before, in an earlier process or of other row counts, agreed on by all ranks of a team.

    find    each rank reads the entry for a problem; ranks meet, and what rank 0 has counts     collective
            else what was measured with fewer and with more rows (weft.planner.between)
    keep    rank 0 writes                                                                       local
    due     after some calls of such a choice: it is time to hold it against sequential         local

So ranks whose folders differ still run the same schedule, and a rank that can read nothing costs no more than the meeting.
Row counts are looked up in what ranks have found together, so that they find the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import get_args

import torch

from weft.comm.team import Team
from weft.core.problem import Problem
from weft.planner.between import Between
from weft.planner.cache import Entry, Key, decode, encode, from_environment, space
from weft.runtime.bound import BoundProgram
from weft.runtime.choose import Effort, effort, profile_for
from weft.runtime.trial import Choice, Trial, as_good
from weft.runtime.versions import gpu_number, links_between, machine_of, versions

PROVED_AFTER = 20
"""Calls of a choice that was taken over, until it is held against the sequential program: all is warm by then."""
PREDICTED_AFTER = 3
"""The same of a choice that is only predicted: as many as callers make before they capture a graph."""
_AS_GOOD = 3
"""Specs beside the chosen one that an entry speaks for."""
_EFFORTS: tuple[Effort, ...] = get_args(Effort)


def agree(team: Team, device: torch.device) -> None:
    """See that every rank can read what schedules are chosen by, and has the others' effort, and copy lanes as they do. Raises
    ValueError on all where one cannot, or has not; the team goes on. Collective."""
    wrong: ValueError | None = None
    mine = 0
    try:
        mine = 1 + _EFFORTS.index(effort()) + len(_EFFORTS) * profile_for(device).fans_out
    except ValueError as error:
        wrong = error
    found = team.enter("what schedules are chosen by can be read", mine)
    if wrong is not None:
        raise wrong
    if 0 in found:
        raise ValueError(
            f"rank {found.index(0)} cannot read what schedules are chosen by (WEFT_EFFORT, WEFT_MACHINE): see there"
        )
    fan_out, efforts = zip(*(divmod(each - 1, len(_EFFORTS)) for each in found), strict=True)
    if len(set(efforts)) > 1:
        words = ", ".join(f"{_EFFORTS[each]} on rank {rank}" for rank, each in enumerate(efforts))
        raise ValueError(f"WEFT_EFFORT is {words}; set it alike on all ranks")
    if len(set(fan_out)) > 1:
        one, each = fan_out.index(False), fan_out.index(True)
        raise ValueError(
            f"machine profiles differ: rank {one} has one copy lane by its own, rank {each} one for each peer "
            "(copies.engines); set WEFT_MACHINE alike on all ranks"
        )


class KeptPlans:
    """What a team knows of earlier processes, by the user's folder of kept plans."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._cache = from_environment()
        self._between = Between()
        self._links: dict[torch.device, str] = {}

    def find(self, problem: Problem, device: torch.device) -> Choice | None:
        """What an earlier process chose by measuring, or this one for row counts around; None if it must be measured.
        Collective."""
        if device.type == "cuda":
            numbers = self._team.enter("GPUs of the group", gpu_number(device))
            self._links[device] = links_between([numbers[rank] for rank in self._team.near])
        with self._alone():
            entry = self._cache.read(self._key(problem, device)) if self._cache else None
        mine = encode(entry.spec) if entry else 0
        chosen = decode(self._team.enter(f"kept plan of {problem}", mine)[0])
        if chosen is None:
            return self.around(problem)
        self._between.add(problem, chosen, self._as_good(problem, entry))
        us = entry.us if entry and entry.spec == chosen else {}
        return Choice(problem=problem, spec=chosen, trials=tuple(Trial(spec=s, us=t) for s, t in us.items()), kept=True)

    def _as_good(self, problem: Problem, entry: Entry | None) -> list[str]:
        """What rank 0 knows to be as good as what it has chosen. Collective."""
        mine = entry.as_good[:_AS_GOOD] if entry else ()
        found = []
        for at in range(_AS_GOOD):
            number = encode(mine[at]) if at < len(mine) else 0
            if (spec := decode(self._team.enter(f"as good for {problem}: {at}", number)[0])) is None:
                break
            found.append(spec)
        return found

    def around(self, problem: Problem) -> Choice | None:
        """What was measured with fewer and with more rows. Ranks that have made the same calls know the same."""
        found = self._between.find(problem)
        if found is None:
            return None
        spec, *rows = found
        return Choice(problem=problem, spec=spec, like=tuple(rows))

    def keep(self, choice: Choice, device: torch.device) -> None:
        """Remember what was measured; for later processes, on rank 0."""
        if not choice.trials:
            return
        good = as_good(choice.trials, choice.spec)
        self._between.add(choice.problem, choice.spec, good)
        if self._cache and self._team.rank == 0:
            with self._alone():
                key = self._key(choice.problem, device)
                self._cache.write(Entry(key=key, spec=choice.spec, us=choice.us, as_good=good))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """What is raised in here, a warning that is an error, say, is this rank's alone: the others are told."""
        try:
            yield
        except BaseException as error:
            raise self._team.fail(error) from error.__cause__

    def _key(self, problem: Problem, device: torch.device) -> Key:
        machine, known = _here(device, self._team.world_size)
        if device in self._links:
            machine = machine | {"links": self._links[device]}
        machine = machine | {"profile": profile_for(device).digest}  # says what is worth measuring
        return Key(machine=machine, versions=known, problem=problem, space=space(effort()))


class Unproved:
    """Programs that run what was not measured here, and the calls that are left until they are held against sequential.

    Calls alike are as many on every rank, so that all ranks come to the trial at the same one.
    """

    def __init__(self) -> None:
        self._left: dict[BoundProgram, int] = {}
        self.verdicts: dict[Hashable, str] = {}
        """What was proved runs as, by key."""

    def add(self, program: BoundProgram, key: Hashable, calls: int) -> None:
        """key: what a verdict is about. One holds for the process, also for a program that is bound anew."""
        if key not in self.verdicts:
            self._left[program] = calls

    def due(self, program: BoundProgram) -> bool:
        """Count a call. Whether it is the one before which the program is to be proved, once."""
        if program not in self._left:
            return False
        self._left[program] -= 1
        return self._left[program] == 0 and self._left.pop(program) == 0

    def forget(self, program: BoundProgram) -> None:
        self._left.pop(program, None)


@cache
def _here(device: torch.device, world_size: int) -> tuple[dict[str, str], dict[str, str]]:
    return machine_of(device, world_size), versions(device.type)
