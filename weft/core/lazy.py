"""Imports the attributes of a package on first access, so that `import weft` loads nothing heavy."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str] | None = None) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package or module that imports its names on first access.

    package: its `__name__`.
    homes: the module that defines each public name, relative to the package or from `weft.` on. A name that the module does
        not define means the module itself.
    """
    known = dict(homes or {})

    def modules() -> list[str]:
        path = vars(sys.modules[package]).get("__path__", ())
        return [found.name for found in pkgutil.iter_modules(path) if not found.name.startswith("_")]

    def get(name: str) -> Any:
        if name in known:
            home = known[name]
            module = importlib.import_module(home if home.startswith("weft.") else f"{package}.{home}")
            found = getattr(module, name, module)
        elif name in modules():
            found = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # The name is stored, because otherwise every call of an operator would pay some microseconds for this function.
        return vars(sys.modules[package]).setdefault(name, found)

    def listed() -> list[str]:
        return sorted({*known, *modules(), *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return get, listed
