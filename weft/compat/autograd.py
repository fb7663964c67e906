"""What autograd does at this moment, which torch tells by private functions alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

NO_BACKWARD = -1
"""What `backward_pass` returns outside of a backward pass."""


def backward_pass() -> int:
    """The number of the backward pass that runs in this thread, the same in all of its functions; NO_BACKWARD if none does.

    A checkpoint computes its forward pass again within one.
    """
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Within a backward pass: call this at its end, before what is asked for later, in the thread that runs it. What it raises,
    the backward pass raises."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
