"""The patches of this folder are bugs of the tree as it is, spread over the package, and name tests that there are."""

from __future__ import annotations

import ast

import pytest
from mutate import FOLDER, ROOT, Mutant, mutants, patch

NAMES = sorted(path.stem for path in FOLDER.glob("*.patch"))


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_applies_and_names_tests_that_exist(name: str) -> None:
    (mutant,) = mutants([name])
    patch(mutant, ROOT, "--check")
    for test in mutant.tests:
        file, _, function = test.partition("::")
        named = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert not function or function in named


def _rooms(mutant: Mutant) -> set[str]:
    """The folders of the package that a patch changes."""
    lines = mutant.path.read_text().splitlines()
    return {line.split("/")[2] for line in lines if line.startswith("+++ b/weft/")}


def test_they_are_many_and_every_room_has_some() -> None:
    found = mutants()
    assert len(found) >= 60
    rooms = {path.parent.name for path in (ROOT / "weft").glob("*/__init__.py")}
    assert rooms - {room for mutant in found for room in _rooms(mutant)} == set()
