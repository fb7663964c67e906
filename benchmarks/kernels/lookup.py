"""Which bags, warps and bytes a row suit the lookup kernel? Each constant of weft.kernels.lookup is varied alone."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import LOOKUPS
from benchmarks.kernels.single_gpu import one_rank
from benchmarks.lookups import REPEAT, LookupCase, Tables
from benchmarks.measure import Work, release, say, trial
from weft.kernels import lookup as kernel

TUNED = {"_ROW_BYTES": (2048, 4096, 8192, 16384), "_BAGS": (1, 2, 4, 8), "_WARPS_PER_SM": (16, 32, 64)}
ROUNDS = 7


def run(words: Sequence[str], rounds: int) -> None:
    """Print what each value gives, of the cases whose names have one of the words."""
    with one_rank():
        for case in LOOKUPS:
            if any(word in case.name for word in words):
                tune(case, rounds)
                release()


def tune(case: LookupCase, rounds: int) -> None:
    tables = Tables(case)
    works = {f"{name}={value}": _varied(tables, name, value) for name, values in TUNED.items() for value in values}
    times, missing = trial(works, ["graph"], check=lambda *_: None, needed=(), rounds=rounds, repeat=REPEAT)
    for name, time in times["graph"].items():
        say(f"{case.name} {name}: {time.us:.0f} us, {case.gathered_bytes / time.us / 1e6:.2f} TB/s")
    usual = {name: getattr(kernel, name) for name in TUNED}
    say(f"usual {usual}; missing {missing}")


def _varied(tables: Tables, name: str, value: int) -> Work:
    usual = getattr(kernel, name)
    setattr(kernel, name, value)
    try:
        made = tables.lookup()
    finally:
        setattr(kernel, name, usual)

    def work() -> object:
        setattr(kernel, name, value)
        try:
            return made()
        finally:
            setattr(kernel, name, usual)

    return work
