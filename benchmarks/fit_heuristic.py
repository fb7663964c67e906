"""Which weights estimate best? Fits those of weft/perf/decisions/*.json (weft.perf.rules) to lines of benchmarks/planner.py.

Of each schedule of an operator the weights, none below zero, that make the least relative errors: coordinate descent on the
squares of (estimate / time - 1). Lines of several files are fitted together; those of a simulation count for less beside
measured ones, and stand alone for machines that nobody has measured. `--known` adds what benchmarks/results/ has of other
problems: the cases of tp.jsonl, all_to_all.jsonl, all_reduce.jsonl and embedding.jsonl, on 4 GPUs and on 2, in graphs.
Problems of the sets `unseen` and `fresh` are refused: they are there to hold weights to.

    python benchmarks/fit_heuristic.py --known --out weft/perf/decisions/switch.json \\
        benchmarks/results/planner_fit.jsonl out/simulated.jsonl

A mesh's are those of `planner.py --simulate mi300x8 --world-size 8`, --set fit and --set large.
Each line is taken with the profile that it was simulated on, measured ones with --machine. --only fits one operator's or
schedule's weights again, into a file that has the others. Times of programs that weft no longer runs are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from cases import CASES
from problems import HELD, TRIED, drawn
from scores import FICCO, Line, read_lines

from weft.core import codec
from weft.core.machine import Machine, load
from weft.core.problem import LOOKUP_OPS, LookupProblem, Op, Problem
from weft.perf.rules import TERMS, Estimates, Fitted, Weights, terms
from weft.schedules import FAMILIES, parse, spec
from weft.schedules.matmul_reduce_scatter import ONE_KERNEL_BYTES

RESULTS = Path(__file__).with_name("results")
SIMULATED = 0.1
"""Weight of a simulated line beside a measured one."""
BENCHES = ("tp", "all_to_all", "all_reduce", "embedding", "tp_2gpus", "all_to_all_2gpus", "all_reduce_2gpus")
"""Those whose lines `known` reads; each line's case begins with one."""
BEFORE_ONE_KERNEL = ("39e2814", "705df5a")
"""Commits at which sequential_stores of matmul_reduce_scatter exchanged few bytes by two kernels, not by one (docs/log.md)."""
USEFUL = 0.03
"""Schedules that are the fastest of no larger share of an operator's lines get no weights."""
ROUNDS = 2000
RIDGE = 1e-6


def nonnegative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """x of at least 0 with the least |rows x - wanted|, nearly.

    >>> nonnegative(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([2.0, -1.0])).round(3).tolist()
    [2.0, 0.0]
    """
    square = rows.T @ rows + RIDGE * np.eye(rows.shape[1])
    towards = rows.T @ wanted
    found = np.zeros(rows.shape[1])
    for _ in range(ROUNDS):
        before = found.copy()
        for at in range(len(found)):
            found[at] = max(0.0, found[at] + (towards[at] - square[at] @ found) / square[at, at])
        if np.abs(found - before).max() < 1e-7:
            break
    return found


def weights(text: str, lines: Sequence[Line], fallback: Machine) -> Weights | None:
    """Those of one schedule, fitted to the lines that have it; None if none has."""
    timed = [(line, *counted(text, line.problem.world_size)) for line in lines]
    known = [(line, name, chunks, line.us[spec(name, chunks)]) for line, name, chunks in timed if spec(name, chunks) in line.us]
    if not known:
        return None
    beside = any(not line.simulated for line, *_ in known)
    share = np.array([SIMULATED**0.5 if line.simulated and beside else 1.0 for line, *_ in known])
    relative = np.array(
        [np.array(terms(line.problem, machine_of(line, fallback), name, n)) / us for line, name, n, us in known]
    )
    found = np.array([float(f"{value:.3g}") for value in nonnegative(relative * share[:, None], share)])
    errors = np.log(np.maximum(relative @ found, 1e-9))
    error = math.sqrt(float((share**2 @ (errors - errors.mean()) ** 2) / (share**2).sum()))
    return Weights(spec=text, weights=tuple(found.tolist()), error=round(error, 3))


def counted(text: str, world_size: int) -> tuple[str, int]:
    """A spec's family and chunks, world_size of them where it has no count."""
    name, chunks = parse(text)
    return name, (chunks or world_size) if FAMILIES[name].chunked else 1


def machine_of(line: Line, fallback: Machine) -> Machine:
    """The profile that a line's sizes are related to."""
    return _loaded(line.machine.removeprefix("simulated ")) if line.simulated else fallback


@functools.cache
def _loaded(name: str) -> Machine:
    return load(name)


