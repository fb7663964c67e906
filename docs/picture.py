"""Takes the README's picture: one chart of a report, by headless Chromium (needs chromium, chromedriver and selenium).

weft run llama3-8b --ranks 4 --report out/
python docs/picture.py out/index.html timeline-predicted-2 docs/timeline.png 860

The last number is the window's width in pixels, 1000 by default. What only a reader of the page can use is left out.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from selenium import webdriver

WIDTH, HEIGHT = 1000, 800
SCALE = 2
"""Pixels of the picture for one of the page, so that it is sharp on any screen."""
INTERACTIVE = "document.querySelectorAll('button, details').forEach((part) => part.remove())"


def take(report: Path, element: str, picture: Path, width: int = WIDTH) -> None:
    """Write `picture`: the part of the report around the chart `element`, with its heading."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{HEIGHT}"):
        options.add_argument(argument)
    options.add_argument(f"--force-device-scale-factor={SCALE}")
    # A driver of our own: without one selenium asks the network for it.
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as browser:
        browser.get(report.resolve().as_uri())
        browser.execute_script(INTERACTIVE)
        chart = browser.find_element("id", element)
        chart.find_element("xpath", "..").screenshot(str(picture))


if __name__ == "__main__":
    take(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
