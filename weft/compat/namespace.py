"""This module imports weft's operators when a program first names one as torch.ops.weft.NAME.

A program saved by torch.export, or a policy that lists operators, may do so before any call of weft. Import torch before weft;
otherwise this is not installed.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch._ops import _OpNamespace


class _Namespace(_OpNamespace):
    """A _Namespace is the object torch.ops.weft. It imports `module` before it reports that an operator is missing."""

    __module__ = _OpNamespace.__module__  # torch builds the names of operators from it

    def __init__(self, name: str, module: str) -> None:
        super().__init__(name)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # While the module is being imported, torch itself asks whether an operator already exists.
            if name.startswith("_") or self._module in sys.modules:
                raise
        importlib.import_module(self._module)
        return super().__getattr__(name)


def load_when_named(namespace: str, module: str) -> None:
    """Import `module`, which defines the operators torch.ops.NAMESPACE.*, when a program first names one of them."""
    if namespace not in vars(torch.ops):
        setattr(torch.ops, namespace, _Namespace(namespace, module))
