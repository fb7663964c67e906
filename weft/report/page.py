"""The page of a run: one HTML file that loads nothing, with every number as text beside its chart.

From the top: what ran where, what is predicted for the named machine, what was measured here. The page's policy forbids all
loading, so a browser holds it to being self-contained; plotly.js stands in it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from plotly.offline import get_plotlyjs

from weft.report.charts import Figure
from weft.report.html import Html, join, json_script, tag
from weft.report.sections import measured_section, predicted_section, terms
from weft.report.words import count
from weft.tools.results import Run

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def write_report(run: Run, folder: Path) -> Path:
    """Write `folder`/index.html, making the folder where needed; returns the file's path.

    Raises ValueError if it cannot be written.
    """
    return write_page(page(run), folder)


def write_page(text: str, folder: Path) -> Path:
    """Write a page as `folder`/index.html, whole or not at all. Raises ValueError if it cannot be written."""
    path, part = folder / "index.html", folder / ".index.html.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        reason = error.strerror or error
        raise ValueError(f"folder is {str(folder)!r}; a report needs a folder that can be written to: {reason}") from None
    return path


def page(run: Run) -> str:
    """The whole page as text."""
    charts: dict[str, Figure] = {}
    sections = [
        _header(run),
        predicted_section(run, charts),
        measured_section(run, charts),
        terms(),
    ]
    return document(run.model, sections, charts)


def document(title: str, sections: Sequence[Html], charts: Mapping[str, Figure]) -> str:
    """A page of these sections. charts: a figure for every place that they have for one."""
    scripts = [
        json_script("charts", charts),
        Html(f"<script>{get_plotlyjs()}</script>"),
        Html(f"<script>{_resource('page.js')}</script>"),
    ]
    return f'<!doctype html>\n<html lang="en">{_head(title)}{tag("body", tag("main", *sections), *scripts)}</html>\n'


def _head(title: str) -> Html:
    return tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", f"weft: {title}"),
        Html(f"<style>{_resource('page.css')}</style>"),
    )


def _resource(name: str) -> str:
    return files("weft.report").joinpath(name).read_text(encoding="utf-8")


def _header(run: Run) -> Html:
    right = sum(site.ok for site in run.sites)
    verdict = f"{right} of {count(len(run.sites), 'site')} right" if run.sites else "no site ran"
    facts = [
        ("Predicted for", f"{run.machine}, {count(run.machine_ranks, 'rank')}, {count(run.machine_tokens, 'token')}"),
        ("Measured on", f"{run.device}, {count(run.world_size, 'rank')}, {count(run.tokens, 'token')}"),
        ("Inputs", f"{run.dtype}, seed {run.seed}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in run.versions.items()) or "not recorded"),
    ]
    badge = tag("span", verdict, class_="verdict right" if run.ok and run.sites else "verdict wrong")
    return tag("header", tag("h1", run.model, " ", badge), facts_list(facts))


def facts_list(facts: Iterable[tuple[str, str]]) -> Html:
    """Names and what they are."""
    return tag("dl", join(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts))
