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
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from weft import schedules
from weft.core.problem import Op


class _Library(torch.library.Library):
    """Whose operators refuse dual tensors: torch's autograd, where nothing requires a gradient, would drop their tangents."""

    def impl(self, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **options: Any) -> None:
        super().impl(op_name, _primal(fn, f"weft::{op_name}"), dispatch_key, **options)  # type: ignore[no-untyped-call]


def _primal(kernel: Callable[..., Any], what: str) -> Callable[..., Any]:
    @wraps(kernel)
    def run(*given: Any, **named: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(_is_dual, tree_leaves((given, named)))):
            raise ValueError(
                f"{what} has no forward-mode derivative, and an argument is a dual tensor (torch.autograd.forward_ad,"
                " torch.func.jvp); use reverse mode"
            )
        return kernel(*given, **named)

    return run


def _is_dual(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


_LIBRARY = _Library("weft", "DEF")  # type: ignore[no-untyped-call]


def register(
    schema: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    twice: bool = True,
) -> None:
    """Define weft::... by its schema. fake: shapes alone. context, backward: as torch.library.register_autograd has them.
    twice: whether what autograd finds of the backward are its gradients; where not, they raise ValueError."""
    name = schema.partition("(")[0]
    if backward is not None and not twice:
        backward = _once(backward, f"weft::{name}")
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"weft::{name}", _as_given(backward), setup_context=context, lib=_LIBRARY)


def _once(backward: Callable[..., Any], what: str) -> Callable[..., Any]:
    """A backward whose gradients raise where they are asked for: not where create_graph=True is for others' sake."""

    @wraps(backward)
    def run(ctx: Any, *flow: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *flow)
        read = _Read(ctx)
        with torch.no_grad():
            leaves, structure = tree_flatten(backward(read, *flow))
        grads = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        sources = [leaf for leaf in tree_leaves((flow, read.saved_tensors)) if isinstance(leaf, torch.Tensor)]
        guarded = _FirstAlone.apply(what, len(grads), *grads.values(), *sources)  # type: ignore[no-untyped-call]
        for at, one in zip(grads, guarded, strict=True):
            leaves[at] = one
        return tree_unflatten(leaves, structure)

    return run


class _Read:
    """A context whose saved tensors are asked for once: activation checkpoints do not give them twice."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _FirstAlone(torch.autograd.Function):
    """Gradients as they are, that have none themselves. what: whose they are. count: of the gradients; what they were found
    from comes behind them."""

    @staticmethod
    def forward(ctx: Any, what: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.what = what
        return tuple(grad.detach() for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ValueError(f"{ctx.what} has first derivatives alone; for second ones, use torch's operators in its place")


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
    """Whether nobody but the caller looks at this call: no gradient, tangent, tracer, mode or subclass; and no tensor is a view
    that torch is to negate or conjugate. Then torch's dispatch, some 15 us of host time, has nothing to do."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if forward_ad._current_level >= 0:
        return False
    if (transform := torch._C._functorch.peek_interpreter_stack()) is not None:
        _check_transform(transform.key())
        return False
    grad = torch.is_grad_enabled()
    plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) and not (grad and t.requires_grad) for t in tensors)
    return plain and not any(t.is_neg() or t.is_conj() for t in tensors)


def _check_transform(kind: torch._C._functorch.TransformType) -> None:
    if kind == torch._C._functorch.TransformType.Grad:
        raise ValueError(
            "torch.func's grad, vjp and jacrev cannot be taken of weft's operators, whose derivatives torch.library knows; use"
            " torch.autograd.grad, or backward"
        )


def backward_schedule(schedule: str, op: Op) -> str:
    """A family that was asked for serves both ways where `op`, the other one, has it. Where it has not, and for a Schedule
    value, which is for the forward's problem alone, the way back is auto."""
    family = schedule.partition(":")[0]
    alone = family in schedules.NAMES and family not in schedules.names(op)
    return "auto" if alone or schedule.startswith("value:") else schedule
