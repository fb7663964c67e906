"""A group's way of calling on GPUs, over CPU programs: calls alike are known by number, and captures are asked about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from devices import H200

from weft.runtime import tuner
from weft.runtime.calls import MatmulCall
from weft.runtime.groups import GroupState
from weft.runtime.host_resources import HostResources
from weft.runtime.programs import Programs


class Device:
    """Of a type that is no CPU's."""

    type, index = "cuda", 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device)

    def __hash__(self) -> int:
        return 7


class Capture:
    """Whether the current stream is captured."""

    on = False


def _resources_of(self: GroupState, device: Any) -> HostResources:
    known: dict[Any, Any] = self._resources_by_device
    if device not in known:
        known[device] = HostResources(self.rank_group)
    return known[device]  # type: ignore[no-any-return]


@contextmanager
def fake_gpu(limit: int = 1 << 30) -> Iterator[Capture]:
    """limit: bytes that programs may take."""
    capture = Capture()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MatmulCall, "device", property(lambda call: Device()))
        patch.setattr(GroupState, "_resources_of", _resources_of)
        patch.setattr(Programs, "_limit", lambda self, device: limit)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capture.on)
        patch.setattr(torch.cuda, "get_device_name", lambda device=None: H200.name)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: H200)
        patch.setattr(tuner, "gpu_number", lambda device: 5)
        patch.setattr(tuner, "links_between", lambda numbers: "x")
        patch.setattr(tuner, "queued_timer_for", lambda device: None)
        yield capture
