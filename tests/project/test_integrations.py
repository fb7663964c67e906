"""What of the plug-in for vLLM needs no vLLM. `make integrations` runs the rest with the real package."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "integrations" / "vllm"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of vLLM is an error
    return import_module("weft_vllm")


def test_the_entry_point_is_there_and_does_nothing_when_it_is_off(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["weft"].partition(":")
    register = getattr(import_module(module), name)
    monkeypatch.setenv("WEFT_VLLM", "0")
    register()
    monkeypatch.setenv("WEFT_VLLM", "1")
    with pytest.raises(ImportError):
        register()
    assert project["optional-dependencies"]["vllm"] == [f"vllm=={version}" for version in plugin.TRIED]


@pytest.mark.parametrize(
    ("name", "value"), [("WEFT_VLLM", "yes"), ("WEFT_VLLM_MAX_TOKENS", "0"), ("WEFT_VLLM_MAX_TOKENS", "many")]
)
def test_a_wrong_setting_is_named(plugin: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} is '{value}'"):
        plugin.register()
