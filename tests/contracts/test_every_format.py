"""Every file that weft writes or reads: what is written comes back equal; what is damaged is a ValueError that names the file.
A new format is tested by being listed in FORMATS."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from families import CASES, made
from report_run import SPEEDS, layer, make_run
from weft_log import warned

import weft
import weft_studies.dlrm.system as dlrm
import weft_studies.t3.system as t3
from weft.core import codec, machine
from weft.core.problem import CollectiveProblem, ColumnProblem, LookupProblem, Problem
from weft.core.schedule import Schedule
from weft.planner.models import load_model, preset_names
from weft.planner.models.values import Model
from weft.planner.simulated import Signature, signature
from weft.planner.values import Plan
from weft.runtime.plan_cache import Cache, Entry, Key, digest_of_families
from weft.tools.results import Run


@dataclass(frozen=True, kw_only=True)
class Format:
    """kind: the class of what a file holds. values: what is written, all branches of the class among them. read: of a path."""

    name: str
    kind: Any
    values: Callable[[], Iterator[Any]]
    read: Callable[[Path], Any]


def _of(kind: Any) -> Callable[[Path], Any]:
    return lambda path: codec.read(kind, path)


PROBLEM = Problem(op="all_gather_matmul", m=64, n=48, k=32, world_size=2)
PROBLEMS = (
    PROBLEM,
    LookupProblem.of(batch=4, dims=((2,), (2,))),
    ColumnProblem(m=4, n=4, k=4, world_size=2),
    CollectiveProblem(op="all_to_all", m=4, world_size=2, dtype="uint8"),
)
KEY = Key(machine={"gpu": "made up"}, versions={"weft": "0"}, problem=PROBLEM, families=digest_of_families(PROBLEM))
ENTRY = Entry(key=KEY, spec="flag_gated:2", us={"sequential": 3.0, "flag_gated:2": 2.0})


def _entries() -> Iterator[Entry]:
    yield ENTRY
    for problem in PROBLEMS:
        yield Entry(key=Key(**{**vars(KEY), "problem": problem}), spec="sequential", us={})


FORMATS = (
    Format(name="schedule", kind=Schedule, values=lambda: (made(*case) for case in CASES), read=_of(Schedule)),
    Format(
        name="machine", kind=machine.Machine, values=lambda: (machine.load(name) for name in machine.names()), read=machine.load
    ),
    Format(name="model", kind=Model, values=lambda: (load_model(name) for name in preset_names()), read=_of(Model)),
    Format(name="kept plan", kind=Entry, values=_entries, read=_of(Entry)),
    Format(name="plan", kind=Plan, values=lambda: iter([weft.plan(PROBLEM, "h200x8")]), read=_of(Plan)),
    Format(
        name="run",
        kind=Run,
        values=lambda: iter([make_run(model="none"), make_run(layer("mlp", error=0.5, speeds=SPEEDS), model="one")]),
        read=_of(Run),
    ),
    Format(
        name="losses of a schedule",
        kind=Signature,
        values=lambda: iter([signature(weft.schedule.build(PROBLEM, "flag_gated", 1), machine.load("h200x8"))]),
        read=_of(Signature),
    ),
    Format(name="profile of T3", kind=t3.T3System, values=lambda: iter([t3.load()]), read=_of(t3.T3System)),
    Format(name="profile of DLRM", kind=dlrm.DlrmSystem, values=lambda: iter([dlrm.load()]), read=_of(dlrm.DlrmSystem)),
)
every_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


def _written(form: Format) -> dict[str, Any]:
    """The last value, as data."""
    *_, value = form.values()
    return json.loads(codec.dumps(value))  # type: ignore[no-any-return]


def test_every_class_that_the_package_reads_from_json_is_listed() -> None:
    package = Path(str(files("weft")))
    calls = (re.findall(r"codec\.(?:read|loads)\((?:\w+\.)?([A-Z]\w*)", path.read_text()) for path in package.rglob("*.py"))
    assert {name for found in calls for name in found} <= {form.kind.__name__ for form in FORMATS}


@every_format
def test_what_is_written_comes_back_equal(form: Format, tmp_path: Path) -> None:
    for value in form.values():
        for indent in (None, 2):
            path = tmp_path / "file.json"
            path.write_text(codec.dumps(value, indent=indent) + "\n", encoding="utf-8")
            assert form.read(path) == value


@every_format
def test_a_byte_order_mark_is_read(form: Format, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(_written(form)), encoding="utf-8-sig")
    assert form.read(path) is not None


def damaged(data: dict[str, Any]) -> dict[str, bytes]:
    """What a file may hold in place of the data."""
    text, first = json.dumps(data), next(iter(data))
    return {
        "nothing": b"",
        "truncated": text[: len(text) // 2].encode(),
        "without its end": text[:-1].encode(),
        "two in a row": (text + text).encode(),
        "a list": json.dumps([data]).encode(),
        "a number": b"3",
        "null": b"null",
        "UTF-16": text.encode("utf-16"),
        "not UTF-8": text.replace(first, "\xff").encode("latin-1"),
        "nested without end": b"[" * 100_000,
        "an unknown key": json.dumps(data | {"no_such_key": 1}).encode(),
        "a key that steers a terminal": json.dumps(data | {"\x1b[2J": 1}).encode(),
        "a key of another type": json.dumps(data | {first: {"no": ["such", "value"]}}).encode(),
        "NaN": json.dumps(data | {"no_such_key": float("nan")}).encode(),
        "without a key": json.dumps({key: value for key, value in data.items() if key != first}).encode(),
    }


@every_format
def test_what_is_damaged_is_an_error_that_names_the_file(form: Format, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    for how, content in damaged(_written(form)).items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged\.json") as raised:
            form.read(path)
        assert str(raised.value).isprintable(), how


@every_format
def test_every_key_of_another_type_is_refused_by_its_name(form: Format, tmp_path: Path) -> None:
    path, data = tmp_path / "damaged.json", _written(form)
    for key in data:
        path.write_text(json.dumps(data | {key: {"no": ["such", {}]}}))
        with pytest.raises(ValueError, match=rf"damaged\.json: .*\b{key}\b"):
            form.read(path)


@every_format
@pytest.mark.parametrize("what", ["missing", "a folder", "too large"])
def test_a_file_that_cannot_be_read_is_named(form: Format, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "damaged.json"
    if what == "a folder":
        path.mkdir()
    if what == "too large":
        path.write_text(json.dumps(_written(form)))
        monkeypatch.setattr(codec, "MAX_FILE_BYTES", 10)
    with pytest.raises(ValueError, match=r"damaged\.json"):
        form.read(path)


@pytest.mark.parametrize("how", [*damaged({"a": 1}), "of another version"])
def test_a_kept_plan_that_is_damaged_is_skipped_aloud(how: str, tmp_path: Path) -> None:
    """No call fails for it: a plan can be measured again."""
    cache = Cache(tmp_path)
    cache.write(ENTRY)
    path = cache.path(KEY)
    data = json.loads(path.read_text())
    other = json.dumps(data | {"key": data["key"] | {"families": "of another version"}}).encode()
    path.write_bytes({**damaged(data), "of another version": other}[how])
    with warned(f"a cached plan is skipped, .*{path.name}"):
        assert cache.read(KEY) is None


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize(
    "how", [name for name in damaged({"a": 1}) if "unknown" not in name and "steers" not in name and name != "NaN"]
)
def test_a_models_config_that_is_damaged_is_an_error_that_names_the_file(how: str, tmp_path: Path) -> None:
    """Others write these files: keys that weft does not know are none of its business."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert load_model(str(path)).hidden == 64
    path.write_bytes(damaged(LLAMA)[how])
    with pytest.raises(ValueError, match=r"config\.json") as raised:
        load_model(str(path))
    assert "\n" not in str(raised.value)
