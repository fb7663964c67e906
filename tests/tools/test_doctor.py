"""The doctor: right about this machine, and about others. A stand-in for torch has as many GPUs as a test wants."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fake_torch import fake_torch
from weft_log import logged

from weft.cli import main
from weft.tools import doctor, requirements
from weft.tools.doctor import diagnose
from weft.tools.requirements import Finding, check_environment, environment_findings, variables

ROOT = Path(__file__).parents[2]
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\t0-15\t0
GPU1\tNV18\t X \tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \t16-31\t1

Legend:

  X    = Self
"""


# --- this machine ----------------------------------------------------------------------------------------------------


def test_this_machine_has_what_the_tests_need() -> None:
    found = diagnose()
    assert [str(finding) for finding in found if finding.state == "missing"] == []
    assert {"Python", "CPU cores", "shared memory (host executor)"} <= {finding.what for finding in found}
    assert all(finding.cure for finding in found if finding.state != "ok")


def test_packages_are_those_of_the_project_file() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {text.split(";")[0].strip() for text in wanted} == {f"{p.name}>={p.lowest}" for p in requirements.PACKAGES}


def test_shared_memory_leaves_nothing_behind(tmp_path: Path) -> None:
    assert requirements.shared_memory_finding(tmp_path).state in ("ok", "warn")
    assert list(tmp_path.iterdir()) == []


