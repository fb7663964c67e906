"""A profile of more GPUs, derived from a measured one."""

from __future__ import annotations

import dataclasses

import pytest

from weft.core import codec
from weft.core.machine import Machine, load
from weft.perf.terms import collective_us
from weft.tools.calibrate.profile import derive

H200 = load("h200x8")


def test_a_profile_of_more_gpus_loads_and_says_what_is_derived() -> None:
    found = derive(H200, 16, "h200x16")
    assert codec.loads(Machine, codec.dumps(found), "") == found
    assert (found.name, found.world_size) == ("h200x16", 16)
    assert found.sources["copies.gbps"].startswith("derived from h200x8: measured")
    assert collective_us(found, "all_gather", 1 << 24, 16) > 2 * collective_us(H200, "all_gather", 1 << 24, 8)


def test_fewer_gpus_and_links_that_are_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="--ranks is 8"):
        derive(H200, 8, "h200x8")
    mesh = dataclasses.replace(H200, links=dataclasses.replace(H200.links, topology="mesh"))
    with pytest.raises(ValueError, match=r"links\.topology is 'mesh'"):
        derive(mesh, 16, "x")
