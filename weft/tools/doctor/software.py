"""Examines Python and the packages that weft needs. Each is imported, and its version is compared with the lowest allowed."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
import sys
from dataclasses import dataclass

from weft.tools.doctor.finding import Finding, State

PYTHON = (3, 11)


@dataclass(frozen=True, kw_only=True)
class Package:
    """Package is a distribution, its lowest version, and its use in weft. `without` says what still works without it."""

    name: str
    lowest: str
    purpose: str
    without: str = ""


PLAIN_FLAGS = "plain loads and stores serve on x86-64" if platform.machine() in ("x86_64", "AMD64") else ""
"""Empty on other processors, on which the host executor needs real acquire and release operations."""

PACKAGES = (
    Package(name="torch", lowest="2.11", purpose="tensors, matmuls, collectives"),
    Package(name="triton", lowest="3.4", purpose="kernels"),
    Package(name="numpy", lowest="1.26", purpose="planner, host executor"),
    Package(name="simpy", lowest="4.1", purpose="simulator"),
    Package(name="rich", lowest="13", purpose="command line"),
    Package(name="typer", lowest="0.12", purpose="command line"),
    Package(name="plotly", lowest="5.20", purpose="reports", without="all but --report works"),
    Package(name="atomicshm", lowest="0.1", purpose="flags of the host executor", without=PLAIN_FLAGS),
)


def software_findings() -> tuple[Finding, ...]:
    """Return a finding on Python and one on each package."""
    return (_python(), *(package_finding(package) for package in PACKAGES))


def package_finding(package: Package) -> Finding:
    """Import the package and compare its version. A package that is there but fails to import counts as missing."""
    state: State = "warn" if package.without else "missing"
    what, cure = f"{package.name} ({package.purpose})", f'pip install "{package.name}>={package.lowest}"'
    try:
        module = importlib.import_module(package.name)
    except ModuleNotFoundError:
        without = f"; {package.without}" if package.without else ""
        return Finding(what=what, state=state, detail=f"not installed{without}", cure=cure)
    except Exception as error:  # a broken installation may raise any error, and the doctor must continue
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return Finding(what=what, state=state, detail=f"does not import: {reason[0]}", cure=f"{cure} --force-reinstall")
    version = _version(package.name) or str(getattr(module, "__version__", ""))
    if version and _numbers(version) < _numbers(package.lowest):
        return Finding(what=what, state=state, detail=f"{version}; weft needs {package.lowest}", cure=cure)
    return Finding(what=what, state="ok", detail=version or "version unknown")


def _python() -> Finding:
    seen, needed = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, PYTHON))
    if sys.version_info[:2] < PYTHON:
        return Finding(what="Python", state="missing", detail=seen, cure=f"use Python {needed} or newer")
    return Finding(what="Python", state="ok", detail=seen)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, at least two of them.

    >>> _numbers("2.11.0+cu130"), _numbers("13")
    ((2, 11, 0), (13, 0))
    """
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = tuple(int(part) for part in found.group().split(".")) if found else ()
    return numbers + (0,) * (2 - len(numbers))
