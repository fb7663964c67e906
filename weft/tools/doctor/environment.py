"""The environment: whether weft's variables have values that will do, and names that are read."""

from __future__ import annotations

import os

from weft.tools.doctor.finding import Finding


def environment_findings() -> tuple[Finding, ...]:
    """What weft's variables say; none without PyTorch, with which they are read."""
    try:
        from weft.runtime.environment import READ, unknown
    except Exception:  # a broken installation may fail with anything; the finding of PyTorch says how
        return ()
    found = [_read(name) for name in READ if name in os.environ]
    for name in unknown():
        cure = f"unset {name}; weft reads {', '.join(READ)}"
        found.append(Finding(what=name, state="warn", detail="nothing reads it", cure=cure))
    return tuple(found)


def _read(name: str) -> Finding:
    from weft.runtime.environment import READ

    try:
        READ[name]()
    except ValueError as error:
        return Finding(what=name, state="missing", detail=" ".join(str(error).split()), cure=f"set it so, or unset {name}")
    return Finding(what=name, state="ok", detail=os.environ[name] or "empty")
