"""This module builds HTML. It escapes text unless it is Html already, so no string of a run can become markup or script."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from weft.report.tables import Cell, Column, Judged, ReportTable


class Html(str):
    """Html is markup that needs no escaping."""


def tag(name: str, *children: str, **attributes: str) -> Html:
    """Return `<name attributes>children</name>`. A trailing _ in an attribute's name is dropped, and other _ become -.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    words = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{words}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Html:
    """Return the children one after the other, each escaped unless it is Html."""
    return Html("".join(c if isinstance(c, Html) else html.escape(c) for c in children))


def table(of: ReportTable) -> Html:
    """Return a table in a frame. Narrow windows show a row as a card, in which each cell has its column's name."""

    def cell(name: str, column: Column, content: Cell, **attributes: str) -> Html:
        text = content if isinstance(content, Html) else column.text(content)
        if isinstance(content, Judged):
            text = tag("span", text, class_="right" if content.right else "wrong")
        return tag(name, text, class_="words" if column.words else "number", **attributes)

    first, *others = of.columns
    head = tag("tr", *(cell("th", column, column.head, scope="col") for column in of.columns))
    body = [
        tag(
            "tr",
            cell("th", first, row[0], scope="row"),
            *(cell("td", column, each, data_name=column.head) for column, each in zip(others, row[1:], strict=True)),
        )
        for row in of.rows
    ]
    parts = tag("caption", of.title), tag("thead", head), tag("tbody", *body)
    return tag("div", tag("table", *parts), class_="frame", tabindex="0", role="region", aria_label=of.title)


def json_script(name: str, data: Any) -> Html:
    """Return an element with `data` for the page's script. Every "<" is escaped, so the data cannot end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{html.escape(name)}">{text}</script>')


def html_page(title: str, *children: Html, scripts: Iterable[Html] = ()) -> str:
    """Return a self-contained page. Its policy makes the browser refuse to load anything, and scripts if none are passed."""
    body = tag("main", *children), *scripts
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    policy += "; script-src 'unsafe-inline'; img-src data: blob:" if len(body) > 1 else ""
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", f"weft: {title}"),
        Html(f"<style>{text_of('page.css')}</style>"),
    )
    return f'<!doctype html>\n<html lang="en">{head}{tag("body", *body)}</html>\n'


def text_of(name: str) -> str:
    """Return the text of a file in this package."""
    return files("weft.report").joinpath(name).read_text(encoding="utf-8")
