"""Numbers of a machine decide what kernels choose, and ranks that have different ones are told so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from devices import BLOCK_OF_H200
from rank_pools import POOLS

from weft.core.errors import RankMismatch
from weft.core.hardware import numbers
from weft.core.machine import Machine, load
from weft.core.problem import Problem
from weft.core.schedule import Gemm
from weft.perf.shapes import SHAPES, Arriving, _numbers, _waves_us, by_hardware, push_sms, shape_of
from weft.perf.terms import gemm_cost
from weft.schedules import build

H200 = load("h200x8")


def step(m: int, name: str, op: str = "all_gather_matmul") -> Gemm:
    schedule = build(Problem(op=op, m=m, n=28672, k=8192, world_size=4), name, 1)  # type: ignore[arg-type]
    return next(step for _, _, _, step in schedule if isinstance(step, Gemm))


def chosen(of: Gemm, machine: Machine) -> tuple[int, int]:
    blocks = shape_of(of, BLOCK_OF_H200, machine)
    return blocks.m, blocks.n


def test_late_chunks_and_slow_small_tiles_change_the_tile_shape() -> None:
    gated = step(512, "flag_gated")
    assert chosen(gated, H200) != (128, 256)
    tiles = H200.gpu.stored_tiles
    slow = (tiles[0], *(dataclasses.replace(tile, efficiency=0.2) for tile in tiles[1:]))
    assert chosen(gated, dataclasses.replace(H200, gpu=dataclasses.replace(H200.gpu, stored_tiles=slow))) == (128, 256)
    early = dataclasses.replace(H200.copies, copy_us=0.01, gbps=1e6, several_gbps=1e6)
    assert chosen(gated, dataclasses.replace(H200, copies=early, flag_us=0.01)) == (128, 256)


def test_the_kernel_and_the_simulator_charge_half_a_tile_alike() -> None:
    """Where halves cost as much as whole tiles, a last wave of halves takes a whole wave's time in both."""
    sent = step(512, "direct_store", "matmul_reduce_scatter")
    assert not by_hardware(sent)
    for half_tile in (0.5, 0.8, 1.0):
        machine = dataclasses.replace(H200, gpu=dataclasses.replace(H200.gpu, half_tile=half_tile))
        largest = SHAPES[0]
        cost = gemm_cost(
            machine,
            rows=(128 * 150,),
            n=256,
            k=8192,
            dtype="bfloat16",
            flags=True,
            tiles=H200.gpu.kernel_tiles[:1],
            shape=largest,
        )
        assert cost.halves == 18
        assert cost.busy_us == pytest.approx((1 + half_tile) * cost.tile_us)
        counted = (Arriving(128 * 150, 256, False, (8192,)),)
        assert _waves_us(counted, largest, _numbers(machine, 132), stored=False) == pytest.approx(cost.busy_us, rel=1e-6)


def test_pushes_take_as_many_sms_as_the_machine_says() -> None:
    stores = dataclasses.replace(H200.stores, sms=24, sms_alone=48)
    machine = dataclasses.replace(H200, stores=stores)
    assert [push_sms(machine, 132, alone=alone) for alone in (False, True)] == [24, 48]


def test_every_number_has_a_source() -> None:
    """A field that is added without one makes a profile that does not load."""
    for path, _ in numbers(H200):
        sources = {other: source for other, source in H200.sources.items() if other != path}
        with pytest.raises(ValueError, match=f"sources.{path} is missing"):
            dataclasses.replace(H200, sources=sources)


def _agree(paths: list[str]) -> str:
    import os

    import torch.distributed as dist

    from weft.comm.rank_group import RankGroup
    from weft.runtime.choose import agreed_profile

    os.environ["WEFT_MACHINE"] = paths[dist.get_rank()]
    assert dist.group.WORLD is not None
    group = RankGroup.acquire(dist.group.WORLD)
    try:
        return agreed_profile(group, torch.device("cpu")).name
    except RankMismatch as error:
        return str(error)
    finally:
        del os.environ["WEFT_MACHINE"]
        dist.barrier()
        group.release()


@pytest.mark.ranks
def test_ranks_with_different_profiles_all_get_an_error(tmp_path: Path) -> None:
    assert POOLS.get(2, {}).run(_agree, ["a100x8", "a100x8"]) == ["a100x8", "a100x8"]
    for said in POOLS.get(2, {}).run(_agree, ["a100x8", "mi300x8"]):
        assert "ranks 0 and 1 have different machine profiles" in said
