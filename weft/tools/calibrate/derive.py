"""Derives a profile for more GPUs of the kind on which a profile was measured.

Computation, copies, stores, flags and launches are those of the measured profile. The links lead to a switch, so a port's rate
does not change. The tables of collectives do not change either: predictions for more ranks add a hop for each further rank and
scale the time per byte by the number of peers, but stay within the links' rate (weft.perf.terms.collective_us).
"""

from __future__ import annotations

import dataclasses

from weft.core.machine import Machine


def derive(machine: Machine, world_size: int, name: str) -> Machine:
    """Return `machine` with `world_size` GPUs. Its sources say which numbers are derived.

    Raises ValueError for fewer GPUs than it has, and for links whose rate more GPUs would have to share."""
    if world_size <= machine.world_size:
        raise ValueError(f"--ranks is {world_size}; {machine.name} has {machine.world_size}: derive a profile of more")
    if machine.links.topology != "switch":
        raise ValueError(
            f"links.topology is {machine.links.topology!r}; only behind a switch do more GPUs leave links as they are"
        )
    description = f"{world_size} GPUs, derived from {machine.name} ({machine.description})"
    known = {path: f"derived from {machine.name}: {source}" for path, source in machine.sources.items()}
    known["world_size"] = f"derived from {machine.name}"
    return dataclasses.replace(machine, name=name, description=description, world_size=world_size, sources=known, spreads={})
