"""Draws docs/measured.png: the share of the ideal that each program reaches, from benchmarks/results/tp.jsonl.

    python docs/plot.py out/measured.html && python docs/picture.py out/measured.html measured docs/measured.png

An exact re-run draws the same picture; like README's tables it has no other source than the JSON lines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "tp.jsonl"
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter")
# As in the report: told apart by people who do not see all colours.
COLOURS = {"sequential": "#8c8c8c", "async TP": "#e69f00", "weft": "#0072b2"}
WIDTH, HEIGHT = 960, 460


def shares(row: dict[str, Any]) -> dict[str, float]:
    """The ideal's time over that of each program."""
    times = {"sequential": row["sequential_us"], "async TP": row["peers"].get("async_tp"), "weft": row["overlapped_us"]}
    return {name: row["ideal_us"] / us for name, us in times.items() if us}


def figure(rows: list[dict[str, Any]]) -> go.Figure:
    """One panel an operator, one group of bars a case, graph mode."""
    made = make_subplots(rows=2, cols=1, subplot_titles=OPERATORS, shared_xaxes=True, vertical_spacing=0.14)
    for panel, op in enumerate(OPERATORS, 1):
        found = [row for row in rows if row["op"] == op and row["mode"] == "graph"]
        for name, colour in COLOURS.items():
            values = [shares(row).get(name) for row in found]
            cases = [row["case"] for row in found]
            made.add_bar(x=cases, y=values, name=name, marker_color=colour, showlegend=panel == 1, row=panel, col=1)
    made.add_hline(y=1.0, line={"dash": "dot", "color": "#444444"})
    made.update_yaxes(range=[0, 1.1], tickformat=".0%", title="of the ideal")
    machine = f"{rows[0]['machine']}, {' and '.join(dict.fromkeys(row['commit'] for row in rows))}"
    legend = {"orientation": "h", "y": 1.18, "x": 1, "xanchor": "right"}
    margin = {"l": 70, "r": 20, "t": 80, "b": 30}
    made.update_layout(width=WIDTH, height=HEIGHT, template="plotly_white", legend=legend, title=machine, margin=margin)
    return made


def main() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure(rows).write_html(path, include_plotlyjs=True, div_id="measured", config={"displayModeBar": False})


if __name__ == "__main__":
    main()
