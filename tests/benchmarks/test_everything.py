"""benchmarks/everything.py: parts that exist, end when they may, and leave nothing running."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from single_process_ranks import wait_for

from benchmarks import cases, everything

ROOT = Path(__file__).parents[2]
RUN = "benchmarks.run"


def test_every_part_starts_files_that_there_are() -> None:
    found = everything.make_parts(8, minutes=1, seed=5)
    words = [word for part in found.values() for run in part.runs for word in run.words]
    assert all(find_spec(word) for word in words if word.startswith("benchmarks."))
    benches = [run.words[run.words.index(RUN) + 1] for part in found.values() for run in part.runs if RUN in run.words]
    assert set(benches) == set(cases.BENCHES)
    files = [word for word in words if word.endswith(".py")]
    assert all(Path(file).is_file() for file in files)
    started = {Path(file) for file in files if Path(file).name.startswith("test_")}
    assert started == set((ROOT / "tests" / "gpu").glob("test_*.py"))
    seeds = [run.words[run.words.index("--seed") + 1] for run in found["fuzz"].runs]
    assert (len(seeds), len(set(seeds))) == (18, 18)
    assert {run.visible for run in found["fuzz"].runs} == {None, "0,1", "2,3", "4,5", "6,7"}


def _part(*sources: str, limit_s: float) -> object:
    runs = tuple(everything.Run(words=("-c", source), visible=str(at)) for at, source in enumerate(sources))
    return everything.Part(runs=runs, limit_s=limit_s, environment={"OF_THE_PART": "7"})


def test_what_is_written_is_counted_and_the_last_words_are_told(tmp_path: Path) -> None:
    source = """
import os, sys
open(sys.argv[2], "a").write("{}\\n{}\\n")
print(sys.argv[4], os.environ["OF_THE_PART"], os.environ["CUDA_VISIBLE_DEVICES"])
sys.exit(3)
"""
    good, line = everything.run_part("one", _part(source, limit_s=60), tmp_path, "abc")
    assert not good
    assert line.startswith("one: status 3, ")
    assert line.endswith(" s, 2 lines; abc 7 0")
    assert (tmp_path / "one.jsonl").read_text() == "{}\n{}\n"


def _runs(pid: int) -> bool:
    """Not if it has ended and nobody has asked how: then there is a line of it, which may go at any time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child, start_run = tmp_path / "child", everything.start_run
    hangs = f"""
import subprocess, sys, time
open({str(child)!r}, "w").write(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid))
print("begun", flush=True)
time.sleep(600)
"""

    def under_way(run: Any, part: Any, log: Path, *rest: Any) -> subprocess.Popen[bytes]:
        """The limit begins when one of them has ended, and the other hangs."""
        process: subprocess.Popen[bytes] = start_run(run, part, log, *rest)
        assert wait_for(lambda: "begun" in log.read_text() if hangs in run.words else process.poll() is not None, 60)
        return process

    monkeypatch.setattr(everything, "start_run", under_way)
    start = time.monotonic()
    good, line = everything.run_part("two", _part("print('short')", hangs, limit_s=0.5), tmp_path, "")
    assert not good
    assert line.startswith("two: status 0, stopped at its limit, ")
    assert time.monotonic() - start < 60
    assert wait_for(lambda: not _runs(int(child.read_text())), 30), "what a part had started runs on"


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_what_ends_the_campaign_ends_its_parts(tmp_path: Path, number: signal.Signals) -> None:
    child, waits = tmp_path / "child", tmp_path / "waits"
    hangs = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    source = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell runs in the background
sys.path.insert(0, {str(ROOT)!r})
from benchmarks import everything
part = everything.Part(runs=(everything.Run(words=("-c", {hangs!r})),), limit_s=600)
everything.make_parts = lambda gpus, **_: {{"hangs": part}}
wait_for_runs = everything.wait_for_runs
everything.wait_for_runs = lambda *given: open({str(waits)!r}, "w").close() or wait_for_runs(*given)
sys.argv[1:] = ["--gpus", "2", "--out", {str(tmp_path)!r}]
everything.main()
"""
    campaign = subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: waits.exists() and child.exists() and child.read_text(), 60)
        campaign.send_signal(number)
        assert campaign.wait(30) != 0
    finally:
        campaign.kill()
    assert wait_for(lambda: not _runs(int(child.read_text())), 30), "the part runs on"


def test_a_part_that_fails_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"bad": _part("1 / 0", limit_s=60), "good": _part("print('here')", limit_s=60)}
    monkeypatch.setattr(everything, "make_parts", lambda gpus, **_: known)
    monkeypatch.setattr(sys, "argv", ["everything", "--gpus", "2", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^failed: bad$"):
        everything.main()
    assert "good: status 0, " in capsys.readouterr().out


def test_a_part_that_could_end_too_late_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"long": _part("1 / 0", limit_s=600), "short": _part("print('here')", limit_s=100)}
    monkeypatch.setattr(everything, "make_parts", lambda gpus, **_: known)
    monkeypatch.setattr(sys, "argv", ["everything", "--gpus", "2", "--budget-s", "300", "--out", str(tmp_path)])
    everything.main()
    first, second = capsys.readouterr().out.splitlines()
    assert first == "long: skipped, 300 s are left"
    assert "short: status 0, " in second
    monkeypatch.setattr(sys, "argv", ["everything", "--gpus", "2", "--only", "short,none"])
    with pytest.raises(SystemExit):
        everything.main()
    assert "no part none; there are long, short" in capsys.readouterr().err
