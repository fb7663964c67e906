"""Sets the attributes by which transformers, accelerate and PEFT recognise a tensor-parallel model.

Trainer then gives all ranks of the mesh the same batches, and does not wrap the model in DistributedDataParallel.
`save_pretrained`, also of PEFT's models, gathers whole tensors on all ranks, and one rank writes them.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def declare_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Set the attributes that transformers sets on a model that it has sharded. Do nothing in versions without them."""
    ranks, marked = mesh.size(), "_is_distributed_loading_by_transformers"
    if ranks == 1 or not hasattr(model, marked):
        return
    configuration: Any = importlib.import_module("transformers.distributed.configuration_utils")
    cast(Any, model).config.distributed_config = configuration.DistributedConfig(tp_size=ranks)
    model.__dict__ |= {"_tp_size": ranks, "_fsdp_size": 1, "_device_mesh": mesh, marked: True}
