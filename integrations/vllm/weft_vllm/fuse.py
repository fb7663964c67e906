"""The norm that follows a row-parallel layer, in the graph that vLLM compiles.

vLLM's models add a layer's result to the residual and take the RMSNorm of the sum, which is one node of the graph until vLLM
lowers it. After vLLM's own passes, FuseNorms replaces this node and the layer's by one operator:

    weft_vllm::row_parallel_norm(x, weight, columns, residual, norm_weight, eps) -> (normed, residual)

Everything that is not the same function stays as it is: a norm with another dtype of weight (Gemma's, which adds 1 in float32),
one of a part of the columns, one that vLLM has fused with a quantisation, a layer with FP8 weights, and a result that is used
elsewhere, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from vllm import ir
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import CompilationMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

import weft
from weft_vllm import max_tokens
from weft_vllm.layer import LAYERS, LIBRARY, get_group, vllm_call

logger = init_logger(f"vllm.{__name__}")


class FuseNorms(InductorPass):
    """A pass over vLLM's graph, at the place that vLLM's configuration has for one."""

    def __call__(self, graph: fx.Graph) -> None:
        fused = 0
        for node in list(graph.nodes):
            if node.target is torch.ops.vllm_ir.fused_add_rms_norm.default and _is_same_function(node):
                product, residual, weight, eps = node.args[:4]
                with graph.inserting_before(node):
                    operands = (*product.args, residual, weight, eps)
                    made = graph.call_function(torch.ops.weft_vllm.row_parallel_norm.default, operands)
                made.meta["val"] = node.meta["val"]  # the rest of the node's meta describes other operands
                node.replace_all_uses_with(made)
                graph.erase_node(node)
                graph.erase_node(product)
                fused += 1
        logger.debug("weft fuses %d norms with the layers before them", fused)

    def uuid(self) -> str:
        """Return what names the pass in the caches of compiled graphs."""
        return self.hash_source(type(self), _is_same_function)


def _is_same_function(norm: fx.Node) -> bool:
    """Return whether row_parallel_norm computes what a norm and the node before it do."""
    product, residual, weight, _, *variance = norm.args
    if norm.kwargs or any(size is not None for size in variance):
        return False
    if not (isinstance(product, fx.Node) and product.target is torch.ops.weft_vllm.row_parallel.default):
        return False
    if len(product.users) != 1 or not isinstance(weight, fx.Node):
        return False
    of_layer, of_norm, of_result, of_residual = (node.meta["val"] for node in (product.args[1], weight, product, residual))
    dtypes = {one.dtype for one in (of_layer, of_norm, of_result, of_residual)}
    return len(dtypes) == 1 and of_norm.dim() == 1 and of_residual.dim() == of_result.dim()


def install(config: VllmConfig) -> None:
    """Have vLLM run the pass when it compiles a model. Layers call this before vLLM makes its compiler."""
    passes, key = config.compilation_config.inductor_compile_config, current_platform.pass_key
    if config.compilation_config.mode == CompilationMode.VLLM_COMPILE and not isinstance(
        passes.setdefault(key, FuseNorms()), FuseNorms
    ):
        logger.warning_once("weft fuses no norms, because the configuration has a pass of its own as %s", key)


def row_parallel_norm(
    x: torch.Tensor, weight: torch.Tensor, columns: int, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a layer and the norm after it: by weft if there are few tokens, and as vLLM does otherwise."""
    layer = LAYERS.of(weight)
    if 0 < x.numel() // x.shape[-1] <= max_tokens():
        addends: dict[str, Any] = {"bias": None if layer.skip_bias_add else layer.bias}
        b, group = layer.weight.t(), get_group(layer).device_group
        return weft.matmul_all_reduce_norm(x, b, residual, norm_weight, group, eps=eps, **addends)
    return ir.ops.fused_add_rms_norm(vllm_call(layer, x), residual, norm_weight, eps)


def _fake_row_parallel_norm(
    x: torch.Tensor, weight: torch.Tensor, columns: int, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual)


direct_register_custom_op("row_parallel_norm", row_parallel_norm, fake_impl=_fake_row_parallel_norm, target_lib=LIBRARY)
