"""Families of schedules that users add to the table of families (weft.schedules)."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import get_args

from weft.checker import ScheduleError, check
from weft.core.errors import require
from weft.core.problem import (
    ADDENDS,
    AVERAGES,
    COLLECTIVE_OPS,
    COLUMN_OPS,
    GATHERS,
    LOOKUP_OPS,
    OPS,
    CollectiveProblem,
    ColumnProblem,
    LookupProblem,
    Op,
    Problem,
)
from weft.schedules import FAMILIES, Family, build, ragged, unfit
from weft.schedules.builder import Build

RESERVED = ("auto", "planned", "value", *ragged.FAMILIES)
"""Names with another meaning as `schedule=`."""
_KNOWN_OPS: tuple[Op, ...] = (*OPS, *LOOKUP_OPS, *COLUMN_OPS, *COLLECTIVE_OPS)
"""The operators for which a family can be registered."""
_PROVED_RANKS, _PROVED_CHUNKS = (1, 2, 3, 4), (1, 2)
"""The numbers of ranks and chunks for which a schedule is proved at the registration. A call proves its own schedule again."""


def register(
    name: str,
    builder: Build,
    *,
    ops: Op | Iterable[Op],
    chunked: bool = True,
    candidate: bool = False,
    across_nodes: bool = False,
    overlaps: bool = True,
    unfit: Callable[[Problem], str] | None = None,
    summary: str = "",
    source: str = "",
) -> None:
    """Add a family of schedules, which `schedule=` takes by its name from then on.

    Operators, styles, the compile pass, `weft.plan(..., only=name)` and the commands take it as they take weft's own families.
    The simulator ranks it. Its schedules are proved now, for small problems of 1 to 4 ranks, and again at the first call with
    other sizes. A family takes no FP8 operands.

    Every rank must register the same families in the same order, before its first call. A rank that has not registered a family
    raises ValueError in a call that names it, and the others raise PeerLost. If ranks have registered different families or
    builders, all of them raise RankMismatch.

    Args:
        name: letters, digits and underscores. It must be new.
        builder: takes a weft.schedule.Request and returns a Schedule with the request's problem, name and chunks.
        ops: the operators that the builder can build for, one or several: "all_gather_matmul", ...
        chunked: the caller may choose the number of chunks, by name:chunks. Otherwise the request has 1.
        candidate: `weft.plan`, "auto" and "planned" consider the family, too. The ranking then simulates its schedules for
            every new problem, which takes up to seconds with many ranks and chunks.
        across_nodes: it takes problems with ranks on several nodes.
        overlaps: it communicates during the computation. Reports say so.
        unfit: takes a problem and returns why the family cannot run it, or "" if it can. By default it can run all.
        summary, source: what the family does and where the idea is from, a line each. `weft schedules` prints them.

    Raises ValueError if

    - the name is taken or no name
    - an operator is unknown
    - the builder raises an error, or returns anything but a Schedule for its request
    - the checker does not accept a schedule
    - the family can run none of the problems for which it would be proved
    """
    _check_name(name)
    if not callable(builder):
        raise ValueError(f"builder is a {type(builder).__name__}; it must be a function that takes a weft.schedule.Request")
    text = (builder.__doc__ or "").strip().partition("\n")[0].removesuffix(".")
    family = Family(
        name=name,
        summary=summary or text or "registered",
        source=source or getattr(builder, "__module__", "") or "registered",
        builders=dict.fromkeys(_known_ops(ops), builder),
        chunked=chunked,
        across=across_nodes,
        overlaps=overlaps,
        float8=False,
        candidate=candidate,
        registered=True,
        unfit=unfit or (lambda problem: ""),
    )
    FAMILIES[name] = family
    try:
        for op in family.builders:
            _prove(family, op)
    except BaseException:
        del FAMILIES[name]
        raise


def import_families(modules: Iterable[str]) -> None:
    """Import the modules of `--import`, which register families. They are also looked for in the working directory.

    Raises ValueError, which names the module, if one cannot be imported.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for module in modules:
        try:
            importlib.import_module(module)
        except ValueError as error:
            raise ValueError(f"--import is {module!r}: {error}") from error
        except Exception as error:
            hint = "; name a module, without .py" if module.endswith(".py") else ""
            raise ValueError(f"--import is {module!r}, which raised {type(error).__name__}: {error}{hint}") from error


