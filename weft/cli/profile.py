"""Prints one profile for `weft machines NAME`: each number with its unit and its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from weft.cli import output
from weft.core.hardware import Table, Tile
from weft.core.machine import Machine
from weft.report.tables import Column, ReportTable

_UNITS = {
    "world_size": "GPUs",
    "gpu.sms": "SMs",
    "gpu.tiles": "tile: of the matrix rate",
    "gpu.kernel_tiles": "tile: of the matrix rate",
    "gpu.stored_tiles": "tile: of the matrix rate",
    "gpu.half_tile": "of a whole tile's time",
    "gpu.cut_k": "columns of a",
    "gpu.gather_share": "of the memory's rate",
    "gpu.step_rate": "of the rate of tiles around",
    "gpu.tile_step": "rows or columns",
    "gpu.flag_efficiency": "of the plain kernel's rate",
    "gpu.sustained": "of the rate, after burst_us",
    "copies.engines": "copies at once",
    "copies.turning": "more of their time",
    "stores.gbps": "SMs: GB/s",
    "stores.sms": "SMs",
    "stores.sms_alone": "SMs",
    "kernels.l2_share": "of the cache",
    "kernels.sums": "blocks an SM",
    "kernels.streamed": "of the matrix rate",
    "stores.stall": "of a store's time",
    "stores.tiles": "of the rate",
    "network.sms": "SMs",
    "collective_sms": "SMs",
}
"""The units of numbers whose names do not end in a unit."""
_BY_END = {
    "_us": "us",
    "gbps": "GB/s",
    "_bytes": "bytes",
    ".world_size": "ranks",
    ".points": "bytes of a shard: us",
    ".also": "ranks; bytes of a shard: us",
}
_BY_BEGIN = {"gpu.tflops.": "TFLOP/s", "contention.": "times as long"}


def print_profile(machine: Machine, named: str) -> None:
    """Print the description of the machine and a table of its numbers. named: the name or file that the user gave."""
    out = output.console()
    out.print(str(machine))
    if machine.device:
        out.print(f"Measured on {machine.device}.")
    words = {path: value for path, value in fields(machine) if isinstance(value, (str, bool)) and value != ""}
    out.print(", ".join(f"{path}: {value}" for path, value in words.items() if path not in ("name", "description", "device")))
    out.print()
    heads = ("number", "value", *["spread"] * bool(machine.spreads), "unit", "from")
    rows = []
    for path, value in fields(machine):
        if path in machine.sources:
            spread = [f"+-{machine.spreads[path]:.1%}" if path in machine.spreads else ""] * bool(machine.spreads)
            rows.append((path, shown(value), *spread, unit(path), machine.sources[path]))
    output.print_table(out, ReportTable(title=str(machine), columns=[Column(head, words=True) for head in heads], rows=rows))
    out.print()
    out.print(
        f"What each number means: python -m pydoc weft.machine. As a file for --machine: weft machines {named} --json FILE."
    )


def fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers, tables and words of a machine by path, without its sources and spreads."""
    if dataclasses.is_dataclass(value):
        items = {part.name: getattr(value, part.name) for part in dataclasses.fields(value) if not part.metadata}
    elif isinstance(value, Mapping):
        items = dict(value)
    else:
        if value is not None and value != ():
            yield path, value
        return
    for name, item in items.items():
        if path or name != "sources":
            yield from fields(item, f"{path}.{name}" if path else name)


def unit(path: str) -> str:
    """Return the unit of the number or table at a path, or "" if it has none."""
    found = (unit for begin, unit in _BY_BEGIN.items() if path.startswith(begin))
    ended = (unit for end, unit in _BY_END.items() if path.endswith(end))
    return _UNITS.get(path) or next(found, "") or next(ended, "")


def shown(value: Any) -> str:
    """Format a number, or a table row by row.

    >>> shown(1234.5), shown(((4, 115.0), (8, 210.0)))
    ('1,234.5', '4: 115, 8: 210')
    """
    if isinstance(value, Tile):
        return f"{value.rows} x {value.cols}: {value.efficiency:g}"
    if isinstance(value, Table):
        return f"{value.world_size}; {shown(value.points)}"
    if isinstance(value, tuple) and all(isinstance(item, (int, float)) for item in value):
        return ": ".join(f"{item:.10g}" for item in value)
    if isinstance(value, tuple):
        return (" | " if isinstance(value[0], Table) else ", ").join(map(shown, value))
    return f"{value:,.10g}"
