"""On GPUs a peer's failure comes after the reason for it, where that is one that this rank has noted, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from single_process_ranks import rank_groups

from weft.core.errors import PeerLost
from weft.runtime.cuda_resources import CudaResources
from weft.runtime.groups import GroupState
from weft.runtime.programs import Programs


def _lost(*_: Any, **__: Any) -> None:
    raise PeerLost("rank 1 failed: max_rows is 4, but 5 rows arrived at rank 1")


def _noted() -> None:
    raise ValueError("max_rows is 4, but 5 rows arrived at rank 1")


def _state(noted: bool) -> GroupState:
    """Of one program with splits, whose device has noted what is wrong with them, or nothing."""
    rank_group, _ = rank_groups()
    state = GroupState.__new__(GroupState)
    Programs.__init__(state, rank_group, {})
    program = mock.Mock(ragged=SimpleNamespace(raise_cut=_noted if noted else lambda: None))
    state._programs[program] = cast(Any, None)
    return state


@pytest.mark.parametrize(("noted", "raised"), [(True, ValueError), (False, PeerLost)])
def test_a_call_raises_the_reason(noted: bool, raised: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    state = _state(noted)
    monkeypatch.setattr(state, "_make_call", _lost)
    with pytest.raises(raised, match="max_rows is 4"):
        state.make_call(cast(Any, SimpleNamespace(device=torch.device("cpu"))))


@pytest.mark.parametrize(("noted", "raised"), [(True, ValueError), (False, PeerLost)])
def test_synchronize_raises_the_reason(noted: bool, raised: type[Exception]) -> None:
    state, resources = _state(noted), CudaResources.__new__(CudaResources)
    resources.watchdog = cast(Any, SimpleNamespace(synchronize=_lost))
    state._resources_by_device = {torch.device("cuda", 0): resources}
    with pytest.raises(raised, match="max_rows is 4"):
        state.synchronize()
