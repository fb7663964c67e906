"""Whether the tests notice mistakes: each patch of this folder is one bug of the package, and the tests that its header names
have to fail with it. `make mutate` runs them all; `python tests/mutants/mutate.py NAME ...` runs some.

    What the bug is, in a sentence.
    Caught by: tests/room/test_x.py::test_name
    --- a/weft/...

Status 1 where more than one bug in twenty is caught by no test, and where a patch does not apply: the code that it changes has
changed, so make it anew or delete it.

Each patch is tried in a fork of this process, which has imported what takes long, and nothing of weft.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import os
import py_compile
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
TO_BE_CAUGHT = 0.95
TAKE_LONG = ("torch.distributed", "triton", "numpy", "simpy", "hypothesis", "pytest")
SUITE = ("tests", "--ignore=tests/mutants")
"""All tests but those of the patches, of which one does not apply to a tree that has it."""
CAUGHT, SURVIVED, ERROR = "caught", "SURVIVED", "ERROR:"
ALL_PASSED, NO_TEST, USAGE = 0, 5, 4
"""Exit statuses of pytest."""


@dataclass(frozen=True)
class Mutant:
    path: Path
    bug: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.stem


def read(path: Path) -> Mutant:
    """A patch of this folder. Raises ValueError where its header does not say what it must."""
    header = path.read_text().partition("--- a/")[0]
    bug, _, tests = header.partition("Caught by:")
    if not (bug.strip() and tests.split()):
        raise ValueError(f"{path.name} has to begin with the bug in a sentence and a line 'Caught by: tests/...'")
    return Mutant(path, " ".join(bug.split()), tuple(tests.split()))


def mutants(names: Sequence[str] = ()) -> list[Mutant]:
    """Those of these names, or all."""
    paths = [FOLDER / f"{name.removesuffix('.patch')}.patch" for name in names] or sorted(FOLDER.glob("*.patch"))
    return [read(path) for path in paths]


def patch(mutant: Mutant, tree: Path, *options: str) -> None:
    """Apply a patch to a tree, or do as git apply's options say. Raises ValueError if it does not apply."""
    done = subprocess.run(["git", "apply", *options, str(mutant.path)], cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{mutant.name} does not apply: {done.stderr.strip()}")


def copy(tree: Path) -> None:
    """Put what git tracks, as it lies here, into a folder, compiled."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    # A repository of its own: git apply does nothing in a folder that another repository ignores.
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
    # By the sources' hashes: a bug and its predecessor may have the same size, and be written in the same second.
    compileall.compile_dir(tree / "weft", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def run_tests(tests: Sequence[str], tree: Path, log: Path) -> None:
    """Run tests in a tree as a process that does nothing else. Never returns. With a bug a test may never end: pytest-timeout
    fails it."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'studies'}", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[0], sys.dont_write_bytecode = str(tree), True
    sys.argv = ["pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    status = 1
    try:
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(status)


class Trial:
    """A mutant that is being tried in a tree, in which nothing else runs meanwhile."""

    def __init__(self, mutant: Mutant, tree: Path, *, whole_suite: bool) -> None:
        self.mutant, self.tree, self._log = mutant, tree, tree.with_suffix(".log")
        self._rounds = [mutant.tests, SUITE] if whole_suite else [mutant.tests]
        self._begun = time.monotonic()
        patch(mutant, tree)
        self.pid = self._next()

    def _next(self) -> int:
        self._tests, *self._rounds = self._rounds
        pid = os.fork()
        if pid == 0:
            run_tests(self._tests, self.tree, self._log)
        return pid

    def ended(self, status: int) -> tuple[str, str] | None:
        """One of CAUGHT, SURVIVED and ERROR, and what there is to say of it; None if others of its tests run now."""
        output = self._log.read_text(errors="replace")
        if os.WIFSIGNALED(status):
            return CAUGHT, f"by {self._tests[0]} (signal {os.WTERMSIG(status)})"
        code = os.WEXITSTATUS(status)
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        if code == ALL_PASSED and self._rounds:
            self.pid = self._next()
            return None
        if code == ALL_PASSED:
            return SURVIVED, ""
        if found is None or code in (NO_TEST, USAGE):
            return ERROR, f"pytest could not run {' '.join(self._tests)}: {output[-2000:]}"
        return CAUGHT, f"by {found[1]}"

    def close(self) -> float:
        """Take the patch back. Returns the seconds that the trial took."""
        patch(self.mutant, self.tree, "--reverse")
        return time.monotonic() - self._begun


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Whether the tests notice the bugs of tests/mutants.")
    parser.add_argument("names", nargs="*", help="patches, without .patch; all if none is named")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--all", action="store_true", help="run the whole suite for those that the named tests do not catch")
    options = parser.parse_args(arguments)
    waiting, outcomes = mutants(options.names), Counter[str]()
    asked = len(waiting)

    def tell(mutant: Mutant, outcome: str, words: str) -> None:
        outcomes[outcome] += 1
        print(f"{mutant.name:36} {outcome} {words}", flush=True)

    for name in TAKE_LONG:
        with suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="weft-mutants-") as folder:
        trees = [Path(folder, str(number)) for number in range(options.jobs)]
        copy(trees[0])
        for tree in trees[1:]:
            shutil.copytree(trees[0], tree)
        trials: dict[int, Trial] = {}
        while waiting or trials:
            if waiting and trees:
                mutant, tree = waiting.pop(0), trees.pop()
                try:
                    trial = Trial(mutant, tree, whole_suite=options.all)
                    trials[trial.pid] = trial
                except ValueError as error:
                    tell(mutant, ERROR, str(error))
                    trees.append(tree)
                continue
            pid, status = os.wait()
            trial = trials.pop(pid)
            found = trial.ended(status)
            if found is None:
                trials[trial.pid] = trial
                continue
            trees.append(trial.tree)
            tell(trial.mutant, found[0], f"{found[1]} ({trial.close():.0f} s)")
    print(f"{outcomes[CAUGHT]} of {asked} caught, {outcomes[SURVIVED]} survived, {outcomes[ERROR]} could not be tried")
    return int(outcomes[ERROR] > 0 or outcomes[CAUGHT] < TO_BE_CAUGHT * asked)


if __name__ == "__main__":
    sys.exit(main())
