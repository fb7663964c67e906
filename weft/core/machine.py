"""Machine: the numbers of a host with GPUs. Profiles are data files in weft/core/machines, each number with its source.

Contract: a Machine that exists is complete. Every number is from 1e-12 to 1e15, so that times computed from them are finite;
latencies and `stores.stall` may also be zero. Counts, such as SMs and the sides of tiles, are at most 65,536, because
predictions have an entry for each. `sources` says where each number is from: measured (with its date), a paper, a data sheet,
or assumed. A file that lacks a number or a source, or has an unknown one, is refused with the name of the file and
of the field.

Times are in microseconds, rates in 1e9 bytes/s (gbps) or 1e12 operations/s (tflops).
Topologies, for ranks 0 .. world_size-1:

    switch   each GPU has a port out and a port in of `gbps`; every pair communicates at full speed
    mesh     every pair has a link of `gbps` in each direction
    ring     each GPU has a link of `gbps` in each direction to both neighbours; traffic to others passes through them
    pcie     like switch, and all traffic shares the host's `host_gbps`

`Machine.what_if` changes numbers, and the numbers that depend on them:

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
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from weft.core import codec
from weft.core.errors import require
from weft.core.hardware import LEAST, MOST, AlphaBeta, CopyEngines, Gpu, Kernels, Links, Network, Stores, Table, numbers, within
from weft.core.problem import Problem, Scaling
from weft.core.settings import numbers_of, put, unknown_path

MAY_BE_ZERO = frozenset({"stores.stall", "links.latency_us", "network.latency_us"})
STORES_SHARE = 4
"""Communication blocks occupy at most a quarter of a small GPU's SMs."""
COUNTS = frozenset(
    {
        "world_size",
        "gpu.sms",
        "gpu.tiles",
        "gpu.kernel_tiles",
        "gpu.stored_tiles",
        "gpu.tile_step",
        "copies.engines",
        "stores.sms",
        "stores.sms_alone",
        "kernels.sums",
        "kernels.lookup_copy_bytes",
        "network.sms",
        "collective_sms",
        *(f"collectives.{op}.world_size" for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")),
    }
)
"""The numbers that count something. All other whole numbers are bytes, or extents of matrices."""
MOST_COUNT = 1 << 16
"""No machine has as many SMs or GPUs. Predictions take memory for each of them."""
_NOTHING_US = 1e-3
"""The smallest time, in microseconds. Numbers must be above zero, and times count whole nanoseconds."""
_PROFILES = Path(__file__).with_name("machines")
BY_HAND = "set by hand"
"""The source of a number that was set for a what-if."""
RESCALED = f"scaled with what was {BY_HAND}; before: "
"""The source of a number that was rescaled begins with this text."""
_TEXT_FIELDS = ("links.topology", "copies.strided")
_OPTIONAL = ("links.host_gbps",)
"""Paths that can be set even if the machine does not have them."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs of one host and what connects them.

    help(weft.machine) has units and sources; weft.core.machine.load reads a profile.

    name: the name that `--machine` takes. description: one line for reports. world_size: the number of GPUs.
    launch_us: the time from the end of one kernel of a stream to the start of the next one's work.
    flag_us: the time of a stream's wait or signal.
    wake_us: the time from a signal to the next step of the copy lane that waited for it, if it waited longer than that. None
        for 0.
    fork_us: the time to start the lanes besides the compute lane, and from a copy lane back to it, if measured.
    stages: library matmuls and collectives are called through torch, with the staging around them (weft.perf.transfers).
    collectives: NCCL's collectives by name. all_to_all may be missing, and then costs as much as all_gather. all_reduce may be
        missing, and then is a reduce_scatter and an all_gather.
    collective_sms: the SMs that an NCCL collective occupies. None for as many as stores.sms.
    contention: the slowdown of the first during the second ("gemm during copy"), if known. The simulator uses those of GEMMs
        and copies, of copies at the full rate, and of a user's computation and collectives (weft.perf.concurrent).
    host_wait_us: the time from the end of a copy that the host waits for to the start of a collective that the host enqueues
        then. None for 0.
    slow_lookups: lookups and concurrent kernels that copy rows slow each other (weft.perf.transfers).
    network: the network between several such hosts, if known.
    device: the GPU on which the numbers were measured, as its driver names it. Empty if they have several sources.
    sources: the source of each number, by the path that `numbers` gives it.
    spreads: the variation of measured numbers: half of their interquartile range, as a share of the median.
    """

    name: str
    description: str
    world_size: int
    gpu: Gpu
    copies: CopyEngines
    stores: Stores
    kernels: Kernels
    links: Links
    launch_us: float
    flag_us: float
    collectives: Mapping[Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"], Table | AlphaBeta]
    sources: Mapping[str, str]
    contention: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict, metadata={"about": "numbers"})
    network: Network | None = None
    wake_us: float | None = None
    device: str = ""
    stages: bool = False
    fork_us: float | None = None
    collective_sms: int | None = None
    host_wait_us: float | None = None
    slow_lookups: bool = True

    def __post_init__(self) -> None:
        texts = {"name": self.name, "description": self.description, "device": self.device}
        for path, text in (texts | {f"sources.{path}": text for path, text in self.sources.items()}).items():
            if not text.isprintable():
                raise ValueError(f"{path} is {text!r:.80}; it must be one line of letters that print")
        for path, value in numbers(self):
            if not value > 0 and not (path in MAY_BE_ZERO and value == 0):
                raise ValueError(f"{path} is {value!r}; it must be above zero")
            if value and not LEAST <= value <= MOST:
                raise ValueError(f"{path} is {value!r}; it must be from {LEAST:g} to {MOST:g}")
            if path in COUNTS and value > MOST_COUNT:
                raise ValueError(f"{path} is {value!r}; it must be at most {MOST_COUNT}")
        self._check_tables()
        self._check_sources()
        taken = {"stores.sms": self.stores.sms, "stores.sms_alone": self.stores.sms_alone}
        for path, sms in (taken | ({"network.sms": self.network.sms} if self.network else {})).items():
            if sms >= self.gpu.sms:
                raise ValueError(f"{path} is {sms}; it must be below gpu.sms, {self.gpu.sms}")
        shares = {"gpu.half_tile": self.gpu.half_tile, "kernels.l2_share": self.kernels.l2_share}
        for path, share in (shares | {"kernels.streamed": self.kernels.streamed}).items():
            if share > 1:
                raise ValueError(f"{path} is {share!r}; it is a share, at most 1")
        if self.links.topology == "pcie" and self.links.host_gbps is None:
            raise ValueError("links.host_gbps is missing; a pcie machine shares it: give its rate, too")
        for op in ("all_gather", "reduce_scatter"):
            if op not in self.collectives:
                raise ValueError(f"collectives.{op} is missing; give a Table or an AlphaBeta")

    def _check_tables(self) -> None:
        tables = {"stores.gbps": self.stores.gbps}
        for op, model in self.collectives.items():
            if isinstance(model, Table):
                tables |= {f"collectives.{op}.points": model.points}
                tables |= {f"collectives.{op}.also[{i}].points": table.points for i, table in enumerate(model.also)}
        for path, rows in tables.items():
            keys = [key for key, _ in rows]
            if not keys or keys != sorted(set(keys)):
                raise ValueError(f"{path} has {keys!r} in its first column; it must have at least one row, and rise")
        if not self.gpu.tiles:
            raise ValueError("gpu.tiles is empty; give at least one tile shape")
        if not self.gpu.tflops:
            raise ValueError("gpu.tflops is empty; give the matrix rate of at least one dtype")

    def _check_sources(self) -> None:
        paths = {path for path, _ in numbers(self)}
        for path in sorted(paths - set(self.sources)):
            raise ValueError(f"sources.{path} is missing; say where the number is from: measured, paper, data sheet or assumed")
        for path in sorted(set(self.sources) - paths):
            raise ValueError(f"sources.{path} is about no number of this machine")
        for path in sorted(set(self.spreads) - paths):
            raise ValueError(f"spreads.{path} is about no number of this machine")
        for path, source in self.sources.items():
            if not source.strip():
                raise ValueError(f"sources.{path} is empty; say where the number is from")

    def tflops(self, dtype: str) -> float:
        """Return the matrix peak for `dtype`, or for FP8 operands by the name of their rate (`Problem.rate_name`). Raises
        ValueError if the profile has none."""
        if dtype not in self.gpu.tflops:
            raise ValueError(
                f"dtype is {dtype!r}; machine {self.name} has rates for {', '.join(self.gpu.tflops)}: use one of these, or add "
                f"gpu.tflops.{dtype} and its source to the machine's file"
            )
        return self.gpu.tflops[dtype]

    def kernel_rate(self, scaling: Scaling | None, dtype: str) -> str:
        """Return the name of the rate at which weft's GEMM kernel multiplies operands of a dtype, or of FP8."""
        if scaling is None:
            return dtype
        return scaling.kernel_rate_name if scaling.kernel_rate_name in self.gpu.tflops else scaling.rate_name

    def what_if(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> Machine:
        """Return this machine with other numbers, and with those rescaled that depend on them: the module describes how.

        changes: the new value of each path, or its JSON as text. more: the same, with __ in place of a dot. Raises ValueError
        for a path that does not exist, and for a value that is not allowed, with what would work.

        >>> faster = load("h200x8").what_if(links__gbps=780.0)
        >>> faster.copies.gbps, faster.stores.rate(4), faster.sources["copies.gbps"][:23]
        (740.0, 230.0, 'scaled with what was se')
        """
        return _what_if(self, {**(changes or {}), **{name.replace("__", "."): value for name, value in more.items()}})

    @cached_property
    def within_a_kernel(self) -> Machine:
        """The machine as the steps of a running kernel see it: launches and flags take no time."""
        wake_us = self.wake_us and _NOTHING_US
        return dataclasses.replace(self, launch_us=_NOTHING_US, flag_us=_NOTHING_US, wake_us=wake_us)

    @cached_property
    def digest(self) -> str:
        """A hash of sixteen letters that changes with any field."""
        return hashlib.sha256(codec.dumps(self).encode()).hexdigest()[:16]

    @property
    def fans_out(self) -> bool:
        """True if copies to several peers should run concurrently. Schedules then have a copy lane for each peer."""
        return self.copies.engines > 1

    def require_for(self, problem: Problem) -> None:
        """Raise ValueError if a node of the problem needs more GPUs than the machine has, or several nodes need a network."""
        self.require(max(problem.nodes or (problem.world_size,)))
        if problem.nodes and self.network is None:
            raise ValueError(
                f"nodes is {problem.nodes}; machine {self.name} has no network: set network.gbps, network.latency_us, "
                "network.step_us and network.sms in its profile, each with its source, or use one node"
            )

    def nodes_for(self, world_size: int) -> tuple[int, ...]:
        """Return the ranks of each node, as Problem.nodes, if the ranks are spread evenly over the fewest nodes like this one;
        () for one node. Raises ValueError if they cannot be."""
        count = -(-world_size // self.world_size)
        if count > 1 and world_size % count:
            low = world_size // count * count
            raise ValueError(
                f"ranks is {world_size}; a node is a machine {self.name} of {self.world_size} GPUs, and {count} nodes must "
                f"have equally many ranks: use {low} or {low + count}"
            )
        return (world_size // count,) * count if count > 1 else ()

    def require(self, world_size: int) -> None:
        """Raise ValueError if the machine has fewer GPUs than `world_size`."""
        if world_size > self.world_size:
            raise ValueError(
                f"world_size is {world_size}; machine {self.name} has {self.world_size} GPUs: use at most that many, "
                "a machine file with more, or Problem.nodes for several such hosts"
            )

    def __str__(self) -> str:
        return f"{self.name}: {self.description} ({self.world_size} GPUs, {self.links.topology})"


@cache
def names() -> tuple[str, ...]:
    """Return the names of the shipped profiles."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.json")))


def as_machine(machine: Machine | str | Path) -> Machine:
    """Return the machine that a public function's argument means. A Machine is returned as it is; a name or path is loaded.
    Raises ValueError for anything else."""
    require("machine", machine, (Machine, str, Path), "use a weft.Machine, a name of weft machines, or the path of a JSON file")
    return machine if isinstance(machine, Machine) else load(machine)


def load(name_or_path: str | Path) -> Machine:
    """Load a shipped profile by name, or one from a JSON file. Raises ValueError that names the file and the field."""
    if str(name_or_path) in names():
        return codec.read(Machine, _PROFILES / f"{name_or_path}.json")
    path = Path(name_or_path)
    if path.suffix == ".json" or os.path.isfile(path):  # isfile is also False where the user has no access
        return codec.read(Machine, path)
    raise ValueError(f"machine is {str(name_or_path)!r}; weft has {', '.join(names())}, or give the path of a JSON file")


def _what_if(machine: Machine, changes: Mapping[str, Any]) -> Machine:
    known = dict.fromkeys([*(path for path, _ in numbers(machine)), *_TEXT_FIELDS, *_OPTIONAL])
    for path in changes:
        if path not in known:
            raise unknown_path(path, known, f"machine {machine.name}")

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
