"""The documents are true: their code runs, their commands and links exist, what code writes in them is up to date."""

from __future__ import annotations

import pydoc
import re
import runpy
import shlex
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from torchrun import torchrun

from weft.cli import UsageError, app, main
from weft.cli.simulate import installed_studies
from weft.schedules import FAMILIES

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "studies/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


TEXTS = {name_of(path): path.read_text(encoding="utf-8") for path in DOCUMENTS}


def blocks(text: str) -> list[tuple[str, str]]:
    """(the first line's words, the lines) of every fenced block."""
    return [match.groups() for match in FENCED.finditer(text)]  # type: ignore[misc]


SLOW = re.compile("transformers|torch.compile")
CODE = [
    pytest.param(
        words, code, id=f"{name}-{number}", marks=[pytest.mark.slow] if re.search("transformers|torch.compile", code) else []
    )
    for name, text in TEXTS.items()
    for number, (words, code) in enumerate(blocks(text))
    if words.split()[:1] == ["python"] and not words.endswith(".py")
]
"""Programs that stand alone. Those with a file's name are a page's that has its own test (test_write_a_schedule.py)."""
SAVED = {words.split()[1] for text in TEXTS.values() for words, _ in blocks(text) if re.fullmatch(r"python \w+\.py", words)}
"""Files that a reader saves."""


@pytest.fixture(scope="module")
def generate() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "generate.py")))


@pytest.mark.ranks
@pytest.mark.parametrize(("words", "code"), CODE)
def test_python_runs(words: str, code: str, tmp_path: Path) -> None:
    """As a reader gets it: nothing is added to what stands there."""
    if "torchrun" in words.split():
        program = tmp_path / "program.py"
        program.write_text(code, encoding="utf-8")
        torchrun(program, ranks=2, folder=tmp_path, timeout_s=100)
    else:
        exec(code, {"__name__": "__main__"})


def command_lines(program: str) -> list[list[str]]:
    """Words of every command line of `program` in the documents, in blocks and in running text."""
    lines = [line for text in TEXTS.values() for words, code in blocks(text) if words == "sh" for line in code.splitlines()]
    lines += [code for text in TEXTS.values() for code in re.findall(r"`([^`\n]+)`", FENCED.sub("", text))]
    return [shlex.split(line, comments=True) for line in dict.fromkeys(lines) if line.startswith(f"{program} ")]


