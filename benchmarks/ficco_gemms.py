"""FiCCO's sixteen GEMMs (arXiv 2512.10236): which schedule is chosen, how much is gained, and how near is the ideal?

    python -m benchmarks.ficco_gemms --machine mi300x8 --machine h200x8
    torchrun --nproc-per-node 2 -m benchmarks.ficco_gemms --collect --json benchmarks/results/h200x2/ficco_gemms.jsonl
    python -m benchmarks.ficco_gemms --table --json benchmarks/results/h200x2/ficco_gemms.jsonl

The first simulates all of them on profiles, with as many ranks as those have. --collect measures those that fit on the GPUs
there are (bytes that all candidates hold at once, and time of a call), in graphs, as benchmarks/planner.py does; it goes on
where the file ends. Columns: the best of FiCCO's four schedules (world_size chunks a shard), the best of the full space that
was tried; the gain of each over the sequential program, and of what the heuristic picks among them; the share of the ideal,
which is the longer half's time over the schedule's. Next to them is the paper's claim: up to 1.6x of at most 1.7x. Traps: sizes
are read as global, with N sharded (weft_studies.ficco.gemms); the paper's host is a mesh of 8 x MI300X, which the H200 is not.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.planner import collect
from benchmarks.rows import read
from benchmarks.scores import FICCO, Line, ficco_specs, line_of
from weft.core.machine import Machine, load
from weft.core.problem import Problem
from weft.perf.ranking import choice, estimates
from weft.schedules import build, parse, programs
from weft_studies.ficco.gemms import FICCO_GEMMS, GemmCase

OTHERS = ("sequential_stores", "shard_p2p", "flag_gated:1", "flag_gated:2", "track_and_trigger:1", "direct_store:1")
"""Schedules that are tried in addition to FiCCO's."""
PAPER = "paper, 8 x MI300X: up to 1.6x over sequential, of an ideal of up to 1.7x"
MOST_BYTES, MOST_FLOPS = 100e9, 4e13
"""Of one GPU, for all candidates at once; of one rank's call, some 60 ms on an H200."""
ROUNDS = 3


def tried(problem: Problem) -> tuple[str, ...]:
    return programs(problem, (*ficco_specs(problem), *OTHERS))


def simulated(case: GemmCase, machine: Machine) -> Line:
    """Every candidate's prediction."""
    from weft.perf import run

    problem = case.problem(machine.world_size)
    us = {text: run(build(problem, *parse(text), fan_out=machine.fans_out), machine).total_us for text in tried(problem)}
    return Line(case=str(case), problem=problem, us=us, machine=f"simulated {machine.name}", simulated=True)


def halves(line: Line, machine: Machine, known: Mapping[str, float]) -> tuple[float, float]:
    """(matmul alone, all-gather alone), measured where they were."""
    from weft.perf.terms import whole_collective_us, whole_gemm_us

    computation = known.get("computation/cublas") or whole_gemm_us(machine, line.problem)
    return computation, known.get("communication/default") or whole_collective_us(machine, line.problem)


HEADS = (
    "GEMM",
    "sequential",
    "ideal",
    f"best of FiCCO's {len(FICCO)}",
    "",
    "of ideal",
    "picked",
    "best of all",
    "",
    "of ideal",
    "picked",
)


def row(line: Line, machine: Machine, known: Mapping[str, float]) -> tuple[str, ...]:
    """One GEMM's line of the table. Time in us; gains over sequential."""
    compute_us, communicate_us = halves(line, machine, known)
    ideal_us, sequential_us = max(compute_us, communicate_us), line.us["sequential"]
    cells = [line.case.partition(":")[0], f"{sequential_us:.0f}", f"{sequential_us / ideal_us:.2f}x"]
    for some in (line.among(ficco_specs(line.problem)), line):
        best = min(some.us, key=some.us.__getitem__)
        gain, share = sequential_us / some.us[best], ideal_us / some.us[best]
        cells += [
            best,
            f"{gain:.2f}x",
            f"{share:.0%}",
            f"{sequential_us / some.us[choice(estimates(some.problem, machine, some.us))]:.2f}x",
        ]
    return tuple(cells)


def rows(lines: Sequence[Line], machine: Machine, known: Sequence[Mapping[str, float]]) -> list[tuple[str, ...]]:
    """The table, with its heads."""
    return [HEADS, *(row(line, machine, times) for line, times in zip(lines, known, strict=True))]


def most(lines: Sequence[Line]) -> str:
    """The largest gain, and the paper's."""
    best = max(line.us["sequential"] / line.among(ficco_specs(line.problem)).best_us for line in lines)
    return f"at most {best:.2f}x by FiCCO's; {PAPER}"


def measured(path: Path) -> tuple[list[Line], list[Mapping[str, float]]]:
    """Lines that were measured, and all times of each."""
    found = [row for row in read(path) if row.us]
    return list(map(line_of, found)), [row.us for row in found]


def show(lines: Sequence[Line], machine: Machine, known: Sequence[Mapping[str, float]]) -> None:
    print(lines[0].machine)
    for cells in rows(lines, machine, known):
        print("".join(cell.ljust(22 if at in (3, 7) else 11) for at, cell in enumerate(cells)).rstrip())
    print(most(lines))


def fits(problem: Problem) -> bool:
    """Whether a GPU can hold all candidates, each with the gathered rows and the result, and a call ends soon."""
    gathered, result = problem.m * problem.k * problem.itemsize, problem.m * problem.columns(0) * problem.itemsize
    weights = problem.k * problem.columns(0) * problem.itemsize
    # Staged products and sums in float32 of the 2D schedule: three results more.
    held = (len(tried(problem)) + 1) * (gathered + result) + 6 * result + weights
    return held <= MOST_BYTES and problem.flops <= MOST_FLOPS


def fitting(world_size: int) -> list[tuple[str, Problem]]:
    """(case, problem) of those that fit, the quickest first."""
    cases = [(str(case), case.problem(world_size)) for case in FICCO_GEMMS]
    return sorted(((case, problem) for case, problem in cases if fits(problem)), key=lambda one: one[1].flops)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--collect", action="store_true", help="measure on GPUs (torchrun)")
    options.add_argument("--table", action="store_true", help="what was measured, from the lines")
    options.add_argument("--machine", action="append", help="profiles to simulate on (mi300x8 and h200x8)")
    options.add_argument("--json", type=Path, help="the lines: appended to, or read")
    options.add_argument("--budget-s", type=float, default=70.0, help="no GEMM is begun after that (%(default)s)")
    options.add_argument(
        "--first", type=int, default=0, help="GEMMs that fit to leave out before --collect begins, quickest first"
    )
    options.add_argument("--rounds", type=int, default=ROUNDS, help="samples of each candidate (%(default)s)")
    options.add_argument("--commit", default="", help="what the tree is, for the lines")
    options.set_defaults(set="ficco")
    arguments = options.parse_args()
    if arguments.collect:
        collect(arguments, fitting, tried, lambda problem: 1)
    elif arguments.table:
        lines, known = measured(arguments.json)
        show(lines, load("h200x8"), known)
    else:
        for name in arguments.machine or ("mi300x8", "h200x8"):
            machine = load(name)
            lines = [simulated(case, machine) for case in FICCO_GEMMS]
            show(lines, machine, [{} for _ in lines])


if __name__ == "__main__":
    main()
