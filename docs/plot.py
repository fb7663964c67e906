"""Draws the pictures of measurements in docs/, each from rows alone, so that an exact re-run draws the same picture.

    python docs/plot.py gains benchmarks/results/h200x2 out/gains.html
    python docs/picture.py out/gains.html gains docs/gains.png
    python docs/plot.py resource_aware benchmarks/results/h200x2/resource_aware.jsonl out/resource_aware.html
    python docs/picture.py out/resource_aware.html resource_aware docs/resource_aware.png

gains           README's plot: what `auto` gains over the fastest alternative
resource_aware  an iteration's time over the sequential one's (the paper's TimeRatio) against the GEMM's blocks an SM, for each
                workload and tile, with and without communication priority, with plain overlap and the ideal
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from text_tables import benchmark

from benchmarks import rows
from benchmarks.rows import Row, geomean

# Colours that people who do not see all colours can tell apart.
BLUE, ORANGE = "#0072b2", "#e69f00"
WORDS = {"graph": "in a CUDA graph", "eager": "called eagerly"}
WIDTH, LINE_HEIGHT = 960, 24
TICKS = (0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 2.5)
"""Gains, of a logarithmic axis: twice as fast is as far from 1 as half as fast."""
RANGE = (0.4, 1.25)
"""Of the ratios shown: with one block an SM a GEMM takes longer than both one after the other."""


def gains(folder: Path) -> go.Figure:
    """A row for each group of cases: a dot for each case, a bar at their geometric mean."""
    groups = benchmark("gains").cases(folder)
    order = list(groups)[::-1]
    made = go.Figure()
    for shift, mode, colour in ((0.17, "graph", BLUE), (-0.17, "eager", ORANGE)):
        gains = {at: [one.gain(row) for row in groups[one] if row.mode == mode] for at, one in enumerate(order)}
        points = [(at + shift, each) for at, some in gains.items() for each in some]
        means = [(at + shift, geomean(some)) for at, some in gains.items() if some]
        made.add_bar(
            y=[at for at, _ in means],
            x=[gain - 1 for _, gain in means],
            base=1,
            width=0.3,
            orientation="h",
            marker={"color": colour, "opacity": 0.55},
            name=WORDS[mode],
        )
        dot = {"color": colour, "size": 5, "line": {"color": "white", "width": 0.5}}
        made.add_scatter(
            y=[at for at, _ in points], x=[gain for _, gain in points], mode="markers", marker=dot, showlegend=False
        )
    made.add_vline(x=1.0, line={"color": "#444444"})
    names = [group.name for group in order]
    made.update_yaxes(tickvals=list(range(len(names))), ticktext=names, range=[-0.6, len(names) - 0.4])
    title = "2 x H200: time without weft / time with weft; dots are cases, bars their geometric means"
    made.update_xaxes(title=title, type="log", ticksuffix="x", tickvals=TICKS)
    legend = {"orientation": "h", "y": 1.12, "x": 0}
    margin = {"l": 250, "r": 20, "t": 50, "b": 50}
    height = 100 + LINE_HEIGHT * len(names)
    made.update_layout(width=WIDTH, height=height, template="plotly_white", legend=legend, margin=margin, barmode="overlay")
    return made


def points(path: Path) -> list[Row]:
    """Rows of the paper's controls with a block a tile; of points that were measured more than once, the last.

    Raises ValueError if there is none."""
    papers = [row for row in rows.read(path) if row.bench == "resource_aware" and not any(map(row.extra.get, ("grid", "ctas")))]
    latest = {(*_chart(row), row.extra["blocks_per_sm"], row.extra["priority"]): row for row in papers}
    if not latest:
        raise ValueError(f"{path} has no row of benchmarks/resource_aware.py")
    return list(latest.values())


def resource_aware(path: Path) -> go.Figure:
    """Workloads across, tiles down."""
    found = points(path)
    ops, tiles = (list(dict.fromkeys(names)) for names in zip(*map(_chart, found), strict=True))
    made = make_subplots(
        rows=len(tiles),
        cols=len(ops),
        subplot_titles=[f"{op}, tile {tile}" for tile in tiles for op in ops],
        x_title="blocks an SM",
        y_title="time over sequential",
        shared_yaxes="all",
        vertical_spacing=0.16,
    )
    for op, tile in dict.fromkeys(map(_chart, found)):
        of = sorted((row for row in found if _chart(row) == (op, tile)), key=lambda row: row.extra["blocks_per_sm"])
        _draw(made, of, row=tiles.index(tile) + 1, col=ops.index(op) + 1)
    title = f"{found[0].machine}, commit {found[0].commit}"
    legend, margin = {"orientation": "h", "y": 1.15, "x": 1, "xanchor": "right"}, {"l": 80, "r": 20, "t": 90, "b": 60}
    made.update_xaxes(dtick=1)
    made.update_yaxes(range=RANGE)
    return made.update_layout(template="plotly_white", title=title, width=WIDTH, height=560, legend=legend, margin=margin)


def _chart(row: Row) -> tuple[str, str]:
    return row.op, "x".join(map(str, row.extra["tile"]))


def _ratio(row: Row) -> float:
    return row.us["weft/overlapped"] / row.us["sequential/default"]


def _draw(made: go.Figure, found: Sequence[Row], *, row: int, col: int) -> None:
    for priority, colour in ((False, "#c2410c"), (True, "#1d4ed8")):
        of = [one for one in found if one.extra["priority"] is priority]
        name = f"communication priority {'on' if priority else 'off'}"
        made.add_scatter(
            x=[one.extra["blocks_per_sm"] for one in of],
            y=[_ratio(one) for one in of],
            name=name,
            legendgroup=name,
            showlegend=row == col == 1,
            mode="lines+markers",
            line={"color": colour},
            row=row,
            col=col,
        )
    plain = next(_ratio(one) for one in found if not one.extra["capped"] and not one.extra["priority"])
    ideal = found[0].extra["ideal_us"] / found[0].us["sequential/default"]
    for label, ratio, dash, place in (("plain", plain, "dash", "top right"), ("ideal", ideal, "dot", "bottom right")):
        options = {"line_dash": dash, "line_width": 1, "annotation_text": label, "annotation_position": place}
        made.add_hline(y=ratio, **options, row=row, col=col)


FIGURES = {"gains": gains, "resource_aware": resource_aware}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("figure", choices=tuple(FIGURES))
    options.add_argument("rows", type=Path, help="the folder or file of rows that it is drawn from")
    options.add_argument("html", type=Path, help="the file to write")
    given = options.parse_args()
    given.html.parent.mkdir(parents=True, exist_ok=True)
    made = FIGURES[given.figure](given.rows)
    made.write_html(given.html, include_plotlyjs=True, div_id=given.figure, config={"displayModeBar": False})


if __name__ == "__main__":
    main()
