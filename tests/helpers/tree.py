"""The tree that the tests lie in: its root, its project file, and what git tracks of it."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tracked() -> list[Path]:
    """Text files that git tracks, or skip where this is no checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of tracked files")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in names.split("\0") if name and (path := ROOT / name).is_file()]
