"""Attributes of a package that are imported when they are first named, so that `import weft` loads nothing heavy."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str] | None = None) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package, or a module, whose names are imported when they are first named.

    package: its `__name__`. homes: the module in which each of its public names is defined, relative to the package or from
    `weft.` on; a name that the module does not define stands for the module.
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
        # Stored, because a call of an operator would otherwise pay some microseconds for this function each time.
        return vars(sys.modules[package]).setdefault(name, found)

    def listed() -> list[str]:
        return sorted({*known, *modules(), *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return get, listed
