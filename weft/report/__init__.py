"""A run as a page to look at (`write_report`) and as a trace to open in Perfetto (`write_trace`).

Both read the values of weft.tools.results and nothing else; measured and predicted spans take the same way through. What
draws them is loaded when it is first named, so that `weft.report(model)`, another name of `weft.overlap_report`, needs no
more than torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.models.report import OverlapReport
    from weft.report.page import write_report
    from weft.report.trace import write_trace

__all__ = ["write_report", "write_trace"]
_HOMES = {"write_report": "page", "write_trace": "trace"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft.report' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weft.report.{_HOMES[name]}"), name)


class _Callable(ModuleType):
    """This module: a package and, called with a model, the name that one looks for first."""

    def __call__(self, model: Any) -> OverlapReport:
        from weft.models.report import overlap_report

        return overlap_report(model)


sys.modules[__name__].__class__ = _Callable
