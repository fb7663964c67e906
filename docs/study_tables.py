"""Tables of the published evaluations that `weft simulate` redoes, for generate.py: `t3 WHAT`, and so on for each study.

WHAT is a table by its name in `weft_studies.study.tables`, or `headline`: what the study says in short. Sweeps, and FiCCO's
evaluation, take long to make, so `keep` writes them to files beside this one.
"""

from __future__ import annotations

import functools
import json
import textwrap
from functools import partial
from typing import Any

from text_tables import ROOT, table

from weft.core import codec
from weft_studies.ficco.evaluation import FiccoStudy
from weft_studies.figures import JointSweep, SweptRow, swept_table
from weft_studies.study import STUDIES, Done, StudyTable, load_study, simulate, tables, words

STORED = {name: ROOT / "docs" / f"{name}_study.json" for name in STUDIES}
DRAWS = 200
WIDTH = 118
LITTLE = 0.05


@functools.cache
def stored(name: str) -> Done:
    """A study with its sweeps as they are stored; FiCCO's evaluation is stored, too, and the others are made anew."""
    data: dict[str, Any] = json.loads(STORED[name].read_text(encoding="utf-8"))
    study = load_study(name)
    system = study.load()
    return Done(
        study=study,
        system=system,
        result=codec.load(FiccoStudy, data["result"]) if "result" in data else study.run(system, lambda *_: None),
        variants=tuple(StudyTable(**each | {"rows": [tuple(row) for row in each["rows"]]}) for each in data["variants"]),
        swept=codec.load(tuple[SweptRow, ...], data["sensitivity"]),
        joint=codec.load(JointSweep, data["joint"]),
    )


def made(name: str, what: str) -> str:
    """One table of a study, or its headline."""
    done = stored(name)
    if what == "headline":
        return "\n".join(line for sentence in words(done) for line in textwrap.wrap(sentence, WIDTH))
    if what == "sensitivity":
        return sensitivity(done)
    return table(next(each.rows for each in tables(done) if each.name == what))


def sensitivity(done: Done) -> str:
    """The numbers that change a figure by more than LITTLE of its value. Why a system is refused is too long a text to show."""
    (usual, *_) = done.swept
    moving = {
        row.path
        for row in done.swept
        if not row.refused and any(abs(row.values[name] / usual.values[name] - 1) > LITTLE for name in done.study.headlines)
    }
    shown = [row for row in done.swept if row is usual or row.path in moving]
    heads, *rows = (row[:-1] for row in swept_table(shown, done.study.headlines))
    numbered = dict(enumerate(heads[2:], start=1))
    figures = [f"{place}: {name}" for place, name in numbered.items()]
    return "\n".join([*figures, "", table([(*heads[:2], *map(str, numbered)), *rows])])


def keep(name: str) -> None:
    """Simulate a study and its sweeps, and store them."""
    study = load_study(name)
    done = simulate(study, study.load(), lambda *_: None, sensitivity=True, draws=DRAWS)
    data = {"result": done.result} if name == "ficco" else {}
    variants = [{"name": one.name, "title": one.title, "rows": one.rows, "words": one.words} for one in done.variants]
    data |= {"variants": variants, "sensitivity": done.swept, "joint": done.joint}
    STORED[name].write_text(codec.dumps(data, indent=1) + "\n", encoding="utf-8")


MAKERS = {name: partial(made, name) for name in STUDIES}
