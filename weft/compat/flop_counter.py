"""Tells torch.utils.flop_counter how many floating-point operations an operator does.

That module takes 3 s to load, so formulas wait until somebody else imports it. A FlopCounterMode copies the formulas when it is
made, so one that is active when an operator is defined gets its formula then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_MODULE = "torch.utils.flop_counter"
Formula = Callable[..., Any]
"""Returns a number of operations. It takes the results of an operator, and then its arguments."""
_WAITING: list[tuple[Any, Formula]] = []
"""The operators that torch does not know of yet, each with its formula."""


def register_flops(operator: Any, formula: Formula) -> None:
    """Register the formula of an operator of torch.ops, now or when torch.utils.flop_counter has been imported."""

    def count(*args: Any, out_val: Any = None) -> Any:
        return formula(out_val, *args)

    module = sys.modules.get(_MODULE)
    if module is None:
        if not _WAITING:
            sys.meta_path.insert(0, _AfterImport())
        _WAITING.append((operator, count))
        return
    _add(module, operator, count)
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, module._FlopCounterMode):
            mode.counter.flop_registry.setdefault(operator, count)


def _add(module: ModuleType, operator: Any, count: Formula) -> None:
    module.register_flop_formula(operator, get_raw=True)(count)


class _AfterImport(MetaPathFinder):
    """Finds torch.utils.flop_counter as usual, and registers the formulas that wait for it once it has been executed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        found = (one.find_spec(fullname, path, target) for one in list(sys.meta_path) if one is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:  # a specification may be executed several times, or never
                    sys.meta_path.remove(self)
                while _WAITING:
                    _add(module, *_WAITING.pop())

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def number_of(counts: torch.Tensor, most: Any) -> Any:
    """Return the sum of the counts, of which a tensor has no more than `most`. It waits for the device.

    Return `most` where the values are not there: while a graph is traced or captured.
    """
    there = type(counts) is torch.Tensor and counts.device.type != "meta"
    if not there or (counts.is_cuda and torch.cuda.is_current_stream_capturing()):
        return most
    return min(max(int(counts.sum()), 0), most)
