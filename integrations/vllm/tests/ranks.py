"""What each rank of the tests runs: vLLM's parallel state on gloo, and its layers with weights from vLLM's own loader.

torchrun --nproc-per-node 2 ranks.py CASE prints one line `CASE: ok` on each rank. The environment variable WEFT_VLLM_SPOIL
breaks one thing, and the case must then fail.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from vllm import _custom_ops
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.utils.torch_utils import set_default_torch_dtype

import weft_vllm

SPOIL = os.environ.get("WEFT_VLLM_SPOIL", "")
K, N = 256, 128


def main(case: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    if case == "compiled":
        config.compilation_config.mode = CompilationMode.VLLM_COMPILE
        config.compilation_config.custom_ops, config.compilation_config.compile_sizes = ["none"], []
        passes = config.compilation_config.pass_config
        for name in [name for name in vars(passes) if name.startswith("fuse_")]:
            setattr(passes, name, False)  # vLLM has these passes on GPUs only
    if case.startswith("fp8"):
        config.model_config = FakeModel()  # type: ignore[assignment]
    config.kernel_config.ir_op_priority.set_default()
    with set_current_vllm_config(config):
        init_distributed_environment(size, rank, "env://", rank, backend="gloo")
        stages = 2 if case == "pipeline" else 1
        initialize_model_parallel(1 if case == "size_one" else size // stages, stages, backend="gloo")
        CASES[case]()
    dist.barrier()
    print(f"{case}: ok", flush=True)
    os._exit(0)  # vLLM's shared memory needs no goodbye, and gloo's threads may wait for peers that have left


def lines() -> list[str]:
    """Collect what weft_vllm logs."""
    from weft_vllm.layer import logger

    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return found


def load(layer: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Load whole tensors by the layer's own weight loaders, and let vLLM process them."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        if SPOIL == "shard" and name == "weight":
            parameter.tp_rank, layer.tp_rank = 0, 0  # every rank loads the first shard
        parameter.weight_loader(parameter, tensor)
    if isinstance(layer.bias, torch.Tensor) and "bias" not in tensors:
        layer.bias.data.zero_()
    holder = torch.nn.Module()
    holder.layer = layer
    process_weights_after_loading(holder, FakeModel(), torch.device("cpu"))  # type: ignore[arg-type]
    return layer


class FakeModel:
    """What vLLM's loader reads of a model's configuration for these layers."""

    dtype = torch.bfloat16
    quantization = None
    use_mla = False
    hf_config = None

    def __getattr__(self, name: str) -> Any:
        return None


def build(weft_runs: bool, **options: Any) -> Any:
    """Construct a RowParallelLinear, with or without the plug-in."""
    op_registry_oot.pop("RowParallelLinear", None)
    if weft_runs and SPOIL != "unregistered":
        weft_vllm.register()
    options = {"bias": False, "params_dtype": torch.bfloat16, "return_bias": False} | options
    with set_default_torch_dtype(options["params_dtype"]):
        return RowParallelLinear(K, N, **options)


def whole(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The same random tensor on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mine(x: torch.Tensor) -> torch.Tensor:
    """This rank's columns."""
    group = parallel_state.get_tp_group()
    return x.chunk(group.world_size, -1)[group.rank_in_group].contiguous()


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-2) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), (found.shape, wanted.shape)
    worst = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert worst < tolerance, f"largest difference {worst:.3g} of the largest value"


