"""weft.triton under Triton's interpreter, across rank processes; and what its functions compile to for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_work import documented, run_example

from weft.execute.ranks import Ranks

pytestmark = pytest.mark.ranks
EXAMPLES = documented()


@pytest.fixture(scope="module", params=[2, 3])
def interpreted(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    pytest.importorskip("triton", reason="Triton is not installed")
    with Ranks(request.param, environment={"TRITON_INTERPRET": "1", "WEFT_TIMEOUT_S": "30"}) as pool:
        yield pool


@pytest.mark.parametrize("name", EXAMPLES)
def test_documented_example(interpreted: Ranks, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(EXAMPLES[name], encoding="utf-8")
    interpreted.run(run_example, str(path), timeout_s=60)
