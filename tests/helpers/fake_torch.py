"""A stand-in for torch with as many GPUs as a test wants."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any


def fake_torch(
    *, count: int = 0, cuda: str | None = "13.0", direct: bool = True, arrives: Any = lambda src, dst, values: values
) -> ModuleType:
    """A torch with `count` GPUs. arrives: what `dst` gets when `src` sends `values`; without GPUs in it, a real torch."""
    import torch

    class Remote:
        """A tensor that is said to lie on a GPU."""

        def __init__(self, values: torch.Tensor, index: int) -> None:
            self.values, self.index = values, index

        def copy_(self, src: Remote) -> None:
            self.values = arrives(src.index, self.index, src.values.clone())

        def cpu(self) -> torch.Tensor:
            return self.values

    class Pattern(torch.Tensor):
        def to(self, device: str) -> Any:
            return Remote(self.as_subclass(torch.Tensor).clone(), int(device.removeprefix("cuda:")))

    return SimpleNamespace(  # type: ignore[return-value]
        int32=torch.int32,
        version=SimpleNamespace(cuda=cuda, hip=None),
        arange=lambda *a, **k: torch.arange(*a, **k).as_subclass(Pattern),
        full=lambda size, value, dtype, device: Remote(torch.full(size, value, dtype=dtype), int(device.removeprefix("cuda:"))),
        cuda=SimpleNamespace(
            is_available=lambda: count > 0,
            device_count=lambda: count,
            can_device_access_peer=lambda src, dst: direct,
            get_device_properties=lambda index: SimpleNamespace(
                name="H200", multi_processor_count=132, total_memory=141 << 30, major=9, minor=0
            ),
            nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
        ),
        distributed=SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: True),
    )
