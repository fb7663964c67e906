"""The mode in which calls run: their tensors are plain ones, whatever mode the caller is in."""

from __future__ import annotations

import threading

import torch


class PlainMode(threading.local):
    """A context in which tensors are plain ones and nothing is recorded for a backward pass. torch's own contexts take some
    20 us of a call, so that of inference mode is entered only from within inference mode."""

    def __init__(self) -> None:
        self._grad = False
        self._inference: torch.inference_mode | None = None

    def __enter__(self) -> None:
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


PLAIN = PlainMode()
