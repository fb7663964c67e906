"""This module builds HTML. It escapes text unless it is Html already, so no string of a run can become markup or script."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any


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


def table(caption: str, heads: Iterable[str], rows: Iterable[Iterable[str]], *, words: Iterable[int] = (0,)) -> Html:
    """Return a table in a frame.

    words: the indices of columns of text. The others have numbers and are aligned to the right.

    The first cell of a row is its header. Narrow windows show a row as a card, in which each cell has its column's name.
    """
    text, names = set(words), list(heads)

    def cell(name: str, column: int, content: str, **attributes: str) -> Html:
        return tag(name, content, class_="words" if column in text else "number", **attributes)

    head = tag("tr", *(cell("th", i, h, scope="col") for i, h in enumerate(names)))
    body = [
        tag("tr", *(cell("td", i, c, data_name=names[i]) if i else cell("th", i, c, scope="row") for i, c in enumerate(row)))
        for row in rows
    ]
    parts = tag("caption", caption), tag("thead", head), tag("tbody", *body)
    return tag("div", tag("table", *parts), class_="frame", tabindex="0", role="region", aria_label=caption)


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
