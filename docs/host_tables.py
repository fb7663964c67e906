"""Tables of host time for generate.py: what benchmarks/host has measured. BENCH is a file such as h200x2/host.

host_calls BENCH CLOCK  calls: every variant and method. CLOCK: host (until Python goes on) or loop (a call in a loop)
host_steps BENCH PART   training steps of a part: training, compiled or layer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from text_tables import lines, source, table

from benchmarks.rows import AUTO, Row

SAME, NEW, STREAMS = "same tensors", "new addresses", "two streams"
SEQUENTIAL, PYTORCH, MATMUL = "weft/sequential", "sequential/new", "computation/cublas"
CALLS = {
    AUTO: ("weft", "auto"),
    SEQUENTIAL: ("weft", "sequential"),
    PYTORCH: ("two calls", "of PyTorch"),
    "sequential/preallocated": ("same, given", "output"),
    "peer/torch one_shot": ("matmul, then", "torch one-shot"),
    MATMUL: ("matmul", "alone"),
}
"""Methods of calls, and what stands above their columns."""
CLOCKS = {"host": "host time of a call, us", "loop": "wall time of a call in a loop, us"}
STEPS = {
    "peer/hand": "PyTorch by hand",
    "sequential/torch": "PyTorch's styles",
    "weft/eager": "weft",
    "peer/torch_compile": "PyTorch's styles, compiled",
    "weft/compiled": "weft's styles, compiled",
    "weft/pass": "PyTorch's styles, weft's pass",
    "computation/unsharded": "unsharded, no communication",
}
"""Methods of steps, in the order of a table."""
REFERENCES = ("peer/hand", "computation/unsharded")
"""What a step is compared with."""
PARTS = ("training", "compiled", "layer")


def _read(bench: str, *, steps: bool) -> list[Row]:
    """Return the rows of steps, or of calls. Of a case that was measured several times, the last one."""
    found = {(row.op, row.case, row.state): row for row in lines(bench) if (row.op in PARTS) == steps}
    return list(found.values())


def _us(times: Mapping[str, float], method: str) -> str:
    us = times.get(method)
    return "-" if us is None else f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def _ratio(times: Mapping[str, float], method: str, other: str) -> str:
    return f"{times[method] / times[other]:.2f}" if method in times and other in times else "-"


def host_calls(bench: str, clock: str) -> str:
    """Return a row for each call and variant, with all methods. By the host's clock two streams are as one, and left out."""
    rows = _read(bench, steps=False)
    above, below = zip(*CALLS.values(), strict=True)
    heads = [
        (CLOCKS[clock], "", *above, "auto over", "auto"),
        ("operator, sizes of a rank", "calls have", *below, "PyTorch", "chose"),
    ]
    shown = (row for row in rows if clock == "loop" or row.state != STREAMS)
    return table([*heads, *(_call(row, row.host_us if clock == "host" else row.us) for row in shown)]) + source(rows)


def _call(row: Row, times: Mapping[str, float]) -> tuple[str, ...]:
    return (
        f"{row.op} {row.case}",
        row.state,
        *(_us(times, method) for method in CALLS),
        _ratio(times, AUTO, PYTORCH),
        row.chosen or "-",
    )


def host_steps(bench: str, part: str) -> str:
    """Return a row for each case and method of a part."""
    rows = [row for row in _read(bench, steps=True) if row.op == part]
    heads: list[Sequence[str]] = [
        ("case", "host,", "over the", "wall,", "over the", "memory,"),
        ("  method", "us", "first", "us", "first", "MiB"),
    ]
    return table([*heads, *(line for row in rows for line in _steps(row))]) + source(rows)


def _steps(row: Row) -> list[tuple[str, ...]]:
    methods = sorted((name for name in STEPS if name in row.host_us), key=lambda name: name not in REFERENCES)
    first = methods[0]
    found: list[tuple[str, ...]] = [(row.case, "", "", "", "", "")]
    for name in methods:
        nbytes = row.extra.get("step_bytes", {}).get(name)
        found.append(
            (
                f"  {STEPS[name]}",
                _us(row.host_us, name),
                _ratio(row.host_us, name, first),
                _us(row.us, name),
                _ratio(row.us, name, first),
                "-" if nbytes is None else f"{nbytes / 2**20:,.0f}",
            )
        )
    return found


MAKERS: dict[str, Callable[..., str]] = {"host_calls": host_calls, "host_steps": host_steps}
