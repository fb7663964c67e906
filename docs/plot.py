"""Draws docs/gains.png, README's plot: what `auto` gains over the fastest alternative, from the lines that README's table has.

    python docs/plot.py benchmarks/results/h100x2 out/gains.html && python docs/picture.py out/gains.html gains docs/gains.png

An exact re-run draws the same picture; like README's tables it has no other source than the JSON lines.
"""

from __future__ import annotations

import sys
from pathlib import Path

import plotly.graph_objects as go
from text_tables import benchmark

from benchmarks.rows import gain, geomean

# Two colours that stay apart for people who do not see all colours.
COLOURS = {"graph": "#0072b2", "eager": "#e69f00"}
WORDS = {"graph": "in a CUDA graph", "eager": "called eagerly"}
WIDTH, LINE_HEIGHT = 960, 24


def figure(folder: Path) -> go.Figure:
    """A row for each group of cases: a dot for each case, a bar at their geometric mean."""
    found = benchmark("gains").cases(folder)
    names = list(found)[::-1]
    made = go.Figure()
    for shift, mode in ((0.17, "graph"), (-0.17, "eager")):
        gains = {at: [gain(row) for row in found[name] if row.mode == mode] for at, name in enumerate(names)}
        points = [(at + shift, each) for at, some in gains.items() for each in some]
        means = [(at + shift, geomean(some)) for at, some in gains.items() if some]
        made.add_bar(
            y=[at for at, _ in means],
            x=[gain - 1 for _, gain in means],
            base=1,
            width=0.3,
            orientation="h",
            marker={"color": COLOURS[mode], "opacity": 0.55},
            name=WORDS[mode],
        )
        dot = {"color": COLOURS[mode], "size": 5, "line": {"color": "white", "width": 0.5}}
        made.add_scatter(
            y=[at for at, _ in points], x=[gain for _, gain in points], mode="markers", marker=dot, showlegend=False
        )
    made.add_vline(x=1.0, line={"color": "#444444"})
    made.update_yaxes(tickvals=list(range(len(names))), ticktext=names, range=[-0.6, len(names) - 0.4])
    made.update_xaxes(title='time of the fastest alternative / time of weft with schedule="auto"', ticksuffix="x", dtick=0.2)
    legend = {"orientation": "h", "y": 1.12, "x": 0}
    margin = {"l": 250, "r": 20, "t": 50, "b": 50}
    height = 100 + LINE_HEIGHT * len(names)
    made.update_layout(width=WIDTH, height=height, template="plotly_white", legend=legend, margin=margin, barmode="overlay")
    return made


def main() -> None:
    path = Path(sys.argv[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure(Path(sys.argv[1])).write_html(path, include_plotlyjs=True, div_id="gains", config={"displayModeBar": False})


if __name__ == "__main__":
    main()
