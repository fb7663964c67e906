"""Options that several commands share, with their help texts, and the user's choices, checked before any work starts.

Every function raises a ValueError that says what would work.
"""

from __future__ import annotations

import logging
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.output import progress_bar
from weft.core.problem import COLLECTIVE_OPS, COLUMN_OPS, FLOAT8, ITEMSIZE, LOOKUP_OPS, OPS, DType, Op, Problem, Scaling
from weft.planner.models import (
    Model,
    OperatorCall,
    config_path,
    decode_calls,
    load_model,
    operator_calls,
    place_calls,
    preset_names,
    read_transformers_config,
)

DEFAULT_MACHINE = "h200x8"
DEFAULT_MACHINE_TOKENS = 8192
MOST_TOKENS = 1 << 24
"""The largest number of rows of one matmul, which is more than models get at once."""


def _import_families(modules: list[str] | None) -> list[str] | None:
    if modules:
        from weft.checker.families import import_families

        import_families(modules)
    return modules


MODEL = Annotated[
    str,
    typer.Argument(metavar="MODEL", help=f"{', '.join(preset_names())}; or the path of a Hugging Face config.json."),
]
MACHINE = Annotated[
    str, typer.Option(metavar="NAME", help="Machine to predict for: a name from weft machines, or a JSON file.")
]
SCHEDULE = Annotated[
    str,
    typer.Option(metavar="auto|NAME[:CHUNKS]", help="auto lets the planner choose; names are listed by weft schedules."),
]
OP = Annotated[str | None, typer.Option(metavar="NAME", help=f"Only layers of this operator: {', '.join(OPS)}.")]
JSON = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE|-", help="Write all results as JSON; with -, only that is written to standard output."
    ),
]
REPORT = Annotated[Path | None, typer.Option(metavar="DIR", help="Write an HTML page, DIR/index.html.")]
TRACE = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")]
IMPORT = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        callback=_import_families,
        is_eager=True,
        help="First import this module, which registers families of schedules (weft.schedule.register). Repeatable.",
    ),
]
OPERAND_DTYPE = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="Dtype of operands: bfloat16, float16, float32; or of a, float8_e4m3fn or float8_e5m2, with float8_e4m3fn for b.",
    ),
]
RECIPE = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Which elements of an FP8 operand share a scale: tensorwise, rowwise (default) or blockwise. "
        "Operators that send rows before they multiply use rowwise instead of tensorwise.",
    ),
]
OUT_DTYPE = Annotated[str | None, typer.Option(metavar="NAME", help="Dtype of the result of FP8 operands. Default: bfloat16.")]


CPU_RANKS = 4
MOST_CPU_RANKS = 64
DEVICES = ("auto", "cpu", "cuda")


def choose_layers(name: str, op: str | None, layer: str | None = None, *, ranks: int) -> tuple[Model, tuple[OperatorCall, ...]]:
    """Return the model and its operator calls over `ranks` ranks. op, layer: return only those of this operator, or of this
    name."""
    only = None if op is None else choose_op(op)
    imports = " with PyTorch and transformers, which takes seconds" if config_path(name) else ""
    with progress_bar(f"reading {name}{imports}"), _quiet_imports():
        model = _parallelized(name, load_model(name), ranks)
    everything = decode_calls(model) if only == "matmul_all_reduce" else operator_calls(model)
    found = tuple(one for one in everything if only in (None, one.op))
    if only is not None and not found:
        raise ValueError(f"--op is {op!r}; model {model.name} has no layer of it, use another operator or leave --op out")
    named = tuple(one for one in found if layer in (None, one.name))
    if not named:
        raise ValueError(f"--layer is {layer!r}; model {model.name} has {', '.join(one.name for one in found)}")
    return model, named


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Leave out what torchao and torch warn of when transformers imports them, which is not about the model. Errors stay."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _parallelized(name: str, model: Model, ranks: int) -> Model:
    """Return the model with the operator calls that it has after weft.parallelize, if that takes it, or a note why not."""
    path = config_path(name)
    if path is None and model.places and model.kv_heads % ranks:  # a preset has the places for numbers that divide its heads
        why = f"needs a number of ranks that divides the {model.kv_heads} key and value heads"
        return replace(model, places=(), notes=(f"weft.parallelize {why}; styles could make these calls", *model.notes))
    config = None if path is None or not model.read else read_transformers_config(path)
    if config is None:
        return model
    from weft.models.preview import is_parallelized, preview

    why = "does not take this model"
    if is_parallelized(config):
        try:
            return place_calls(model, preview(config, ranks))
        except ValueError as error:
            why = f"refuses this model: {error}"
    return replace(model, notes=(f"weft.parallelize {why}; styles could make these calls", *model.notes))


