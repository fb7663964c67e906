"""Is every file either read by weft or refused with a ValueError? A fuzzer of everything that reads files.

    python tests/campaigns/fuzz_parsers.py schedule --seconds 600    guided by coverage with atheris
    python tests/campaigns/fuzz_parsers.py all --seconds 60 --random

An input is a right file with some edits: a value replaced by one of another type or by an extreme one, a key renamed, left out
or added, a list's entries repeated or dropped. One input in eight is plain bytes, which hardly get past the JSON parser.
Whatever was read is then used: it is printed, written and read again, which must give the same value. A schedule is checked,
since that proof stands between a file and an executor. An input for which a parser takes longer than SLOW_S is a finding, too:
a small file must not cost much.

Findings are written to out/fuzz. `--input FILE` tries one of them again. To install atheris: pip install "weft[fuzz]".
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import weft
from weft.core import codec
from weft.core.errors import LOGGER
from weft.core.machine import Machine
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.planner.models import load_model, operator_calls, preset_names
from weft.planner.models.config import read_config
from weft.planner.models.values import Model
from weft.runtime.plan_cache import Cache, Entry, Key, digest_of_families
from weft.schedules import parse, spec

PACKAGE = Path(weft.__file__).parent
SLOW_S = 5.0
MEMORY_BYTES = 4 << 30
EXTREMES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 8, 2**31, 2**63, 10**30, -(10**30)),
    *(0.0, -0.5, 1e-300, 1e299, 1e308, float("inf"), float("nan")),
    *("", "a", "0", "\x00", "\ud800", "é" * 40, "../../x", "float32", "Wait", "copy", "x" * 5000),
    *([], [[]], [0], [0, 1], [None] * 3, {}, {"": {}}, {"type": []}, {"type": "Copy"}, [[[[[[[[]]]]]]]]),
)
Parser = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """parser: reads a text, and uses what it has read. seeds: right texts."""

    parser: Parser
    seeds: tuple[str, ...]


def _values(cls: type, use: Callable[[Any], object] = str) -> Parser:
    """A value class by the codec: read, used, written, and read again."""

    def parser(text: str) -> None:
        value = codec.loads(cls, text)
        use(value)
        again = codec.dumps(value)
        assert codec.loads(cls, again) == value, "it does not come back as it was"

    return parser


def _config(text: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
        file.flush()
        model = read_config(Path(file.name))
    for call in operator_calls(model):
        str(call)
    codec.loads(Model, codec.dumps(model))


def _config_by_keys(text: str) -> None:
    """As on a machine without transformers."""
    with mock.patch.dict(sys.modules, {"transformers": None}):  # type: ignore[dict-item]
        _config(text)


def _kept_plan(text: str) -> None:
    """As a group finds it: skipped with a warning in the log, or the entry that was asked for. No error leaves Cache.read."""
    key = _entry().key
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder))
        cache.folder.mkdir(mode=0o700)
        path = cache.path(key)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        path.chmod(0o600)
        with mock.patch.object(LOGGER, "handle") as logged:
            entry = cache.read(key)
    assert (entry is None) == logged.called, "a plan that is not taken is logged, and no other"
    assert entry is None or entry.key == key


def _entry() -> Entry:
    problem = Problem(op="all_gather_matmul", m=64, n=64, k=64, world_size=4)
    key = Key(
        machine={"gpu": "H200", "count": "4"},
        versions={"weft": "1", "torch": "2"},
        problem=problem,
        families=digest_of_families(problem),
    )
    return Entry(key=key, spec="flag_gated:2", us={"sequential": 12.5, "flag_gated:2": 9.0})


def _schedules() -> Iterator[str]:
    families = {"all_gather_matmul": "flag_gated", "matmul_reduce_scatter": "direct_store", "matmul_all_reduce": "two_shot"}
    for op, name in families.items():
        yield codec.dumps(weft.schedule.build(Problem(op=op, m=8, n=6, k=4, world_size=2), name, 1))  # type: ignore[arg-type]


def _texts(folder: str) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in sorted((PACKAGE / folder).glob("*.json")))


CONFIG = {
    "model_type": "mixtral",
    "_name_or_path": "some/model",
    "hidden_act": "silu",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def targets() -> dict[str, Target]:
    """Everything that reads a file of the user's, or one that the user could have changed."""
    configs = (json.dumps(CONFIG), json.dumps({"model_type": "llava", "text_config": CONFIG}))
    return {
        "config": Target(_config, configs),
        "config by keys": Target(_config_by_keys, configs),
        "machine": Target(_values(Machine), _texts("core/machines")),
        "schedule": Target(_values(Schedule, _proved), tuple(_schedules())),
        "plan": Target(_kept_plan, (codec.dumps(_entry()),)),
        "model": Target(_values(Model), tuple(codec.dumps(load_model(name)) for name in preset_names()[:2])),
        "spec": Target(_spec, ('"flag_gated:4"', '"sequential"')),
    }


