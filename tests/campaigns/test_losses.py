"""A short form of losses.py: a model learns under weft's operators as it does under torch's."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
import losses
from losses import Losses, Setup, Text, all_runs, compared

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

SMALL = {"hidden": 32, "width": 48, "layers": 1, "heads": 4, "words": 24, "batch": 4, "length": 16, "steps": 20}


def _runs(dtype: str) -> tuple[dict[str, Losses], dict[str, Any]]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return all_runs(mesh, Setup(**SMALL, dtype=dtype, lr=1e-2, warm_up=2), ended=lambda *_: None)


@pytest.mark.slow
def test_the_same_curve_in_float32(ranks: RankFixture) -> None:
    for runs, comparison in ranks(2).run(_runs, "float32"):
        assert runs["weft"][-1] < runs["weft"][0] - 0.5
        assert max(comparison["farthest"].values()) < 2e-4, comparison["farthest"]


def test_distances() -> None:
    comparison = compared({"alone": [3.0, 2.0], "torch": [3.0, 1.5], "weft": [2.75, 1.5]}, floor=1.0)
    assert comparison["distance"] == {"torch from alone": 0.25, "weft from torch": 0.125, "weft from alone": 0.375}
    assert comparison["farthest"]["weft from alone"] == 0.5


def test_text_follows_its_chain() -> None:
    text = Text(12)
    words = text.batch(3, batch=200, length=30)
    before, after = words[:, :-1].flatten(), words[:, 1:].flatten()
    assert bool((text.next_WN[before] == after[:, None]).any(1).all())
    first = (text.next_WN[before, 0] == after).float().mean()
    assert first >= 0.45
    assert math.isclose(text.entropy, 1.208, abs_tol=1e-3)
    assert not torch.equal(words, text.batch(4, batch=200, length=30))


def test_nothing_that_an_earlier_run_chose_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*given: Any, **options: Any) -> None:
        return None

    for name, value in {"WEFT_CACHE_DIR": "/of/the/user", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("faulthandler.dump_traceback_later", nothing)
    monkeypatch.setattr(torch.cuda, "set_device", nothing)
    for name in ("init_process_group", "init_device_mesh"):
        monkeypatch.setattr(dist, name, nothing)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    losses.start()
    assert os.environ["WEFT_CACHE_DIR"] == ""
