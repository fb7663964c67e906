"""Calls of torch, Triton, CUDA and NCCL that are private or depend on the version.

TESTED lists the versions of torch and Triton that weft was tested with. Others may work, and get a warning.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import torch

TESTED = {"torch": ("2.11", "2.13", "2.14", "2.15"), "triton": ("3.6", "3.8", "3.9")}
"""The minor versions with which all tests ran, in ascending order, by package. pyproject.toml lists them, too."""
_LOG = logging.getLogger("weft.compat")


@cache
def warn_of_untested_versions() -> None:
    """Log one warning for each package whose version is not in TESTED. It is called when the first group is used."""
    installed = {"torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):  # CPU ranks need no Triton
        # The version is read without importing Triton, which reads at its import whether to interpret kernels.
        installed["triton"] = version_of("triton")
    for package, version in installed.items():
        if minor(version) not in TESTED[package]:
            tested = ", ".join(TESTED[package])
            _LOG.warning(
                "%s %s has not been tested with weft (tested: %s); if something fails, try one of those",
                package,
                version,
                tested,
            )


def minor(version: str) -> str:
    """Return the major and minor number of a version.

    >>> minor("2.11.0+cu130")
    '2.11'
    """
    return ".".join(version.split(".")[:2])
