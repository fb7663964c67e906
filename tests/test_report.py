"""The page of a run, as text and in a browser."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_run import HOSTILE, LANES, make_run, site

from weft.core.codec import dumps, loads
from weft.core.span import Span
from weft.report import write_report
from weft.report.charts import SHOWN_RANKS, timeline
from weft.report.html import json_script
from weft.report.page import page as render
from weft.tools.results import Run

LOADING = {"src", "srcset", "href", "data", "action", "poster", "background"}
NAME = "mlp <b>down</b>"


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run(site(NAME, error=1e-7), site("attention output", error=0.5))


@pytest.fixture(scope="module")
def page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(run, tmp_path_factory.mktemp("report") / "new")


class Reader(HTMLParser):
    """Attributes that load something, tables as rows of text, and all text outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.scripts = 0
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.scripts += tag == "script"
        self.loads += [(name, value) for name, value in attrs if name in LOADING]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if {"script", "style"} & set(self._open):
            return
        self.texts.append(data)
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def read(page: Path) -> Reader:
    return Reader(page.read_text(encoding="utf-8"))


def test_returns_the_one_file_that_it_writes(page: Path) -> None:
    assert page.name == "index.html"
    assert list(page.parent.iterdir()) == [page]


def test_loads_nothing(page: Path, read: Reader) -> None:
    text = page.read_text(encoding="utf-8")
    assert read.loads == []
    assert "default-src 'none'" in text
    assert "@import" not in text.split("<script")[0]


def test_names_cannot_be_markup(page: Path, read: Reader) -> None:
    text = page.read_text(encoding="utf-8")
    assert HOSTILE not in text
    assert "<b>down</b>" not in text
    assert read.scripts == 3
    assert f"llama {HOSTILE}" in "".join(read.texts)


def test_predicted_comes_first_and_its_numbers_are_text(read: Reader) -> None:
    numbers = ["8,192 × 28,672 × 4,096", "flag_gated:8", "790", "512", "480", "94 %"]
    why = "Copies are hidden <u>whole</u> behind one GEMM."
    assert [NAME, *numbers, why] in read.rows
    text = "".join(read.texts)
    assert text.index("Predicted for h200x8") < text.index("Measured on this machine (cpu)")


def test_measured_numbers_are_text_and_tell_right_from_wrong(read: Reader) -> None:
    times = ["12,346", "23,457", "9,000", "38 %"]
    first = [NAME, "64 × 128 × 96", "hetero_fused_1d:4", "right", "1e-07", "1e-05", *times]
    wrong = ["attention output", "64 × 128 × 96", "hetero_fused_1d:4", "WRONG", "0.5", "1e-05", *times]
    assert first in read.rows
    assert wrong in read.rows
    assert "1 of 2 sites right" in "".join(read.texts)


def test_what_ran_and_what_did_not_is_said(read: Reader) -> None:
    text = "".join(read.texts)
    for words in ("cpu, 4 ranks, 64 tokens", "h200x8, 8 ranks, 8,192 tokens", "float32, seed 7", "weft 0.1.0, torch 2.13.0"):
        assert words in text


def test_data_for_the_script_cannot_end_it() -> None:
    text = json_script("data", {"name": f"</script>{HOSTILE}"})
    assert Reader(text).scripts == 1
    assert json.loads(text.partition(">")[2].removesuffix("</script>")) == {"name": f"</script>{HOSTILE}"}


@pytest.mark.parametrize(("device", "said"), [("cpu", True), ("cuda", False)])
def test_cpu_times_are_not_called_fast(device: str, said: bool, tmp_path: Path) -> None:
    text = write_report(make_run(site("a", error=0), device=device), tmp_path).read_text(encoding="utf-8")
    assert ("show that it runs, not that it is fast" in text) == said


@pytest.mark.parametrize(("overlapped_us", "said"), [(9001.0, False), (8960.0, False), (8000.0, True)])
def test_a_share_over_100_percent_is_explained(overlapped_us: float, said: bool, tmp_path: Path) -> None:
    found = dataclasses.replace(site("a", error=0), overlapped_us=overlapped_us)
    text = write_report(make_run(found), tmp_path).read_text(encoding="utf-8")
    assert ("A share over 100 %:" in text) == said


def test_a_run_without_sites_has_a_page(tmp_path: Path) -> None:
    text = "".join(Reader(write_report(make_run(), tmp_path).read_text(encoding="utf-8")).texts)
    assert "no site ran" in text


def test_a_run_read_back_from_json_has_the_same_page(run: Run) -> None:
    assert render(loads(Run, dumps(run))) == render(run)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.touch()
    with pytest.raises(ValueError, match=r"folder is .*taken"):
        write_report(make_run(), path)


