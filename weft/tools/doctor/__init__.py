"""`weft doctor` finds out which of weft's requirements this machine fulfils, and says how to fix the others.

It tries everything: it imports packages, creates shared memory, and lets every pair of GPUs exchange data and compares the
data, because a link can exist and deliver wrong bytes. Then it compares the rate of each transport with that of the links, and
times one operator to see whether overlap pays. It leaves the machine unchanged.
"""

from __future__ import annotations

from weft.tools.doctor.environment import environment_findings
from weft.tools.doctor.finding import Finding, State
from weft.tools.doctor.gpus import gpu_findings
from weft.tools.doctor.host import host_findings
from weft.tools.doctor.software import software_findings

__all__ = ["Finding", "State", "diagnose"]


def diagnose(*, quick: bool = False) -> tuple[Finding, ...]:
    """Return all findings, in the order in which a user would fix them.

    This takes some seconds to import PyTorch, and about 20 s on two or more GPUs. quick: whether to skip timing transports."""
    return (*software_findings(), *environment_findings(), *host_findings(), *gpu_findings(quick=quick))
