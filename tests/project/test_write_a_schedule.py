"""docs/write-a-schedule.md as a reader follows it: files are saved, commands run, and print what the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import torchrun

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "write-a-schedule.md"
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _run(command: str, folder: Path) -> str:
    """What a command of the page prints, run in `folder`."""
    program, *words = shlex.split(command)
    if program == "torchrun":
        assert words[:2] == ["--nproc-per-node", "2"]
        return torchrun(folder / words[2], ranks=2, folder=folder, timeout_s=100)
    start = {"python": [], "weft": ["-m", "weft"]}[program]
    done = subprocess.run(
        [sys.executable, *start, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def _pattern(text: str) -> str:
    """A regular expression for what a page says is printed; a line of three dots stands for any lines."""
    lines = [r"(?:.*\n)*" if line == "..." else re.escape(line.rstrip()) + " *\n" for line in text.splitlines()]
    return "".join(lines)


@pytest.mark.ranks
def test_the_page_works_as_it_is_read(tmp_path: Path) -> None:
    printed, compared = "", 0
    for head, code in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        language, *words = head.split()
        if language == "python":
            (tmp_path / words[0]).write_text(code, encoding="utf-8")
        elif language == "sh":
            for command in code.splitlines():
                printed = _run(command, tmp_path)
                assert printed.strip(), command
        else:
            assert (language, words) == ("text", ["output"])
            assert re.fullmatch(_pattern(code), printed.rstrip("\n") + "\n"), printed
            compared += 1
    assert compared == 2
    assert "All results are right" in _run(
        "weft run llama3-8b --op all_gather_matmul --schedule last_chunk_first:2 --ranks 3 --device cpu --tokens 2 "
        "--import my_families",
        tmp_path,
    ), "two of three ranks have a row"
