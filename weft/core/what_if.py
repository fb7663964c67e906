"""Changes numbers of a machine, and the numbers that depend on them.

    links.gbps       The rates of copies, stores, a host's links and collectives change in proportion. Fixed costs stay.
    links.topology   The sum of the rates of a GPU's links stays. On a ring each of two links has half of it, on a mesh each of
                     n - 1 links an equal share. The rates of collectives change with the traffic on the busiest link.
    gpu.sms          The peak rates of matmuls change in proportion, because the rate of an SM stays. Memory and links stay. The
                     rate of stores by a given number of SMs stays, so its table ends at the new number of SMs. Communication
                     blocks get at most a fixed share of the SMs.
    world_size       Nothing else changes. The simulator extrapolates the tables of collectives by hops and bytes.

A number that is set explicitly is taken as it is. The sources of the numbers say which were set, and which were rescaled.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from weft.core import codec
from weft.core.machine import STORES_SHARE, AlphaBeta, Machine, Table, numbers, within
from weft.core.settings import numbers_of, put

BY_HAND = "set by hand"
"""The source of a number that was set for a what-if."""
RESCALED = f"scaled with what was {BY_HAND}; before: "
"""The source of a number that was rescaled begins with this text."""
_TEXT_FIELDS = ("links.topology", "copies.strided")
_OPTIONAL = ("links.host_gbps",)
"""Paths that can be set even if the machine does not have them."""


def what_if(machine: Machine, changes: Mapping[str, Any]) -> Machine:
    """Return the machine with these changes, and with all numbers rescaled that depend on them, as the module describes.

    Raises ValueError for a path that the machine does not have, and for a value that it cannot have, with what would work.

    changes: the new value of each path, or its JSON as text.
    """
    known = dict.fromkeys([*(path for path, _ in numbers(machine)), *_TEXT_FIELDS, *_OPTIONAL])
    for path in changes:
        if path not in known:
            raise ValueError(f"{path!r} is no number of machine {machine.name}; it has {', '.join(known)}")

    def read(path: str, value: Any) -> Any:
        return numbers_of(path, value) if isinstance(value, str) and path not in _TEXT_FIELDS else value

    edits = {path: read(path, value) for path, value in changes.items()}
    if not edits:
        return machine
    _check(machine, edits)
    data: dict[str, Any] = codec.dump(machine)
    _put_all(data, edits)
    rescaled = _rescale_with_links(machine, data, edits)
    rescaled |= _rescale_with_sms(machine, data, edits, rescaled)
    _put_all(data, rescaled)
    data["sources"] |= {path: BY_HAND for path in edits if path not in _TEXT_FIELDS}
    data["sources"] |= {path: RESCALED + machine.sources[path] for path in rescaled if path in machine.sources}
    data["description"] = _describe(machine, edits)
    made: Machine = codec.load(Machine, data)
    return made


def _put_all(data: dict[str, Any], values: Mapping[str, Any]) -> None:
    for path, value in values.items():
        put(data, path, lambda _: value)  # noqa: B023


def _check(machine: Machine, edits: Mapping[str, Any]) -> None:
    """Raise ValueError for a number that no schedule could run with, with what would work."""
    if edits.get("copies.engines") == 0:
        raise ValueError(
            "copies.engines is 0; schedules that copy need an engine: for a GPU without one, choose a schedule that stores, "
            "such as --schedule direct_store or flag_gated_2d"
        )
    blocks, sms = edits.get("stores.sms", 1), edits.get("gpu.sms", machine.gpu.sms)
    if isinstance(blocks, int) and isinstance(sms, int) and blocks > max(1, sms // 2):
        raise ValueError(f"stores.sms is {blocks}; a GEMM runs during communication: use at most {sms // 2}, half of gpu.sms")
    if edits.get("gpu.sms") == 1:
        raise ValueError("gpu.sms is 1; communication blocks and a GEMM run concurrently: use 2 or more")


def _describe(machine: Machine, edits: Mapping[str, Any]) -> str:
    """Return the description of the changed machine: its number of GPUs, and the edits."""
    description = machine.description
    if "world_size" in edits:
        description = re.sub(rf"^{machine.world_size}\b", str(edits["world_size"]), description)
    others = [f"{path} {value}" for path, value in edits.items() if not isinstance(value, list)]
    others += [path for path, value in edits.items() if isinstance(value, list)]
    return f"{description}; what if {', '.join(others)}"


def _rescale_with_links(machine: Machine, data: dict[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers that change with the rate or the topology of links, by path."""
    links, ranks = machine.links, max(2, data["world_size"])
    rescaled: dict[str, Any] = {}
    topology = edits.get("links.topology", links.topology)
    if topology not in _LINKS_PER_GPU:
        return rescaled  # loading the machine raises an error that lists the topologies
    if topology != links.topology and "links.gbps" not in edits:
        rescaled["links.gbps"] = within(links.gbps * _LINKS_PER_GPU[links.topology](ranks) / _LINKS_PER_GPU[topology](ranks))
    rate = edits.get("links.gbps", rescaled.get("links.gbps", links.gbps))
    if not isinstance(rate, (int, float)) or not rate > 0:
        return rescaled  # loading the machine raises an error that says what works
    host = edits.get("links.host_gbps", links.host_gbps)
    if "links.gbps" in edits and topology == links.topology:
        factor = rate / links.gbps
        if links.host_gbps and "links.host_gbps" not in edits:
            host = rescaled["links.host_gbps"] = within(links.host_gbps * factor)
        for path, gbps in (("copies.gbps", machine.copies.gbps), ("copies.several_gbps", machine.copies.several_gbps)):
            rescaled[path] = within(gbps * factor)
        rescaled["stores.gbps"] = [[sms, within(gbps * factor)] for sms, gbps in machine.stores.gbps]
    after = dataclasses.replace(links, topology=topology, gbps=rate, host_gbps=host)
    for op, model in machine.collectives.items():
        factor = links.wire_us(op, 1.0, ranks) / after.wire_us(op, 1.0, ranks)
        paths = {path for path, _ in numbers(model, f"collectives.{op}") if not path.endswith(".world_size")}
        if factor != 1.0 and not paths & set(edits):
            rescaled |= _rescale_collective(op, model, factor)
    return {path: value for path, value in rescaled.items() if path not in edits}


