"""weft simulate: a published evaluation, simulated, with its figures beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import typer

from weft.cli import output
from weft.cli.progress import Progress, progress_bar

S = TypeVar("S")
D = TypeVar("D")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Study(Generic[S, D, R]):
    """What a study is made of: its system S with one number changed, all its results D, the rows R of its sensitivity; what is
    printed, recorded and written of them."""

    load: Callable[[], S]
    changed: Callable[[S, str, str], S]
    run: Callable[[S, Progress], D]
    sensitivity: Callable[[S, Progress], Iterable[R]]
    shown: Callable[[D, Sequence[R]], Iterator[str | list[tuple[str, ...]]]]
    record: Callable[[D, Sequence[R]], dict[str, Any]]
    write: Callable[[D, Sequence[R], Path], Path]


def command(
    study: Annotated[
        str,
        typer.Argument(metavar="STUDY", help="t3: track and trigger (arXiv 2401.16677); dlrm: DLRM at scale (2305.06942)."),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a number of the system, such as hbm.gbps=2000, nodes=128. Repeatable."
        ),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Also take each assumed number a quarter lower and higher: half a minute.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write an HTML report, DIR/index.html.")] = None,
) -> None:
    """Simulate a published system on hardware that does not exist, and compare with what was published."""
    if study not in STUDIES:
        raise ValueError(f"study is {study!r}; weft simulates {', '.join(STUDIES)}")
    _simulate(STUDIES[study](), settings or [], sensitivity, as_json, report)


def _simulate(study: Study[S, D, R], settings: Sequence[str], sensitivity: bool, as_json: bool, report: Path | None) -> None:
    system = _system(study, settings)
    output.require_folder(report, "--report")
    with progress_bar() as progress:
        done = study.run(system, progress)
        rows = tuple(study.sensitivity(system, progress)) if sensitivity else ()
    if as_json:
        print(json.dumps(study.record(done, rows), indent=2, allow_nan=False))
    else:
        _show(study.shown(done, rows))
    if report is not None:
        path = study.write(done, rows, report)
        if not as_json:
            print(f"wrote {path}")


def _system(study: Study[S, D, R], settings: Sequence[str]) -> S:
    system = study.load()
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: it must be KEY=VALUE, such as hbm.gbps=2000")
        system = study.changed(system, key.strip(), value)
    return system


def _show(parts: Iterable[str | list[tuple[str, ...]]]) -> None:
    """Lines, and tables whose first row has the heads, each with a line before it."""
    out = output.console()
    for part in parts:
        if isinstance(part, str):
            out.print(part)
            continue
        listed = output.table(*part[0])
        for row in part[1:]:
            listed.add_row(*row)
        out.print()
        out.print(listed)


# Studies are loaded when asked for: each has its own packages to import.


def _t3() -> Study[Any, Any, Any]:
    from weft.report.t3 import write_t3_report
    from weft.sim.profile import changed
    from weft.sim.t3 import study, system, tables
    from weft.sim.t3.record import record
    from weft.sim.t3.sensitivity import sensitivity

    return Study(
        load=system.load,
        changed=changed,
        run=study.run,
        sensitivity=sensitivity,
        shown=tables.shown,
        record=record,
        write=write_t3_report,
    )


def _dlrm() -> Study[Any, Any, Any]:
    from weft.report.dlrm import write_dlrm_report
    from weft.sim.dlrm import study, system, tables
    from weft.sim.dlrm.record import record
    from weft.sim.dlrm.sensitivity import sensitivity
    from weft.sim.profile import changed

    return Study(
        load=system.load,
        changed=changed,
        run=study.run,
        sensitivity=sensitivity,
        shown=tables.shown,
        record=record,
        write=write_dlrm_report,
    )


STUDIES: dict[str, Callable[[], Study[Any, Any, Any]]] = {"t3": _t3, "dlrm": _dlrm}
