"""Ways to run independent computation beside collectives: the value, what each is predicted to take, which are worth measuring.

A Way is to `weft.concurrent` what a Schedule is to the operators: all that two ways differ in. The computation is the caller's
own, so there are no steps to prove or simulate, and the prediction is a formula of what computation and collectives take alone:

    sequential   computation + collectives
    beside       collectives are slowed to their rate on so many blocks; computation by the SMs that those hold while they run,
                 or, where vendor GEMMs leave SMs free, throughout; of what that saves a share is hidden, the larger the
                 surer the collectives are of SMs

Sources: occupancy and priority, arXiv 2606.09200; launch order, reserved units and DMA collectives, ConCCL, arXiv 2412.14335.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.core.machine import Machine

Transport = Literal["none", "vendor", "copy_engine"]
AT_MOST = 14
"""Ways that are measured, sequential among them."""
BUDGETS = ((0, 24), (16, 0), (8, 8))
"""(blocks, SMs left) of a vendor's collective that has priority: 16 blocks reach 0.89 of what all SMs store to peers on
8 x H200. Without SMs left, 8 were never the best of 23 pairs on 4 x H200; nor were 16 with 16."""
SUM_BLOCKS = ((32, 0), (64, 0), (12, 4), (32, 16))
"""(blocks that sum what copy engines bring, SMs left). Alone, on 2 x H200 and 512 MiB, 8 blocks take 2.2 times the vendor's
time, 16 1.34, 32 0.92. Beside a GEMM that fills the SMs 32 were faster than 16 in three pairs of three on 4 x H200. GEMMs of
powers of two have as many waves on 128 SMs as on 132, and 12 blocks fit on the 4 others."""
PULLED_SUM_BLOCKS = ((32, 0), (12, 4))
"""Likewise, where the receivers pull the sums."""
MOVE_BLOCKS, PULLED_MOVE_BLOCKS = ((0, 0), (0, 4)), ((0, 0),)
"""Likewise, where nothing is summed: what has arrived is copied on this GPU."""
_SUMS_AN_SM = 3
"""Blocks of such a sum that an SM holds: where SMs come free one by one, they lie as closely as that."""
VENDOR_BLOCKS = 24
"""What a vendor's collective takes by itself; assumed."""
WITHIN = 1.25
"""Kinds predicted to take more than so many times as long as the fastest are measured last."""
_HIDDEN_LATE, _HIDDEN_FIRST, _HIDDEN_PRIORITY = 0.33, 0.56, 0.9
"""Shares hidden of what could be. On 8 x H200, beside GEMMs: two streams 0.33 to 0.56, with priority and the collective first
0.69 to 0.91."""
_SLOWER_MOVING, _SLOWER_REDUCING = 1.0, 1.2
"""Collectives by copy engines against the vendor's: 64 and 512 MiB took 0.76 to 0.95 on 2 x H200, with sums 0.9 to 1.5."""
_SLOWER_PULLING = 1.25
"""A pull reaches 235 GB/s on 8 x H200 where pushes from one stream reach 295."""
_FLAGS = ("late", "priority", "pull", "keep")
_NUMBERS = ("ctas", "left", "resident", "ahead")
SHARDED = ("ahead", "keep")
"""What a way says about parameters that are gathered and freed again: fully_shard's."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How computation and collectives share the device. Prints as a spec, which `parse` reads.

    transport: who moves the bytes; "none": collectives first, then computation. late: collectives are enqueued after the
    computation. priority: their stream has the highest. pull: copy engines of the receivers move, straight to the result. ctas:
    blocks of their kernels (of copy engines: of the sums), 0 for their own choice. left: SMs that vendor GEMMs leave free.
    resident: blocks an SM that named kernels keep to, 0 for what they have. Of sharded parameters: ahead, groups whose gathers
    are enqueued before the one at hand computes, 0 for as fully_shard does; keep, gathered once a step, for both passes.

    >>> print(Way(priority=True, ctas=16))
    vendor+priority+ctas=16
    """

    transport: Transport = "vendor"
    late: bool = False
    priority: bool = False
    pull: bool = False
    ctas: int = 0
    left: int = 0
    resident: int = 0
    ahead: int = 0
    keep: bool = False

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0, for no limit, or above")
        if self.pull and self.transport != "copy_engine":
            raise ValueError(f"{self.transport} has pull; only copy_engine pulls")
        if self.transport == "none" and self._modifiers():
            raise ValueError(f"sequential has no {self._modifiers()[0]}: nothing runs beside it; use vendor or copy_engine")

    def _modifiers(self) -> list[str]:
        flags = [name for name in _FLAGS if getattr(self, name)]
        return flags + [f"{name}={value}" for name in _NUMBERS if (value := getattr(self, name))]

    @property
    def beside(self) -> bool:
        """Whether anything overlaps."""
        return self.transport != "none"

    @property
    def kind(self) -> tuple[object, ...]:
        """What ways have in common that differ in numbers alone."""
        return self.transport, self.late, self.priority, self.pull, self.left > 0, self.resident > 0

    def __str__(self) -> str:
        return "+".join(["sequential" if self.transport == "none" else self.transport, *self._modifiers()])


SEQUENTIAL = Way(transport="none")
PLAIN = Way()
"""Two streams and nothing else: what PyTorch does by itself."""


