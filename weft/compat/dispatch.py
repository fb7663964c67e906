"""What torch's dispatcher, autograd and guards know about a call, and what weft's operators tell torch.

Most of these names are private in torch. `thread_state` reads, in one frame, the settings on which an eager call depends.

`layout_check` compares the layouts of tensors with those of earlier ones in one call of torch. torch.compile guards its graphs
in the same way. Reading and comparing shapes, strides, dtypes and devices one by one takes several times as long.

`load_when_named` imports weft's operators when a program first names one as torch.ops.weft.NAME. A program saved by
torch.export, or a policy that lists operators, may do so before any call of weft. Import torch before weft; otherwise this is
not installed.

`register_flops` says how many floating-point operations an operator does. torch.utils.flop_counter takes 3 s to load, so
formulas wait until somebody else imports it. A FlopCounterMode copies the formulas when it is made, so one that is active when
an operator is defined gets its formula then.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._dynamo import guards
from torch._C._functorch import TransformType, is_legacy_batchedtensor, peek_interpreter_stack
from torch._ops import _OpNamespace
from torch.autograd import forward_ad
from torch.distributed import _functional_collectives as functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError

from weft.compat.c10d import begin_gather, begin_sum

__all__ = ["all_gathered", "all_reduced", "grouped_mm", "multiplies", "tree_flatten", "tree_leaves", "tree_unflatten"]

variable: Callable[[bytes], bytes | None] = os.environ._data.get  # type: ignore[attr-defined]
"""Returns a variable of the environment by its name, or None. It sees what os.environ has, also after changes."""


SavedTensorsHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Packs what autograd saves, and unpacks it."""


def recomputation_hooks() -> SavedTensorsHooks | None:
    """Return the hooks of an activation checkpoint that computes its function again on this thread, or None."""
    hooks: SavedTensorsHooks | None = _top_saved_tensors_default_hooks(False)
    return hooks if hooks is not None and hooks[0].__qualname__.startswith("_recomputation_hook") else None


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


