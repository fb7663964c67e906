"""`import weft` is free: it loads no heavy package, starts nothing, and changes nothing in torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

HEAVY = ["torch", "triton", "numpy", "simpy", "plotly", "rich", "typer", "atomicshm", "cuda", "multiprocessing", "torchao"]

LOADS = f"""
import json, sys
before = set(sys.modules)
import weft.schedule
print(json.dumps(sorted(set({HEAVY}) & (set(sys.modules) - before))))
"""

STARTS = """
import json, os, pathlib, threading
def state():
    children = [p.read_text().split() for p in pathlib.Path("/proc/self/task").glob("*/children")]
    return {"threads": threading.active_count(), "children": children, "environment": dict(os.environ)}
before = state()
import weft
print(json.dumps([before, state()]))
"""

PATCHES = """
import json
import torch, torch.distributed, torch.distributed.tensor, torch.nn.functional
SPACES = [torch, torch.Tensor, torch.nn.Linear, torch.nn.Module, torch.nn.functional, torch.distributed, torch.ops,
          torch.distributed.tensor, torch.distributed.distributed_c10d]
def state():
    return {f"{space.__name__}.{name}": id(value) for space in SPACES for name, value in vars(space).items()}
before = state()
import weft
after = state()
changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
print(json.dumps({"changed": changed, "cuda": torch.cuda.is_initialized()}))
"""


def run(source: str) -> Any:
    """What `source`, run in a fresh interpreter, prints as JSON."""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_loads_no_heavy_package() -> None:
    assert run(LOADS) == []


def test_starts_no_thread_or_process() -> None:
    before, after = run(STARTS)
    assert after == before


def test_patches_nothing_and_leaves_cuda_alone() -> None:
    """torch.ops.weft is torch's own place for weft's operators."""
    assert run(PATCHES) == {"changed": ["torch.ops.weft"], "cuda": False}


def test_every_public_name_stays_what_it_is() -> None:
    """Modules are imported in passing; none may take the place of a name that users call."""
    import importlib
    import types

    import weft

    for name in weft.__all__:
        first = getattr(weft, name)
        importlib.import_module("weft.checker")
        importlib.import_module("weft.schedules.timelines")
        assert getattr(weft, name) is first
        assert not isinstance(first, types.ModuleType)
    assert set(weft.__all__) <= set(dir(weft))


def test_the_top_level_lists_what_users_call() -> None:
    """Rooms that only weft imports from are not listed; schedules are built in weft.schedule."""
    import weft

    assert not {"comm", "compat", "kernels", "runtime", "tools", "report", "build", "check", "Schedule"} & set(dir(weft))
    assert {"Schedule", "ScheduleError", "build", "check", "simulate", "timeline"} <= set(dir(weft.schedule))
    assert all(getattr(weft, name) for name in dir(weft))
    assert all(getattr(weft.schedule, name) for name in weft.schedule.__all__)


NAMED = """
import weft
for name in ("overlap.controls.sm_budget", "overlap.hooks.units", "models.experts.MoE", "hooks.ddp", "collectives.all_reduce",
             "planner.Plan", "report.write_report", "core.machine.load", "triton.Peers"):
    found = weft
    for part in name.split("."):
        assert found is weft or part in dir(found), f"{part} of {name} is not listed"
        found = getattr(found, part)
"""


@pytest.mark.slow
def test_rooms_and_their_modules_are_attributes_after_import_weft_alone() -> None:
    done = subprocess.run([sys.executable, "-c", NAMED], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import pytest

    import weft

    for package, name in ((weft, "nothing"), (weft.overlap, "nothing"), (weft.models, "nothing"), (weft.schedule, "nothing")):
        with pytest.raises(AttributeError, match="nothing"):
            getattr(package, name)


OPERATORS = """
import torch, weft, sys
assert "weft.ops" not in sys.modules
torch.ops.weft.matmul_reduce_scatter.default
assert not hasattr(torch.ops.weft, "nothing")
"""


def test_operators_are_there_after_import_weft_alone() -> None:
    done = subprocess.run([sys.executable, "-c", OPERATORS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
