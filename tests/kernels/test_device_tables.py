"""Tables on a device: a bounded number of them, but all that a CUDA graph reads."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.tables import DeviceTables


def test_tables_are_bounded_and_made_once() -> None:
    made: list[int] = []
    tables: DeviceTables[int] = DeviceTables(3)

    def get(key: int) -> int:
        return tables.get(key, torch.device("cpu"), lambda: made.append(key) or key)  # type: ignore[func-returns-value]

    for key in (1, 2, 3, 1, 4):
        assert get(key) == key
    assert len(tables) == 3
    assert get(1) == 1
    assert made == [1, 2, 3, 4], "2 was the least recently used"
    get(2)
    assert made == [1, 2, 3, 4, 2]


def test_what_a_graph_reads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    tables: DeviceTables[object] = DeviceTables(2)
    device = torch.device("cuda", 0)
    first = tables.get("first", device, object)
    capturing = True
    assert tables.get("first", device, object) is first
    capturing = False
    for key in range(10):
        tables.get(key, device, object)
    assert tables.get("first", device, object) is first
    assert len(tables) == 3


def test_no_table_is_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tables: DeviceTables[object] = DeviceTables(2)
    with pytest.raises(ValueError, match="once with such tensors before capturing a graph"):
        tables.get("new", torch.device("cuda", 0), object)
    assert tables.get("new", torch.device("cpu"), object)
