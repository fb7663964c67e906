"""The doctor on GPUs: every transport is timed within the bound, and none fails."""

from __future__ import annotations

import time

from on_gpus import NEEDS_REAL_TWO, alarm

from weft.tools.doctor import TRANSPORTS, gpu_findings

pytestmark = NEEDS_REAL_TWO


def test_every_transport_is_timed() -> None:
    begun = time.monotonic()
    with alarm(90):
        found = {finding.what: finding for finding in gpu_findings(quick=False)}
    seconds = time.monotonic() - begun
    for finding in found.values():
        print(finding)
    print(f"{seconds:.1f} s")
    timed = [found[f"transport: {transport.name}"] for transport in TRANSPORTS]
    assert [str(finding) for finding in timed if "GB/s" not in finding.detail] == []
    overlap = next(finding for what, finding in found.items() if what.startswith("overlap"))
    assert "could be hidden at most" in overlap.detail
    assert seconds < 60
