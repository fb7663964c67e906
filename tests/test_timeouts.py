"""How long ranks wait for each other, as the environment has it."""

from __future__ import annotations

import pytest

from weft.team import timeout_from_environment


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e400", "1e10", "soon", ""])
def test_what_is_no_bound_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=f"WEFT_TIMEOUT_S is '{text}'; it must be a number of seconds above 0, and at most"):
        timeout_from_environment()


@pytest.mark.parametrize(("text", "seconds"), [("0.5", 0.5), (" 5 ", 5.0), ("1e9", 1e9)])
def test_what_is_one_is_taken(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT_S", text)
    assert timeout_from_environment() == seconds
