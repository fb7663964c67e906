"""Code that is written for a GPU, on a CPU."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "device" in given:
            given["device"] = "cpu"
        return func(*("cpu" if isinstance(one, str) and one == "cuda" else one for one in args), **given)
