"""What if a number of a machine were another: the machine with what goes along with it.

    links.gbps       copies, stores, a host's links and collectives carry bytes in proportion; fixed costs stay
    links.topology   a GPU's links together keep their rate: on a ring each of two has half, on a mesh each of n - 1 its part;
                     collectives go with what crosses the busiest link. Their sources say so
    gpu.sms          the matrix peak goes along, since an SM keeps its rate. Memory and links do not. So many SMs store as fast
                     as before, so the table of stores ends at the new count. Lanes of communication blocks shrink where they
                     would have more than their share
    world_size       tables of collectives stay: more ranks are extrapolated by hops and bytes

What is set itself does not go along with anything. Sources say which numbers were set, and which went along.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from weft.core import codec
from weft.core.machine import STORES_SHARE, AlphaBeta, Machine, Table, numbers, within
from weft.core.settings import numbers_of

BY_HAND = "set by hand"
"""The source of a number that was set for a what-if."""
RESCALED = f"scaled with what was {BY_HAND}; before: "
"""What the source of a number begins with that went along."""
_TEXT_FIELDS = ("links.topology", "copies.strided")
_OPTIONAL = ("links.host_gbps",)


def what_if(machine: Machine, changes: Mapping[str, Any]) -> Machine:
    """See the module's text. changes: by path, a value, or a text that has it as JSON. Raises ValueError for a path that the
    machine does not have, and for a value that it cannot have, with what would work."""
    known = dict.fromkeys([*(path for path, _ in numbers(machine)), *_TEXT_FIELDS, *_OPTIONAL])
    for path in changes:
        if path not in known:
            raise ValueError(f"{path!r} is no number of machine {machine.name}; it has {', '.join(known)}")

    def read(path: str, value: Any) -> Any:
        return numbers_of(path, value) if isinstance(value, str) and path not in _TEXT_FIELDS else value

    edits = {path: read(path, value) for path, value in changes.items()}
    if not edits:
        return machine
    _refuse(machine, edits)
    changed = _set(machine, edits)
    moved = _with_links(machine, changed, edits)
    moved |= _with_sms(machine, changed, edits, moved)
    sources: dict[str, str | None] = dict.fromkeys(path for path in edits if path not in _TEXT_FIELDS)
    sources |= {path: RESCALED + machine.sources[path] for path in moved if path in machine.sources}
    return _replace(changed, moved, sources, _describe(machine, edits))


def _refuse(machine: Machine, edits: Mapping[str, Any]) -> None:
    """What cannot be said, with what would work."""
    if edits.get("copies.engines") == 0:
        raise ValueError(
            "copies.engines is 0; schedules of copies need an engine: for a GPU without one, name a schedule of stores by "
            "--schedule, such as direct_store or flag_gated_2d"
        )
    blocks, sms = edits.get("stores.sms", 1), edits.get("gpu.sms", machine.gpu.sms)
    if isinstance(blocks, int) and isinstance(sms, int) and blocks > max(1, sms // 2):
        raise ValueError(f"stores.sms is {blocks}; a GEMM runs during communication: use at most {sms // 2}, half of gpu.sms")
    if edits.get("gpu.sms") == 1:
        raise ValueError("gpu.sms is 1; communication blocks and a GEMM run concurrently: use 2 or more")


def _set(machine: Machine, edits: Mapping[str, Any]) -> dict[str, Any]:
    """The machine as JSON has it, with the edited values."""
    data: dict[str, Any] = codec.dump(machine)
    for path, value in edits.items():
        _put(data, path, value)
    return data


def _put(data: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        data = data[parent]
    data[last] = value


def _replace(data: dict[str, Any], moved: Mapping[str, Any], sources: Mapping[str, str | None], description: str) -> Machine:
    for path, value in moved.items():
        _put(data, path, value)
    for path, source in sources.items():
        data["sources"][path] = source or BY_HAND
    data["description"] = description
    made: Machine = codec.load(Machine, data)
    return made


def _describe(machine: Machine, edits: Mapping[str, Any]) -> str:
    """Return the description of the changed machine: its number of GPUs, and the edits."""
    description = machine.description
    if "world_size" in edits:
        description = re.sub(rf"^{machine.world_size}\b", str(edits["world_size"]), description)
    others = [f"{path} {value}" for path, value in edits.items() if not isinstance(value, list)]
    others += [path for path, value in edits.items() if isinstance(value, list)]
    return f"{description}; what if {', '.join(others)}"


def _with_links(machine: Machine, data: dict[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """What goes along with the rate of links, or their topology."""
    links, ranks = machine.links, max(2, data["world_size"])
    moved: dict[str, Any] = {}
    topology = edits.get("links.topology", links.topology)
    if topology not in _LINKS:
        return moved  # the machine says which there are
    if topology != links.topology and "links.gbps" not in edits:
        moved["links.gbps"] = within(links.gbps * _LINKS[links.topology](ranks) / _LINKS[topology](ranks))
    rate = edits.get("links.gbps", moved.get("links.gbps", links.gbps))
    if not isinstance(rate, (int, float)) or not rate > 0:
        return moved  # the machine says what it must be
    host = edits.get("links.host_gbps", links.host_gbps)
    if "links.gbps" in edits and topology == links.topology:
        factor = rate / links.gbps
        if links.host_gbps and "links.host_gbps" not in edits:
            host = moved["links.host_gbps"] = within(links.host_gbps * factor)
        for path, gbps in (("copies.gbps", machine.copies.gbps), ("copies.several_gbps", machine.copies.several_gbps)):
            moved[path] = within(gbps * factor)
        moved["stores.gbps"] = [[sms, within(gbps * factor)] for sms, gbps in machine.stores.gbps]
    after = dataclasses.replace(links, topology=topology, gbps=rate, host_gbps=host)
    for op, model in machine.collectives.items():
        factor = links.wire_us(op, 1.0, ranks) / after.wire_us(op, 1.0, ranks)
        paths = {path for path, _ in numbers(model, f"collectives.{op}") if not path.endswith(".world_size")}
        if factor != 1.0 and not paths & set(edits):
            moved |= _along(op, model, factor)
    return {path: value for path, value in moved.items() if path not in edits}


_LINKS: dict[str, Callable[[int], float]] = {
    "switch": lambda n: 1.0,
    "pcie": lambda n: 1.0,
    "ring": lambda n: 2.0,
    "mesh": lambda n: n - 1.0,
}
"""The number of links of a GPU to n - 1 peers."""


def _along(op: str, model: Table | AlphaBeta, factor: float) -> dict[str, Any]:
    """By path, a collective on links of `factor` times the rate: what grows with bytes takes as much less."""
    found = codec.dump(rescale(model, factor))
    names = ("gbps",) if isinstance(model, AlphaBeta) else ("points", "also") if model.also else ("points",)
    return {f"collectives.{op}.{name}": found[name] for name in names}


def rescale(model: Table | AlphaBeta, factor: float) -> Table | AlphaBeta:
    """`model` on links of `factor` times the rate: what grows with bytes takes as much less, latency stays. Numbers stay within
    what a machine's may be.

    >>> rescale(Table(world_size=2, points=((64, 10.0), (1024, 30.0))), 2.0).points
    ((64, 10.0), (1024, 20.0))
    """
    if isinstance(model, AlphaBeta):
        return dataclasses.replace(model, gbps=within(model.gbps * factor))
    fixed_us = min(us for _, us in model.points)
    points = tuple((size, within(fixed_us + (us - fixed_us) / factor)) for size, us in model.points)
    return dataclasses.replace(model, points=points, also=tuple(_table(other, factor) for other in model.also))


def _table(table: Table, factor: float) -> Table:
    made = rescale(table, factor)
    assert isinstance(made, Table)
    return made


def _with_sms(
    machine: Machine, data: dict[str, Any], edits: Mapping[str, Any], moved_before: Mapping[str, Any]
) -> dict[str, Any]:
    """What goes along with the number of SMs. moved_before: what has gone along with the links."""
    sms, before = data["gpu"]["sms"], machine.gpu.sms
    if "gpu.sms" not in edits or not isinstance(sms, int) or sms < 2:
        return {}
    moved: dict[str, Any] = {f"gpu.tflops.{dtype}": within(rate * sms / before) for dtype, rate in machine.gpu.tflops.items()}
    stores = machine.stores
    if "stores.gbps" in moved_before:
        stores = dataclasses.replace(stores, gbps=tuple((count, gbps) for count, gbps in moved_before["stores.gbps"]))
    moved["stores.gbps"] = [*([count, gbps] for count, gbps in stores.gbps if count < sms), [sms, stores.rate(sms)]]
    if sms < before:
        moved["stores.sms"] = max(1, min(stores.sms, sms // STORES_SHARE))
        moved["stores.sms_alone"] = max(1, min(stores.sms_alone, sms // 2))
        if machine.network:
            moved["network.sms"] = max(1, min(machine.network.sms, sms // STORES_SHARE))
        if machine.collective_sms:
            moved["collective_sms"] = max(1, min(machine.collective_sms, sms // STORES_SHARE))
    return {path: value for path, value in moved.items() if path not in edits}
