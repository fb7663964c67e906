"""Draws docs/losses.png: losses.py's runs, step by step, and how far apart they are.

    python benchmarks/losses_plot.py benchmarks/results/losses.jsonl out/losses.html
    python docs/picture.py out/losses.html losses docs/losses.png

Above, the losses of the three runs, and the text's entropy, below which no model comes. Below, distances from torch's run:
weft's, and one process's, which is what other orders of sums in bfloat16 do by themselves; means over a window of steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

WINDOW = 5
WIDTH, HEIGHT = 960, 520
# As in the report: told apart by people who do not see all colours.
COLOURS = {"alone": "#8c8c8c", "torch": "#e69f00", "weft": "#0072b2"}
WORDS = {"alone": "one process", "torch": "torch's styles", "weft": "weft.parallelize"}


def apart(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """|difference|, smoothed."""
    found = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return [statistics.fmean(found[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(found))]


def figure(runs: Mapping[str, Sequence[float]], floor: float, title: str) -> go.Figure:
    made = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.6, 0.4])
    for name, losses in runs.items():
        line = {"color": COLOURS[name], "width": 2, "dash": "dot" if name == "weft" else "solid"}
        made.add_scatter(y=list(losses), name=WORDS[name], mode="lines", line=line, row=1, col=1)
    for name in ("alone", "weft"):
        values = apart(runs[name], runs["torch"])
        line = {"color": COLOURS[name], "width": 2}
        made.add_scatter(y=values, name=f"{WORDS[name]}, from torch's", mode="lines", line=line, row=2, col=1)
    below = {"annotation_text": "entropy of the text", "annotation_position": "bottom right"}
    made.add_hline(y=floor, line={"dash": "dot", "color": "#444444"}, row=1, col=1, **below)
    made.update_yaxes(title="loss", rangemode="tozero", row=1, col=1)
    made.update_yaxes(title="distance", type="log", exponentformat="power", minor={"showgrid": False}, row=2, col=1)
    made.update_xaxes(title="step", row=2, col=1)
    legend, margin = {"orientation": "h", "y": 1.12, "x": 1, "xanchor": "right"}, {"l": 70, "r": 20, "t": 90, "b": 50}
    return made.update_layout(template="plotly_white", title=title, width=WIDTH, height=HEIGHT, legend=legend, margin=margin)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("results", type=Path)
    options.add_argument("html", type=Path)
    arguments = options.parse_args()
    lines: list[dict[str, Any]] = [json.loads(line) for line in arguments.results.read_text(encoding="utf-8").splitlines()]
    *parts, told = lines[-4:]
    setup = told["setup"]
    title = f"{told['machine']}, {setup['layers']} layers of {setup['hidden']}, {setup['dtype']}, commit {told['commit']}"
    arguments.html.parent.mkdir(parents=True, exist_ok=True)
    made = figure({part["run"]: part["losses"] for part in parts}, told["floor"], title)
    made.write_html(arguments.html, include_plotlyjs=True, div_id="losses", config={"displayModeBar": False})


if __name__ == "__main__":
    main()
