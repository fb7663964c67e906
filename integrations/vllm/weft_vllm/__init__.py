"""A plug-in for vLLM. vLLM finds `register` by the entry point group vllm.general_plugins, and calls it in each process.

Settings, which must be the same on all ranks:

    WEFT_VLLM=0                 leaves vLLM as it is
    WEFT_VLLM_MAX_TOKENS=128    weft makes the calls of up to this many tokens, and vLLM those of more
"""

from __future__ import annotations

import os

TRIED = ("0.33.0",)
"""The versions of vLLM that the plug-in was tried with."""


def enabled() -> bool:
    """Return whether the environment lets the plug-in replace layers."""
    given = os.environ.get("WEFT_VLLM", "1")
    if given not in ("0", "1"):
        raise ValueError(f"WEFT_VLLM is {given!r}; use 0 or 1")
    return given == "1"


def max_tokens() -> int:
    """Return the largest number of tokens of a call that weft makes. 128 is an estimate that was not measured."""
    given = os.environ.get("WEFT_VLLM_MAX_TOKENS", "128")
    if not given.isdecimal() or int(given) == 0:
        raise ValueError(f"WEFT_VLLM_MAX_TOKENS is {given!r}; use a positive number of tokens")
    return int(given)


def register() -> None:
    """Have vLLM construct weft's layer wherever a model asks for a RowParallelLinear. More calls change nothing."""
    if not enabled():
        return
    max_tokens()  # a wrong value is an error now, and not in the first call
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    from weft_vllm.layer import WeftRowParallelLinear

    name = "RowParallelLinear"
    found = op_registry_oot.get(name)
    if found is None:
        PluggableLayer.register_oot(WeftRowParallelLinear, name=name)
    elif found is not WeftRowParallelLinear:
        raise RuntimeError(f"vLLM's {name} is already replaced by {found.__module__}.{found.__name__}; set WEFT_VLLM=0")
