"""The operators as torch sees them: torch.library definitions in the namespace weft, with fakes and backward.

A module for each kind of operator; weft.ops is the way in for people. Defined through torch.library.Library, not the
custom_op decorator: that one's wrapper loads torch._dynamo at the first call, and once that is loaded beside a process
group, the group's threads outlive its destruction (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from weft import schedules
from weft.problem import Op

_LIBRARY = torch.library.Library("weft", "DEF")  # type: ignore[no-untyped-call]


def register(
    schema: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Define weft::... by its schema. fake: shapes alone. context, backward: as torch.library.register_autograd has them."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"weft::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"weft::{name}", _as_given(backward), setup_context=context, lib=_LIBRARY)


def _as_given(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose matmuls keep to their dtypes, as its operator did, also where it is called under autocast."""

    @wraps(backward)
    def run(*given: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return backward(*given)
        with torch._C._DisableAutocast():
            return backward(*given)

    return run


def unseen(*tensors: torch.Tensor) -> bool:
    """Whether nobody but the caller looks at this call: no gradient, tracer, mode or subclass. Then torch's dispatch, some 15
    us of host time, has nothing to do."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    grad = torch.is_grad_enabled()
    return all(type(t) in (torch.Tensor, torch.nn.Parameter) and not (grad and t.requires_grad) for t in tensors)


def backward_schedule(schedule: str, op: Op) -> str:
    """A family that was asked for serves both ways where `op`, the other one, has it. Where it has not, and for a Schedule
    value, which is for the forward's problem alone, the way back is auto."""
    family = schedule.partition(":")[0]
    alone = family in schedules.NAMES and family not in schedules.names(op)
    return "auto" if alone or schedule.startswith("value:") else schedule
