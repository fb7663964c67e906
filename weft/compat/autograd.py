"""What autograd does at this moment, which torch tells by a private function alone."""

from __future__ import annotations

import torch

NO_BACKWARD = -1
"""What `backward_pass` returns outside of a backward pass."""


def backward_pass() -> int:
    """The number of the backward pass that runs in this thread, the same in all of its functions; NO_BACKWARD if none does.

    A checkpoint computes its forward pass again within one.
    """
    return int(torch._C._current_graph_task_id())