def parse(spec: str) -> Way:
    """The Way that prints as `spec`. Raises ValueError with the grammar.

    >>> parse("copy_engine+priority+left=8")
    Way(transport='copy_engine', late=False, priority=True, pull=False, ctas=0, left=8, resident=0, ahead=0, keep=False)
    """
    name, *words = spec.split("+")
    transports: dict[str, Transport] = {"sequential": "none", "vendor": "vendor", "copy_engine": "copy_engine"}
    options: dict[str, int | bool] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key in options or not (key in _NUMBERS and value.isdecimal() if equals else key in _FLAGS):
            name = ""
        options[key] = int(value) if value.isdecimal() else True
    if name not in transports:
        raise ValueError(
            f"way is {spec!r}; use auto, sequential, or vendor or copy_engine with any of "
            "+late, +priority, +pull, +ctas=N, +left=N, +resident=N; under fully_shard also +ahead=N, +keep"
        )
    return Way(transport=transports[name], **options)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What this device, this software and these collectives can do of what a Way says. pull: beside copy_engine. residents:
    residencies to try of the named kernels."""

    priority: bool = False
    ctas: bool = False
    left: bool = False
    copy_engine: bool = False
    pull: bool = False
    residents: tuple[int, ...] = ()


def possible(way: Way, abilities: Abilities) -> bool:
    """Whether a way asks for nothing that is not there."""
    blocks = abilities.ctas or not way.ctas or way.transport == "copy_engine"
    moved = (abilities.copy_engine or way.transport != "copy_engine") and (abilities.pull or not way.pull)
    given = (abilities.priority or not way.priority) and (abilities.left or not way.left)
    return blocks and moved and given and (not way.resident or way.resident in abilities.residents)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is to share the device, each as measured alone, the slowest rank's. reduces: a collective adds."""

    compute_us: float
    communication_us: float
    reduces: bool

    @property
    def sequential_us(self) -> float:
        return self.compute_us + self.communication_us

    @property
    def ideal_us(self) -> float:
        return max(self.compute_us, self.communication_us)


def share_of_ideal(us: float, *, sequential_us: float, ideal_us: float) -> float:
    """Of the speed-up that hiding everything would bring, the share that `us` reaches: ConCCL's measure. 1 where there is none.

    >>> share_of_ideal(120.0, sequential_us=150.0, ideal_us=100.0)
    0.5
    """
    whole = sequential_us / ideal_us - 1
    return (sequential_us / us - 1) / whole if whole > 0 else 1.0


def predicted_us(way: Way, load: Load, machine: Machine) -> float:
    """What a way takes on a machine. left and blocks beyond the machine's SMs leave the computation one."""
    if not way.beside:
        return load.sequential_us
    sms, blocks = machine.gpu.sms, _blocks(way, load)
    communication_us = load.communication_us * _slower(way, load, machine)
    free = max(1, sms - max(way.left, blocks))
    if way.left:
        together = max(communication_us, load.compute_us * sms / free)
    else:
        done = min(load.compute_us, communication_us * free / sms)
        together = communication_us + load.compute_us - done
    saved = load.sequential_us - max(together, load.compute_us)
    return load.sequential_us - _hidden(way) * saved


def _blocks(way: Way, load: Load) -> int:
    """SMs that collectives hold."""
    if way.transport == "copy_engine":
        return -(-(way.ctas or SUM_BLOCKS[0][0]) // _SUMS_AN_SM) if load.reduces else 0
    return way.ctas or VENDOR_BLOCKS


def _slower(way: Way, load: Load, machine: Machine) -> float:
    """Of collectives in this way, relative to the vendor's alone."""
    if way.transport == "copy_engine":
        return (_SLOWER_REDUCING if load.reduces else _SLOWER_MOVING) * (_SLOWER_PULLING if way.pull else 1.0)
    return max(1.0, machine.stores.rate(VENDOR_BLOCKS) / machine.stores.rate(way.ctas or VENDOR_BLOCKS))


def _hidden(way: Way) -> float:
    """Copy engines, and blocks for which room is left, wait for no SM."""
    if way.transport == "copy_engine" or way.left:
        return 1.0
    return _HIDDEN_PRIORITY if way.priority else _HIDDEN_LATE if way.late else _HIDDEN_FIRST


def candidates(abilities: Abilities, load: Load) -> tuple[Way, ...]:
    """All ways that could be taken, sequential and two plain streams first."""
    found = [SEQUENTIAL, PLAIN, Way(late=True)]
    if abilities.priority:
        found += [Way(priority=True, resident=resident) for resident in (0, *abilities.residents)]
    found += [Way(priority=abilities.priority, ctas=ctas, left=left) for ctas, left in BUDGETS]
    if abilities.priority:
        found.append(Way(late=True, priority=True, ctas=BUDGETS[1][0]))
    pushed, pulled = (SUM_BLOCKS, PULLED_SUM_BLOCKS) if load.reduces else (MOVE_BLOCKS, PULLED_MOVE_BLOCKS)
    for pull, blocks in ((False, pushed), (True, pulled)):
        for ctas, left in blocks:
            found.append(Way(transport="copy_engine", priority=abilities.priority, pull=pull, ctas=ctas, left=left))
    return tuple(way for way in dict.fromkeys(found) if possible(way, abilities))


def shortlist(abilities: Abilities, load: Load, machine: Machine, at_most: int = AT_MOST) -> tuple[str, ...]:
    """Specs worth measuring: sequential, two plain streams, then the best of each kind that comes near, then others, as
    predicted.

    Where there is nothing to hide, sequential alone. A pure function: ranks with the same numbers get the same list.
    """
    if not min(load.compute_us, load.communication_us) > 0:
        return (str(SEQUENTIAL),)
    us = {way: predicted_us(way, load, machine) for way in candidates(abilities, load)}
    ranked = [way for way in sorted(us, key=lambda way: us[way]) if way not in (SEQUENTIAL, PLAIN)]
    leaders = {way.kind: way for way in reversed(ranked) if us[way] <= WITHIN * min(us.values())}
    chosen = sorted(ranked, key=lambda way: way not in leaders.values())
    return tuple(str(way) for way in (SEQUENTIAL, PLAIN, *chosen[: at_most - 2]))
