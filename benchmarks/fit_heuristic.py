"""Which thresholds choose best? Fits the decision trees of weft/decisions/*.json to lines of benchmarks/planner.py.

A tree is grown greedily: the threshold that takes most loss away, until a leaf has too few problems, or nothing is gained. A
leaf's schedule is the one that loses least on average to the best known of each problem; thresholds have two digits, so that
the table can be read. Schedules that a line does not have count as its slowest. Lines of several files are fitted together;
those of a simulation count for less beside measured ones. `--known` adds what benchmarks/results/ has of other problems: the
cases of tp.jsonl, all_to_all.jsonl, all_reduce.jsonl and embedding.jsonl, in graphs.

    python benchmarks/fit_heuristic.py --known --out weft/decisions/switch.json out/simulated.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cases import CASES
from problems import TRIED
from scores import Line, read_lines

from weft import codec
from weft.machine import Machine, load
from weft.problem import LookupProblem, Op, Problem
from weft.rules import FEATURES, Feature, Leaf, Rules, Split, sizes, table
from weft.schedules import parse, spec

RESULTS = Path(__file__).with_name("results")
DEPTH = 3
LEAST, LEAST_WEIGHT = 3, 1.25
"""Problems that a leaf must have, and their weight."""
GAIN = 0.002
"""What a threshold must take from the mean loss of an operator."""
SIMULATED = 0.05
"""Weight of a simulated line beside a measured one."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """losses: of each spec of TRIED, as it stands there."""

    features: Mapping[Feature, float]
    losses: Mapping[str, float]
    weight: float


def sample(line: Line, machine: Machine, weight: float) -> Sample:
    found = sizes(line.problem, machine)
    slowest = max(line.us.values())
    losses = {}
    for text in TRIED[line.problem.op]:
        name, chunks = parse(text)
        losses[text] = line.us.get(spec(name, chunks or line.problem.world_size), slowest) / line.best_us - 1
    return Sample(features={name: of(found) for name, of in FEATURES.items()}, losses=losses, weight=weight)


def grown(samples: Sequence[Sample], depth: int, gain: float) -> Split | Leaf:
    """A tree for these problems. gain: weight times loss that a threshold must take away."""
    leaf = _leaf(samples)
    if depth == 0:
        return leaf
    best = min(_splits(samples), key=lambda found: found[0], default=None)
    if best is None or _loss(samples) - best[0] < gain:
        return leaf
    _, feature, at_least = best
    above = [s for s in samples if s.features[feature] >= at_least]
    below = [s for s in samples if s.features[feature] < at_least]
    then, otherwise = grown(above, depth - 1, gain), grown(below, depth - 1, gain)
    if isinstance(then, Leaf) and isinstance(otherwise, Leaf) and then.spec == otherwise.spec:
        return leaf
    return Split(feature=feature, at_least=at_least, then=then, otherwise=otherwise)


def _splits(samples: Sequence[Sample]) -> Iterator[tuple[float, Feature, float]]:
    """(what is still lost, feature, threshold) of every threshold that leaves both sides enough."""
    for feature in FEATURES:
        values = sorted({s.features[feature] for s in samples})
        for at_least in sorted({_round((low * high) ** 0.5) for low, high in pairwise(values)}):
            above = [s for s in samples if s.features[feature] >= at_least]
            below = [s for s in samples if s.features[feature] < at_least]
            if min(len(above), len(below)) >= LEAST and min(_weight(above), _weight(below)) >= LEAST_WEIGHT:
                yield _loss(above) + _loss(below), feature, at_least


def _round(value: float) -> float:
    return float(f"{value:.2g}")


def _weight(samples: Sequence[Sample]) -> float:
    return sum(s.weight for s in samples)


def _losses(samples: Sequence[Sample]) -> dict[str, float]:
    return {text: sum(s.weight * s.losses[text] for s in samples) for text in samples[0].losses}


def _loss(samples: Sequence[Sample]) -> float:
    return min(_losses(samples).values())


def _leaf(samples: Sequence[Sample]) -> Leaf:
    """Of equal losses the simpler one, which stands earlier."""
    losses = _losses(samples)
    best = min(losses, key=lambda text: losses[text])
    return Leaf(spec=best, problems=len(samples), loss=round(losses[best] / _weight(samples), 4))


def known() -> Iterator[Line]:
    """What benchmarks/results/ has measured of other problems."""
    for bench in ("tp", "all_to_all", "all_reduce", "embedding"):
        for text in (RESULTS / f"{bench}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            problem = _known_problem(bench, row["op"], row["case"], row["world_size"])
            if row["mode"] == "graph" and problem is not None:
                us = {"sequential": row["peers"].get("weft_sequential", row["sequential_us"])} | row["candidates"]
                case = f"{bench} {row['case']}"
                yield Line(case=case, problem=problem, us=us, machine=row["machine"], simulated=False)


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


def fitted(lines: Sequence[Line], machine: Machine) -> Rules:
    """A tree for each operator, with a few words about what they come from."""
    trees: dict[str, Split | Leaf] = {}
    measured = any(not line.simulated for line in lines)
    for op in TRIED:
        samples = [
            sample(line, machine, SIMULATED if line.simulated and measured else 1.0) for line in lines if line.problem.op == op
        ]
        if not samples:
            raise ValueError(f"files have no problem of {op}; every operator needs some")
        trees[op] = grown(samples, DEPTH, GAIN * _weight(samples))
    counts = {name: sum(line.machine == name for line in lines) for name in dict.fromkeys(line.machine for line in lines)}
    words = ", ".join(f"{count} problems on {name}" for name, count in counts.items())
    return Rules(source=f"benchmarks/fit_heuristic.py: {words}", trees=trees)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("files", nargs="*", type=Path, help="lines of benchmarks/planner.py, set fit")
    options.add_argument("--known", action="store_true", help="add the cases of the other benchmarks")
    options.add_argument("--machine", default="h200x8", help="the profile that features are counted with (%(default)s)")
    options.add_argument("--out", type=Path, help="where the rules go; else they are printed alone")
    arguments = options.parse_args()
    lines = [line for path in arguments.files for line in read_lines(path) if not line.failed] + (
        list(known()) if arguments.known else []
    )
    found = fitted(lines, load(arguments.machine))
    for op, tree in found.trees.items():
        print(f"{op}\n{table(tree)}")
    if arguments.out:
        arguments.out.write_text(codec.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
