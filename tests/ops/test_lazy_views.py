"""Views of values that torch has yet to negate or conjugate, whose memory has others: what kernels read must be the values."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_pools import interpreted_ranks, on_ranks
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import weft
from weft import collectives

pytestmark = pytest.mark.ranks

interpreted = interpreted_ranks(2)
SCHEDULES = {
    "all_gather_matmul": ("sequential", "flag_gated:2", "direct_store"),
    "matmul_reduce_scatter": ("direct_store", "one_shot"),
    "matmul_all_reduce": ("two_shot",),
    "matmul_all_to_all": ("track_and_trigger",),
    "all_to_all_matmul": ("flag_gated",),
}


@on_ranks(pool="interpreted")
def test_a_view_has_its_values() -> None:
    draw = torch.Generator().manual_seed(dist.get_rank())
    a, b = (torch.randn(shape, generator=draw).half() for shape in ((32, 32), (32, 16)))
    minus_a, minus_b = torch._neg_view(a), torch._neg_view(b)
    for op, specs in SCHEDULES.items():
        operator = getattr(weft, op)
        for spec in specs:
            expected = operator(-a, b, schedule=spec)
            assert torch.equal(operator(minus_a, b, schedule=spec), expected), (op, spec)
            assert torch.equal(operator(a, minus_b, schedule=spec), expected), (op, spec)
    for spec in ("sequential", "copy_engine"):
        assert torch.equal(collectives.all_reduced(minus_a, schedule=spec), collectives.all_reduced(-a, schedule=spec))
        assert torch.equal(collectives.all_gather(minus_a, schedule=spec), collectives.all_gather(-a, schedule=spec))
        turned = torch.complex(a.float(), -a.float())
        assert torch.equal(
            collectives.all_to_all(turned.conj(), schedule=spec), collectives.all_to_all(turned, schedule=spec).conj()
        )


@on_ranks(pool="interpreted")
def test_results_are_not_written_below_one() -> None:
    a = torch._neg_view(torch.ones(4))
    for call in (lambda: collectives.all_reduce(a), lambda: weft.AllReduce(a)):
        with pytest.raises(ValueError, match="tensor is a view of values that torch has yet to negate"):
            call()


@on_ranks(pool="interpreted")
def test_what_is_in_other_tensors_is_refused() -> None:
    """A tensor of a collective that is under way, and a sharded one: by address, there is nothing of them."""
    late = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)  # type: ignore[arg-type]
    sharded = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    for held in (late, sharded):
        said = f"is a {type(held).__name__}, which holds its values in other tensors; use .*to_local.*wait"
        for call in (lambda x: collectives.all_reduce(x), lambda x: weft.AllReduce(x)):
            with pytest.raises(ValueError, match=f"tensor {said}"):
                call(held)
        with pytest.raises(ValueError, match=f"input {said}"):
            collectives.all_gather_into_tensor(torch.zeros(8), held)
    total = late.wait()
    collectives.all_reduce(total)
    assert total.tolist() == [4.0] * 4
