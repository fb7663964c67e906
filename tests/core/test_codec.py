"""Reading is strict: what is not exactly a value is refused, and the message names the place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from weft.core import codec, machine
from weft.core.problem import Problem
from weft.core.schedule import Schedule, Step
from weft.schedules import build


@dataclass(frozen=True, kw_only=True)
class Leaf:
    size: int
    share: float = 1.0
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tree:
    leaves: tuple[Leaf, ...] = ()
    pair: tuple[int, str] = (0, "")
    by_name: Mapping[str, Leaf] | None = None
    kind: Literal["oak", "elm"] = "oak"
    alive: bool = True

    def __post_init__(self) -> None:
        if len(self.leaves) > 3:
            raise ValueError(f"leaves has {len(self.leaves)} items; a tree has at most 3")


TREE = Tree(leaves=(Leaf(size=1), Leaf(size=2, share=0.5, name="x")), by_name={"top": Leaf(size=3)}, kind="elm")


def test_round_trip() -> None:
    assert codec.loads(Tree, codec.dumps(TREE)) == TREE
    assert codec.dump(TREE)["leaves"] == [{"size": 1}, {"size": 2, "share": 0.5, "name": "x"}], "defaults are left out"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"roots": 1}, "roots is not a field of Tree"),
        ({"leaves": [{"size": 1}, {}]}, "leaves[1].size is missing from Leaf"),
        ({"leaves": [{"size": "1"}]}, "leaves[0].size is '1'"),
        ({"leaves": [{"size": True}]}, "leaves[0].size is True"),
        ({"leaves": [{"size": 1, "share": False}]}, "leaves[0].share is False"),
        ({"leaves": [{"size": 1, "name": 1}]}, "leaves[0].name is 1"),
        ({"leaves": [3]}, "leaves[0] is 3"),
        ({"leaves": {"size": 1}}, "leaves is {'size': 1}"),
        ({"pair": [1]}, "pair is [1]"),
        ({"by_name": [1]}, "by_name is [1]"),
        ({"kind": "ash"}, "kind is 'ash'"),
        (
            {"leaves": [{"size": 1, "name": "a\x1b[31m"}]},
            r"leaves[0].name is 'a\x1b[31m'",
        ),
        ({"leaves": [{"size": 1, "name": "a" * 1001}]}, "leaves[0].name has 1001 characters"),
        ({"by_name": {"\x1b[2J": {"size": 1}}}, r"a key of by_name is '\x1b[2J'"),
        ({"\x1b[2J": 1}, r"a key of Tree is '\x1b[2J'"),
        ({"alive": 1}, "alive is 1"),
        ({"leaves": [{"size": i} for i in range(4)]}, "leaves has 4 items"),
        ([], "value is []"),
    ],
)
def test_refuses(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        codec.load(Tree, data)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400", "1e301"])
def test_refuses_numbers_that_are_none(number: str) -> None:
    with pytest.raises(ValueError, match=r"somewhere: leaves\[0\]\.share"):
        codec.loads(Tree, f'{{"leaves": [{{"size": 1, "share": {number}}}]}}', "somewhere")


def test_writes_no_numbers_that_are_none() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        codec.dumps(Leaf(size=1, share=float("nan")))


def test_what_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    """A table holds tables for fewer ranks, and those hold none. Deeper than Python goes, nothing else is said of it."""
    profile = codec.dumps(machine.load("h200x8"))
    gathers = json.dumps(json.loads(profile)["collectives"]["all_gather"])
    assert profile.count(gathers) == 1
    for depth, message in ((1, ""), (2, "has also of its own"), (50, "has also of its own"), (400, "nested too deeply")):
        tables = [f'{{"type": "Table", "world_size": {ranks}, "points": [[1, 1.0]]' for ranks in range(depth + 2, 1, -1)]
        deep = ', "also": ['.join(tables) + "}" + "]}" * depth
        path = tmp_path / "machine.json"
        path.write_text(profile.replace(gathers, deep))
        if message:
            with pytest.raises(ValueError, match=rf"machine\.json: .*{message}"):
                machine.load(path)
        else:
            machine.load(path)


def test_steps_of_a_schedule_are_told_apart_and_checked() -> None:
    schedule = build(Problem(op="all_gather_matmul", m=4, n=4, k=4, world_size=2), "flag_gated", 1)
    data = codec.dump(schedule)
    assert codec.load(Schedule, data) == schedule
    step = data["ranks"][0][0]["steps"][1]
    assert step["type"] == "Copy"
    for key, value, message in [
        ("type", "Launch", "ranks[0][0].steps[1].type is 'Launch'"),
        ("type", None, "ranks[0][0].steps[1].type is None"),
        ("src", [], "ranks[0][0].steps[1].src is []"),
        ("lane", 1, "ranks[0][0].steps[1].lane is not a field of Copy"),
    ]:
        broken = json.loads(json.dumps(data))
        broken["ranks"][0][0]["steps"][1][key] = value
        with pytest.raises(ValueError, match=re.escape(message)):
            codec.load(Schedule, broken)


@pytest.mark.parametrize("kind", [[], {}, "Gpu"])
def test_a_type_that_is_no_name_is_refused(kind: object) -> None:
    with pytest.raises(ValueError, match="type"):
        codec.load(Step, {"type": kind})