def find_machine_file(name: str) -> Path | None:
    """Return the file of a machine; None for a shipped profile."""
    from weft.core.machine import names

    return None if name in names() else Path(name)


def choose_dtype(dtype: str) -> DType:
    """Return `dtype`. Raises ValueError if weft does not overlap it."""
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype is {dtype!r}; weft overlaps {', '.join(ITEMSIZE)}")
    return typing.cast(DType, dtype)


def choose_elements(dtype: str, recipe: str | None, out_dtype: str | None) -> tuple[DType, Scaling | None]:
    """Return the dtype of the result, and the scaling of the operands if `dtype` is FP8."""
    if dtype in FLOAT8:
        return choose_dtype(out_dtype or "bfloat16"), Scaling(a=dtype, recipe=recipe or "rowwise")  # type: ignore[arg-type]
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype is {dtype!r}; use {', '.join((*ITEMSIZE, *FLOAT8))}")
    for name, given in (("--recipe", recipe), ("--out-dtype", out_dtype)):
        if given is not None:
            raise ValueError(f"{name} is {given!r}, which is for FP8 operands; leave it out, or use --dtype {FLOAT8[0]}")
    return choose_dtype(dtype), None


def make_problem(
    layer: OperatorCall, tokens: int, ranks: int, dtype: DType, scaling: Scaling | None, nodes: tuple[int, ...] = ()
) -> Problem:
    """Return the problem of an operator call. nodes: as Problem.nodes. Raises a ValueError that names the layer."""
    try:
        return replace(layer.problem(tokens, ranks, dtype, scaling), nodes=nodes)
    except ValueError as error:
        raise ValueError(f"{error}, at {layer.name}") from None


IMPORTS = ", in a module that --import names"
"""What follows "weft.schedule.register adds others" in the error of a command for an unknown schedule."""


def choose_schedule(schedule: str, layers: Sequence[OperatorCall]) -> tuple[str | None, int | None]:
    """Return (family, chunks) if the operators of all layers have the schedule; (None, None) for auto."""
    from weft.schedules import FAMILIES, check_op, parse

    if schedule == "auto":
        return None, None
    try:
        name, chunks = parse(schedule)
    except ValueError as error:
        imports = "" if schedule.partition(":")[0] in FAMILIES else IMPORTS
        raise ValueError(f"{error}{imports}") from None
    for layer in layers:
        try:
            check_op(name, layer.op)
        except ValueError as error:
            others = " or ".join(f"--op {op}" for op in FAMILIES[name].builders if op in (*OPS, *LOOKUP_OPS))
            raise ValueError(f"{error}{others and f'; or use {others}'}") from None
    return name, chunks


def choose_op(op: str) -> Op:
    """Return `op`. Raises ValueError if weft does not have it."""
    known = (*OPS, *LOOKUP_OPS, *COLUMN_OPS, *COLLECTIVE_OPS)
    if op not in known:
        raise ValueError(f"op is {op!r}; weft has {', '.join(known)}")
    return op


def choose_device(device: str, ranks: int | None) -> tuple[str, int]:
    """Return ("cpu" or "cuda", ranks). auto selects the GPUs if there are two or more, and at least as many as the ranks.

    Invalid environment variables are reported here, because otherwise every rank would fail with the same error."""
    from weft.tools.requirements import check_environment

    check_environment()
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; use {', '.join(DEVICES)}")
    if device == "cpu":
        return "cpu", _cpu_ranks(ranks)
    count = count_gpus()
    if device == "auto":
        return ("cuda", ranks or count) if count >= max(2, ranks or 0) else ("cpu", _cpu_ranks(ranks))
    if count < max(1, ranks or 0):
        fewer = f"--ranks {count}, or " if count else ""
        asked = f" and ranks is {ranks}" if ranks else ""
        found = "1 GPU was" if count == 1 else f"{count or 'no'} GPUs were"
        raise ValueError(f"device is 'cuda'{asked}, but {found} found; use {fewer}--device cpu, which runs any number of ranks")
    return "cuda", ranks or count


def _cpu_ranks(ranks: int | None) -> int:
    if ranks and ranks > MOST_CPU_RANKS:
        raise ValueError(f"ranks is {ranks}; on the CPU each is a process: use at most {MOST_CPU_RANKS}")
    return ranks or CPU_RANKS


def count_gpus() -> int:
    """Return the number of GPUs that PyTorch sees."""
    with progress_bar("importing PyTorch"):
        import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
