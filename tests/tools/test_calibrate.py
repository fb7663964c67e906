"""Calibration: what a machine is made of can be read off samples of it, and the probes of the host executor run."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from conftest import RankFixture

import weft
from weft.cli import main
from weft.core import codec, machine
from weft.core.hardware import numbers
from weft.core.problem import ITEMSIZE, Problem
from weft.perf import run
from weft.perf.shapes import SHAPES, streamed_tile
from weft.perf.terms import collective_us, gemm_us, hbm_us, kernel_cost, staged_us, stalled_us
from weft.schedules import build
from weft.tools import calibrate as package
from weft.tools.calibrate import COLLECTIVES, GPU_BYTES, GPU_SHAPES, NOT_MEASURED, Probe, base, common, probes, run_probes
from weft.tools.calibrate.common import ProbeSample, of, typical_spread
from weft.tools.calibrate.kernel_fields import staging_check
from weft.tools.calibrate.profile import Profile, line

H200 = machine.load("h200x8")
WORLD_SIZE = 8


def sample(what: str, key: tuple[int, ...], us: float) -> ProbeSample:
    return ProbeSample(what=what, key=key, us=(0.98 * us, us, 1.02 * us))


def samples_of(of_machine: machine.Machine) -> list[ProbeSample]:
    """What probes would see on it, if the cost model were the truth."""
    copy, size = of_machine.copies, WORLD_SIZE - 1
    found = [
        sample("launch", (16,), of_machine.launch_us),
        sample("flag", (16,), of_machine.flag_us),
        sample("hop", (16,), of_machine.links.latency_us + (of_machine.wake_us or 0.0) + 3 * of_machine.flag_us),
        sample("memory", (1 << 28,), 2 * (1 << 28) / (of_machine.gpu.hbm_gbps * 1e3)),
        sample("several", (1 << 24, 1), size * (copy.copy_us + (1 << 24) / (copy.gbps * 1e3))),
        sample("several", (1 << 24, 7), size * (1 << 24) / (copy.several_gbps * 1e3)),
        sample("turns", (1 << 24, 4), 4 * size * copy.copy_us + size * (1 << 24) / (copy.turned_gbps(4) * 1e3)),
        sample("power", (1,), 100.0),
        sample("power", (40,), (100.0 + 39 * 100.0 / (of_machine.gpu.sustained or 1.0)) / 40),
        sample("gemm alone", (), 100.0),
        sample("gemm during copy", (), 110.0),
        *kernel_samples(of_machine),
    ]
    found += [sample("gemm bfloat16", key, gemm_us(of_machine, *key, "bfloat16")) for key in GPU_SHAPES]
    for nbytes in (1 << 16, 1 << 20, 1 << 24, 1 << 26):
        for count in (1, 8):
            found.append(sample("copy push", (nbytes, count), count * (copy.copy_us + nbytes / (copy.gbps * 1e3))))
    for sms, gbps in of_machine.stores.gbps:
        found.append(sample("stores", (1 << 24, sms), size * (1 << 24) / (gbps * 1e3)))
    for op in COLLECTIVES:
        found += [sample(op, (nbytes,), collective_us(of_machine, op, nbytes, WORLD_SIZE)) for nbytes in GPU_BYTES]
    return found


def kernel_samples(machine: machine.Machine) -> list[ProbeSample]:
    """What probes of weft's kernels would see, by the terms that price them."""
    gpu, stores, kernels, launch, found = machine.gpu, machine.stores, machine.kernels, machine.launch_us, []
    sms, columns = gpu.sms, 1024

    def tiles(shape: Any, rows: int, inner: int, *, stored: bool = False) -> float:
        cost = kernel_cost(machine, rows=(rows,), n=columns, k=inner, dtype="bfloat16", shape=shape, stored=stored)
        return cost.busy_us

    for shape in SHAPES:
        key = (shape.m, shape.n, 128 * sms, columns, 4096)
        found.append(sample("counted tiles", key, launch + tiles(shape, 128 * sms, 4096)))
        found.append(sample("stored tiles", key, launch + tiles(shape, 128 * sms, 4096, stored=True)))
    rows = 128 * (sms + sms // 8)
    found.append(sample("cut tiles", (128, 256, rows, columns, 4096), launch + tiles(SHAPES[0], rows, 4096)))
    size, rate = 2 * 128 * sms * columns, stores.rate(sms) * (stores.tiles or 1.0) * 1e3
    for inner in (512, 8192):
        key, busy_us = (128, 256, 128 * sms, columns, inner), tiles(SHAPES[0], 128 * sms, inner)
        far_us = busy_us / 4 + size / rate if inner == 512 else busy_us + 4 * stalled_us(machine, size, 4 * sms, sms)
        found += [sample("near tiles", key, launch + busy_us), sample("far tiles", key, launch + far_us)]
    gathered = (1 << 20) * 512
    found.append(sample("lookup", (1 << 20, 512), launch + hbm_us(machine, gathered / gpu.gather_share + gathered / 32)))
    found.append(sample("sums", (3 << 25, 8), launch + (3 << 25) / (8 * kernels.sm_gbps * 1e3)))
    found.append(sample("pulled sums", (6 << 25, 8), launch + (6 << 25) / (8 * kernels.pull_gbps * 1e3)))
    for m, n in ((16, 2048), (512, 128 * 33)):
        for inner in (512, 4096):
            problem = Problem(op="matmul_all_reduce", m=m, n=n, k=inner * WORLD_SIZE, world_size=WORLD_SIZE)
            key = (m, n, problem.k, *streamed_tile(problem, n, 1, m, sms))
            found.append(sample("one_shot", key, run(build(problem, "one_shot"), machine).total_us))
    copied, slowed = 1 << 24, gpu.hbm_gbps / (gpu.hbm_gbps - kernels.lookup_copy_bytes * kernels.lookup_copy_gbps)
    found += [
        sample("strided copy alone", (copied,), 60.0),
        sample("strided copy during lookup", (), launch + copied / (kernels.lookup_copy_gbps * 1e3)),
        sample("lookup alone", (), 100.0),
        sample("lookup during strided copy", (), 100.0 * slowed),
        sample("cached", (20 << 20,), launch + (20 << 20) / ((gpu.l2_gbps or 1.0) * 1e3)),
        sample("one run", (4096, 8192), 200.0),
        sample("two runs", (4096, 8192), 200.0 + staged_us(machine, rows=2, row_bytes=4096 * 8192, outs=1, out_bytes=0)),
    ]
    return found


def test_a_machine_is_read_off_its_samples() -> None:
    """From the base with other numbers back to them: a profile does not depend on what the base says of what is measured."""
    tiles = tuple(dataclasses.replace(tile, efficiency=0.8 * tile.efficiency) for tile in H200.gpu.tiles)
    gpu = dataclasses.replace(H200.gpu, hbm_gbps=3000.0, tiles=tiles, tile_us=1.5, sustained=0.8)
    copies = dataclasses.replace(H200.copies, copy_us=4.0, gbps=200.0, several_gbps=150.0, turning=0.3)
    truth = dataclasses.replace(H200, gpu=gpu, copies=copies, launch_us=5.0, flag_us=0.5, wake_us=9.0)
    made = Profile(H200, samples_of(truth), world_size=WORLD_SIZE, when="2026-11-21").machine("mine", "made up")
    assert (made.launch_us, made.flag_us, made.links.latency_us) == (5.0, 0.5, pytest.approx(1.0))
    near = {"gbps": pytest.approx(200.0), "copy_us": pytest.approx(4.0, rel=1e-2), "turning": pytest.approx(0.3, rel=0.02)}
    assert made.copies == dataclasses.replace(copies, **near)
    assert (made.gpu.sustained, made.wake_us) == (pytest.approx(0.8, rel=1e-3), pytest.approx(9.0))
    assert made.gpu.hbm_gbps == pytest.approx(3000, rel=1e-3)
    assert made.stores.gbps == truth.stores.gbps
    assert made.stores.sms == 16
    for shape in GPU_SHAPES:
        assert gemm_us(made, *shape, "bfloat16") == pytest.approx(gemm_us(truth, *shape, "bfloat16"), rel=0.05)
    for op in COLLECTIVES:
        for nbytes in GPU_BYTES:
            assert collective_us(made, op, nbytes, 8) == pytest.approx(collective_us(truth, op, nbytes, 8), abs=1e-3)
    assert made.contention == {**H200.contention, "gemm during copy": 1.1}


def test_what_weft_s_kernels_reach_is_read_off_their_samples() -> None:
    slower = tuple(dataclasses.replace(tile, efficiency=0.9 * tile.efficiency) for tile in H200.gpu.kernel_tiles)
    stored = tuple(dataclasses.replace(tile, efficiency=0.85 * tile.efficiency) for tile in H200.gpu.stored_tiles)
    gpu = dataclasses.replace(
        H200.gpu, kernel_tiles=slower, stored_tiles=stored, half_tile=0.65, gather_share=0.9, l2_gbps=6000.0
    )
    stores = dataclasses.replace(H200.stores, tiles=0.7, stall=0.5)
    numbers: dict[str, Any] = {"sm_gbps": 40.0, "pull_gbps": 30.0, "streamed": 0.35, "row_us": 0.004, "exchange_us": 2.5}
    kernels = dataclasses.replace(H200.kernels, **numbers, lookup_copy_gbps=200.0, lookup_copy_bytes=5)
    truth = dataclasses.replace(H200, gpu=gpu, stores=stores, kernels=kernels, launch_us=4.0)
    samples = samples_of(truth)
    made = Profile(H200, samples, world_size=WORLD_SIZE, when="2026-11-21").machine("mine", "made up")
    for shape in SHAPES:
        for stored_by in (False, True):
            found, wanted = (
                one.gpu.flag_efficiency * one.gpu.kernel_efficiency(shape.m, shape.n, stored=stored_by) for one in (made, truth)
            )
            assert found == pytest.approx(wanted, rel=0.03)
    assert made.gpu.half_tile == pytest.approx(0.65, abs=0.02)
    assert made.gpu.gather_share == pytest.approx(0.9, rel=0.01)
    assert made.gpu.l2_gbps == pytest.approx(6000.0, rel=0.01)
    assert (made.stores.tiles, made.stores.stall) == (pytest.approx(0.7, rel=0.02), pytest.approx(0.5, rel=0.05))
    for name, value in numbers.items():
        assert getattr(made.kernels, name) == pytest.approx(value, rel=0.05), name
    assert made.kernels.lookup_copy_gbps == pytest.approx(200.0, rel=0.01)
    assert made.kernels.lookup_copy_bytes == 5
    assert staging_check(made, samples).endswith("(1.00)")
    assert staging_check(made, []) == ""


def test_a_probe_that_fails_costs_its_own_numbers_alone(caplog: pytest.LogCaptureFixture) -> None:
    remaining = [s for s in samples_of(H200) if s.what not in ("launch", "sums", "all_to_all")]
    broken = [dataclasses.replace(s, us=(0.0,) * 3) if s.what == "lookup" else s for s in remaining]
    failed = {"launch_us": "probe 'launches' failed: rank 1: boom", "kernels.sm_gbps": "probe 'sums' failed: rank 0: no"}
    made = Profile(H200, broken, world_size=8, when="2026-11-21", failed=failed).machine("mine", "")
    assert (made.launch_us, made.kernels.sm_gbps) == (H200.launch_us, H200.kernels.sm_gbps)
    assert made.sources["launch_us"] == "assumed: as h200x8; probe 'launches' failed: rank 1: boom"
    assert made.sources["kernels.sm_gbps"].endswith("; probe 'sums' failed: rank 0: no")
    assert made.gpu.gather_share == H200.gpu.gather_share
    assert made.sources["gpu.gather_share"].startswith("assumed: as h200x8; gpu.gather_share is -")
    assert "all_to_all" in made.sources["collectives.all_to_all.points"]
    assert made.sources["kernels.pull_gbps"].startswith("measured ")
    assert made.sources["gpu.hbm_gbps"].startswith("measured ")
    assert any("gpu.gather_share" in record.getMessage() for record in caplog.records)


def _raises(device: str) -> list[ProbeSample]:
    raise MemoryError("planted")


@pytest.mark.ranks
def test_a_run_goes_on_after_a_probe_that_raises() -> None:
    todo = [
        Probe(name="bad", work=_raises, measures=("launch_us",)),
        Probe(name="memory", work=common.memory, arguments=(1 << 12,), measures=("gpu.hbm_gbps",)),
    ]
    found = run_probes("cpu", 2, todo)
    assert set(found.samples) == {"memory"}
    assert set(found.failed) == {"bad"}
    assert "MemoryError: planted" in found.failed["bad"]
    assert set(found.seconds) == {"bad", "memory"}


@pytest.mark.ranks
def test_a_run_ends_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_probes("cpu", 2, [Probe(name="bad", work=_raises)], total_s=0.0)
    assert found.failed == {"bad": "not tried within 0 s"}


def test_each_number_is_measured_or_it_is_said_why_not() -> None:
    measured = {path for probe in probes("cuda") for path in probe.measures}
    for path, _ in numbers(H200):
        begins = [path.startswith(one) for one in (*measured, *NOT_MEASURED)]
        assert any(begins) or path == "world_size" or path.startswith("gpu.tflops."), path


def test_every_number_has_a_source_and_measured_ones_a_spread() -> None:
    made = Profile(H200, samples_of(H200), world_size=WORLD_SIZE, when="2026-11-21").machine("mine", "made up")
    assert set(made.sources) == {path for path, _ in numbers(made)}
    assert made.sources["gpu.burst_us"] == "assumed: as h200x8"
    measured = {path for path, source in made.sources.items() if source.startswith("measured 2026-11-21: ")}
    assert set(made.spreads) == measured
    assert made.spreads["launch_us"] == 0.02
    assert codec.loads(machine.Machine, codec.dumps(made)) == made
    with pytest.raises(ValueError, match=r"spreads\.nothing is about no number"):
        dataclasses.replace(made, spreads={"nothing": 0.1})


def test_every_dtype_has_a_rate_on_a_cpu() -> None:
    assert set(base("cpu", 2).gpu.tflops) == set(ITEMSIZE)
    measured = [probe.arguments[1] for probe in probes("cpu") if probe.work is common.gemms]
    assert sorted(measured) == sorted(ITEMSIZE)


def test_lines_and_spreads() -> None:
    found = line([(1000, 3.0), (3000, 5.0), (5000, 7.0)])
    assert (found.fixed_us, found.gbps) == (2.0, 1.0)
    falling = line([(1000, 5.0), (2000, 4.0)])
    assert falling.gbps == 0.5
    one = ProbeSample(what="x", key=(4, 2), us=(9.0, 10.0, 11.0))
    assert (one.median_us, one.spread) == (10.0, 0.1)
    assert typical_spread([one, ProbeSample(what="x", key=(), us=(1.0,))]) == 0.05
    assert of([one], "x") == [one]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_probes_can_be_sent_to_ranks(device: str) -> None:
    found = probes(device)
    assert len({probe.name for probe in found}) == len(found)
    assert {"launches", "flags", "flags between ranks", "memory", "concurrent pairs", *COLLECTIVES} <= {p.name for p in found}
    for probe in found:
        assert pickle.loads(pickle.dumps((probe.work, probe.arguments))) == (probe.work, probe.arguments)


SMALL: dict[str, tuple[Any, ...]] = {
    "gemms": (((32, 32, 32),), "float32"),
    "memory": (1 << 16,),
}


def _probed() -> list[ProbeSample]:
    """Every probe of the host executor on this rank, at small sizes."""
    found = [*common.gemms("cpu", *SMALL["gemms"]), *common.memory("cpu", *SMALL["memory"])]
    found += common.gemms("cpu", SMALL["gemms"][0], "float16")
    for op in COLLECTIVES:
        found += common.collectives("cpu", op, (256, 4096))
    for probe in (common.host_launches, common.host_flags, common.host_hops, common.host_copies, common.host_concurrent):
        found += probe("cpu")
    weft.close()
    return found


@pytest.mark.ranks
def test_host_probes_make_a_profile_that_plans(ranks: RankFixture) -> None:
    first, second = ranks(2).run(_probed)
    assert first == second, "every rank has the slowest rank's times"
    assert all(us > 0 for one in first for us in one.us)
    # What rate this type has is the machine's affair, and on cores that others have less than what stands for none.
    (half,) = (one for one in first if one.what == "gemm float16")
    found = [dataclasses.replace(one, us=(20.0,) * len(one.us)) if one is half else one for one in first]
    made = Profile(base("cpu", 2), found, world_size=2, when="2026-11-21").machine("host", "this host")
    assert made.contention.keys() == {"gemm during copy", "copy during gemm"}
    problem = weft.Problem(op="all_gather_matmul", m=64, n=64, k=64, world_size=2, dtype="float32")
    for dtype in ("float32", "float16"):
        assert weft.plan(dataclasses.replace(problem, dtype=dtype), made).chosen.predicted_us > 0
    assert made.sources["gpu.tflops.float16"].startswith("measured ")


def test_the_command_writes_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = package.ProbeResults(
        samples={"all": samples_of(H200)}, seconds={"launches": 1.5}, failed={"gathers": "rank 0: [x]"}
    )
    monkeypatch.setattr(package, "run_probes", lambda device, ranks, todo, progress: probed)
    file = tmp_path / "mine.json"
    assert main(["calibrate", "--device", "cpu", "--ranks", "8", "--out", str(file)]) == 0
    said = capsys.readouterr().out
    assert "launches 1.5" in said
    assert "not measured: gpu.gather_share: probe 'gathers': rank 0: [x]" in said
    assert "check: rows brought together" in said
    made = machine.load(file)
    assert (made.name, made.world_size, made.links.topology) == ("mine", 8, "pcie")
    assert json.loads(file.read_text())["spreads"]["flag_us"] == 0.02


def test_profiles_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faster = dataclasses.replace(H200, name="faster", launch_us=1.5, fork_us=8.08, spreads={"fork_us": 0.05})
    file = tmp_path / "faster.json"
    file.write_text(codec.dumps(faster))
    assert main(["machines", "--diff", "h200x8", str(file)]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert ["launch_us", "3", "1.5", "0.50"] in rows
    assert ["fork_us", "8", "8.08", "1.01", "within", "5.0%"] in rows
    assert main(["machines", "--diff", "h200x8", "a100x8"]) == 0
    compared, _, only = capsys.readouterr().out.partition("numbers are the same")
    assert "stores.gbps" in compared
    assert "copies.turning" not in compared, "a100x8 does not have it"
    assert "Only h200x8 has " in only
    assert "copies.turning" in only
    assert main(["machines", "--diff", "h200x8", "nothing"]) == 2


def test_a_profile_is_not_named_as_one_that_weft_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By that name --machine would take the other one."""
    monkeypatch.chdir(tmp_path)
    for out in ("h200x8", "./h200x8"):
        assert main(["calibrate", "--device", "cpu", "--ranks", "2", "--out", out]) == 2
        assert "--out is h200x8" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
