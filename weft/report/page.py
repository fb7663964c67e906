"""Writes the page of a run: one HTML file that shows every number as text next to its chart.

The page explains weft and the rows of its tables, then shows the predictions for the named machine, then what ran here. The
file contains everything that it needs, plotly.js included. Its content security policy makes browsers refuse to load more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from plotly.offline import get_plotlyjs

from weft.report.charts import Figure
from weft.report.html import Html, html_page, join, json_script, tag, text_of
from weft.report.sections import predicted_section, ran_section
from weft.report.words import count
from weft.tools.results import Run


def write_report(run: Run, folder: Path) -> Path:
    """Write the page of a run as `folder`/index.html, and return the file's path. The folder is created if it does not exist.

    Raises ValueError if it cannot be written.
    """
    return write_page(run_page(run), folder)


def write_page(text: str, folder: Path) -> Path:
    """Write a page as `folder`/index.html, and return the file's path. Raises ValueError if it cannot be written.

    The page is first written to a temporary file, so an error does not leave half a page.
    """
    path, temporary = folder / "index.html", folder / ".index.html.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = error.strerror or error
        raise ValueError(f"folder is {str(folder)!r}; a report needs a folder that can be written to: {reason}") from None
    return path


def run_page(run: Run) -> str:
    """Return the page of a run as HTML."""
    charts: dict[str, Figure] = {}
    sections = [
        _header(run),
        predicted_section(
            f"1. Predicted for {run.machine_words}",
            [(layer.name, layer.plan) for layer in run.layers],
            charts,
            ranks=run.machine_ranks,
            tokens=run.machine_tokens,
        ),
        ran_section(run, charts),
    ]
    return document(run.model, sections, charts)


def document(title: str, sections: Sequence[Html], charts: Mapping[str, Figure]) -> str:
    """Return a page of these sections as HTML. charts: the figure for each chart in the sections, by the id of its element."""
    scripts = [
        json_script("charts", charts),
        Html(f"<script>{get_plotlyjs()}</script>"),
        Html(f"<script>{text_of('page.js')}</script>"),
    ]
    return html_page(title, *sections, scripts=scripts)


def _header(run: Run) -> Html:
    right_results = sum(layer.ok for layer in run.layers)
    verdict = f"{right_results} of {count(len(run.layers), 'result')} right" if run.layers else "no layer ran"
    facts = [
        ("Predicted for", f"{run.machine}, {count(run.machine_ranks, 'rank')}, {count(run.machine_tokens, 'token')}"),
        ("Run on", f"{run.device}, {count(run.world_size, 'rank')}, {count(run.tokens, 'token')}"),
        ("Inputs", f"{run.dtype}, seed {run.seed}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in run.versions.items()) or "not recorded"),
    ]
    badge = tag("span", verdict, class_="verdict right" if run.ok and run.layers else "verdict wrong")
    title = tag("h1", f"{run.model}: communication hidden behind computation ", badge)
    return tag("header", title, *(tag("p", text, class_="lead") for text in _introduction(run)), facts_list(facts))


def _introduction(run: Run) -> tuple[str, ...]:
    """Return paragraphs that explain weft, the rows and the sections of the page."""
    schedules = "schedules that were chosen for these ranks" if run.unpredicted_layers else "the same schedules"
    ran = f"{schedules} on {run.world_size} processes of this machine's CPU, at a size that CPUs can do"
    if run.device != "cpu":
        ran = f"schedules on {run.world_size} GPUs of this machine, and how long they took"
    return (
        "weft is a library for PyTorch that hides communication between GPUs behind computation. A model that is spread over "
        "several GPUs has communicating layers: a matmul, or a lookup, with the collective next to it that gathers its input "
        f"or combines its output. The rows on this page are the communicating layers of {run.model}.",
        f"The page shows two things. Section 1 predicts how long each communicating layer takes on {run.machine_words}, "
        "sequentially and with a schedule that overlaps communication and computation. Section 2 shows what ran here: "
        f"{ran}. Every schedule was proved, and every result was compared with the sequential program in float32. "
        "All times are in milliseconds (ms).",
    )


def facts_list(facts: Iterable[tuple[str, str]]) -> Html:
    """Return a list of facts, each with its name, as HTML."""
    return tag("dl", join(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts))
