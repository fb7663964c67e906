"""The findings of `weft doctor`: what this machine has of weft's requirements, and how to fix what is missing.

Everything is tried, not only looked up: packages are imported, shared memory is created, and every pair of GPUs exchanges
data that is compared afterwards, since a link may be there and yet deliver wrong bytes. Then each transport is timed, against
what the links should give, and one operator: whether overlap pays here. Nothing is changed or left behind.
"""

from __future__ import annotations

from weft.tools.doctor.environment import environment_findings
from weft.tools.doctor.finding import Finding, State
from weft.tools.doctor.gpus import gpu_findings
from weft.tools.doctor.host import host_findings
from weft.tools.doctor.software import software_findings

__all__ = ["Finding", "State", "diagnose"]


def diagnose(*, quick: bool = False) -> tuple[Finding, ...]:
    """All findings, in the order in which one would mend them. Takes some seconds: it imports PyTorch. On two GPUs or more,
    some 20 s, unless quick: then no transport is timed."""
    return (*software_findings(), *environment_findings(), *host_findings(), *gpu_findings(quick=quick))