def _check_name(name: str) -> None:
    require("name", name, str, "use a string")
    if name in FAMILIES:
        raise ValueError(f"name is {name!r}, which is taken; weft has {', '.join(FAMILIES)}")
    if not (name.isidentifier() and name.isascii()) or name in RESERVED:
        raise ValueError(f"name is {name!r}; use letters, digits and underscores, and none of {', '.join(RESERVED)}")


def _known_ops(ops: Op | Iterable[Op]) -> list[Op]:
    found: list[Op] = [ops] if isinstance(ops, str) else list(ops)
    assert set(_KNOWN_OPS) < set(get_args(Op))
    for op in found:
        if op not in _KNOWN_OPS:
            raise ValueError(f"ops has {op!r}; schedules can be registered for {', '.join(_KNOWN_OPS)}")
    if not found:
        raise ValueError(f"ops is empty; name at least one of {', '.join(_KNOWN_OPS)}")
    return found


def _prove(family: Family, op: Op) -> None:
    reasons = []
    for problem in _examples(op):
        if reason := unfit(family.name, problem):
            reasons.append(reason)
            continue
        for chunks in _PROVED_CHUNKS if family.chunked else (1,):
            where = f"name is {family.name!r}: for {problem}" + (f" chunks={chunks}" if family.chunked else "")
            try:
                check(build(problem, family.name, chunks))
            except ScheduleError as error:
                raise ValueError(f"{where}, the checker refuses its schedule: {error}{_hint(op)}") from error
            except ValueError as error:
                raise ValueError(f"{where}: {error}{_hint(op)}") from error
            except Exception as error:
                raise ValueError(f"{where}, the check of its schedule raised {type(error).__name__}: {error}") from error
    if len(reasons) == len(list(_examples(op))):
        raise ValueError(f"name is {family.name!r}: it fits no problem of {op} for which it would be proved: {reasons[-1]}")


def _hint(op: Op) -> str:
    """Return a hint for an operator that is a collective alone, whose name is easily taken for one that multiplies."""
    multiplying = [name for name in OPS if op in (name.removeprefix("matmul_"), name.removesuffix("_matmul"))]
    if op not in COLLECTIVE_OPS or not multiplying:
        return ""
    use = " or ".join(multiplying)
    return f". ops has {op!r}, the collective without a matmul; with one it is {use}. The operators are {', '.join(_KNOWN_OPS)}"


def _examples(op: Op) -> Iterator[Problem]:
    """Problems of each number of ranks, with uneven shards where the operator has them, and of each kind of result."""
    for plain in _plain_examples(op):
        yield plain
        if op in GATHERS:
            yield replace(plain, return_gathered=True)
        if op in AVERAGES:
            yield replace(plain, reduce_op="avg")
        if op == "matmul_all_reduce":
            yield replace(plain, addends=ADDENDS)
            yield replace(plain, addends=ADDENDS, norm_eps=1e-6)


def _plain_examples(op: Op) -> Iterator[Problem]:
    for ranks in _PROVED_RANKS:
        if op in LOOKUP_OPS:
            yield LookupProblem.of(batch=11, dims=((8, 4), (12,), (4,), (8,))[:ranks])
        elif op in COLLECTIVE_OPS:
            yield CollectiveProblem(op=op, m=24 * ranks, world_size=ranks)
        elif op in COLUMN_OPS:
            yield ColumnProblem(op=op, m=12 * ranks, n=8 * ranks, k=8 * ranks, world_size=ranks)
        else:
            yield Problem(op=op, m=11 * ranks - 1, n=8 * ranks, k=16, world_size=ranks)
