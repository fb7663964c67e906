"""The mode in which calls run: their tensors are plain ones, whatever mode the caller is in."""

from __future__ import annotations

import threading
from typing import Any

import torch


class PlainMode(threading.local):
    """A context in which tensors are plain ones, nothing is recorded for a backward pass, and matmuls keep to their dtypes:
    the compute lane runs on the caller's thread, whose autocast would round what is summed in float32. torch's own contexts
    take some 20 us of a call, so that those of inference mode and of autocast are entered only from within."""

    def __init__(self) -> None:
        self._grad = False
        self._inference: torch.inference_mode | None = None
        self._exact: Any = None

    def __enter__(self) -> None:
        if torch._C._is_any_autocast_enabled():
            self._exact = torch._C._DisableAutocast()
            self._exact.__enter__()
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: object) -> None:
        torch._C._set_grad_enabled(self._grad)
        if self._inference is not None:
            self._inference.__exit__(*raised)
            self._inference = None
        if self._exact is not None:
            self._exact.__exit__(*raised)
            self._exact = None


PLAIN = PlainMode()
