"""What torch's dispatcher and autograd know of the thread that calls, which torch says by private functions alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.autograd import forward_ad


def observed() -> bool:
    """Whether something of torch's acts on every operator that this thread calls: a dispatch mode, a function mode, a transform
    of torch.func, or forward-mode autograd."""
    return (
        _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or forward_ad._current_level >= 0
        or peek_interpreter_stack() is not None
    )


def forward_mode() -> bool:
    """Whether this thread is within torch.autograd.forward_ad.dual_level, which torch.func.jvp enters, too."""
    return forward_ad._current_level >= 0


def has_tangent(value: object) -> bool:
    """Whether a value is a dual tensor of forward-mode autograd."""
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


def in_functional_gradient() -> bool:
    """Whether the innermost transform of torch.func is one for reverse-mode gradients: grad, vjp or jacrev."""
    transform = peek_interpreter_stack()
    return transform is not None and transform.key() == TransformType.Grad


traced_graph: Callable[[], object | None] = torch._C._get_tracing_state
"""Returns what torch.jit.trace records of this thread's calls, None if nothing is traced. Sizes of tensors are tensors then."""


def is_batch_of_gradients(value: object) -> bool:
    """Whether a value is a batch of gradients, as torch.autograd.grad(is_grads_batched=True) hands to each backward."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Returns whether autocast is on in this thread, for any device."""


def without_autocast() -> torch._C._DisableAutocast:
    """A context without autocast, for any device."""
    return torch._C._DisableAutocast()


def writes_to(tensor: torch.Tensor) -> int:
    """How often a tensor, or a view of it, has been written in place: autograd's version counter."""
    return tensor._version


def graph_break(reason: str) -> None:
    """End torch.compile's graph here. `fullgraph=True` raises an error that has the reason."""
    torch._dynamo.graph_break(msg=reason)


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Sets whether this thread records gradients. torch's own context for that takes several microseconds."""


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
