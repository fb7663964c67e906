"""Losses against static sizes, as one HTML file that loads nothing: a panel for each size, a colour for each family."""

from __future__ import annotations

import html
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from weft.core.machine import Machine
from weft.planner.signature import Signature
from weft.planner.sizes import FEATURES, Feature, sizes

SHOWN: tuple[Feature, ...] = ("op_to_byte", "traffic_mib", "m_over_k", "balance")
TITLES: dict[Feature, str] = {
    "op_to_byte": "operations a byte of the matmul",
    "traffic_mib": "memory traffic of the matmul, MiB",
    "m_over_k": "M / K",
    "balance": "matmul at peak / transfer at the links' rate",
    "shard_rows": "rows of a shard",
}
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#f0e442", "#000000")
SYMBOLS = ("circle", "diamond-open", "x")
_HEIGHT_PX = 380


def figure(signatures: Sequence[Signature], machine: Machine) -> go.Figure:
    """Every schedule as a point: the loss over the ideal against each size that is shown."""
    assert set(SHOWN) <= set(FEATURES)
    made = make_subplots(rows=2, cols=2, subplot_titles=[TITLES[name] for name in SHOWN])
    families = list(dict.fromkeys(found.spec.partition(":")[0] for found in signatures))
    for place, name in enumerate(SHOWN):
        for index, family in enumerate(families):
            some = [found for found in signatures if found.spec.partition(":")[0] == family]
            made.add_trace(
                go.Scatter(
                    x=[FEATURES[name](sizes(found.problem, machine)) for found in some],
                    y=[100 * found.loss for found in some],
                    text=[html.escape(str(found)) for found in some],
                    mode="markers",
                    name=family,
                    legendgroup=family,
                    showlegend=place == 0,
                    marker=mark(index),
                    hovertemplate="%{text}<extra></extra>",
                ),
                row=1 + place // 2,
                col=1 + place % 2,
            )
    made.update_xaxes(type="log")
    made.update_yaxes(title_text="% over the ideal", rangemode="tozero")
    title = f"Time over the ideal, the longer of matmul and collective alone: {signatures[0].where}"
    made.update_layout(height=2 * _HEIGHT_PX, title=title, template="plotly_white")
    return made


def mark(index: int) -> dict[str, str | int]:
    """A marker for each family: colours, and where they are used up, another shape."""
    return {"color": COLOURS[index % len(COLOURS)], "symbol": SYMBOLS[index // len(COLOURS) % len(SYMBOLS)], "size": 7}


def losses_page(signatures: Sequence[Signature], machine: Machine) -> str:
    """The page, as HTML."""
    text: str = figure(signatures, machine).to_html(include_plotlyjs=True)
    return text
