"""Machine profiles: complete, each number with its source, strict when read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from machine_tiny import tiny

from weft.core import codec, machine
from weft.core.hardware import Table, numbers

PROFILES = Path(machine.__file__).with_name("machines")


@pytest.mark.parametrize("name", machine.names())
def test_profile_is_complete(name: str) -> None:
    loaded = machine.load(name)
    assert loaded.name == name
    paths = {path for path, _ in numbers(loaded)}
    assert paths == set(loaded.sources)


def _changed(tmp_path: Path, path: str, value: Any) -> Path:
    """h200x8 with the number at `path` replaced, or removed for None."""
    data = json.loads((PROFILES / "h200x8.json").read_text())
    *parents, last = path.split(".")
    at = data
    for key in parents:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(data))
    return file


BAD = [
    ("gpu.sms", 0, r"gpu\.sms is 0"),
    ("gpu.sms", 10**9, r"gpu\.sms is 1000000000; it must be at most 65536"),
    ("world_size", 10**5, r"world_size is 100000; it must be at most 65536"),
    ("gpu.tiles", [{"rows": 10**8, "cols": 64, "efficiency": 0.5}], r"gpu\.tiles is 100000000; it must be at most 65536"),
    ("launch_us", 1e100, r"launch_us is 1e\+100"),
    ("gpu.tflops", {"bfloat16": 0, "float16": 1, "float32": 1}, r"gpu\.tflops\.bfloat16 is 0\.0"),
    ("gpu.tiles", [], r"gpu\.tiles is empty"),
    ("launch_us", None, r"launch_us is missing from Machine"),
    ("copies.engines", 1.5, r"copies\.engines is 1\.5"),
    ("links.topology", "torus", r"links\.topology is 'torus'"),
    ("links.topology", "pcie", r"links\.host_gbps is missing"),
    ("stores.gbps", [[8, 1.0], [4, 2.0]], r"stores\.gbps has \[8, 4\] in its first column"),
    ("stores.sms", 132, r"stores\.sms is 132"),
    ("collectives.all_gather", None, r"sources\.collectives\.all_gather\.also is about no number"),
    ("collectives.all_gather.points", [[1, -2.0]], r"collectives\.all_gather\.points is -2\.0"),
    ("collectives.all_gather.world_size", 4, r"all_gather: also is of \[2, 4\] ranks"),
    ("sources", {}, r"sources\.collective_sms is missing"),
    ("typo", 1, r"typo is not a field of Machine"),
]


@pytest.mark.parametrize("field", ["name", "sources.launch_us"])
@pytest.mark.parametrize("text", ["one\ntwo", "\u202eback"])
def test_texts_that_would_steer_a_terminal_are_refused(field: str, text: str) -> None:
    """A file may come from elsewhere, and its texts are printed."""
    data = codec.dump(tiny())
    outer, _, inner = field.partition(".")
    data[outer] = data[outer] | {inner: text} if inner else text
    with pytest.raises(ValueError, match=rf"{field} is '.*'"):
        codec.load(machine.Machine, data)


@pytest.mark.parametrize(("path", "value", "message"), BAD)
def test_bad_files_are_refused_by_file_and_field(tmp_path: Path, path: str, value: Any, message: str) -> None:
    file = _changed(tmp_path, path, value)
    with pytest.raises(ValueError, match=message) as error:
        machine.load(file)
    assert str(error.value).startswith(f"{file}: ")
    assert "\n" not in str(error.value)


def test_a_source_that_is_blank() -> None:
    good = tiny()
    data = codec.dump(good)
    data["sources"]["launch_us"] = " "
    with pytest.raises(ValueError, match=r"sources\.launch_us is empty"):
        codec.load(machine.Machine, data)


def test_store_rate_between_points() -> None:
    stores = machine.load("h200x8").stores
    assert [stores.rate(sms) for sms in (2, 4, 6, 16, 132, 200)] == [57.5, 115.0, 162.5, 245.0, 274.0, 274.0]


def test_what_a_machine_lacks_is_named() -> None:
    tiny(world_size=2).require(2)
    with pytest.raises(ValueError, match=r"world_size is 3"):
        tiny(world_size=2).require(3)
    with pytest.raises(ValueError, match=r"dtype is 'float32'"):
        tiny().tflops("float32")
    with pytest.raises(ValueError, match=r"machine is 'h100'"):
        machine.load("h100")


def test_h100s_on_a_host_of_eight_are_those_that_were_measured_in_twos() -> None:
    two, eight = machine.load("h100x2"), machine.load("h100x8")
    assert two.gpu == eight.gpu
    for op in ("all_gather", "reduce_scatter"):
        measured, derived = two.collectives[op], eight.collectives[op]  # type: ignore[index]
        assert isinstance(measured, Table)
        assert isinstance(derived, Table)
        assert next(each for each in derived.also if each.world_size == 2).points == measured.points
