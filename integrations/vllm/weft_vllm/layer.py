"""vLLM's RowParallelLinear, with calls of few tokens made by weft.matmul_all_reduce.

One operator of torch.library stands in the graph that vLLM compiles, because the graph must hold for every number of tokens:

    weft_vllm::row_parallel(x [..., k], weight, columns) -> [..., N]

Its body runs eagerly, or while a CUDA graph is captured, and decides by the number of tokens. It finds the layer by the address
of the weight. With the layer's name as an argument no two layers would have the same graph, and Inductor would compile each.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group, split_tensor_along_last_dim
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

import weft
from weft_vllm import max_tokens

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged below its own name

DTYPES = (torch.bfloat16, torch.float16)
LIBRARY = torch.library.Library("weft_vllm", "FRAGMENT")


class Layers:
    """The row-parallel layers of this process: those that weft runs, and why it does not run the others."""

    def __init__(self) -> None:
        self.by_address: WeakValueDictionary[int, WeftRowParallelLinear] = WeakValueDictionary()
        self._waiting: WeakSet[WeftRowParallelLinear] = WeakSet()
        self.reasons: Counter[str] = Counter()

    def of(self, weight: torch.Tensor) -> WeftRowParallelLinear:
        """Return the layer that has a weight. Raises RuntimeError for a weight that was exchanged after it was loaded."""
        layer = self.by_address.get(weight.data_ptr())
        if layer is None:
            raise RuntimeError(
                f"no layer was loaded with this weight of shape {list(weight.shape)}; weights must stay where they are loaded, "
                "or set WEFT_VLLM=0"
            )
        return layer

    def expect(self, layer: WeftRowParallelLinear) -> None:
        """Count a layer that was constructed, and whose weights are yet to be loaded."""
        self._waiting.add(layer)

    def settle(self, layer: WeftRowParallelLinear) -> None:
        """Count a layer whose weights are loaded. After the last one, log how many are replaced."""
        if layer.reason is None:
            self.by_address[layer.weight.data_ptr()] = layer
        if layer not in self._waiting:
            return
        self._waiting.remove(layer)
        self.reasons[layer.reason or ""] += 1
        if not self._waiting:
            replaced, total = self.reasons.pop("", 0), self.reasons.total()
            others = "; ".join(f"{count}: {reason}" for reason, count in sorted(self.reasons.items()))
            text = "weft runs %d of %d row-parallel layers in calls of up to %d tokens%s"
            logger.info(text, replaced, replaced + total, max_tokens(), f". vLLM runs the others ({others})" if others else "")
            self.reasons.clear()


LAYERS = Layers()


class WeftRowParallelLinear(RowParallelLinear):
    """A RowParallelLinear, of which weft makes the calls of few tokens.

    reason: why vLLM makes all calls of this layer. None if weft makes those of few tokens.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.group_name = get_tp_group().unique_name
        self.reason = self._refusal()
        LAYERS.expect(self)
        if self.reason is None:
            from weft_vllm.fuse import install  # which imports this module

            install(get_current_vllm_config())

    def update_param_tp_status(self) -> None:
        """vLLM calls this in __init__, and again when the weights are loaded and in the layout in which they stay."""
        super().update_param_tp_status()
        if hasattr(self, "reason"):
            self.reason = self.reason or self._layout_refusal()
            LAYERS.settle(self)

    def forward(self, input_: torch.Tensor) -> Any:
        if self.reason is not None:
            return super().forward(input_)
        if not self.input_is_parallel:
            input_ = split_tensor_along_last_dim(input_, num_partitions=self.tp_size)[self.tp_rank].contiguous()
        output = torch.ops.weft_vllm.row_parallel(input_, self.weight, self.output_size)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None

    def _refusal(self) -> str | None:
        """Return why vLLM has to run the layer, as far as that is known before its weights are loaded."""
        config = get_current_vllm_config()
        method, kernel = self.quant_method, _kernel_of(self)
        offload = config.offload_config
        found = {
            "tensor parallel size 1": self.tp_size == 1,
            "no all-reduce follows it": not self.reduce_results,
            f"platform {current_platform.device_name}": not (current_platform.is_cuda() or current_platform.is_cpu()),
            "LoRA multiplies and reduces by itself": config.lora_config is not None,
            "VLLM_BATCH_INVARIANT": bool(envs.VLLM_BATCH_INVARIANT),
            "microbatches run at once": config.parallel_config.use_ubatching,
            "weights are offloaded": offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0,
            f"dtype {self.params_dtype}": self.params_dtype not in DTYPES,
            f"quantised by {type(method).__name__}": type(method) is not UnquantizedLinearMethod and kernel is None,
        }
        return next((reason for reason, holds in found.items() if holds), None)

    def _layout_refusal(self) -> str | None:
        """Return why weft does not take the loaded weights."""
        kernel, shape = _kernel_of(self), (self.output_size, self.input_size_per_partition)
        if kernel is None:
            return None if self.weight.shape == shape else "vLLM has packed the weight"
        name = type(kernel).__name__
        if kernel.config.out_dtype not in (None, self.params_dtype):
            return f"{name} returns {kernel.config.out_dtype}"
        b, scale = _scaled_b(self, kernel)
        k, n = shape[1], shape[0]
        unit = 128 if isinstance(kernel, Fp8BlockScaledMMLinearKernel) else 16
        if b.dtype != torch.float8_e4m3fn or b.shape != (k, n) or b.stride(0) != 1 or k % unit or n % 16:
            return f"{name} has packed the weight, or weft has no FP8 product of this size"
        blocks = (-(-k // 128), -(-n // 128))
        fits = scale.shape == blocks if unit == 128 else scale.numel() in (1, n)
        return None if fits and scale.dtype == torch.float32 else f"{name} has scales that weft does not take"


def _kernel_of(layer: WeftRowParallelLinear) -> Any:
    """Return vLLM's FP8 kernel of a layer whose activations are quantised, too. None for any other layer."""
    kernel = getattr(getattr(layer, "scheme", layer.quant_method), "fp8_linear", None)
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        sizes = kernel.config.weight_quant_key.scale.group_shape, kernel.config.activation_quant_key.scale.group_shape
        return kernel if [tuple(size) for size in sizes] == [(128, 128), (1, 128)] else None
    # A kernel that has a step of its own after loading packs the weight, as Marlin's does.
    ours = isinstance(kernel, FP8ScaledMMLinearKernel)
    packs = ours and type(kernel).process_weights_after_loading is not FP8ScaledMMLinearKernel.process_weights_after_loading
    return kernel if ours and not packs else None


def _scaled_b(layer: WeftRowParallelLinear, kernel: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an FP8 weight as weft's b, and its scales."""
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        return layer.weight.t(), kernel._get_layer_params(layer).block_scale.t()
    weight, scale, *_ = kernel._get_layer_params(layer)
    return weight, scale


def matmul_all_reduce(layer: WeftRowParallelLinear, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Make a layer's call by weft."""
    kernel, group = _kernel_of(layer), get_group(layer).device_group
    addends = {"bias": None if layer.skip_bias_add else layer.bias, "residual": residual}
    if kernel is None:
        return weft.matmul_all_reduce(x, layer.weight.t(), group, **addends)
    b, scale_b = _scaled_b(layer, kernel)
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):  # weft quantises x by 1x128 blocks, as vLLM's kernels do
        return weft.matmul_all_reduce(x, b, group, scale_b=scale_b.contiguous(), **addends)
    rows = x.reshape(-1, x.shape[-1])
    _, _, scale_x, bound = kernel._get_layer_params(layer)
    quantised, scale_a = kernel.quant_fp8(rows, scale_x, bound)
    quantised = quantised[: rows.shape[0]].view(x.shape)  # some kernels add rows
    if scale_a.numel() == scale_b.numel() == 1:
        scale_a, scale_b = scale_a.reshape(1), scale_b.reshape(1)
    else:
        scale_a = scale_a[: rows.shape[0]].expand(rows.shape[0], 1).reshape(*x.shape[:-1], 1)
        scale_b = scale_b.reshape(1, -1).expand(1, b.shape[1]).contiguous()
    return weft.matmul_all_reduce(quantised, b, group, scale_a=scale_a, scale_b=scale_b, output_dtype=x.dtype, **addends)


def vllm_call(layer: WeftRowParallelLinear, x: torch.Tensor) -> torch.Tensor:
    """Make a layer's call as vLLM does."""
    bias = None if layer.tp_rank > 0 or layer.skip_bias_add else layer.bias
    return get_group(layer)._all_reduce_out_place(layer.quant_method.apply(layer, x, bias))


def get_group(layer: WeftRowParallelLinear) -> Any:
    """Return the tensor parallel group in which the layer was constructed."""
    from vllm.distributed.parallel_state import _groups

    group = _groups[layer.group_name]()
    if group is None:
        raise RuntimeError(f"vLLM's group {layer.group_name} is destroyed")
    return group


def row_parallel(x: torch.Tensor, weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Run a layer: by weft if there are few tokens, and as vLLM does otherwise."""
    layer = LAYERS.of(weight)
    tokens = x.numel() // x.shape[-1]
    return matmul_all_reduce(layer, x) if 0 < tokens <= max_tokens() else vllm_call(layer, x)


def _fake_row_parallel(x: torch.Tensor, weight: torch.Tensor, columns: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], columns)


direct_register_custom_op("row_parallel", row_parallel, fake_impl=_fake_row_parallel, target_lib=LIBRARY)
