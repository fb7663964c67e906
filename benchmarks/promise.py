"""Is any site slower than sequential, once the promise has been kept? What `heuristic` and `planned` choose, in use.

Neither measures before it chooses; after some calls weft holds the choice against the sequential program, and puts that back
where the choice is no faster. Here each problem is called by `heuristic`, by `planned` and by `sequential`: first until the
promise has been kept, then timed, in turns. The problems are those of planner.jsonl that were measured on as many GPUs, those
first whose heuristic pick was the slowest beside sequential there.

    torchrun --nproc-per-node 2 benchmarks/promise.py --budget-s 60 --json benchmarks/results/promise.jsonl
    python benchmarks/promise.py --table --json benchmarks/results/promise.jsonl

Protocol: measure.py's. A line for each problem and mode: what was chosen, whether sequential was put back, the times. Where
what runs was slower than sequential by more than 1%, all are timed once more, four times as often, and those times count; the
line has the first ones, too, as first_us. Traps: a site that runs sequential is called twice in a round, so that its two times
tell what luck makes of one; eager calls of few rows wait for the host.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from checked_options import count, modes_of
from scores import AS_FAST, Line, by_sizes, pooled, read_lines

from weft.core import codec
from weft.core.machine import Machine, load
from weft.runtime.kept import PREDICTED_AFTER

RESULTS = Path(__file__).with_name("results")
ASKED = ("heuristic", "planned")
PUT_BACK = "sequential is put back"
ROUNDS, AGAIN = 5, 4
"""Samples of each; how many times as many where one was slower than sequential by more than luck."""


def hardest(lines: Sequence[Line], world_size: int, machine: Machine) -> list[Line]:
    """The lines of so many ranks, the one first whose heuristic pick took the longest beside sequential."""
    found = [pooled(line) for line in lines if line.us and not line.simulated and line.problem.world_size == world_size]
    return sorted(found, key=lambda line: -line.us[by_sizes(line, machine)] / line.us["sequential"])


def kept(call: Callable[[], object]) -> bool:
    """Call until the promise has been kept. Whether sequential was put back, which must be said once."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(PREDICTED_AFTER + 2):
            call()
    times = sum(PUT_BACK in str(warning.message) for warning in said)
    if times > 1:
        raise RuntimeError(f"it was said {times} times that {PUT_BACK}")
    return times == 1


def runs(asked: str) -> str:
    """What the world's group runs where `asked` was asked for last."""
    import torch.distributed as dist

    from weft import schedules
    from weft.runtime.groups import GROUPS

    world = dist.group.WORLD
    assert world is not None
    found = GROUPS.state(world.group_name).runs(asked)
    return schedules.spec(found.name, found.chunks)


