"""benchmarks/rows.py: rows come back as they were written, what is no row is refused, and figures follow from times."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gains, rows
from benchmarks.rows import Row

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
US = {
    "sequential/default": 100.0,
    "sequential/symmetric": 90.0,
    "communication/default": 30.0,
    "communication/symmetric": 20.0,
    "computation/cublas": 60.0,
    "peer/async_tp": 80.0,
    "weft/sequential": 95.0,
    "weft/sequential_stores": 88.0,
    "weft/shard_p2p": 70.0,
    "weft/auto": 64.0,
    "float8/auto": 1.0,
}


def row(us: dict[str, float], **more: Any) -> Row:
    about = {"bench": "tp", "op": "all_gather_matmul", "case": "one", "dtype": "bfloat16", "world_size": 2}
    return Row(**about | {"mode": "graph", "machine": "by hand", "us": us} | more)


def test_figures_follow_from_times() -> None:
    one = row(US)
    assert rows.alternative(one) == ("peer/async_tp", 80.0)
    assert rows.gain(one) == 80.0 / 64.0
    assert rows.ideal(one) == 60.0
    assert rows.ideal(row(US | {"computation/cublas": 10.0})) == 20.0
    assert rows.unoverlapped(one) == 88.0
    assert rows.best(one, "weft/") == ("weft/shard_p2p", 70.0)
    assert rows.best(one, "weft/", but=()) == ("weft/auto", 64.0)
    assert rows.best_us(one, "sequential/") == 90.0
    assert "1.25x as fast as peer/async_tp" in rows.sentence(one)
    assert "all_gather_matmul graph, auto: 1.250x" in rows.summary([one])


def test_what_was_not_measured_has_no_figure() -> None:
    one = row({"weft/shard_p2p": 70.0})
    assert rows.best(one, "peer/") is rows.default(one) is rows.unoverlapped(one) is None
    assert math.isnan(rows.ideal(one))
    with pytest.raises(ValueError, match="without weft"):
        rows.alternative(one)
    assert math.isnan(rows.gain(row({"sequential/default": 70.0})))
    assert "no memory" in rows.sentence(row({}, missing={rows.CASE: "no memory"}))


@pytest.mark.parametrize(("name", "us"), [("weft/splits", 5.0), ("weft/compiled", 6.0)])
def test_the_default_where_nothing_is_chosen(name: str, us: float) -> None:
    assert rows.default(row({"weft/pass": 1.0, name: us})) == us


def test_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    one = row(
        US, chosen="shard_p2p", host_us={"weft/auto": 3.0}, missing={"peer/x": "why"}, extra={"shape": [1, 2]}, state="cold"
    )
    for made in (one, row({})):
        rows.append(path, made)
    rows.append(None, one)
    assert rows.read(path) == [one, row({})]
    assert "missing" not in json.loads(path.read_text().splitlines()[1])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"auto_us": 1.0}, "'auto_us'"),
        ({"us": {"auto": 1.0}}, "'auto' begins with none"),
        ({"op": None}, "'op'"),
    ],
)
def test_what_is_no_row_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = tmp_path / "x.jsonl"
    good = json.loads(rows.text_of(row(US)))
    bad = {name: value for name, value in (good | changes).items() if value is not None}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    with pytest.raises(ValueError, match=rf"x\.jsonl, line 2: .*{says}"):
        rows.read(path)


def test_every_result_can_be_read() -> None:
    paths = sorted(RESULTS.rglob("*.jsonl"))
    assert len(paths) > 20
    for path in paths:
        assert all(one.us or one.host_us or one.missing or one.extra for one in rows.read(path))


def test_a_gain_is_attributed(tmp_path: Path) -> None:
    """What overlap alone gains is over weft's own program that does one thing after the other."""
    rows.append(tmp_path / "tp.jsonl", row(US, case="x M=8192"))
    *_, line = gains.table(tmp_path)
    assert line == ("all_gather_matmul, M >= 8192", "1", "async TP", "1.25", "-", "1.25", "1.38")
