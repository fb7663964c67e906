"""The sections of the page. Each has its table and charts, and adds its figures to `charts` under the id of their place."""

from __future__ import annotations

from collections.abc import Sequence

from weft.planner.values import Plan
from weft.report.charts import Figure, bars
from weft.report.html import Html, join, table, tag
from weft.report.panels import Charts, chart_panel, timeline_panel
from weft.report.words import count, percent, sizes, us
from weft.schedules import spec
from weft.tools.results import Run, SiteRun


def predicted_section(run: Run, charts: Charts) -> Html:
    """What the named machine is predicted to take."""
    title = f"Predicted for {run.machine}"
    if not run.sites:
        return tag("section", tag("h2", title), tag("p", "No site was planned."))
    plans = [site.plan for site in run.sites]
    charts["bars-predicted"] = _bars(run, plans, [p.chosen.predicted_us for p in plans])
    lines = [
        timeline_panel(f"timeline-predicted-{i}", f"{s.site}, {s.plan.chosen.spec}", s.plan.spans, _marks(s.plan), charts)
        for i, s in enumerate(run.sites)
    ]
    parts = [_lead(run), _predicted_table(run), chart_panel("bars-predicted", f"Bars: {title}; the table has the numbers")]
    return tag("section", tag("h2", title), *parts, *lines)


def measured_section(run: Run, charts: Charts) -> Html:
    """What this machine took, and whether the results are right."""
    title = f"Measured on this machine ({run.device})"
    if not run.sites:
        return tag("section", tag("h2", title), tag("p", "No site was run."))
    charts["bars-measured"] = _bars(run, run.sites, [s.overlapped_us for s in run.sites])
    lines = [
        timeline_panel(f"timeline-measured-{i}", f"{s.site}, {spec(s.schedule, s.chunks)}", s.spans, _marks(s), charts)
        for i, s in enumerate(run.sites)
    ]
    parts = [*_caveats(run), _measured_table(run), chart_panel("bars-measured", f"Bars: {title}; the table has the numbers")]
    return tag("section", tag("h2", title), *parts, *lines)


def terms() -> Html:
    """What the words of the tables mean."""
    meanings = (
        ("sequential", "the matmul and the collective, one after the other"),
        ("overlapped", "the same result by the schedule that is named"),
        ("ideal", "the larger of the whole matmul alone and the whole collective alone"),
        ("share of ideal", "ideal over overlapped; 100 % leaves nothing exposed; beyond, the exchange beats the collective"),
        ("error", "largest difference from the sequential program, relative to the largest element of the reference"),
    )
    return tag("footer", tag("h2", "Terms"), tag("dl", join(tag("div", tag("dt", w), tag("dd", m)) for w, m in meanings)))


def _bars(run: Run, times: Sequence[Plan] | Sequence[SiteRun], overlapped: list[float]) -> Figure:
    sequential, ideal = [t.sequential_us for t in times], [t.ideal_us for t in times]
    return bars([s.site for s in run.sites], {"sequential": sequential, "overlapped": overlapped, "ideal": ideal})


def _marks(times: Plan | SiteRun) -> dict[str, float]:
    return {"sequential": times.sequential_us, "ideal": times.ideal_us}


def _lead(run: Run) -> Html:
    before = sum(s.plan.sequential_us for s in run.sites)
    after = sum(s.plan.chosen.predicted_us for s in run.sites)
    ideal = sum(s.plan.ideal_us for s in run.sites)
    gain = f"{before / after:.2f} times as fast as" if after else "as fast as"
    text = (
        f"{count(len(run.sites), 'site')} together: {us(before)} µs one after the other, {us(after)} µs overlapped, "
        f"{us(ideal)} µs if nothing were exposed (ideal). Overlapped is {gain} sequential."
    )
    return tag("p", text, class_="lead")


def _caveats(run: Run) -> list[Html]:
    texts = []
    if run.device == "cpu":
        texts.append(
            "Ranks are processes of this host's CPU. These times show that it runs, not that it is fast: "
            "nothing here has GPUs, copy engines or links to overlap."
        )
    if run.over_ideal:
        texts.append(
            "A share over 100 %: the slower half alone took longer than the overlapped call; times scatter by that much."
        )
    texts += [f"{s.site}: chosen by measurement, µs: {_tried(s)}" for s in run.sites if s.tried]
    return [tag("p", text, class_="note") for text in texts]


def _tried(site: SiteRun) -> str:
    """Every candidate's time, the fastest first."""
    return ", ".join(f"{name} {us(time)}" for name, time in site.fastest_first)


def _predicted_table(run: Run) -> Html:
    heads = ("site", "M × N × K", "schedule", "sequential µs", "overlapped µs", "ideal µs", "share of ideal", "why")
    rows = [
        (
            site.site,
            sizes(site.plan.problem),
            site.plan.chosen.spec,
            us(site.plan.sequential_us),
            us(site.plan.chosen.predicted_us),
            us(site.plan.ideal_us),
            percent(site.plan.share_of_ideal),
            site.plan.why,
        )
        for site in run.sites
    ]
    caption = f"{count(run.machine_ranks, 'rank')} of {run.machine}, {count(run.machine_tokens, 'token')}; global M, N and K"
    return table(caption, heads, rows, words=(0, 2, 7))


def _measured_table(run: Run) -> Html:
    times = ("sequential µs", "overlapped µs", "ideal µs", "share of ideal")
    heads = ("site", "M × N × K", "schedule", "result", "max error", "tolerance", *times)
    rows = [
        (
            site.site,
            sizes(site.problem),
            spec(site.schedule, site.chunks),
            _verdict(site),
            f"{site.max_error:.2g}",
            f"{site.tolerance:.2g}",
            us(site.sequential_us),
            us(site.overlapped_us),
            us(site.ideal_us),
            percent(site.share_of_ideal),
        )
        for site in run.sites
    ]
    caption = f"{count(run.world_size, 'rank')}, {count(run.tokens, 'token')}; medians of the slowest rank"
    return table(caption, heads, rows, words=(0, 2, 3))


def _verdict(site: SiteRun) -> Html:
    return tag("span", "right" if site.ok else "WRONG", class_="right" if site.ok else "wrong")
