"""What was measured before, in an earlier process or of other row counts, agreed on by all ranks of a group.

    find    each rank reads the entry for a problem; ranks meet, and what rank 0 has counts     collective
            else what was measured with fewer and with more rows (weft.planner.between)
    keep    rank 0 writes                                                                       local
    due     after some calls of such a choice: it is time to hold it against sequential         local

So ranks whose folders differ still run the same schedule, and a rank that can read nothing costs no more than the meeting.
Row counts are looked up in what ranks have found together, so that they find the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

import torch

from weft.comm.rank_group import RankGroup
from weft.core.problem import Problem
from weft.planner.between import Between
from weft.planner.cache import Entry, Key, decode, encode, from_environment, space
from weft.runtime.bound import BoundProgram
from weft.runtime.choose import profile_for
from weft.runtime.trial import Choice, Trial, as_good
from weft.runtime.versions import gpu_number, links_between, machine_of, versions

PROVED_AFTER = 20
"""Calls of a choice that was taken over, until it is held against the sequential program: all is warm by then."""
_AS_GOOD = 3
"""Specs beside the chosen one that an entry speaks for."""


def agree(rank_group: RankGroup, device: torch.device) -> None:
    """See that every rank can read its machine profile, and that all profiles have as many copy lanes. Raises ValueError on all
    ranks where one cannot, or where they differ; the group goes on. Collective."""
    wrong: ValueError | None = None
    mine = 0
    try:
        mine = 2 if profile_for(device).fans_out else 1
    except ValueError as error:
        wrong = error
    found = rank_group.enter("the machine profile can be read", mine)
    if wrong is not None:
        raise wrong
    if 0 in found:
        raise ValueError(f"rank {found.index(0)} cannot read its machine profile (WEFT_MACHINE): see the error there")
    if len(set(found)) > 1:
        one, each = found.index(1), found.index(2)
        raise ValueError(
            f"machine profiles differ: rank {one} has one copy lane by its own, rank {each} one for each peer "
            "(copies.engines); set WEFT_MACHINE alike on all ranks"
        )


class KeptPlans:
    """What a group knows of earlier processes, by the user's folder of kept plans."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._cache = from_environment()
        self._between = Between()
        self._links: dict[torch.device, str] = {}

    def find(self, problem: Problem, device: torch.device) -> Choice | None:
        """What an earlier process chose by measuring, or this one for row counts around; None if it must be measured.
        Collective."""
        if device.type == "cuda":
            numbers = self._rank_group.enter("GPUs of the group", gpu_number(device))
            self._links[device] = links_between([numbers[rank] for rank in self._rank_group.near])
        with self._rank_group.failing():
            entry = self._cache.read(self._key(problem, device)) if self._cache else None
        mine = encode(entry.spec) if entry else 0
        chosen = decode(self._rank_group.enter(f"kept plan of {problem}", mine)[0])
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
            if (spec := decode(self._rank_group.enter(f"as good for {problem}: {at}", number)[0])) is None:
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
        if self._cache and self._rank_group.rank == 0:
            with self._rank_group.failing():
                key = self._key(choice.problem, device)
                self._cache.write(Entry(key=key, spec=choice.spec, us=choice.us, as_good=good))

    def _key(self, problem: Problem, device: torch.device) -> Key:
        machine, known = _here(device, self._rank_group.world_size)
        if device in self._links:
            machine = machine | {"links": self._links[device]}
        machine = machine | {"profile": profile_for(device).digest}  # says what is worth measuring
        return Key(machine=machine, versions=known, problem=problem, space=space())


class Unproved:
    """Programs that run what was not measured here, and the calls that are left until they are held against sequential.

    Calls alike are as many on every rank, so that all ranks come to the trial at the same one.
    """

    def __init__(self) -> None:
        self._left: dict[BoundProgram, int] = {}
        self.proved: set[Hashable] = set()
        """What has been held against sequential, by key."""

    def add(self, program: BoundProgram, key: Hashable, calls: int) -> None:
        """key: what is proved once in a process, also for a program that is bound anew."""
        if key not in self.proved:
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