def counted(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return what a call returns, and how many calls of weft.matmul_all_reduce it makes."""
    import weft

    made, real = [], weft.matmul_all_reduce
    weft.matmul_all_reduce = lambda *given, **options: made.append(1) or real(*given, **options)  # type: ignore
    try:
        return call(), len(made)
    finally:
        weft.matmul_all_reduce = real


def compare(tokens: int, calls: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    """Compare a layer with vLLM's own, and with the product of the whole tensors."""
    weight, x = whole(1, N, K, dtype=dtype) / 16, whole(tokens, tokens, K, dtype=dtype)
    tensors = {"weight": weight} | ({"bias": whole(3, N, dtype=dtype)} if options.get("bias") else {})
    options |= {"params_dtype": dtype}
    given = x if options.get("input_is_parallel") is False else mine(x)
    wanted = load(build(False, **options), tensors)(given)
    layer = load(build(True, **options), tensors)
    found, made = counted(lambda: layer(given))
    assert made == calls, f"{made} calls of weft instead of {calls}"
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    for one, other in pairs:
        close(one, other)
    if not isinstance(found, tuple):
        bias = tensors.get("bias", torch.zeros(N)).float()
        close(found, torch.nn.functional.linear(x.float(), weight.float(), bias).to(dtype))


def eager() -> None:
    """Shapes, dtypes and options, below and above the limit of tokens."""
    for tokens, calls in ((1, 1), (7, 1), (128, 1), (129, 0)):
        compare(tokens, calls)
    compare(5, 1, bias=True)
    compare(5, 1, dtype=torch.float16)
    compare(5, 1, input_is_parallel=False)
    compare(5, 1, bias=True, skip_bias_add=True, return_bias=True)


def pipeline() -> None:
    """Two stages of two ranks: each has a tensor parallel group of its own."""
    compare(7, 1, bias=True)


def size_one() -> None:
    """A tensor parallel group of one rank."""
    found = lines()
    compare(7, 0)
    assert any("weft runs 0 of 1" in line and "1: tensor parallel size 1" in line for line in found), found


def reasons() -> None:
    """One line says how many layers weft runs, and why vLLM runs the others."""
    found = lines()
    others: list[dict[str, Any]] = [{"reduce_results": False}, {"disable_tp": True}, {"params_dtype": torch.float32}]
    layers = [build(True), *(build(True, **options) for options in others)]
    for layer in layers[1:]:
        load(layer, {"weight": whole(1, N, K, dtype=layer.params_dtype)})
    assert not found, found
    load(layers[0], {"weight": whole(1, N, K)})
    (line,) = found
    assert "weft runs 1 of 4 row-parallel layers in calls of up to 128 tokens" in line, line
    for reason in ("1: no all-reduce follows it", "1: tensor parallel size 1", "1: dtype torch.float32"):
        assert reason in line, line


class Block(torch.nn.Module):
    """Two layers with the norms of most models, one of Gemma's, and one layer without a norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", weft_runs: bool = True) -> None:
        from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

        super().__init__()
        self.layers = torch.nn.ModuleList(build(weft_runs) for _ in range(4))
        self.norms = torch.nn.ModuleList([*(RMSNorm(N, dtype=torch.bfloat16) for _ in range(2)), GemmaRMSNorm(N)])
        for number, layer in enumerate(self.layers):
            load(layer, {"weight": whole(10 + number, N, K) / 16})
        for number, norm in enumerate(self.norms):
            norm.weight.data = whole(20 + number, N).abs() + 0.5

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        h = residual
        for layer, norm in zip(self.layers, self.norms, strict=False):
            h, residual = norm(layer(x + h.repeat(1, x.shape[1] // h.shape[1])), residual)
        return self.layers[3](x) + h + residual


def compiled() -> None:
    """vLLM's compiler: one graph for every number of tokens, with the norms of two layers in weft's calls."""
    from vllm.compilation.decorators import support_torch_compile
    from vllm.compilation.passes.utility import fix_functionalization
    from vllm.config import get_current_vllm_config
    from vllm.forward_context import set_forward_context

    import weft

    norms, real = [], weft.matmul_all_reduce_norm
    weft.matmul_all_reduce_norm = lambda *given, **options: norms.append(1) or real(*given, **options)  # type: ignore
    library = torch.library.Library("_C", "FRAGMENT")  # vLLM's last pass names these operators of its extension for GPUs
    source = inspect.getsource(fix_functionalization)
    for name in set(re.findall(r"torch\.ops\._C\.(\w+)", source)):
        if not hasattr(torch.ops._C, name):
            library.define(f"{name}() -> ()")
    config = get_current_vllm_config()
    theirs = Block(vllm_config=config, weft_runs=False)
    block = support_torch_compile(Block, dynamic_arg_dims={"x": 0, "residual": 0})(vllm_config=config)
    with torch.inference_mode(), set_forward_context(None, config):
        for tokens in (200, 7, 128, 129, 1):
            x, residual = mine(whole(tokens, tokens, K)), whole(tokens + 1, tokens, N)
            wanted = theirs.forward(x, residual.clone())
            norms.clear()
            found, made = counted(lambda x=x, residual=residual: block(x, residual.clone()))
            few = tokens <= 128
            assert (made, len(norms)) == ((2, 2) if few else (0, 0)), (tokens, made, len(norms))
            close(found, wanted, 4e-2)


def fp8_config(kind: str) -> Any:
    """vLLM's configuration of a checkpoint with FP8 weights."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    if kind == "rowwise":
        elements = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = elements | {"strategy": "channel", "dynamic": False}
        activations = elements | {"strategy": "token", "dynamic": True}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
        return CompressedTensorsConfig.from_config(
            {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups, "ignore": []}
        )
    blocks = [128, 128] if kind == "blockwise" else None
    scheme = "static" if kind == "static" else "dynamic"
    return Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme=scheme, weight_block_size=blocks)


