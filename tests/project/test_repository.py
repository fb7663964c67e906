"""The tree as a whole: it holds on other machines, its packages and data ship, its dependencies are pinned."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from setuptools import find_namespace_packages
from tree import PROJECT, ROOT, tracked

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


def test_entry_point_exists() -> None:
    module, name = PROJECT["project"]["scripts"]["weft"].split(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_every_package_ships() -> None:
    found = PROJECT["tool"]["setuptools"]["packages"]["find"]
    shipped = set(find_namespace_packages(str(ROOT), **found))
    code = [path.relative_to(ROOT) for path in tracked() if path.suffix == ".py" and path.is_relative_to(ROOT / "weft")]
    assert {".".join(path.parts[:-1]) for path in code} - shipped == set()


def test_every_data_file_ships() -> None:
    package = ROOT / "weft"
    shipped = {path for glob in PROJECT["tool"]["setuptools"]["package-data"]["weft"] for path in package.glob(glob)}
    data = {path for path in tracked() if path.is_relative_to(package) and path.suffix != ".py"}
    assert data - shipped == set()


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"], *(d for e in extras for d in e)]
    names = {re.split(r"[^\w.-]", text)[0].lower().replace("_", "-") for text in wanted}
    assert names - {pin.split("==")[0].lower().replace("_", "-") for pin in pins} == set()
