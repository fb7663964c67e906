"""The page of a run, as text and in a browser."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_run import HOSTILE, LANES, SPEEDS, layer, make_run

from weft.core.span import Span
from weft.report import write_report
from weft.report.charts import SHOWN_RANKS, legend_of, timeline
from weft.report.tables import json_script
from weft.tools.results import Run

LOADING = {"src", "srcset", "href", "data", "action", "poster", "background"}
NAME = "mlp <b>down</b>"


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run(layer(NAME, error=1e-7), layer("attention output", error=0.5))


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
    numbers = ["flag_gated:8", "overlapped", "1.54x", "790", "512", "480", "94%", "8,192 x 28,672 x 4,096"]
    assert [NAME, *numbers] in read.rows
    text = "".join(read.texts)
    assert text.index("8 x NVIDIA H200") < text.index("4 CPU ranks")


def test_right_results_are_told_from_wrong_ones(read: Reader) -> None:
    first = [NAME, "hetero_fused_1d:4", "proved", "right", "1e-07", "1e-05", "64 x 128 x 96"]
    wrong = ["attention output", "hetero_fused_1d:4", "proved", "WRONG", "0.5", "1e-05", "64 x 128 x 96"]
    assert first in read.rows
    assert wrong in read.rows
    assert "1 of 2" in "".join(read.texts)


def test_a_page_has_one_unit_of_time(page: Path, read: Reader) -> None:
    """Tables had ms, and the sentences that explain a choice us."""
    figures = json.loads(page.read_text(encoding="utf-8").partition('id="charts">')[2].partition("</script>")[0])
    assert {figure["layout"]["xaxis"]["title"]["text"] for figure in figures.values()} == {"us"}
    assert not any(re.search(r"[0-9] ms\b|\bms$", text) for text in read.texts)


def test_data_for_the_script_cannot_end_it() -> None:
    text = json_script("data", {"name": f"</script>{HOSTILE}"})
    assert Reader(text).scripts == 1
    assert json.loads(text.partition(">")[2].removesuffix("</script>")) == {"name": f"</script>{HOSTILE}"}


def test_only_gpus_are_compared_in_speed(tmp_path: Path, read: Reader) -> None:
    measured = make_run(layer("a", error=0, speeds=SPEEDS), device="cuda")
    text = write_report(measured, tmp_path).read_text(encoding="utf-8")
    assert ["a", "hetero_fused_1d:4", "0.53x", "12,346", "23,457", "9,000", "38%", "512"] in Reader(text).rows
    assert "bars-measured" in text
    assert "timeline-measured-0" in text
    assert "Times of CPUs say nothing about GPUs, so they are neither compared nor drawn" in "".join(read.texts)
    assert not any(cell.startswith("12,3") for row in read.rows for cell in row)


def test_a_layer_that_stays_sequential_says_why(tmp_path: Path) -> None:
    found = layer("a", error=0)
    rival = found.plan.chosen
    plan = dataclasses.replace(
        found.plan, candidates=(dataclasses.replace(rival, schedule="sequential", chunks=1, predicted_us=500.0), rival)
    )
    run = make_run(
        dataclasses.replace(found, plan=dataclasses.replace(plan, sequential_us=500.0), schedule="sequential", chunks=1)
    )
    text = "".join(Reader(write_report(run, tmp_path).read_text(encoding="utf-8")).texts)
    assert plan.why in text


def test_what_ran_instead_of_the_prediction_is_named(tmp_path: Path) -> None:
    same = dataclasses.replace(layer("a", error=0), schedule="flag_gated", chunks=8)
    for found, said in ((same, False), (layer("a", error=0), True)):
        text = "".join(Reader(write_report(make_run(found), tmp_path).read_text(encoding="utf-8")).texts)
        assert ("a ran hetero_fused_1d:4" in text) == said
        assert ("the same schedules" in text) != said


@pytest.mark.parametrize(("overlapped_us", "said"), [(8960.0, False), (8000.0, True)])
def test_a_share_over_100_percent_is_explained(overlapped_us: float, said: bool, tmp_path: Path) -> None:
    found = layer("a", error=0, speeds=dataclasses.replace(SPEEDS, overlapped_us=overlapped_us))
    text = write_report(make_run(found, device="cuda"), tmp_path).read_text(encoding="utf-8")
    assert ("Over 100% of ideal" in text) == said


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
    assert list(legend_of(figure)) == ["gemm"]


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


@pytest.mark.parametrize("index", [0, 1])
def test_first_ranks_of_timelines_are_drawn(opened: Any, run: Run, index: int) -> None:
    place = f"predicted-{index}"
    spans = run.layers[index].plan.spans
    shown = [s for s in spans if s.rank < SHOWN_RANKS]
    assert len(select(opened, f"#timeline-{place} .bars .point")) == len(shown)
    assert sorted(select(opened, f"#timeline-{place} .ytick")) == sorted(f"rank {r} {lane}" for r in (0, 1) for lane in LANES)
    assert set(select(opened, f"ul:has(+ #timeline-{place}) li")) == {s.kind for s in spans}


def test_a_button_shows_all_ranks_and_hides_them_again(opened: Any, run: Run) -> None:
    name = "timeline-predicted-0"
    spans = run.layers[0].plan.spans
    counts = {"Show 2 ranks": len(spans), "Show all 8 ranks": len([s for s in spans if s.rank < SHOWN_RANKS])}
    for text, expected in counts.items():
        opened.execute_script(f"document.querySelector('button[data-chart={name}]').click()")
        wait(opened, partial(drawn, opened, name, expected))
        assert select(opened, f"button[data-chart={name}]") == [text]


def test_bars_of_a_timeline_lie_where_the_spans_do(opened: Any, run: Run) -> None:
    script = """
        const axis = document.getElementById("timeline-predicted-0")._fullLayout.xaxis;
        return [...document.querySelectorAll("#timeline-predicted-0 .bars:first-child .point path")]
            .map((path) => path.getBBox()).map((box) => [axis.p2l(box.x), axis.p2l(box.x + box.width)])"""
    bars = sorted(opened.execute_script(script))
    spans = sorted([s.start_us, s.end_us] for s in run.layers[0].plan.spans if s.kind == "gemm" and s.rank < SHOWN_RANKS)
    assert [edge for bar in bars for edge in bar] == pytest.approx([edge for span in spans for edge in span], abs=5.0)


def test_charts_have_their_height_before_they_are_drawn(page: Path, opened: Any) -> None:
    """A chart that got its height when it was drawn moved what stands below it."""
    found = "return [...document.querySelectorAll('.chart')].map((e) => [e.id, e.getBoundingClientRect().height])"
    figures = json.loads(page.read_text(encoding="utf-8").partition('id="charts">')[2].partition("</script>")[0])
    assert dict(opened.execute_script(found)) == {name: figure["layout"]["height"] for name, figure in figures.items()}
    assert all(f"#{name} {{ height: " in page.read_text(encoding="utf-8").partition("</style></head>")[2] for name in figures)
    assert next(iter(figures)) == "bars-predicted", "it comes first on the page"


def test_a_number_comes_before_definitions(read: Reader) -> None:
    text = "".join(read.texts)
    assert text.index("1.54x as fast is predicted") < text.index("weft is a library")


def test_page_fits_a_narrow_window(opened: Any) -> None:
    opened.set_window_size(500, 900)
    width = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    wait(opened, lambda: opened.execute_script(width)[0] <= opened.execute_script(width)[1])
    script = """
        const box = (part) => document.querySelector("#timeline-predicted-0 ." + part).getBoundingClientRect();
        const drawn = box("main-svg").width == document.getElementById("timeline-predicted-0").clientWidth;
        return [drawn && window.innerWidth <= 360, box("nsewdrag").width, box("nsewdrag").height]"""

    def readable() -> bool:
        settled, across, down = opened.execute_script(script)
        return bool(settled and across > 90 and down > 100)  # the longest label takes half of the width in a wide font

    narrow = {"width": 360, "height": 900, "deviceScaleFactor": 1, "mobile": False}  # narrower than windows may be
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    wait(opened, lambda: opened.execute_script(width)[0] <= opened.execute_script(width)[1] <= 360)
    wait(opened, readable)
    cut = "return [...document.querySelectorAll('td, th, .chart, p')].filter((e) => e.scrollWidth > e.clientWidth + 1).length"
    assert opened.execute_script(cut) == 0
    beyond = "return [...document.querySelectorAll('td')].filter((e) => e.getBoundingClientRect().right > 360).length"
    assert opened.execute_script(beyond) == 0
    assert "schedule" in opened.execute_script(
        "return getComputedStyle(document.querySelectorAll('td')[0], '::before').content"
    )
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    opened.set_window_size(1200, 900)


def test_nothing_was_executed_loaded_or_complained_about(opened: Any) -> None:
    assert opened.execute_script("return window.hacked === undefined")
    assert opened.get_log("browser") == []
    asked = opened.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == []
