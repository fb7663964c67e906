"""Writes weft/planner/accuracy.json: how wrong predictions are, and what was measured of single calls. The wheel has it in
place of benchmarks/results. `make docs` runs this; tests/project/test_accuracy.py fails where the file is not what it makes.

The errors are those of benchmarks/simulated.py, without what the profile was fitted to. A gain is that of the newest row of a
case in a graph.
"""

from __future__ import annotations

import json
from typing import Any

from text_tables import ROOT, benchmark, date_of, lines

from weft.core.machine import load

FILE = ROOT / "weft" / "planner" / "accuracy.json"
GAINS = ("h200x2/tp", "h200x4/tp", "h200x8/tp", "h100x4/tp")
ALONE = "sequential/default"


def made() -> dict[str, Any]:
    """What the file has."""
    simulated = benchmark("simulated")
    found = simulated.held(simulated.compared(load(simulated.MACHINE)))
    ranks = sorted({one.of.problem.world_size for one in found})
    groups = {"all": found, **{str(n): [one for one in found if one.of.problem.world_size == n] for n in ranks}}
    of = {name: simulated.errors(some) for name, some in groups.items()}
    rounded = {name: {"times": one.count, "median": round(one.median, 3), "p95": round(one.p95, 3)} for name, one in of.items()}
    return {
        "source": "python docs/kept_accuracy.py",
        "machine": simulated.MACHINE,
        "ranks": f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}",
        "errors": rounded,
        "gains": gains(),
    }


def gains() -> list[dict[str, Any]]:
    rows = {(bench, row.op, row.case): row for bench in GAINS for row in lines(bench) if row.mode == "graph"}
    return [
        {
            "gpu": row.versions["gpu"],
            "problem": dict(row.problem),
            "sequential_us": round(row.us[ALONE], 1),
            "auto_us": round(row.us["weft/auto"], 1),
            "chosen": row.chosen,
            "commit": row.commit,
            "date": date_of(row.commit),
        }
        for row in rows.values()
        if row.problem and {ALONE, "weft/auto"} <= row.us.keys()
    ]


def text() -> str:
    """The file's text, with a line for each error and each gain."""
    kept = made()
    errors = ",\n".join(f'  "{name}": {json.dumps(one)}' for name, one in kept.pop("errors").items())
    measured = ",\n".join(f"  {json.dumps(one)}" for one in kept.pop("gains"))
    about = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in kept.items())
    return f'{{\n{about} "errors": {{\n{errors}\n }},\n "gains": [\n{measured}\n ]\n}}\n'


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
