"""This package writes a run as an HTML page (`write_report`) and as a trace for Perfetto (`write_trace`).

Both read only the values of weft.tools.results. `weft.overlap_report` (overlap.py) reads the calls that a process group has
run, and does not import plotly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.lazy import lazy_names

if TYPE_CHECKING:
    from weft.report.page import write_report
    from weft.report.trace import write_trace

__all__ = ["write_report", "write_trace"]
__getattr__, __dir__ = lazy_names(__name__, {"write_report": "page", "write_trace": "trace"})
