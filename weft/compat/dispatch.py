"""These functions ask torch's dispatcher and autograd about the calling thread, for which torch has only private functions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import TransformType, is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils.checkpoint import _StopRecomputationError


def observed() -> bool:
    """Return whether torch intercepts every operator that this thread calls.

    A dispatch mode, a function mode, a transform of torch.func, and forward-mode autograd do that.
    """
    return (
        _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or forward_ad._current_level >= 0
        or peek_interpreter_stack() is not None
    )


def forward_mode() -> bool:
    """Return whether this thread is within torch.autograd.forward_ad.dual_level, which torch.func.jvp enters, too."""
    return forward_ad._current_level >= 0


def has_tangent(value: object) -> bool:
    """Return whether a value is a dual tensor of forward-mode autograd."""
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


def in_functional_gradient() -> bool:
    """Return whether the innermost transform of torch.func is one for reverse-mode gradients: grad, vjp or jacrev."""
    transform = peek_interpreter_stack()
    return transform is not None and transform.key() == TransformType.Grad


traced_graph: Callable[[], object | None] = torch._C._get_tracing_state
"""Returns what torch.jit.trace records of this thread's calls, or None. While tracing, sizes of tensors are tensors."""


is_batch_of_gradients: Callable[[torch.Tensor], bool] = is_legacy_batchedtensor
"""Returns whether a tensor is a batch of gradients, which torch.autograd.grad(is_grads_batched=True) passes to backwards."""


def call_backward_directly(function: Any) -> None:
    """Let autograd call the backward of an autograd.Function, and not a function of torch that looks for it in each call."""
    function._backward_cls.apply = function.backward


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the `apply` of an autograd.Function for calls that no transform of torch.func observes.

    torch's own `apply` asks for such transforms, and looks at each argument.
    """
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Returns whether autocast is on in this thread, for any device."""


def without_autocast() -> torch._C._DisableAutocast:
    """Return a context that disables autocast for all devices."""
    return torch._C._DisableAutocast()


def without_inference_mode() -> AbstractContextManager[Any]:
    """Return a context without inference mode. torch's own context for that takes several microseconds."""
    return torch._C._InferenceMode(False)


def writes_to(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or a view of it, has been written in place: autograd's version counter."""
    return tensor._version


def graph_break(reason: str) -> None:
    """End torch.compile's graph here. `fullgraph=True` raises an error that has the reason."""
    torch._dynamo.graph_break(msg=reason)


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Sets whether this thread records gradients. torch's own context for that takes several microseconds."""


NO_BACKWARD = -1
"""What `backward_pass` returns outside of a backward pass."""


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread, or NO_BACKWARD if none runs.

    It is the same in all functions of a backward pass. A checkpoint computes its forward pass again within one.
    """
    return int(torch._C._current_graph_task_id())


def ends_recomputation(error: BaseException) -> bool:
    """Return whether torch.utils.checkpoint ends a recomputation by this error, after its last tensor was saved."""
    return isinstance(error, _StopRecomputationError)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that runs now, in the thread that runs it.

    Calls are in the order in which they were requested. The backward pass raises what the function raises.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)