_LINKS_PER_GPU: dict[str, Callable[[int], float]] = {
    "switch": lambda n: 1.0,
    "pcie": lambda n: 1.0,
    "ring": lambda n: 2.0,
    "mesh": lambda n: n - 1.0,
}
"""The number of links that a GPU has among n GPUs, by topology."""


def _rescale_collective(op: str, model: Table | AlphaBeta, factor: float) -> dict[str, Any]:
    """Return the numbers of a collective whose links are `factor` times as fast, by path."""
    rescaled = codec.dump(rescale(model, factor))
    names = ("gbps",) if isinstance(model, AlphaBeta) else ("points", "also") if model.also else ("points",)
    return {f"collectives.{op}.{name}": rescaled[name] for name in names}


def rescale(model: Table | AlphaBeta, factor: float) -> Table | AlphaBeta:
    """Return the costs of a collective whose links are `factor` times as fast.

    The time that grows with bytes is divided by the factor, and the latency stays. All numbers stay within the limits of a
    machine's numbers.

    >>> rescale(Table(world_size=2, points=((64, 10.0), (1024, 30.0))), 2.0).points
    ((64, 10.0), (1024, 20.0))
    """
    if isinstance(model, AlphaBeta):
        return dataclasses.replace(model, gbps=within(model.gbps * factor))
    fixed_us = min(us for _, us in model.points)
    points = tuple((size, within(fixed_us + (us - fixed_us) / factor)) for size, us in model.points)
    return dataclasses.replace(model, points=points, also=tuple(_rescale_table(other, factor) for other in model.also))


def _rescale_table(table: Table, factor: float) -> Table:
    rescaled = rescale(table, factor)
    assert isinstance(rescaled, Table)
    return rescaled


def _rescale_with_sms(
    machine: Machine, data: dict[str, Any], edits: Mapping[str, Any], rescaled_with_links: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the numbers that change with the number of SMs, by path.

    rescaled_with_links: the numbers that `_rescale_with_links` has returned.
    """
    sms, before = data["gpu"]["sms"], machine.gpu.sms
    if "gpu.sms" not in edits or not isinstance(sms, int) or sms < 2:
        return {}
    rescaled: dict[str, Any] = {
        f"gpu.tflops.{dtype}": within(rate * sms / before) for dtype, rate in machine.gpu.tflops.items()
    }
    stores = machine.stores
    if "stores.gbps" in rescaled_with_links:
        stores = dataclasses.replace(stores, gbps=tuple((count, gbps) for count, gbps in rescaled_with_links["stores.gbps"]))
    rescaled["stores.gbps"] = [*([count, gbps] for count, gbps in stores.gbps if count < sms), [sms, stores.rate(sms)]]
    if sms < before:
        rescaled["stores.sms"] = max(1, min(stores.sms, sms // STORES_SHARE))
        rescaled["stores.sms_alone"] = max(1, min(stores.sms_alone, sms // 2))
        if machine.network:
            rescaled["network.sms"] = max(1, min(machine.network.sms, sms // STORES_SHARE))
        if machine.collective_sms:
            rescaled["collective_sms"] = max(1, min(machine.collective_sms, sms // STORES_SHARE))
    return {path: value for path, value in rescaled.items() if path not in edits}
