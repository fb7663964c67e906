"""Parameters that every rank has whole."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from weft.models import replicas
from weft.models.replicas import always, never, replicate_alone


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


class Recursive(nn.Module):
    """Reads its parameter before and after a forward of its own, and lets others look meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.entered, self.looked = threading.Event(), threading.Event()

    def forward(self, depth: int) -> list[str]:
        seen = [str(self.weight)]
        if depth:
            seen += self(depth - 1)
        else:
            self.entered.set()
            assert self.looked.wait(20)
        return [*seen, str(self.weight)]


@pytest.fixture
def recursive(monkeypatch: pytest.MonkeyPatch) -> Recursive:
    module = Recursive()
    monkeypatch.setattr(replicas, "part_of", lambda module, name, **options: "plain")
    monkeypatch.setattr(replicas, "DTensor", nn.Parameter)
    replicate_alone(module, lambda parameter, placement: parameter, never)  # type: ignore[arg-type, return-value]
    return module


def test_a_forward_within_the_same_forward_leaves_the_outer_one_its_plain_parameters(recursive: Recursive) -> None:
    recursive.looked.set()
    assert recursive(2) == ["plain"] * 6
    assert recursive.weight is recursive._parameters["weight"]


def test_another_thread_sees_the_parameter_itself_while_a_forward_runs(recursive: Recursive) -> None:
    seen: list[Any] = []
    runs = threading.Thread(target=lambda: seen.append(recursive(0)))
    runs.start()
    assert recursive.entered.wait(20)
    assert recursive.weight is recursive._parameters["weight"]
    recursive.looked.set()
    runs.join(20)
    assert seen == [["plain", "plain"]]
