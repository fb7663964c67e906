"""Options that several commands share, with their help texts."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.models import preset_names

DEFAULT_MACHINE = "h200x8"
DEFAULT_MACHINE_TOKENS = 8192

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
OP = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only sites of this operator, such as matmul_all_reduce (decode).")
]
DTYPE = Annotated[str, typer.Option(metavar="NAME", help="bfloat16, float16 or float32.")]