@pytest.mark.parametrize("words", command_lines("weft"), ids=" ".join)
def test_weft_commands_exist(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    studied = words[1] == "simulate" and words[2:] and words[2] in installed_studies()
    assert main([*words[1 : 3 if studied else 2], "--help"]) == 0
    text = capsys.readouterr().out
    assert [word for word in words[2:] if word.startswith("-") and word not in text] == []
    if "--import" in words:
        return  # what it registers is not there (test_write_a_schedule.py)
    if words[1] == "schedules" and words[2:]:
        assert words[2] in FAMILIES
    try:
        group = typer.main.get_command(app)
        name, command, rest = group.resolve_command(group.make_context("weft", words[1:]), words[1:])
        command.make_context(name, rest)
    except UsageError as error:
        if "Missing" not in str(error):  # text may leave arguments out, not make them up
            raise


@pytest.mark.parametrize("words", command_lines("make"), ids=" ".join)
def test_make_targets_exist(words: list[str]) -> None:
    assert subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("words", command_lines("python"), ids=" ".join)
def test_scripts_exist(words: list[str]) -> None:
    assert find_spec(words[2]) if words[1] == "-m" else words[1] in SAVED or (ROOT / words[1]).is_file()


def test_commands_are_found() -> None:
    assert {words[1] for words in command_lines("weft")} >= {"run", "plan", "schedules", "machines", "doctor"}
    assert {words[1] for words in command_lines("make")} >= {"run", "test", "docs"}


def test_what_code_writes_is_up_to_date(generate: SimpleNamespace) -> None:
    """Tables, timelines and signatures, in README.md and each page."""
    texts = {path: path.read_text(encoding="utf-8") for path in generate.documents()}
    assert [path.name for path, text in texts.items() if generate.filled(text) != text] == [], "run `make docs`"
    blocks_of = {path.name: len(generate.BLOCK.findall(text)) for path, text in texts.items()}
    assert blocks_of["measured.md"] > 5
    assert blocks_of["operators.md"] > 1


def test_a_block_is_filled(generate: SimpleNamespace) -> None:
    head, end = "before\n```text timeline all_gather_matmul sequential\n", "\n```\nafter\n"
    new = generate.filled(f"{head}old{end}")
    assert "old" not in new
    assert "rank 0" in new
    assert new.startswith(head)
    assert new.endswith(end)


def test_signatures_are_as_a_user_writes_them(generate: SimpleNamespace) -> None:
    """Defaults are in quotes where they are text; methods have no self; what is not there is an error."""
    made = generate.made("signatures models") + generate.made("signatures plans") + generate.made("signatures errors")
    assert "weft.ColwiseParallel(*, input_layouts=None, output_layouts=None, use_local_output=True, schedule='auto'" in made
    assert "weft.Machine.what_if(changes=None, /, **more)\n    Return this machine" in made
    assert "weft.PeerLost\n" in made
    with pytest.raises(ValueError, match=r"there is no weft\.gather"):
        generate.signatures.signature("weft.gather")


MOST_BYTES = 260_000


def test_the_pages_are_no_longer_than_somebody_reads() -> None:
    """Without the laboratory book."""
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs").glob("*.md")}
    assert sum(sizes.values()) <= MOST_BYTES, sorted(sizes.items(), key=lambda one: -one[1])[:5]


def test_a_table_of_several_machines_is_refused(generate: SimpleNamespace) -> None:
    made = generate.text_tables
    (one, *others) = made.lines("h200x2/dlrm_step")
    assert f"{one.machine}, torch " in made.source([one, *others])
    for change in ({"machine": "8 x NVIDIA B200"}, {"versions": {**one.versions, "nccl": "2.99"}}):
        with pytest.raises(ValueError, match=r"cases of one table are of 2 x NVIDIA H200.* and of "):
            made.source([one, replace(one, **change)])


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_resolve(path: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", path.read_text(encoding="utf-8"))):
        target, _, anchor = link.partition("#")
        to = (path.parent / target).resolve() if target else path
        if "://" not in link and (not to.exists() or (anchor and anchor not in anchors(to))):
            broken.append(link)
    assert broken == []


ROOMS = ("weft", "studies", "tests", "benchmarks", "docs", "examples", "integrations")
FILES = [path.relative_to(ROOT) for paths in (ROOT.glob("*"), *((ROOT / r).rglob("*") for r in ROOMS)) for path in paths]


def there(named: str) -> bool:
    """Whether a file's path, or the end of one, or a dotted name of weft is of something that there is."""
    if re.fullmatch(r"weft(\.\w+)+", named) and not named.endswith((".py", ".json")):
        module, _, rest = named.rpartition(".")
        return hasattr(pydoc.locate(module), rest) or pydoc.locate(named) is not None
    wanted = Path(named.removeprefix("../"))
    return any(path.parts[-len(wanted.parts) :] == wanted.parts for path in FILES)


@pytest.mark.parametrize("name", [name for name in TEXTS if not name.startswith("docs/lab/")])
def test_files_and_names_of_weft_exist(name: str) -> None:
    """Those in code font: `weft/core/schedule.py`, `schedule.py`, `weft.schedule.check(schedule)`. The laboratory book names
    what there was on its days."""
    words = re.findall(r"`((?:[\w./-]+\.(?:py|md|json|jsonl|png)|weft(?:\.\w+)+))(?:\(.*?\))?`", TEXTS[name])
    assert [word for word in dict.fromkeys(words) if not there(word)] == []
