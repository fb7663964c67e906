"""The doctor on GPUs: every transport is timed within the bound, and none fails."""

from __future__ import annotations

import faulthandler
import time

import pytest
import torch

from weft.doctor.gpus import gpu_findings
from weft.doctor.transports import TRANSPORTS

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs two or more GPUs, this machine has {GPUS}")]


def test_every_transport_is_timed() -> None:
    faulthandler.dump_traceback_later(90, exit=True)
    begun = time.monotonic()
    found = {finding.what: finding for finding in gpu_findings(quick=False)}
    seconds = time.monotonic() - begun
    faulthandler.cancel_dump_traceback_later()
    for finding in found.values():
        print(finding)
    print(f"{seconds:.1f} s")
    timed = [found[f"transport: {transport.name}"] for transport in TRANSPORTS]
    assert [str(finding) for finding in timed if "GB/s" not in finding.detail] == []
    overlap = next(finding for what, finding in found.items() if what.startswith("overlap"))
    assert "could be hidden at most" in overlap.detail
    assert seconds < 60
