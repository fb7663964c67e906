"""The tree as a whole: it holds on other machines, its packages and data ship, its dependencies are pinned."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from setuptools import find_namespace_packages
from tree import PROJECT, ROOT, tracked

from weft_studies.study import STUDIES

STUDIES_PROJECT = tomllib.loads((ROOT / "studies" / "pyproject.toml").read_text(encoding="utf-8"))
LOCAL = [
    r"(?<![\w.])/(?:work|root)/",
    r"(?<![\w.])/(?:home|Users)/\w+/",
    r"file:///",
    r"\b(?:pypi|pythonhosted|conda|anaconda|npmjs|download\.pytorch)\.(?:org|com)\b",
    r"--(?:extra-)?index-url|--find-links",
]
"""What ties a file to one machine or to one package index."""


def test_nothing_ties_the_tree_to_a_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked()
        if path != Path(__file__)
        for match in re.finditer("|".join(LOCAL), path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []


def test_entry_points_exist() -> None:
    for points in (PROJECT["project"]["scripts"], STUDIES_PROJECT["project"]["entry-points"]["weft.studies"]):
        for point in points.values():
            module, name = point.split(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_every_study_has_an_entry_point() -> None:
    assert list(STUDIES_PROJECT["project"]["entry-points"]["weft.studies"]) == list(STUDIES)


def test_both_distributions_have_one_version() -> None:
    version = PROJECT["project"]["version"]
    assert STUDIES_PROJECT["project"]["version"] == version
    assert f"weft=={version}" in STUDIES_PROJECT["project"]["dependencies"]


BOTH = [("weft", ROOT, PROJECT), ("weft_studies", ROOT / "studies", STUDIES_PROJECT)]
"""Packages, and the folders and project files of their distributions."""


@pytest.mark.parametrize(("name", "folder", "project"), BOTH)
def test_every_package_ships(name: str, folder: Path, project: dict[str, Any]) -> None:
    found = project["tool"]["setuptools"]["packages"]["find"]
    shipped = set(find_namespace_packages(str(folder), **found))
    code = [path.relative_to(folder) for path in tracked() if path.suffix == ".py" and path.is_relative_to(folder / name)]
    assert {".".join(path.parts[:-1]) for path in code} - shipped == set()


@pytest.mark.parametrize(("name", "folder", "project"), BOTH)
def test_every_data_file_ships(name: str, folder: Path, project: dict[str, Any]) -> None:
    package = folder / name
    shipped = {path for glob in project["tool"]["setuptools"]["package-data"][name] for path in package.glob(glob)}
    data = {path for path in tracked() if path.is_relative_to(package) and path.suffix != ".py"}
    assert data - shipped == set()


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["build-system"]["requires"], *(d for e in extras for d in e)]
    wanted += [*PROJECT["project"]["dependencies"], *STUDIES_PROJECT["project"]["dependencies"]]
    names = {re.split(r"[^\w.-]", text)[0].lower().replace("_", "-") for text in wanted} - {"weft"}
    assert names - {pin.split("==")[0].lower().replace("_", "-") for pin in pins} == set()