def thread_state(dtype: torch.dtype) -> tuple[Any, ...] | None:
    """Return the settings on which a call with factors of this dtype depends. They can be part of a key.

    These are the settings that change results or choices: whether gradients are recorded, those of
    weft.compat.cublas.matmul_settings (of which bfloat16 has fewer), and the variables of the environment
    that weft reads in each call. Return None if a mode for torch's functions or forward-mode autograd observes the thread. What
    else may observe it (weft.compat.dispatch.observed) is found by weft.compat.dispatch.layout_check.
    """
    if _len_torch_function_stack() > 0 or forward_ad._current_level >= 0:
        return None
    of_all = (
        torch.is_grad_enabled(),
        variable(b"WEFT_SCHEDULE"),
        variable(b"WEFT_STAGING_BYTES"),
        torch._C._get_sm_carveout_experimental(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_blas_preferred_backend(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
    )
    if dtype == torch.bfloat16:
        return of_all
    return (
        *of_all,
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
    )


address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
"""Returns the address of a tensor's first element."""


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a function of as many tensors, which returns whether they have the layouts of these, and no two are one object.

    That is so if their types, shapes, strides, dtypes and devices are equal, and whether they require gradients, are to be
    conjugated or negated, and are inference tensors. The thread must also be in the same state for torch's dispatcher:
    autocast, inference mode, a dispatch mode, a transform of torch.func and torch.jit.trace change it.

    Return None if one of them has no strides, or if something observes this thread, so that calls must not be repeated.
    """
    if observed() or traced_graph() is not None or any(one.layout is not torch.strided or one.is_neg() for one in tensors):
        return None
    try:
        shapes: Any = [list(one.shape) for one in tensors]
        strides: Any = [list(one.stride()) for one in tensors]
    except RuntimeError:  # a nested tensor
        return None
    found: Callable[..., bool] = guards.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return found


def make_empty(shape: Sequence[int], like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that allocates a contiguous tensor of this shape, with the dtype of another one on its device.

    It skips torch's dispatcher, and takes a third of the time of torch.empty. The device must be the current one, and no mode
    may observe the thread.
    """
    strides, step = list[int](), 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= max(extent, 1)
    functions: Any = guards
    allocate = functions._empty_strided_cuda if like.is_cuda else functions._empty_strided_cpu
    return partial(allocate, tuple(shape), tuple(strides), like.dtype)


AwaitWork = Callable[[str, str, Any], None]
"""Waits for torch's work of a collective on CPUs: the name of the group, what is waited for, and the work."""


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Return whether this CPU has native matmuls for `dtype`. Without them, matmuls take 100 times as long as in float32."""
    if dtype == torch.float32:
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return bool(getattr(torch.ops.mkldnn, name)())


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the product of each group of a's columns and b's rows, [groups, K, N] in bfloat16.

    a, b: [K, rows] and [rows, N]. On GPUs they begin at multiples of 16 bytes.
    ends: the end of each group, on the device. Rows past the last end are in no group, and are not read.
    """
    return torch._grouped_mm(a, b, offs=ends.to(torch.int32))


def all_reduced(x: torch.Tensor, group: str, await_work: AwaitWork, *, own: bool = False) -> torch.Tensor:
    """Return the sum of x over the ranks of torch's process group with this name. The caller's stream waits for it.

    await_work: waits on CPUs in eager code. Compiled code, and torch's modes that observe operators, wait by torch's functions.
    own: x is a contiguous tensor that nobody else has, so the result may have its memory.
    """
    if type(x) is torch.Tensor and not torch.compiler.is_compiling() and not observed():
        # A functional collective takes some 50 us of host time.
        total = x if own else x.clone(memory_format=torch.contiguous_format)
        _await(begin_sum(total, group), total, group, await_work, "sum")
        return total
    total = functional.all_reduce(x.contiguous(), "sum", group)  # type: ignore[arg-type]
    found: torch.Tensor = functional.wait_tensor(total)  # type: ignore[no-untyped-call]
    return found


def all_gathered(x: torch.Tensor, shape: Sequence[int], group: str, await_work: AwaitWork) -> torch.Tensor:
    """Return the elements of all ranks' x, rank by rank, in a contiguous tensor of this shape. The caller's stream waits.

    x: as many elements on each rank of torch's process group with this name.
    await_work: as for all_reduced.
    """
    x = x.contiguous()
    if type(x) is torch.Tensor and not torch.compiler.is_compiling() and not observed():
        whole = x.new_empty(shape)
        _await(begin_gather(whole.view(-1), x.view(-1), group), x, group, await_work, "gather")
        return whole
    found: torch.Tensor = functional.wait_tensor(  # type: ignore[no-untyped-call]
        functional.all_gather_tensor(x.view(-1), 0, group)  # type: ignore[arg-type]
    )
    return found.view(shape)


def _await(work: Any, x: torch.Tensor, group: str, await_work: AwaitWork, what: str) -> None:
    """Order what comes next after a collective. work is None if the backend has already done that."""
    if work is None:
        return
    if x.is_cpu:
        await_work(group, f"{what} of {x.dtype} {list(x.shape)} by torch", work)
    else:
        work.wait()


class _Namespace(_OpNamespace):
    """A _Namespace is the object torch.ops.weft. It imports `module` before it reports that an operator is missing."""

    __module__ = _OpNamespace.__module__  # torch builds the names of operators from it

    def __init__(self, name: str, module: str) -> None:
        super().__init__(name)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # While the module is being imported, torch itself asks whether an operator already exists.
            if name.startswith("_") or self._module in sys.modules:
                raise
        importlib.import_module(self._module)
        return super().__getattr__(name)


def load_when_named(namespace: str, module: str) -> None:
    """Import `module`, which defines the operators torch.ops.NAMESPACE.*, when a program first names one of them."""
    if namespace not in vars(torch.ops):
        setattr(torch.ops, namespace, _Namespace(namespace, module))


_MODULE = "torch.utils.flop_counter"
Formula = Callable[..., Any]
"""Returns a number of operations. It takes the results of an operator, and then its arguments."""
_WAITING: list[tuple[Any, Formula]] = []
"""The operators that torch does not know of yet, each with its formula."""


def register_flops(operator: Any, formula: Formula) -> None:
    """Register the formula of an operator of torch.ops, now or when torch.utils.flop_counter has been imported."""

    def count(*args: Any, out_val: Any = None) -> Any:
        return formula(out_val, *args)

    module = sys.modules.get(_MODULE)
    if module is None:
        if not _WAITING:
            sys.meta_path.insert(0, _AfterImport())
        _WAITING.append((operator, count))
        return
    _add(module, operator, count)
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, module._FlopCounterMode):
            mode.counter.flop_registry.setdefault(operator, count)


def _add(module: ModuleType, operator: Any, count: Formula) -> None:
    module.register_flop_formula(operator, get_raw=True)(count)


class _AfterImport(MetaPathFinder):
    """Finds torch.utils.flop_counter as usual, and registers the formulas that wait for it once it has been executed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        found = (one.find_spec(fullname, path, target) for one in list(sys.meta_path) if one is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:  # a specification may be executed several times, or never
                    sys.meta_path.remove(self)
                while _WAITING:
                    _add(module, *_WAITING.pop())

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def number_of(counts: torch.Tensor, most: Any) -> Any:
    """Return the sum of the counts, of which a tensor has no more than `most`. It waits for the device.

    Return `most` where the values are not there: while a graph is traced or captured.
    """
    there = type(counts) is torch.Tensor and counts.device.type != "meta"
    if not there or (counts.is_cuda and torch.cuda.is_current_stream_capturing()):
        return most
    return min(max(int(counts.sum()), 0), most)
