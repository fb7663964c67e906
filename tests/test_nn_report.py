"""The overlap report as values: what counts as overlapped, its text, its page; and its other name."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import weft
from weft.nn.report import Called, OverlapReport, Place
from weft.nn.sites import Site


def _called(spec: str, us: float | None, **others: float) -> Called:
    return Called(op="all_gather_matmul", rows=8192, spec=spec, why="fastest of 8 <b>", us=us, **others)


def _place(count: int, *calls: Called, reason: str = "") -> Place:
    site = Site(
        module="layers.*.mlp", parts=("up",), operators=() if reason else ("all_gather_matmul",), reason=reason, n=8, k=4
    )
    return Place(site=site, count=count, calls=calls)


@pytest.fixture
def report() -> OverlapReport:
    fast, measured = _called("shard_p2p", 1000.0, sequential_us=1250.0, ideal_us=940.0), _called("flag_gated:1", 42.0)
    slow = _called("sequential", 3000.0, sequential_us=3000.0), _called("sequential_stores", 90.0, sequential_us=99.0)
    places = (_place(2, fast, measured), _place(3, *slow), _place(1, reason="an <i> of the user's"), _place(4))
    return OverlapReport(model="Llama<1>", places=places)


def test_what_only_ran_sequentially_is_not_overlapped(report: OverlapReport) -> None:
    assert report.headline == "Llama<1>: overlapped 6 of 10 places that communicate, 4 of them not called yet"


def test_text_has_time_gain_and_share(report: OverlapReport) -> None:
    told = str(report).splitlines()
    assert "shard_p2p 1000 us, 1.25x sequential, 0.94 of the predicted ideal (fastest of 8 <b>)" in told[2]
    assert told[3].endswith("flag_gated:1 42 us (fastest of 8 <b>)")
    assert told[-1].strip() == "not called yet"
    assert sum(line.strip() == "not called yet" for line in told) == 1


def test_page_has_the_same_and_no_markup_of_names(report: OverlapReport) -> None:
    page = report.html()
    assert "<title>Llama&lt;1&gt;: overlapped 6 of 10 places that communicate, 4 of them not called yet</title>" in page
    states = ["overlapped", "one after the other was the fastest", "not overlapped", "overlapped"]
    assert re.findall(r"class='state'>([^<]*)<", page) == states
    assert page.count("; not called yet<") == 1
    cells = re.findall(r"<td(?: class='number')?>([^<]*)</td>", page)
    assert [cell for cell in cells if cell in ("1,000", "1,250 (1.25x)", "42.0")] == ["1,000", "1,250 (1.25x)", "42.0"]
    assert "94 %" in page
    assert "an &lt;i&gt; of the user" in page
    assert not re.search(r"<b>|<script|https?://|src=", page)


def test_weft_report_is_its_other_name() -> None:
    with pytest.raises(ValueError, match="model is a Linear in which weft runs nothing"):
        weft.report(torch.nn.Linear(2, 2))


def test_it_needs_no_plotly() -> None:
    code = "import sys, weft; callable(weft.report) or sys.exit(1); 'plotly' in sys.modules and sys.exit(2)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
