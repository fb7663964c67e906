"""A run as a page to look at (`write_report`) and as a trace to open in Perfetto (`write_trace`).

Both read the values of weft.results and nothing else; measured and predicted spans take the same way through.
"""

from weft.report.page import write_report
from weft.report.trace import write_trace

__all__ = ["write_report", "write_trace"]
