"""An overlap report as a page of its own: no scripts, nothing loaded, light or dark as the reader has it.

A row for each place, and below it one for each problem that has run there; what is not overlapped stands out, with its reason.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from weft.models.report_places import Called, ReportedPlace


def page(model: str, title: str, lead: str, share: float, places: Sequence[ReportedPlace]) -> str:
    """The whole page, as text. lead: the sentence below the model's name. share: of the places, those that are overlapped."""
    rows = "\n".join(row for place in places for row in _rows(place))
    return _PAGE.format(
        title=html.escape(title),
        model=html.escape(model),
        lead=lead,
        share=f"{100 * share:.1f}",
        rows=rows,
    )


def _rows(place: ReportedPlace) -> Iterator[str]:
    site, kind = place.site, "yes" if place.overlapped else "no"
    waiting = "not called yet" if place.waits else ""
    said = "; ".join(filter(None, (", ".join(site.operators), site.reason, waiting)))
    yield f'<tr class="place {kind}"><th scope="row">{html.escape(site.name)}</th>{_cell(str(place.count), "number")}'
    yield f'<td colspan="6">{html.escape(said)}</td>{_cell(place.state, "state")}</tr>'
    for call in place.calls:
        yield f'<tr><td colspan="2"></td>{"".join(_cells(call))}</tr>'


def _cells(call: Called) -> Iterator[str]:
    """Operator, rows, schedule, time, sequential's, gain, share, why."""
    yield _cell(call.op)
    yield _cell(f"{call.rows:,}", "number")
    yield _cell(call.spec)
    yield _cell(_us(call.us), "number")
    gain = f" ({call.sequential_us / call.us:.2f}x)" if call.us and call.sequential_us else ""
    yield _cell(_us(call.sequential_us) + gain, "number")
    yield _share(call.share)
    yield _cell(call.why)


def _us(us: float | None) -> str:
    return "not measured" if us is None else f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def _share(share: float | None) -> str:
    if share is None:
        return _cell("", "number")
    filled = f'<span class="bar"><i style="width:{min(100, 100 * share):.0f}%"></i></span>'
    return f"<td class='number'>{filled}{100 * share:.0f} %</td>"


def _cell(text: str, kind: str = "") -> str:
    return f"<td{f' class={kind!r}' if kind else ''}>{html.escape(text)}</td>"


HEADS: Sequence[str] = ("operator", "rows", "schedule", "time, us", "sequential, us", "of the ideal", "why this one")

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root {{ --page: #fff; --text: #1b1f24; --quiet: #59636e; --line: #d5dae0; --good: #17693a; --bad: #8a3b12; --bar: #0072b2 }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #14171b; --text: #e6e9ed; --quiet: #9aa4af; --line: #363d45;
    --good: #63c98c; --bad: #f0a36b; --bar: #56b4e9 }}
}}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 24px 20px 64px; max-width: 1280px;
  color: var(--text); background: var(--page) }}
h1 {{ margin: 0; font-size: 1.7rem; overflow-wrap: anywhere }} p {{ max-width: 80ch; color: var(--quiet) }}
.lead {{ margin: 4px 0 8px; font-size: 1.15rem; color: var(--text) }}
.whole {{ height: 8px; border-radius: 4px; background: var(--line); overflow: hidden }}
.whole i {{ display: block; height: 100%; background: var(--good) }}
.frame {{ overflow-x: auto }} table {{ border-collapse: collapse; width: 100%; font-size: .92rem }}
th, td {{ text-align: left; vertical-align: top; padding: 5px 10px }} thead th {{ color: var(--quiet); font-weight: 500 }}
.place th, .place td {{ border-top: 1px solid var(--line); padding-top: 10px }} .place th {{ font-weight: 600 }}
.state {{ white-space: nowrap; font-weight: 600 }} .yes .state {{ color: var(--good) }} .no .state {{ color: var(--bad) }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }}
.bar {{ display: inline-block; width: 60px; height: 8px; margin-right: 8px; background: var(--line); border-radius: 4px }}
.bar i {{ display: block; height: 100%; background: var(--bar); border-radius: 4px }}
</style></head>
<body><h1>{model}</h1><p class="lead">{lead}</p><div class="whole"><i style="width:{share}%"></i></div>
<p>Times were measured when a schedule was chosen, at the first call of a size, beside the sequential program's. The ideal, the
larger of the matmul alone and the collective alone, is predicted for this machine; 100 % hides one of the two wholly.</p>
<div class="frame"><table>
<thead><tr><th>place</th><th class="number">times</th>{heads}</tr></thead>
<tbody>
{rows}
</tbody></table></div></body></html>
""".replace(
    "{heads}", "".join(f"<th{' class=number' if head.endswith(('us', 'ideal', 'rows')) else ''}>{head}</th>" for head in HEADS)
)