def test_spans_share_a_trace_a_kind() -> None:
    many = [
        Span(rank=i % 8, lane="compute", kind="gemm", name="g", start_us=float(i), end_us=i + 1.0, flops=1)
        for i in range(10_000)
    ]
    figure = timeline(many, {})
    assert len(figure["data"]) == 2
    assert [len(t["x"]) for t in figure["data"]] == [10_000 * SHOWN_RANKS // 8, 10_000 * (8 - SHOWN_RANKS) // 8]
    assert [t["visible"] for t in figure["data"]] == [True, False]
    assert sum(t["showlegend"] for t in figure["data"]) == 1


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver on the path, so the page cannot be opened")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    switches = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-sync window-size=1200,900"
    quiet = "disable-background-networking disable-component-update disable-dev-shm-usage"
    for switch in (*switches.split(), *quiet.split(), f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chrome.set_page_load_timeout(60)
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def opened(browser: Any, page: Path) -> Any:
    browser.get(page.as_uri())
    wait(browser, lambda: browser.execute_script("return document.body.dataset.charts") == "drawn")
    return browser


def wait(browser: Any, ready: Callable[[], bool]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60).until(lambda _: ready())


def select(browser: Any, selector: str) -> list[str]:
    """Text of all elements that a CSS selector finds."""
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    found = browser.execute_script(script, selector)
    assert isinstance(found, list)
    return found


def drawn(browser: Any, name: str, points: int) -> bool:
    return len(select(browser, f"#{name} .bars .point")) == points


@pytest.mark.parametrize(("name", "longest"), [("bars-predicted", "790"), ("bars-measured", "23,457")])
def test_bars_are_drawn(opened: Any, name: str, longest: str) -> None:
    assert len(select(opened, f"#{name} .bars .point")) == 3 * 2
    assert select(opened, f"#{name} .legendtext") == ["sequential", "overlapped", "ideal"]
    assert select(opened, f"#{name} .ytick") == [NAME, "attention output"]
    assert longest in select(opened, f"#{name} .bartext")


@pytest.mark.parametrize("place", ["measured-0", "measured-1", "predicted-0", "predicted-1"])
def test_first_ranks_of_timelines_are_drawn(opened: Any, run: Run, place: str) -> None:
    group, index = place.split("-")
    of = run.sites[int(index)]
    spans = of.spans if group == "measured" else of.plan.spans
    shown = [s for s in spans if s.rank < SHOWN_RANKS]
    assert len(select(opened, f"#timeline-{place} .bars .point")) == len(shown)
    assert sorted(select(opened, f"#timeline-{place} .ytick")) == sorted(f"rank {r} {lane}" for r in (0, 1) for lane in LANES)
    assert set(select(opened, f"#timeline-{place} .legendtext")) == {s.kind for s in spans}


def test_a_button_shows_all_ranks_and_hides_them_again(opened: Any, run: Run) -> None:
    name = "timeline-predicted-0"
    spans = run.sites[0].plan.spans
    counts = {"Show 2 ranks": len(spans), "Show all 8 ranks": len([s for s in spans if s.rank < SHOWN_RANKS])}
    for text, expected in counts.items():
        opened.execute_script(f"document.querySelector('button[data-chart={name}]').click()")
        wait(opened, partial(drawn, opened, name, expected))
        assert select(opened, f"button[data-chart={name}]") == [text]


def test_bars_of_a_timeline_lie_where_the_spans_do(opened: Any, run: Run) -> None:
    script = """
        const axis = document.getElementById("timeline-measured-0")._fullLayout.xaxis;
        return [...document.querySelectorAll("#timeline-measured-0 .bars:first-child .point path")]
            .map((path) => path.getBBox()).map((box) => [axis.p2l(box.x), axis.p2l(box.x + box.width)])"""
    bars = sorted(opened.execute_script(script))
    spans = sorted([s.start_us, s.end_us] for s in run.sites[0].spans if s.kind == "gemm" and s.rank < SHOWN_RANKS)
    assert [edge for bar in bars for edge in bar] == pytest.approx([edge for span in spans for edge in span], abs=200)


def test_page_fits_a_narrow_window(opened: Any) -> None:
    opened.set_window_size(500, 900)
    width = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    wait(opened, lambda: opened.execute_script(width)[0] <= opened.execute_script(width)[1])
    script = """
        const box = (part) => document.querySelector("#timeline-predicted-0 ." + part).getBoundingClientRect();
        const drawn = box("main-svg").width == document.getElementById("timeline-predicted-0").clientWidth;
        return [drawn && window.innerWidth <= 360, box("nsewdrag").width, box("xtitle").bottom, box("legend").top]"""

    def readable() -> bool:
        settled, bars, title, legend = opened.execute_script(script)
        return bool(settled and bars > 250 and title < legend)

    narrow = {"width": 360, "height": 900, "deviceScaleFactor": 1, "mobile": False}  # narrower than windows may be
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    wait(opened, lambda: opened.execute_script(width)[0] <= opened.execute_script(width)[1] <= 360)
    wait(opened, readable)  # a chart scrolls by itself
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    opened.set_window_size(1200, 900)


def test_nothing_was_executed_loaded_or_complained_about(opened: Any) -> None:
    assert opened.execute_script("return window.hacked === undefined")
    assert opened.get_log("browser") == []
    asked = opened.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == []
