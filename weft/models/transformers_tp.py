"""What transformers, accelerate and PEFT ask a model to learn that it is tensor parallel.

Then Trainer gives all ranks of the mesh the same batches and leaves the model as it is (else it wraps it in
DistributedDataParallel), and `save_pretrained`, of PEFT's models too, gathers whole tensors on all ranks and one writes them.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def declare_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Set what transformers sets on a model that it has sharded itself. Its versions without such a mark are left alone."""
    ranks, marked = mesh.size(), "_is_distributed_loading_by_transformers"
    if ranks == 1 or not hasattr(model, marked):
        return
    configuration: Any = importlib.import_module("transformers.distributed.configuration_utils")
    cast(Any, model).config.distributed_config = configuration.DistributedConfig(tp_size=ranks)
    model.__dict__ |= {"_tp_size": ranks, "_fsdp_size": 1, "_device_mesh": mesh, marked: True}
