"""A newcomer's install: the wheel that setuptools builds of what git tracks works by itself, without the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from test_project import PROJECT, ROOT, tracked

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make audit` builds it, from a copy of the tracked files, so that nothing else can slip in."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
    for path in tracked():
        if path.is_relative_to(ROOT / "weft") or path.name in ("pyproject.toml", "README.md", "LICENSE"):
            copy = tree / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=tree, check=True, capture_output=True, timeout=60)
    (made,) = out.glob("*.whl")
    return made


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
        told = message_from_string(archive.read(info).decode())
        points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert (told["Name"], told["Version"], told["Requires-Python"]) == ("weft", PROJECT["project"]["version"], ">=3.11")
    assert told["License-Expression"] == "Apache-2.0"
    assert "weft = weft.cli:main" in points


def _run(unpacked: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "WEFT_CACHE_DIR": "", "COLUMNS": "100"}
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
        "from weft import machine, rules, models; from typing import get_args;"
        "print(*[machine.load(name).name for name in machine.names()]);"
        "print(*[models.load_model(name).name for name in models.preset_names()]);"
        "print(len([rules.estimates(kind) for kind in get_args(rules.Topology)]))"
    )
    machines, presets, kinds = _run(unpacked, "-c", code).splitlines()
    assert len(machines.split()) == len(list((ROOT / "weft" / "machines").glob("*.json")))
    assert len(presets.split()) == len(list((ROOT / "weft" / "models").glob("*.json")))
    assert int(kinds) >= 3