def with_block_kernel() -> None:
    """Give vLLM a block-scaled kernel for any CPU: its own needs AMX. It multiplies what it dequantises."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    class Dequantised(linear.Fp8BlockScaledMMLinearKernel):
        is_supported = classmethod(lambda cls, capability=None: (True, None))

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> Any:
            b = B.float() * Bs.repeat_interleave(128, 0).repeat_interleave(128, 1)
            return (A.float() * As.repeat_interleave(128, 1)) @ b.t()

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Dequantised]


def quantise(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight by a given scale, as vLLM does when it has loaded it."""
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def fp8() -> None:
    """FP8 weights with scales for the tensor, for rows and for blocks of 128x128."""
    with_block_kernel()
    _custom_ops.scaled_fp8_quant = quantise  # vLLM's own is in its extension for GPUs
    largest = torch.finfo(torch.float8_e4m3fn).max
    weight, bias = whole(1, N, K, dtype=torch.float32) / 16, whole(3, N)
    for kind in ("tensorwise", "static", "rowwise", "blockwise"):
        if kind == "blockwise":
            grid = weight.reshape(N // 128, 128, K // 128, 128).abs().amax((1, 3)) / largest
            scale, spread = grid, grid.repeat_interleave(128, 0).repeat_interleave(128, 1)
        else:
            scale = weight.abs().amax(1, keepdim=True) / largest if kind == "rowwise" else weight.abs().max() / largest
            spread = scale
        tensors = {"weight": (weight / spread).to(torch.float8_e4m3fn), "bias": bias}
        tensors["weight_scale_inv" if kind == "blockwise" else "weight_scale"] = scale
        tensors |= {"input_scale": torch.tensor(0.01)} if kind == "static" else {}
        for tokens, calls in ((7, 1), (129, 0)):
            x = mine(whole(tokens, tokens, K))
            options = {"bias": True, "quant_config": fp8_config(kind), "prefix": "down_proj"}
            wanted = load(build(False, **options), tensors)(x)
            layer = load(build(True, **options), tensors)
            assert layer.reason is None, (kind, layer.reason)
            found, made = counted(lambda layer=layer, x=x: layer(x))
            assert made == calls, (kind, made)
            close(found, wanted)
            close(found, torch.nn.functional.linear(whole(tokens, tokens, K).float(), weight, bias.float()).bfloat16(), 8e-2)


def off() -> None:
    """WEFT_VLLM=0 leaves vLLM's class where it is."""
    os.environ["WEFT_VLLM"] = "0"
    assert type(build(True)) is RowParallelLinear
    os.environ["WEFT_VLLM"] = "1"
    assert type(build(True)) is not RowParallelLinear
    assert isinstance(build(True).quant_method, UnquantizedLinearMethod)


CASES = {case.__name__: case for case in (eager, compiled, fp8, pipeline, size_one, reasons, off)}

if __name__ == "__main__":
    main(sys.argv[1])
