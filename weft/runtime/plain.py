"""The mode in which calls run: their tensors are plain ones, whatever mode the caller is in."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import torch

from weft.compat.dispatch import autocast_enabled, set_grad_enabled, without_autocast


class PlainMode(threading.local):
    """A context in which tensors are plain ones, nothing is recorded for a backward pass, and matmuls keep to their dtypes:
    the compute lane runs on the caller's thread, whose autocast would round what is summed in float32. torch's own contexts
    take some 20 us of a call, so that those of inference mode and of autocast are entered only from within. It may be entered
    again within itself, and whatever is raised on the way in or out, the modes that were entered are left."""

    def __init__(self) -> None:
        self._entered: list[tuple[bool, ExitStack | None]] = []
        """For each time that this thread has entered: whether gradients were recorded, and torch's contexts."""

    def __enter__(self) -> None:
        contexts: ExitStack | None = None
        if autocast_enabled() or torch.is_inference_mode_enabled():
            with ExitStack() as entering:
                if autocast_enabled():
                    entering.enter_context(without_autocast())
                if torch.is_inference_mode_enabled():
                    entering.enter_context(torch.inference_mode(False))
                contexts = entering.pop_all()
        self._entered.append((torch.is_grad_enabled(), contexts))
        set_grad_enabled(False)

    def __exit__(self, *raised: object) -> None:
        grad, contexts = self._entered.pop()
        set_grad_enabled(grad)
        if contexts is not None:
            contexts.close()


PLAIN = PlainMode()
