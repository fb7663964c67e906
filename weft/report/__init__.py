"""A run as a page to look at (`write_report`) and as a trace to open in Perfetto (`write_trace`).

Both read the values of weft.tools.results and nothing else. `weft.overlap_report` (overlap.py, places.py, overlap_page.py)
reads what a process group has run, and loads no plotly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.lazy import lazy_names

if TYPE_CHECKING:
    from weft.report.page import write_report
    from weft.report.trace import write_trace

__all__ = ["write_report", "write_trace"]
__getattr__, __dir__ = lazy_names(__name__, {"write_report": "page", "write_trace": "trace"})