def measured(line: Line, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each mode."""
    import measure
    import torch
    import torch.distributed as dist
    from sites import Site, checked_against

    torch.manual_seed(dist.get_rank())
    problem = line.problem
    site = measure.together("tensors", partial(Site, problem))
    works, back, names = {"sequential": site.call("sequential")}, dict[str, bool](), dict[str, str]()
    check = checked_against(measure.together("sequential", works["sequential"]))  # type: ignore[arg-type]
    for asked in ASKED:
        works[asked] = site.call(asked)
        back[asked] = measure.together(asked, partial(kept, works[asked]))
        names[asked] = runs(asked)
    modes = arguments.modes.split(",")
    start = partial(measure.row, bench="promise", op=problem.op, case=line.case, dtype=problem.dtype, arguments=arguments)

    def timed(modes: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
        times, missing = measure.trial(works, modes, check=check, needed=tuple(works), rounds=rounds, repeat=4)
        assert not missing, missing
        return {mode: {"us": {name: t.us for name, t in times[mode].items()}, "runs": names} for mode in modes}

    found = timed(modes, arguments.rounds)
    if doubtful := [mode for mode in modes if any(ratio > 1 + AS_FAST for ratio in of_others(found[mode]))]:
        again = timed(doubtful, AGAIN * arguments.rounds)
        found |= {mode: again[mode] | {"samples": AGAIN * arguments.rounds, "first_us": found[mode]["us"]} for mode in doubtful}
    told = {"put_back": back, "problem": codec.dump(problem)}
    return [start(mode=mode) | found[mode] | told for mode in modes]


def collect(arguments: argparse.Namespace) -> None:
    import measure
    import torch
    import torch.distributed as dist

    measure.start()
    left_out = []
    begun_s = time.monotonic()
    found = hardest(read_lines(RESULTS / "planner.jsonl"), dist.get_world_size(), load("h200x8"))
    for line in found[arguments.first :]:
        spent = [0.0] * dist.get_world_size()
        dist.all_gather_object(spent, time.monotonic() - begun_s)
        if max(spent) > arguments.budget_s:
            break
        try:
            with torch.no_grad():
                rows = measured(line, arguments)
        except measure.Failed as failed:
            measure.say(f"LEFT OUT {line.case}: {failed}", file=sys.stderr)
            left_out.append(line.case)
            rows = []
        for row in rows:
            measure.append(arguments.json, row)
            measure.say(words(row))
        measure.release()
    measure.stop(left_out)


def over(row: Mapping[str, Any]) -> dict[str, float]:
    """By what was asked for: its time over sequential's."""
    return {asked: row["us"][asked] / row["us"]["sequential"] for asked in ASKED}


def of_others(row: Mapping[str, Any]) -> list[float]:
    """As `over`, where another program than sequential runs."""
    return [over(row)[asked] for asked in ASKED if row["runs"][asked] != "sequential"]


def words(row: Mapping[str, Any]) -> str:
    each = [f"{asked} {over(row)[asked]:.2f}" + " (put back)" * row["put_back"][asked] for asked in ASKED]
    return f"{row['mode']:5} {row['op']} {row['case']}: sequential {row['us']['sequential']:.0f} us; {', '.join(each)}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many sites that run another program are slower than sequential by more than luck. The others run sequential: how far
    its two times are apart is luck."""
    told = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        some = [row for row in rows if row["mode"] == mode]
        for asked in ASKED:
            ratios = [over(row)[asked] for row in some if row["runs"][asked] != "sequential"]
            same = [over(row)[asked] for row in some if row["runs"][asked] == "sequential"]
            slower = sum(ratio > 1 + AS_FAST for ratio in ratios)
            back = sum(row["put_back"][asked] for row in some)
            told.append(
                f"{mode:5} {asked:9} {len(ratios)} of {len(some)} run others, slower by more than {AS_FAST:.0%}: {slower}, "
                f"at most {max(ratios, default=0):.2f}x sequential's time; put back in {back}, "
                f"the same program twice: {min(same, default=1):.2f} to {max(same, default=1):.2f}x"
            )
    return "\n".join(told)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--table", action="store_true", help="what was measured, from the lines")
    options.add_argument("--json", type=Path, help="the lines: appended to, or read")
    options.add_argument("--modes", type=modes_of, default="graph,eager", help="of graph and eager, with commas (%(default)s)")
    options.add_argument("--rounds", type=count, default=ROUNDS, help="samples of each (%(default)s)")
    options.add_argument("--first", type=int, default=0, help="problems to leave out, the hardest first")
    options.add_argument("--budget-s", type=float, default=60.0, help="no problem is begun after that (%(default)s)")
    options.add_argument("--commit", default="", help="what the tree is, for the lines")
    arguments = options.parse_args()
    if arguments.table and not arguments.json:
        options.error("--table reads the lines of --json")
    if arguments.table:
        print(table([json.loads(text) for text in arguments.json.read_text(encoding="utf-8").splitlines()]))
    else:
        collect(arguments)


if __name__ == "__main__":
    main()
