"""A profile for more GPUs of the kind that one was measured on.

What a GPU does alone, its copies, stores, flags and launches are those of the measured profile. Its links are behind a switch,
so that a port's rate stays. Tables of collectives stay as measured: predictions for more ranks add a hop for each further one,
and scale what grows with bytes by the number of peers, but never below what the links carry (weft.perf.terms.collective_us).
"""

from __future__ import annotations

import dataclasses

from weft.core.machine import Machine


def derive(machine: Machine, world_size: int, name: str) -> Machine:
    """`machine` with `world_size` GPUs; sources say what is derived. Raises ValueError for fewer GPUs than it has, and for
    links that more GPUs would divide among them."""
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
