"""Parameters that every rank has whole."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from weft.models.replicas import always, replicate_alone


class Tied(nn.Module):
    """One parameter under two names, and a name without one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Parameter(torch.ones(3))
        self.register_parameter("none", None)


def test_a_parameter_with_two_names_stays_one() -> None:
    module = Tied()
    made: dict[int, nn.Parameter] = {}

    def distribute(parameter: nn.Parameter, placement: Replicate) -> nn.Parameter:
        return made.setdefault(id(parameter), nn.Parameter(parameter.detach().clone()))

    replicate_alone(module, distribute, always)  # type: ignore[arg-type]
    (whole,) = made.values()
    assert module._parameters["first"] is module._parameters["second"] is whole
