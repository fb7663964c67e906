"""The doctor's table of transports: what links should give, what samples say of it, and ranks that fail or hang."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist
from fake_torch import fake_torch

from weft.runtime.ranks import RankFailed
from weft.tools import doctor
from weft.tools.calibrate import Probe, ProbeResults, run_probes
from weft.tools.calibrate.common import ProbeSample
from weft.tools.doctor import TRANSPORTS, Rates, judged, pcie_gbps, rates, verdict
from weft.tools.requirements import Finding

MIB = 1 << 20
H200 = Rates(kind="NV18", pair_gbps=450.0, port_gbps=450.0)
BY_NAME = {transport.name: transport for transport in TRANSPORTS}


def _matrix(count: int, kind: str) -> list[list[str]]:
    return [["X" if row == col else kind for col in range(count)] for row in range(count)]


@pytest.mark.parametrize(
    ("matrix", "major", "pcie", "pair", "port"),
    [
        (_matrix(8, "NV18"), 9, "5, 16", 450.0, 450.0),  # H100, H200: a switch
        (_matrix(8, "NV12"), 8, "4, 16", 300.0, 300.0),  # A100: a switch
        (_matrix(4, "NV4"), 8, "4, 16", 100.0, 300.0),  # A100, four of them: each pair has links of its own
        (_matrix(8, "NV18"), 10, "5, 16", 900.0, 900.0),  # B200
        (_matrix(2, "PHB"), 9, "4, 16", 31.504, 31.504),
    ],
)
def test_what_links_should_give(matrix: list[list[str]], major: int, pcie: str, pair: float, port: float) -> None:
    found = rates(matrix, major, pcie)
    assert found is not None
    assert (found.pair_gbps, found.port_gbps) == pytest.approx((pair, port))


def test_the_slowest_pair_counts() -> None:
    mixed = [["X", "NV2", "NV1"], ["NV2", "X", "SYS"], ["NV1", "SYS", "X"]]
    assert rates(mixed, 7, "3, 16") == Rates(kind="SYS", pair_gbps=pcie_gbps("3, 16") or 0, port_gbps=pcie_gbps("3, 16") or 0)
    assert rates([["X", "NV2", "NV1"], ["NV2", "X", "NV2"], ["NV1", "NV2", "X"]], 7, "") == Rates(
        kind="NV1", pair_gbps=25.0, port_gbps=75.0
    )


@pytest.mark.parametrize(
    ("matrix", "major", "pcie"), [([], 9, "5, 16"), (_matrix(2, "NV18"), 99, "?"), (_matrix(2, "SYS"), 9, "N/A")]
)
def test_what_is_not_known(matrix: list[list[str]], major: int, pcie: str) -> None:
    assert rates(matrix, major, pcie) is None


def _sample(what: str, key: tuple[int, ...], us: float) -> ProbeSample:
    return ProbeSample(what=what, key=key, us=(us, us, us))


@pytest.mark.parametrize(
    ("name", "samples", "detail", "state"),
    [
        (
            "copy engine, push to one peer",
            [_sample("copy push", (MIB, 8), 24.0), _sample("copy push", (64 * MIB, 1), 186.4)],
            "360 GB/s",
            "ok",
        ),
        ("copy engine, pull from one peer", [_sample("copy pull", (64 * MIB, 1), 5000.0)], "13 GB/s", "warn"),
        ("NCCL all_gather", [_sample("all_gather", (64 * MIB,), 600.0)], "336 GB/s", "ok"),
        ("NCCL all_reduce", [_sample("all_reduce", (64 * MIB,), 1200.0)], "336 GB/s", "ok"),
    ],
)
def test_samples_against_links(name: str, samples: list[ProbeSample], detail: str, state: str) -> None:
    found = judged(BY_NAME[name], ProbeResults(samples={name: samples}), 4, H200)
    assert name in found.what
    assert (found.detail.startswith(detail), found.state) == (True, state)
    assert bool(found.cure) == (state != "ok")


def test_links_that_are_not_known_and_probes_that_fail() -> None:
    push = BY_NAME["copy engine, push to one peer"]
    timed = ProbeResults(samples={push.name: [_sample("copy push", (64 * MIB, 1), 186.4)]})
    assert judged(push, timed, 4, None).detail.startswith("360 GB/s a GPU; what")
    failed = judged(push, ProbeResults(failed={push.name: "rank 1: RuntimeError: no peer access"}), 4, H200)
    assert (failed.state, failed.detail, failed.cure) == ("warn", "rank 1: RuntimeError: no peer access", push.cure)


def test_whether_overlap_pays() -> None:
    alone = [_sample("all_gather", (1,), 375.0), _sample("gemm bfloat16", (1, 1, 1), 1332.0)]
    good = verdict(ProbeResults(samples={"overlap": [*alone, _sample("shard_p2p", (1,), 1364.0)]}))
    assert (good.state, good.cure) == ("ok", "")
    assert all(number in good.detail for number in ("22%", "1364 us", "20%"))
    bad = verdict(ProbeResults(samples={"overlap": [*alone, _sample("shard_p2p", (1,), 1800.0)]}))
    assert (bad.state, " 0%" in bad.detail, bool(bad.cure)) == ("warn", True, True)
    assert verdict(ProbeResults(failed={"overlap": "not tried"})).state == "warn"


def _fine(device: str) -> list[ProbeSample]:
    return [_sample(device, (dist.get_rank() * 0,), 1.0)]


def _raises(device: str) -> Any:
    raise MemoryError("planted")


def _dies(device: str) -> Any:
    if dist.get_rank():
        os._exit(3)
    return _fine(device)


def _hangs(device: str) -> Any:
    time.sleep(60)


@pytest.mark.ranks
def test_a_probe_that_raises_dies_or_hangs_is_told_and_the_others_go_on() -> None:
    works = {"first": _fine, "raises": _raises, "second": _fine, "dies": _dies, "hangs": _hangs, "third": _fine}
    todo = [Probe(name=name, work=work) for name, work in works.items()]
    found = run_probes("cpu", 2, todo, probe_s=8.0, total_s=100.0)
    assert found.samples == {name: [_sample("cpu", (0,), 1.0)] for name in ("first", "second", "third")}
    assert "MemoryError: planted" in found.failed.pop("raises")
    assert found.failed.pop("dies") == "rank 1: died with exit code 3"
    assert "no answer within 8 s" in found.failed.pop("hangs")
    assert found.failed == {}


def test_ranks_that_do_not_start_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_no_probes(*_: object, **__: object) -> ProbeResults:
        raise RankFailed([(1, "RuntimeError: no peer access")], [])

    monkeypatch.setattr("weft.tools.calibrate.run_probes", run_no_probes)
    found = doctor.transport_findings(2, H200)
    assert {(one.state, one.detail) for one in found} == {("warn", "ranks do not start: rank 1: RuntimeError: no peer access")}
    assert len(found) == len(TRANSPORTS) + 1


def test_quick_times_no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(**_: object) -> tuple[Finding, ...]:
        return (Finding(what="transport", state="ok", detail="timed"),)

    monkeypatch.setitem(sys.modules, "torch", fake_torch(count=2))
    monkeypatch.setattr(doctor, "PATTERN", 100)
    monkeypatch.setattr(doctor, "_bindings", lambda count: Finding(what="cuda-bindings", state="ok", detail="13"))
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    monkeypatch.setattr(doctor, "_run", lambda *command: "5, 16\n5, 16" if "--format=csv,noheader" in command else MATRIX)
    given: list[Any] = []
    monkeypatch.setattr(doctor, "transport_findings", lambda *arguments: (given.append(arguments), ready())[1])
    assert doctor.gpu_findings(quick=True)[-1].what == "peer access"
    assert doctor.gpu_findings(quick=False)[-1].detail == "timed"
    assert given == [(2, H200)]


MATRIX = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tNV18\tPHB\nGPU1\tNV18\t X \tPHB\n"
