"""What residency and priority do to the time of a GEMM beside a collective: charts of resource_aware.py's rows.

One chart a workload and tile: an iteration's time over the sequential one's (the paper's TimeRatio) against the GEMM's blocks
an SM, with and without communication priority, beside the plain overlap and the ideal. One HTML file that loads nothing; the
picture in docs/ is taken of it:

    python -m benchmarks.resource_aware_plot benchmarks/results/resource_aware.jsonl out/resource_aware.html
    python docs/picture.py out/resource_aware.html resource_aware docs/resource_aware.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks import rows
from benchmarks.rows import Row

COLOURS = {False: "#c2410c", True: "#1d4ed8"}
WIDTH, HEIGHT = 960, 560
NAME = "resource_aware"
RANGE = (0.4, 1.25)
"""Of the ratios shown: with one block an SM a GEMM takes longer than both one after the other."""


def read(path: Path) -> list[Row]:
    """The benchmark's lines of the paper's controls with a block a tile; of points that were measured more than once, the last.
    Raises ValueError if there is none."""
    papers = (line for line in rows.read(path) if line.bench == NAME and not (line.extra.get("grid") or line.extra.get("ctas")))
    latest = {_point(line): line for line in papers}
    if not latest:
        raise ValueError(f"{path} has no line of benchmarks/resource_aware.py")
    return list(latest.values())


def _chart(line: Row) -> tuple[str, str]:
    return line.op, "x".join(map(str, line.extra["tile"]))


def _point(line: Row) -> tuple[object, ...]:
    return *_chart(line), line.extra["blocks_per_sm"], line.extra["priority"]


def _ratio(line: Row) -> float:
    return line.us["weft/overlapped"] / line.us["sequential/default"]


def figure(lines: Sequence[Row]) -> go.Figure:
    """Workloads across, tiles down."""
    ops, tiles = (list(dict.fromkeys(names)) for names in zip(*map(_chart, lines), strict=True))
    titles = [f"{op}, tile {tile}" for tile in tiles for op in ops]
    made = make_subplots(
        rows=len(tiles),
        cols=len(ops),
        subplot_titles=titles,
        x_title="blocks an SM",
        y_title="time over sequential",
        shared_yaxes="all",
        vertical_spacing=0.16,
    )
    for op, tile in dict.fromkeys(map(_chart, lines)):
        of = sorted((line for line in lines if _chart(line) == (op, tile)), key=lambda line: line.extra["blocks_per_sm"])
        _draw(made, of, row=tiles.index(tile) + 1, col=ops.index(op) + 1)
    title = f"{lines[0].machine}, commit {lines[0].commit}"
    legend, margin = {"orientation": "h", "y": 1.15, "x": 1, "xanchor": "right"}, {"l": 80, "r": 20, "t": 90, "b": 60}
    made.update_xaxes(dtick=1)
    made.update_yaxes(range=RANGE)
    return made.update_layout(template="plotly_white", title=title, width=WIDTH, height=HEIGHT, legend=legend, margin=margin)


def _draw(made: go.Figure, lines: Sequence[Row], *, row: int, col: int) -> None:
    for priority, colour in COLOURS.items():
        of = [line for line in lines if line.extra["priority"] is priority]
        name = f"communication priority {'on' if priority else 'off'}"
        made.add_scatter(
            x=[line.extra["blocks_per_sm"] for line in of],
            y=[_ratio(line) for line in of],
            name=name,
            legendgroup=name,
            showlegend=row == col == 1,
            mode="lines+markers",
            line={"color": colour},
            row=row,
            col=col,
        )
    plain = next(_ratio(line) for line in lines if not line.extra["capped"] and not line.extra["priority"])
    ideal = lines[0].extra["ideal_us"] / lines[0].us["sequential/default"]
    for label, ratio, dash, place in (("plain", plain, "dash", "top right"), ("ideal", ideal, "dot", "bottom right")):
        options = {"line_dash": dash, "line_width": 1, "annotation_text": label, "annotation_position": place}
        made.add_hline(y=ratio, **options, row=row, col=col)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("lines", type=Path, help="rows of resource_aware.py")
    options.add_argument("html", type=Path, help="the file to write")
    arguments = options.parse_args()
    arguments.html.parent.mkdir(parents=True, exist_ok=True)
    made = figure(read(arguments.lines))
    made.write_html(arguments.html, include_plotlyjs=True, div_id=NAME, config={"displayModeBar": False})


if __name__ == "__main__":
    main()
