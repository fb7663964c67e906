"""Benchmarks take over what an earlier run chose only where they ask for it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import measure


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, no world."""

    def nothing(*args: Any, **options: Any) -> None:
        return None

    for name in ("WEFT_TIMEOUT_S", "WEFT_CACHE_DIR"):
        monkeypatch.setenv(name, "/of/the/user")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("faulthandler.dump_traceback_later", nothing)
    monkeypatch.setattr(torch.cuda, "set_device", nothing)
    monkeypatch.setattr(dist, "init_process_group", nothing)


@pytest.mark.usefixtures("alone")
def test_what_the_users_environment_names_is_not_taken_over() -> None:
    measure.start()
    assert os.environ["WEFT_CACHE_DIR"] == ""


@pytest.mark.usefixtures("alone")
def test_a_benchmark_may_ask_for_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PLANS", "/of/its/own")
    measure.start()
    assert os.environ["WEFT_CACHE_DIR"] == "/of/its/own"
