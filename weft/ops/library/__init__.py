"""Operators that are not yet defined in one file: their torch.library definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.ops.common import backward_schedule, define, outside_dispatcher

__all__ = ["backward_schedule", "register", "unseen"]


def register(
    schema: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    twice: bool = True,
) -> None:
    define(schema, run=run, fake=fake, save=context, backward=backward, double_backward=twice)


def unseen(*tensors: torch.Tensor) -> bool:
    return outside_dispatcher(tensors)