def known() -> Iterator[Line]:
    """What benchmarks/results/ has measured of other problems."""
    for bench in BENCHES:
        for text in (RESULTS / f"{bench}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            problem = _known_problem(bench.removesuffix("_2gpus"), row["op"], row["case"], row["world_size"])
            if row["mode"] == "graph" and problem is not None:
                us = {"sequential": row["peers"].get("weft_sequential", row["sequential_us"])} | row["candidates"]
                case = f"{bench} {row['case']}"
                yield Line(case=case, problem=problem, us=us, machine=row["machine"], simulated=False, commit=row["commit"])


def _known_problem(bench: str, op: Op, case: str, size: int) -> Problem | None:
    """None for a case whose rows go in numbers that only devices know."""
    words = case.replace("=", " ").replace("x", " ").split()
    if bench == "tp":
        return next(known.problem(size) for known in CASES if (known.op, known.name) == (op, case))
    if bench == "embedding":
        tables, dim, _, pooling, _, batch = words
        return LookupProblem.of(batch=int(batch), dims=((int(dim),) * int(tables),) * size, pooling=int(pooling))
    if bench == "all_reduce":
        return Problem(op=op, m=int(words[3]), n=int(words[1]), k=int(words[0]) * size, world_size=size)
    m, k, n, *experts = words
    return None if experts else Problem(op=op, m=int(m), n=int(n), k=int(k), world_size=size)


def current(line: Line) -> Line:
    """The line without the time of a program that weft runs otherwise since."""
    problem = line.problem
    few = problem.op == "matmul_reduce_scatter" and problem.m * problem.n * problem.itemsize <= ONE_KERNEL_BYTES
    if not few or line.commit not in BEFORE_ONE_KERNEL:
        return line
    return replace(line, us={name: us for name, us in line.us.items() if name != "sequential_stores"})


def checked(lines: Sequence[Line]) -> list[Line]:
    """What weights may be fitted to. Raises ValueError for a problem of the sets that they are held to."""
    sizes = {line.problem.world_size for line in lines}
    unseen = {problem for size in sizes for name in HELD for _, problem in drawn(name, size)}
    for line in lines:
        if line.problem in unseen and not line.case.startswith(BENCHES):
            raise ValueError(f"{line.case} is of a set that weights are held to; give lines of --set fit")
    return [current(line) for line in lines]


def fitted(lines: Sequence[Line], machine: Machine) -> Estimates:
    """Weights of each operator's schedules, in the order of TRIED, with a few words about what they come from.

    Raises ValueError as `checked` does, and where an operator has no problem.
    """
    lines = checked(lines)
    found: dict[str, tuple[Weights, ...]] = {}
    for op in TRIED:
        some = [line for line in lines if line.problem.op == op]
        if not some:
            raise ValueError(f"files have no problem of {op}; every operator needs some")
        rows = (weights(text, some, machine) for text in TRIED[op] if _useful(text, some))
        found[op] = tuple(row for row in rows if row is not None)
    measured_on = "" if all(line.simulated for line in lines) else machine.name
    ranges = {op: fitted_range([line.problem for line in lines if line.problem.op == op]) for op in found}
    source = f"benchmarks/fit_heuristic.py: {_words(lines)}"
    return Estimates(source=source, weights=found, measured_on=measured_on, fitted=ranges)


def fitted_range(problems: Sequence[Problem]) -> Fitted:
    """Within which bounds the problems of one operator lie."""

    def extent(name: str) -> tuple[int, int]:
        values = [getattr(problem, name) for problem in problems]
        return min(values), max(values)

    return Fitted(
        world_sizes=tuple(sorted({problem.world_size for problem in problems})),
        dtypes=tuple(sorted({problem.dtype for problem in problems})),
        m=extent("m"),
        n=extent("n"),
        k=extent("k"),
    )


def fitted_again(before: Estimates, only: str, lines: Sequence[Line], machine: Machine) -> Estimates:
    """The weights with those of one operator, or of one schedule of it, fitted anew. only: OP or OP:SCHEDULE.

    Raises ValueError as `checked` does, for what has no weights, and where no line has a schedule's time."""
    op, _, text = only.partition(":")
    rows = before.weights.get(op, ())  # type: ignore[call-overload]
    some = [line for line in checked(lines) if line.problem.op == op and (not text or _timed(text, line))]
    made = {row.spec: weights(row.spec, some, machine) for row in rows if text in ("", row.spec)}
    if not made or None in made.values():
        known = ", ".join(row.spec for row in rows) or f"an operator of {', '.join(before.weights)}"
        raise ValueError(f"only is {only}; give one of {known}, and lines that have its time")
    changed = tuple(made.get(row.spec) or row for row in rows)
    return replace(before, source=f"{before.source}; {only}: {_words(some)}", weights=dict(before.weights) | {op: changed})


def _timed(text: str, line: Line) -> bool:
    return spec(*counted(text, line.problem.world_size)) in line.us


def _words(lines: Sequence[Line]) -> str:
    """How many problems of each machine."""
    counts = {name: sum(line.machine == name for line in lines) for name in dict.fromkeys(line.machine for line in lines)}
    return ", ".join(f"{count} problems on {name}" for name, count in counts.items())


def _useful(text: str, lines: Sequence[Line]) -> bool:
    """Whether it is sequential, FiCCO's, a lookup's, or often enough the fastest; no other is worth the time to estimate it."""
    name, without_count = parse(text)[0], ":" not in text
    if text == "sequential" or (name in FICCO and without_count) or lines[0].problem.op in LOOKUP_OPS:
        return True
    best = sum(line.us.get(spec(*counted(text, line.problem.world_size))) == line.best_us for line in lines)
    return best > USEFUL * len(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("files", nargs="*", type=Path, help="lines of benchmarks/planner.py, set fit")
    options.add_argument("--known", action="store_true", help="add the cases of the other benchmarks")
    options.add_argument("--machine", default="h200x8", help="the profile of what was measured (%(default)s)")
    options.add_argument("--out", type=Path, help="where the weights go; else they are printed alone")
    options.add_argument("--only", metavar="OP[:SCHEDULE]", help="of this alone; --out has the others")
    arguments = options.parse_args()
    if arguments.only and not arguments.out:
        options.error("--only changes the file that --out names; give both")
    lines = [line for path in arguments.files for line in read_lines(path) if not line.failed]
    lines += known() if arguments.known else ()
    machine = load(arguments.machine)
    if arguments.only:
        found = fitted_again(codec.read(Estimates, arguments.out), arguments.only, lines, machine)
    else:
        found = fitted(lines, machine)
    for op, rows in found.weights.items():
        print(op, *TERMS)
        for row in rows:
            print(f"  {row.spec:22}", *(f"{weight:8.3g}" for weight in row.weights), f"+-{row.error:.1%}")
    if arguments.out:
        arguments.out.write_text(codec.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
