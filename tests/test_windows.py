"""Memory that is registered with NCCL, without NCCL: what the library is asked, and when it is asked for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.execute import windows
from weft.execute.windows import Registration, Window

IN_PROGRESS, INVALID = 7, 5


class Nccl:
    """The library: every call is noted; a registration ends after `looks` of those that ask. A handle is a multiple of ten."""

    def __init__(self, looks: int = 0, refuses: int = 0) -> None:
        self.looks, self.refuses, self.calls = looks, refuses, list[tuple[object, ...]]()

    def ncclCommWindowRegister(self, communicator: int, place: Any, nbytes: Any, window: Any, flags: int) -> int:
        self.calls.append(("register", communicator, place.value, nbytes.value, flags))
        window._obj.value = 10 * communicator
        return IN_PROGRESS if self.looks else self.refuses

    def ncclCommGetAsyncError(self, communicator: int, state: Any) -> int:
        self.looks -= 1
        state._obj.value = IN_PROGRESS if self.looks else self.refuses
        return 0

    def ncclCommWindowDeregister(self, communicator: int, window: Any) -> int:
        self.calls.append(("deregister", communicator, window.value))
        return 0

    def ncclGetErrorString(self, status: int) -> bytes:
        return f"status {status}".encode()


def window_of(library: Nccl, backend: object, monkeypatch: pytest.MonkeyPatch) -> Window:
    monkeypatch.setattr(windows, "_library", lambda: library)
    window = Window.__new__(Window)
    window._backend, window._pool, window._matrix = backend, "pool", None
    window.memory = torch.zeros(8, dtype=torch.uint8)
    window._registration = Registration(backend, window.memory)
    return window


@pytest.mark.parametrize("looks", [0, 3])
@pytest.mark.parametrize("broken", [True, False])
def test_windows_of_a_communicator_that_may_be_aborted_are_left_to_it(
    broken: bool, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch never hears of them: it would refuse to abort a communicator that has any."""
    library = Nccl(looks)
    window = window_of(library, SimpleNamespace(_comm_ptr=lambda: 4), monkeypatch)
    place = window.memory.data_ptr()
    window.close(broken=broken)
    assert library.calls == [("register", 4, place, 8, 1)] + ([] if broken else [("deregister", 4, 40)])
    assert window._pool is None
    assert library.looks == 0


def test_windows_of_a_group_that_was_destroyed_went_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> int:
        raise RuntimeError("NCCL communicator was aborted")

    for after in (gone, lambda: 0, lambda: 5):
        library, backend = Nccl(), SimpleNamespace(_comm_ptr=lambda: 4)
        window = window_of(library, backend, monkeypatch)
        backend._comm_ptr = after
        window.close()
        assert [name for name, *_ in library.calls] == ["register"]


@pytest.mark.parametrize("looks", [0, 2])
def test_windows_that_nccl_refuses(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="NCCL refused a window: status 5"):
        window_of(Nccl(looks, INVALID), SimpleNamespace(_comm_ptr=lambda: 4), monkeypatch)
    with pytest.raises(RuntimeError, match="run a collective first"):
        window_of(Nccl(), SimpleNamespace(_comm_ptr=lambda: 0), monkeypatch)
