"""The end of a communicator in which a rank waits in vain, without one: who is told, who waits for it."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch

from weft.overlap.concurrent.cuda import CudaExecutor
from weft.runtime import network
from weft.runtime.network import CudaWire


def test_an_abort_that_fails_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.Abort, "_WAITS_S", 30.0)

    def refuses() -> None:
        raise RuntimeError("a segment handle is left\nframe #0")

    assert not network.Abort(refuses, "0").ended()
    assert caplog.messages == ["the process group cannot be aborted (a segment handle is left): end this process"]


class Graphs:
    """A communicator whose abort waits for graphs that hold it."""

    def __init__(self) -> None:
        self.dropped, self.done, self.shut = threading.Event(), threading.Event(), False

    def abort(self, group: object = None) -> None:
        assert self.dropped.wait(30)
        self.done.set()

    def shutdown(self) -> None:
        self.shut = True


def test_an_abort_that_waits_for_graphs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    held, free = Graphs(), Graphs()
    free.dropped.set()
    for graphs, waits_s in ((free, 30.0), (held, 0.05)):  # that one's thread may come late to what takes no time
        monkeypatch.setattr(network.Abort, "_WAITS_S", waits_s)
        wire = CudaWire.__new__(CudaWire)
        wire._backend, wire._abort = graphs, None
        wire.abort()
        wire.close()
        assert graphs.shut == graphs.dropped.is_set() == graphs.done.is_set()
    monkeypatch.setattr("weft.overlap.concurrent.cuda._abort_process_group", lambda group: group.abort())
    device = CudaExecutor(torch.device("cuda", 0))
    device._groups = {("world", 8): (cast(Any, None), cast(Any, held))}
    device.close(broken=True)
    assert not held.done.is_set()
    held.dropped.set()
    assert held.done.wait(30)
