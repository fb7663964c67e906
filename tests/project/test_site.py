"""The site: every page is in the navigation, links out become paths."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = [*(path.name for path in (ROOT / "docs").glob("*.md")), "studies.md"]  # site_pages.py makes the last one
    assert sorted(re.findall(r"([\w-]+\.md)$", navigation, re.MULTILINE)) == sorted(pages)


def test_links_out_of_the_site_become_paths() -> None:
    adapted = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))["adapted"]
    assert adapted("[a](../weft/perf/engine.py#x) [b](design.md#y)\n") == "a (`weft/perf/engine.py`) [b](design.md#y)\n"
    assert adapted("[log](lab/log.md#x)\n") == "log (`docs/lab/log.md`)\n"
    assert adapted("[T3](../studies/README.md#t3)\n") == "[T3](studies.md#t3)\n"


def test_signatures_become_docstrings() -> None:
    adapted = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))["adapted"]
    page = adapted("## A\n\n```py signatures plans\nweft.Problem(...)\n```\n")
    assert page.startswith("## A\n\n::: weft.core.problem.Problem\n\n")
    assert "::: weft.core.machine.Machine.what_if\n" in page
    assert "```" not in page


def test_every_fenced_block_of_the_site_has_a_language_alone() -> None:
    """Else mkdocs takes it for prose, and kernel[grid](arguments) in it for a link."""
    adapted = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))["adapted"]
    for page in sorted((ROOT / "docs").glob("*.md")):
        fences = re.findall(r"^```(.*)$", adapted(page.read_text(encoding="utf-8")), re.MULTILINE)
        assert not [fence for fence in fences if not re.fullmatch("[a-z]*", fence)], page.name