# --- environment -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "warn"),
        ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", "warn"),
        ("CUDA_VISIBLE_DEVICES", "3", "ok"),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "warn"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", None),
    ],
)
def test_how_cuda_is_started(monkeypatch: pytest.MonkeyPatch, name: str, value: str, state: str | None) -> None:
    for each in ("CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    found = {finding.what: finding.state for finding in environment_findings()}
    assert found.get(name) == state


def test_values_that_will_not_do_and_names_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variables():
        monkeypatch.delenv(name, raising=False)
    assert [finding.what for finding in environment_findings() if finding.what in variables()] == []
    bad = {
        "TIMEOUT_S": "soon",
        "MACHINE": "h100",
        "RANKS_PER_NODE": "0",
        "STAGING_BYTES": "1",
    }
    for name, value in bad.items():
        monkeypatch.setenv(f"WEFT_{name}", value)
    monkeypatch.setenv("WEFT_CACHE_DIR", "")
    monkeypatch.setenv("WEFT_TIMEOUT", "5")
    found = {finding.what: finding for finding in environment_findings()}
    assert {name: found[f"WEFT_{name}"].state for name in bad} == dict.fromkeys(bad, "missing")
    assert all(repr(value) in found[f"WEFT_{name}"].detail for name, value in bad.items())
    assert (found["WEFT_CACHE_DIR"].state, found["WEFT_TIMEOUT"].state) == ("ok", "warn")
    assert "WEFT_TIMEOUT_S" in found["WEFT_TIMEOUT"].cure


def test_a_profile_of_another_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls use it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("WEFT_MACHINE", "h200x8")
    with logged() as said:
        check_environment()
    assert any("h200x8, which was measured on NVIDIA H200, but this is cpu" in text for text in said)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    with logged() as said:
        check_environment()
    assert said == []


def test_all_variables_of_the_package_are_known() -> None:
    named = {name for path in (ROOT / "weft").rglob("*.py") for name in re.findall(r"WEFT_[A-Z_]+", path.read_text())}
    assert named == set(variables())


@pytest.mark.parametrize("command", [["run", "llama3-8b", "--device", "cpu"], ["calibrate", "--device", "cpu"]])
def test_a_bad_value_ends_a_command_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    """It ended them with status 3, which stands for a rank that failed while it ran."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_TIMEOUT_S", "soon")
    assert main(command) == 2
    assert "WEFT_TIMEOUT_S is 'soon'" in capsys.readouterr().err


# --- command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("warn", 0), ("missing", 1)])
def test_status_is_1_only_if_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: Any, status: int
) -> None:
    finding = Finding(what="thing", state=state, detail="seen", cure="do this")
    monkeypatch.setattr("weft.cli.machine.diagnose", lambda **_: (finding,))
    assert main(["doctor"]) == status
    assert "-> do this" in capsys.readouterr().out
    assert main(["doctor", "--json", "-"]) == status
    assert json.loads(capsys.readouterr().out) == [{"what": "thing", "state": state, "detail": "seen", "cure": "do this"}]


def test_the_doctor_starts_where_everything_is_missing() -> None:
    gone = [package.name for package in requirements.PACKAGES if package.name not in ("rich", "typer")]
    code = f"import sys; sys.modules.update(dict.fromkeys({gone})); from weft.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "torch" in done.stdout.splitlines()[-1]


# --- what is missing -------------------------------------------------------------------------------------------------


def test_missing_package_is_named_with_its_cure() -> None:
    needed = requirements.package_finding(requirements.Package(name="weft_no_such", lowest="2.0", purpose="tests"))
    assert (needed.state, "weft_no_such>=2.0" in needed.cure) == ("missing", True)
    spare = requirements.Package(name="weft_no_such", lowest="2.0", purpose="tests", without="the rest works")
    assert requirements.package_finding(spare).state == "warn"


def test_old_package_is_missing_too() -> None:
    found = requirements.package_finding(requirements.Package(name="numpy", lowest="99", purpose="tests"))
    assert found.state == "missing"
    assert "99" in found.detail


@pytest.mark.parametrize(("lowest", "state"), [("2.11", "missing"), ("2.9", "ok"), ("2.8.5", "ok"), ("3", "missing")])
def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch, lowest: str, state: str) -> None:
    monkeypatch.setattr(requirements, "_version", {"numpy": "2.9.1"}.get)
    assert requirements.package_finding(requirements.Package(name="numpy", lowest=lowest, purpose="tests")).state == state


def test_package_that_does_not_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "weft_broken.py").write_text("raise OSError('libcuda.so.1: cannot open\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    found = requirements.package_finding(requirements.Package(name="weft_broken", lowest="1", purpose="tests"))
    assert (found.state, found.detail) == ("missing", "does not import: libcuda.so.1: cannot open")


def test_no_shared_memory(tmp_path: Path) -> None:
    found = requirements.shared_memory_finding(tmp_path / "none")
    assert (found.state, "No such file" in found.detail, "--shm-size" in found.cure) == ("missing", True, True)


def test_small_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(requirements, "ENOUGH_BYTES", 1 << 62)
    assert requirements.shared_memory_finding(tmp_path).state == "warn"


# --- GPUs ------------------------------------------------------------------------------------------------------------


def test_without_gpu_it_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda=None))
    monkeypatch.setattr(doctor, "_run", lambda *_: None)
    (found,) = doctor.gpu_findings()
    assert found.state == "warn"
    assert "weft run --device cpu, weft plan" in found.cure
    monkeypatch.setattr(doctor, "_run", lambda *_: "GPU 0: H200")
    assert "CUDA wheel" in doctor.gpu_findings()[0].cure


def test_links_are_counted_by_kind() -> None:
    assert doctor.link_kinds(TOPOLOGY) == {"NV18": 1, "SYS": 2}
    found = doctor.links_finding(TOPOLOGY)
    assert (found.state, found.detail) == ("warn", "NV18 between 1 pair, SYS between 2 pairs")
    assert doctor.links_finding(TOPOLOGY.replace("SYS", "NV12")).state == "ok"
    assert doctor.links_finding(None).state == "warn"


def test_a_link_that_delivers_wrong_bytes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PATTERN", 1000)

    def arrives(src: int, dst: int, values: Any) -> Any:
        return values * 0 if (src, dst) == (0, 2) else values

    found = doctor.peer_findings(fake_torch(count=3, arrives=arrives), 3)
    assert [finding.what for finding in found] == ["peer access GPU 0 -> GPU 2", "peer access GPU 2 -> GPU 0"]
    assert all(finding.state == "missing" and "1000 of 1000" in finding.detail and finding.cure for finding in found)


def test_no_direct_access_and_failing_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PATTERN", 1000)
    assert "no direct access" in doctor.peer_findings(fake_torch(count=2, direct=False), 2)[0].detail

    def arrives(src: int, dst: int, values: Any) -> Any:
        raise RuntimeError("CUDA error: peer access is not supported\nmore")

    found = doctor.peer_findings(fake_torch(count=2, arrives=arrives), 2)
    assert found[0].detail == "the copy failed: CUDA error: peer access is not supported"


def test_two_gpus_from_build_to_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(count=2))
    monkeypatch.setattr(doctor, "PATTERN", 1000)
    monkeypatch.setattr(doctor, "_run", lambda *_: "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n")
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    found = {finding.what: finding for finding in doctor.gpu_findings()}
    assert found["CUDA (of PyTorch)"].detail == "13.0"
    assert found["NCCL (sequential, collectives)"].detail == "2.28.9"
    assert found["cuda-bindings (stream waits, copy engines)"].state == "missing"
    assert found["GPU 1"].detail.startswith("H200, 132 SMs, 141 GiB, sm_90")
    assert (found["links"].state, found["peer access"].state) == ("ok", "ok")