def _spec(text: str) -> None:
    """What `schedule=` takes."""
    name, chunks = parse(text.strip('"'))
    assert parse(spec(name, chunks or 1))[0] == name, "it does not come back as it was"


def _proved(schedule: Schedule) -> None:
    """Printed and proved, or refused: ScheduleError is a ValueError."""
    str(schedule)
    weft.schedule.check(schedule)


class Choices:
    """Numbers from bytes; zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, bound: int) -> int:
        taken = self._data[self._at : self._at + 2]
        self._at += 2
        return int.from_bytes(taken.ljust(2, b"\0"), "little") % max(1, bound)


def text_of(data: bytes, seeds: tuple[str, ...]) -> str:
    """The input that some bytes stand for: plain, one in eight; else edits of a seed."""
    if data[:1] < b"\x20":
        return data[1:].decode("utf-8", "replace")
    choices = Choices(data[1:])
    document = json.loads(seeds[choices.below(len(seeds))])
    for _ in range(1 + choices.below(4)):
        document = edited(document, choices)
    return json.dumps(document)


def edited(document: Any, choices: Choices) -> Any:
    """A copy of the document with one edit at some place of its tree. All places are as likely."""
    places = [([copy.deepcopy(document)], 0)]
    for parent, at in places:  # grows meanwhile
        node = parent[at]
        places += [
            (node, key) for key in (node if isinstance(node, dict) else range(len(node) if isinstance(node, list) else 0))
        ]
    parent, at = places[choices.below(len(places))]
    parent[at] = _replaced(parent[at], choices, EXTREMES[choices.below(len(EXTREMES))], choices.below(6))
    root, _ = places[0]
    return root[0]


def _replaced(node: Any, choices: Choices, value: Any, how: int) -> Any:
    if isinstance(node, dict) and node and how in (1, 2, 3):
        key = list(node)[choices.below(len(node))]
        rest = {name: child for name, child in node.items() if name != key}
        return {1: rest, 2: {**rest, key + "_": node[key]}, 3: {**node, key: value}}[how]
    if isinstance(node, list) and node and how in (1, 2, 3):
        return {1: node[:-1], 2: node + node[-1:], 3: node[::-1]}[how]
    if isinstance(node, int) and not isinstance(node, bool) and how in (1, 2):
        return node + (1, -1)[how - 1]
    return value


def tried(target: Target, text: str) -> str:
    """What is wrong with how a target reads a text; nothing if it is not."""
    begun = time.monotonic()
    try:
        target.parser(text)
    except ValueError:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    return f"it took {seconds:.0f} s" if seconds > SLOW_S else ""


def at_random(target: Target, seconds: float, seed: int = 1, inputs: int = 1 << 62) -> tuple[int, dict[str, str]]:
    """(inputs tried, finding -> a text that shows it)."""
    generator, until, found = random.Random(seed), time.monotonic() + seconds, {}
    for number in range(inputs):
        if time.monotonic() > until:
            return number, found
        text = text_of(generator.randbytes(generator.randrange(2, 40)), target.seeds)
        if wrong := tried(target, text):
            found.setdefault(wrong[:60], text)
    return inputs, found


def _guided(name: str, target: Target, seconds: float) -> None:
    """By atheris, which ends the process itself: at the first finding, or after the time."""
    import atheris

    atheris.instrument_all()

    def one(data: bytes) -> None:
        text = text_of(data, target.seeds)
        if wrong := tried(target, text):
            print(f"{name}: {wrong}: {save_input(name, text)}", flush=True)
            raise AssertionError(wrong)

    atheris.Setup([sys.argv[0], f"-max_total_time={seconds:.0f}", "-max_len=64", "-verbosity=0", "-print_final_stats=1"], one)
    atheris.Fuzz()


def save_input(name: str, text: str, folder: Path = Path("out/fuzz")) -> Path:
    """Where an input is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parser", choices=[*targets(), "all"])
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--random", action="store_true", help="not guided by coverage")
    options.add_argument("--input", type=Path, help="a file that was kept")
    given = options.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    chosen = targets() if given.parser == "all" else {given.parser: targets()[given.parser]}
    wrong = False
    for name, target in chosen.items():
        if given.input:
            print(tried(target, given.input.read_text(encoding="utf-8", errors="surrogatepass")) or "fine")
        elif given.random:
            inputs, found = at_random(target, given.seconds, given.seed)
            wrong |= bool(found)
            print(f"{name}: {inputs} inputs, {len(found)} findings", flush=True)
            for what, text in found.items():
                print(f"  {what}: {save_input(name, text)}")
        else:
            _guided(name, target, given.seconds)
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
