"""A newcomer's install: the wheel that setuptools builds of what git tracks works by itself, without the source tree. So does
the one of a source distribution, installed by pip where there is what weft depends on, and nothing of weft."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from importlib.util import find_spec
from pathlib import Path

import pytest
from tree import PROJECT, ROOT, tracked

pytestmark = pytest.mark.slow

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
NEEDED = ("torch", "triton", "numpy", "simpy", "rich", "typer", "plotly", "atomicshm")
SMALL = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 1}


def _built(what: str, tree: Path, out: Path) -> Path:
    """build_wheel or build_sdist of a tree."""
    subprocess.run([sys.executable, "-c", BUILD, what, str(out)], cwd=tree, check=True, capture_output=True, timeout=60)
    (made,) = (path for path in out.iterdir() if path.suffix == (".whl" if what == "build_wheel" else ".gz"))
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files that a build needs, so that nothing else can slip in."""
    tree = tmp_path_factory.mktemp("tree")
    for path in tracked():
        if (
            path.is_relative_to(ROOT / "weft")
            or path.is_relative_to(ROOT / "studies")
            or path.name in ("pyproject.toml", "README.md", "LICENSE")
        ):
            copy = tree / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make audit` builds it."""
    return _built("build_wheel", tree, tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return place


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {str(path.relative_to(ROOT)) for path in tracked() if path.is_relative_to(ROOT / "weft")}


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(info).decode())
        points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Python"]) == (
        "weft",
        PROJECT["project"]["version"],
        ">=3.11",
    )
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Classifier") == PROJECT["project"]["classifiers"]
    assert "weft = weft.cli:main" in points


def _run(unpacked: Path, *command: str, path: Path | None = None) -> str:
    folders = os.pathsep.join(map(str, filter(None, (unpacked, path))))
    environment = {**os.environ, "PYTHONPATH": folders, "WEFT_CACHE_DIR": "", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=unpacked.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_runs_without_the_source_tree(unpacked: Path) -> None:
    where = _run(unpacked, "-c", "import weft; print(weft.__file__, weft.__version__)")
    assert where.split() == [str(unpacked / "weft" / "__init__.py"), PROJECT["project"]["version"]]
    assert "Usage" in _run(unpacked, "-m", "weft", "--help")


def test_its_data_are_found(unpacked: Path) -> None:
    code = (
        "from weft.core import machine; from weft.planner import models;"
        "print(*[machine.load(name).name for name in machine.names()]);"
        "print(*[models.load_model(name).name for name in models.preset_names()]);"
    )
    machines, presets = _run(unpacked, "-c", code).splitlines()
    assert len(machines.split()) == len(list((ROOT / "weft" / "core" / "machines").glob("*.json")))
    assert len(presets.split()) == len(list((ROOT / "weft" / "planner" / "models").glob("*.json")))


def test_studies_are_a_wheel_of_their_own(unpacked: Path, tree: Path, tmp_path: Path) -> None:
    """With its folder on the path, as with any distribution that is installed, weft finds them by their entry points."""
    made, place = _built("build_wheel", tree / "studies", tmp_path), tmp_path / "studies"
    with zipfile.ZipFile(made) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(place)
    folder = ROOT / "studies"
    assert held == {str(path.relative_to(folder)) for path in tracked() if path.is_relative_to(folder / "weft_studies")}
    assert "of 1 predicted figures" in _run(unpacked, "-m", "weft", "simulate", "iso", path=place)
    code = "from weft_studies.dlrm import system as dlrm; from weft_studies.t3 import system as t3; dlrm.load(), t3.load()"
    _run(unpacked, "-c", code, path=place)


@pytest.fixture(scope="module")
def from_source(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the source distribution."""
    out, place = tmp_path_factory.mktemp("sdist"), tmp_path_factory.mktemp("source")
    with tarfile.open(_built("build_sdist", tree, out)) as archive:
        archive.extractall(place, filter="data")
    (source,) = place.iterdir()
    return _built("build_wheel", source, out)


@pytest.fixture(scope="module")
def newcomer(from_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts' folder of an environment of its own. It finds what weft depends on where this one has it."""
    pytest.importorskip("pip", reason="pip is not installed, so nothing can be installed")
    place = tmp_path_factory.mktemp("newcomer") / "venv"
    venv.create(place)
    (packages,) = place.glob("lib/python*/site-packages")
    specs = filter(None, map(find_spec, NEEDED))
    (packages / "needed.pth").write_text("\n".join({str(Path(spec.origin or "").parents[1]) for spec in specs}))
    install = ("-m", "pip", "--python", str(place), "install", "--quiet", "--no-deps", "--no-index", str(from_source))
    subprocess.run([sys.executable, *install], check=True, capture_output=True, timeout=60)
    return place / "bin"


def test_a_source_distribution_has_all_that_a_wheel_needs(wheel: Path, from_source: Path) -> None:
    with zipfile.ZipFile(wheel) as direct, zipfile.ZipFile(from_source) as other:
        assert sorted(direct.namelist()) == sorted(other.namelist())


def _run_command(newcomer: Path, script: str, *words: str, folder: Path) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**inherited, "CUDA_VISIBLE_DEVICES": "", "WEFT_CACHE_DIR": "", "COLUMNS": "150"}
    command = [str(newcomer / script), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.ranks
def test_a_newcomer_asks_the_doctor_and_runs_a_model(newcomer: Path, tmp_path: Path) -> None:
    where = _run_command(newcomer, "python", "-c", "import weft; print(weft.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(newcomer.parent)
    assert "Nothing is missing" in _run_command(newcomer, "weft", "doctor", folder=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    text = _run_command(newcomer, "weft", "run", "config.json", "--ranks", "2", "--tokens", "16", folder=tmp_path)
    assert "4 communicating layers" in text
    assert "All results are right." in text
