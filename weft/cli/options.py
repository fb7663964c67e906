"""Options that several commands share, with their help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.core.problem import OPS
from weft.planner.models import preset_names

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
