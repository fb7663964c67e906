"""Plan a model of your own from its config.json, run its communicating layers on CPU ranks, and write the report.

    python examples/03_plan_a_config.py                         a small model, written to a temporary folder
    python examples/03_plan_a_config.py path/to/config.json     any Hugging Face config, or the folder that it is in

The command line does the same: weft plan CONFIG; weft run CONFIG --ranks 2 --tokens 64 --report out/
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import weft
from weft.core import machine
from weft.planner.models import Model, OperatorCall, load_model, operator_calls
from weft.report import write_report
from weft.tools.results import Run
from weft.tools.run import run_model

MACHINE_TOKENS = 8192
SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
}


def small_config(folder: Path) -> Path:
    """A config.json as Hugging Face writes it, with the keys that weft reads."""
    path = folder / "small-llama" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(SMALL, indent=2), encoding="utf-8")
    return path


def print_plans(model: Model, target: weft.Machine) -> None:
    """What the planner would do on all GPUs of the machine, and why."""
    print(model)
    for note in model.notes:
        print(f"note: {note}")
    for call in operator_calls(model):
        if isinstance(call, OperatorCall):
            plan = weft.plan(call.problem(MACHINE_TOKENS, target.world_size, "bfloat16"), target)
            print(f"\n{call.name}: {plan.chosen.spec} on {target.name}\n{plan.why}")
        else:
            print(f"\n{call}")


def run_on_cpus(model: Model, target: weft.Machine, *, ranks: int, tokens: int) -> Run:
    """Every communicating layer on rank processes of this host, compared with the sequential program."""
    return run_model(
        model,
        ranks=ranks,
        device="cpu",
        tokens=tokens,
        op=None,
        schedule="auto",
        machine=target,
        machine_ranks=target.world_size,
        machine_tokens=MACHINE_TOKENS,
        dtype="bfloat16",
        seed=0,
        progress=lambda what, done, total: print(f"{done}/{total} {what}", file=sys.stderr),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", help="path of a config.json; default: a small one")
    parser.add_argument("--report", type=Path, default=Path("out"), help="folder of the report")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(options.config or str(small_config(Path(folder))))
    target = machine.load("h200x8")
    print_plans(model, target)
    done = run_on_cpus(model, target, ranks=options.ranks, tokens=options.tokens)
    print("", *done.layers, sep="\n")
    print(f"{done}; report: {write_report(done, options.report)}")
    if not done.ok:
        raise SystemExit("a result is wrong")


if __name__ == "__main__":
    main()
