"""Results of a compiled graph that are views of one tensor: kept where they are that, else laid into one."""

from __future__ import annotations

import pytest
import torch

from weft.models.inductor.outputs import AliasedResults, Lie, ResultLayout

BASE = Lie((4, 6), (6, 1), 3)
LEFT, RIGHT = Lie((4, 3), (6, 1), 3), Lie((4, 3), (6, 1), 6)
FAMILY = AliasedResults(BASE, (0, 1), (LEFT, RIGHT))


def _lying(lie: Lie, room: torch.Tensor, more: int = 0) -> torch.Tensor:
    return room.as_strided(lie.shape, lie.strides, lie.offset + more)


@pytest.mark.parametrize("more", [0, 5], ids=["where they were", "elsewhere"])
def test_views_of_one_tensor_are_not_copied(more: int) -> None:
    room = torch.arange(40.0)
    outs = [_lying(LEFT, room, more), _lying(RIGHT, room, more)]
    assert [found is out for found, out in zip(FAMILY.laid(outs), outs, strict=True)] == [True, True]


def _apart() -> list[torch.Tensor]:
    return [_lying(LEFT, torch.arange(40.0)), _lying(RIGHT, torch.arange(40.0))]


def _closer() -> list[torch.Tensor]:
    room = torch.arange(40.0)
    return [_lying(LEFT, room), _lying(RIGHT, room, 1)]


def _packed() -> list[torch.Tensor]:
    return [out.contiguous() for out in _apart()]


@pytest.mark.parametrize("make", [_apart, _closer, _packed])
@pytest.mark.parametrize(
    "family", [FAMILY, AliasedResults(BASE, (0, 1), (BASE, RIGHT))], ids=["views alone", "with their base"]
)
def test_others_become_views_of_a_copy(make: object, family: AliasedResults) -> None:
    outs = make()  # type: ignore[operator]
    if family.lies[0] == BASE:
        outs[0] = torch.cat(outs, 1)
    laid = ResultLayout(family.lies, (family,)).laid(outs)
    assert [found.tolist() for found in laid] == [out.tolist() for out in outs]
    assert [found.stride() for found in laid] == [lie.strides for lie in family.lies]
    laid[0][0, -1] = 100.0
    laid[1][1, 0] = 200.0
    assert laid[0][1, -3:].tolist()[0] == (200.0 if family.lies[0] == BASE else outs[0][1, -3].item())
    starts = [found.storage_offset() for found in laid]
    assert starts[1] - starts[0] == family.lies[1].offset - family.lies[0].offset
    assert laid[0].untyped_storage().data_ptr() == laid[1].untyped_storage().data_ptr()
