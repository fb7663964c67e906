"""How often does the planner choose the fastest schedule of problems that it has never seen, and what does a wrong choice cost?

Problems are drawn (problems.py): `unseen` to hold the planner to, `fit` to set the heuristic's thresholds by.

    torchrun --nproc-per-node 4 -m benchmarks.planner --collect --budget-s 70 --json benchmarks/results/planner.jsonl
    torchrun --nproc-per-node 4 -m benchmarks.planner --collect --set fit --json benchmarks/results/planner_fit.jsonl
    python -m benchmarks.planner --simulate h200x8 --set fit --world-size 4 --json out/simulated.jsonl
    python -m benchmarks.planner --score --json benchmarks/results/planner.jsonl

--collect goes on where the file ends: problems that it holds already are left out, so a run may be cut into several. No problem
is begun after the budget. Protocol: measure.py's, mode graph; a few rows of each result are compared with sequential's; the two
halves alone are NCCL's default and cuBLAS. What fails is in the row's `missing`, with its reason, under `case` where nothing of
a problem can be measured. --simulate writes the same rows from the simulator, and says so in `machine`. --score (scores.py)
needs no GPU. Traps: every candidate of a problem is bound at once (up to some 20 times its memory), so that they take turns;
kernels are compiled at first use, a few seconds each.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, get_args

from benchmarks.problems import COUNT, SetName, drawn, tried
from benchmarks.rows import CASE, Row, append, sentence
from benchmarks.scores import measured, read_lines, report
from weft.core import codec
from weft.core.machine import load
from weft.core.problem import LOOKUP_OPS, LookupProblem, Problem
from weft.schedules import build, parse

ROUNDS = 3
TIMEOUT_S, ALARM_S = "20", 40
_RUN_US, _FEWEST_REPEATS, _MOST_REPEATS = 2500.0, 2, 12


def repeats(problem: Problem) -> int:
    """Calls of a sample: as many as fill some 2.5 ms, at a rate that an H200 may reach; several, since ranks leave the barrier
    apart, and a graph of several streams starts late (docs/simulator.md, one run on 4 GPUs)."""
    per_us = 1e6 if problem.op in LOOKUP_OPS else 5e8
    return max(_FEWEST_REPEATS, min(_MOST_REPEATS, round(_RUN_US / (20 + problem.flops / per_us))))


def collect(
    arguments: argparse.Namespace,
    cases: Callable[[int], Sequence[tuple[str, Problem]]],
    specs: Callable[[Problem], tuple[str, ...]],
    calls: Callable[[Problem], int],
) -> None:
    """Measure what the budget allows of cases(world_size), from --first on, a line each as soon as it is known; what the file
    holds already is left out. specs: candidates of a problem. calls: of a sample."""
    import torch.distributed as dist

    from benchmarks import measure  # here, since --score and --simulate need no torch

    begun_s = time.monotonic()
    measure.ALARM_S = ALARM_S
    os.environ.setdefault("WEFT_TIMEOUT_S", TIMEOUT_S)
    done = {line.problem for line in read_lines(arguments.json)} if arguments.json and arguments.json.exists() else set()
    measure.start()
    count = 0
    for case, problem in cases(dist.get_world_size())[arguments.first :]:
        if problem in done:
            continue
        spent = [time.monotonic() - begun_s] * dist.get_world_size()
        dist.all_gather_object(spent, spent[0])
        if max(spent) > arguments.budget_s:
            break
        count += _collected(case, problem, specs(problem), calls(problem), arguments)
    measure.say(f"{count} problems in {time.monotonic() - begun_s:.0f} s, {len(done)} were there")
    measure.stop()


def _collected(case: str, problem: Problem, specs: Sequence[str], calls: int, arguments: argparse.Namespace) -> bool:
    """Whether one problem could be measured. Its memory is given back either way."""
    import torch

    from benchmarks import measure

    begun_s, reason = time.monotonic(), ""
    extra = {"set": arguments.set, "repeats": calls}
    row = partial(
        measure.row, bench="planner", op=problem.op, case=case, dtype=problem.dtype, problem=problem, mode="graph", extra=extra
    )
    try:
        with torch.no_grad():
            times, missing = _measured(problem, specs, arguments.rounds, calls)
            made = row(times=times["graph"], missing=missing, arguments=arguments)
    except measure.Failed as failed:
        reason = str(failed)
    # Behind the except: what failed would hold the problem's tensors.
    if reason:
        measure.say(f"LEFT OUT {case}: {reason}", file=sys.stderr)
        made = row(missing={CASE: reason}, arguments=arguments)
    else:
        measure.say(f"{sentence(made)} ({time.monotonic() - begun_s:.1f} s)")
    measure.append(arguments.json, made)
    measure.release()
    return not reason


def _measured(problem: Problem, specs: Sequence[str], rounds: int, calls: int) -> Any:
    """As measure.trial has it. calls: of a sample."""
    import torch
    import torch.distributed as dist

    from benchmarks import measure
    from benchmarks.lookups import ProblemTables
    from benchmarks.methods import Matmul, alone, close_sample, halves

    torch.manual_seed(dist.get_rank())
    works: dict[str, measure.Work]
    operands: ProblemTables | Matmul
    rows: dict[str, int] = {}
    if isinstance(problem, LookupProblem):
        operands = bags = measure.together("tensors", partial(ProblemTables, problem))
        columns = max(map(problem.columns, range(problem.world_size)))
        works = {"communication/default": measure.together("halves", partial(alone, problem, bags.options, columns=columns))}
    else:
        turned = problem.op == "matmul_all_reduce"
        operands = matmul = measure.together("tensors", partial(Matmul, problem, turned=turned))
        works = measure.together("halves", partial(halves, matmul))
        rows = {"rows": problem.m} if problem.op == "all_gather_matmul" else {}
    works |= {f"weft/{spec}": operands.weft(spec, **rows) for spec in specs}
    expected: Any = measure.together("weft/sequential", works["weft/sequential"])
    check = close_sample(expected)
    return measure.trial(works, ("graph",), check=check, needed=("weft/sequential",), rounds=rounds, repeat=calls)


def simulated(set_name: str, machine_name: str, item: tuple[str, Problem]) -> Row:
    """A row of predictions."""
    from weft.perf import run
    from weft.perf.terms import whole_collective_us, whole_gemm_us

    case, problem = item
    machine = load(machine_name)
    us = {"computation/cublas": whole_gemm_us(machine, problem), "communication/default": whole_collective_us(machine, problem)}
    for spec in tried(problem):
        us[f"weft/{spec}"] = run(build(problem, *parse(spec), fan_out=machine.fans_out), machine).total_us
    return Row(
        bench="planner",
        op=problem.op,
        case=case,
        problem=codec.dump(problem),
        dtype=problem.dtype,
        world_size=problem.world_size,
        mode="graph",
        machine=f"simulated {machine_name}",
        us=us,
        extra={"set": set_name},
    )


def simulate(arguments: argparse.Namespace) -> None:
    """Predict a whole set, a row each, on as many processes as asked for."""
    items = drawn(arguments.set, arguments.world_size, arguments.count)
    work = partial(simulated, arguments.set, arguments.simulate)
    with ProcessPoolExecutor(arguments.processes) as pool:
        for row in pool.map(work, items):
            append(Path(arguments.json), row)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = options.add_mutually_exclusive_group(required=True)
    what.add_argument("--collect", action="store_true", help="measure on GPUs (torchrun)")
    what.add_argument("--simulate", metavar="MACHINE", help="predict on a machine")
    what.add_argument("--score", action="store_true", help="say how well heuristic and cost model choose, from the lines")
    options.add_argument("--json", type=Path, nargs="+", required=True, help="the lines: appended to (one file), or read")
    options.add_argument("--set", choices=get_args(SetName), default="unseen", help="which problems (%(default)s)")
    options.add_argument("--first", type=int, default=0, help="problems of the set to leave out before --collect begins")
    options.add_argument("--budget-s", type=float, default=240.0, help="no problem is begun after that (%(default)s)")
    options.add_argument("--rounds", type=int, default=ROUNDS, help="samples of each candidate (%(default)s)")
    options.add_argument("--repeats", type=int, default=0, help="calls of a sample (default: by the problem's size)")
    options.add_argument("--commit", default="", help="what the tree is, for the lines")
    options.add_argument("--world-size", type=int, default=4, help="of --simulate (%(default)s)")
    options.add_argument("--count", type=int, default=COUNT, help="problems of --simulate (%(default)s)")
    options.add_argument("--processes", type=int, default=os.cpu_count(), help="of --simulate (%(default)s)")
    options.add_argument("--machine", default="h200x8", help="whose profile --score predicts with (%(default)s)")
    arguments = options.parse_args()
    if not arguments.score:
        (arguments.json,) = arguments.json
    if arguments.collect:
        collect(
            arguments,
            partial(drawn, arguments.set),
            tried,
            lambda problem: arguments.repeats or repeats(problem),
        )
    elif arguments.simulate:
        simulate(arguments)
    else:
        machine = load(arguments.machine)
        print(f"profile {machine.name}")
        print(report(measured(arguments.json, machine)))


if __name__ == "__main__":
    main()
