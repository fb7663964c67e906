"""The simulator: what shares a GPU's memory or its SMs beside GEMMs, in stories whose times can be worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from machine_tiny import tiny

from weft.core.machine import Machine, load
from weft.core.problem import LookupProblem, Problem
from weft.core.schedule import Copy, Gemm, Lane, Part, Region, Schedule
from weft.core.span import Span
from weft.perf import simulate
from weft.perf.terms import gathered_bytes
from weft.schedules import build

ALONE = Problem(op="all_gather_matmul", m=8, n=4, k=8, world_size=1)
H200 = load("h200x8")
LOOKUP = LookupProblem.of(batch=4, dims=((16,), (16,)))
"""A rank looks up 2 samples of 64 bytes for its peer, and as many for itself."""


def with_memory(gbps: float, **changes: object) -> Machine:
    machine = tiny(strided="kernel")
    return dataclasses.replace(machine, gpu=dataclasses.replace(machine.gpu, hbm_gbps=gbps), **changes)  # type: ignore[arg-type]


def of_one_rank(*lanes: Lane) -> Schedule:
    return dataclasses.replace(build(ALONE, "sequential"), ranks=(lanes,))


def within(low: int, cols: tuple[int, int] = (0, 8)) -> Copy:
    """64 bytes, or less, from rows to other rows of the same buffer."""
    return Copy(Region("a", 0, (low, low + 4), cols), Region("a", 0, (4 - low, 8 - low), cols))


def ends(spans: tuple[Span, ...], kind: str) -> list[float]:
    return [span.end_us for span in spans if span.kind == kind and not span.rank]


def test_copies_within_a_gpu_share_its_memory() -> None:
    """128 bytes are read and written at 64 a us, after 2 us of fixed cost; two copies at once have half of that each."""
    machine = with_memory(0.064, copies=dataclasses.replace(tiny().copies, engines=2))
    one, two = (Lane(name, "copy", (within(low),)) for name, low in (("one", 0), ("two", 4)))
    assert ends(simulate(of_one_rank(one), machine), "copy") == [4.0]
    assert ends(simulate(of_one_rank(one, two), machine), "copy") == [6.0, 6.0]


def test_lanes_beside_the_compute_lane_fork_and_join() -> None:
    """A copy of 2 us begins at 10, and is back 10 us after its end."""
    lanes = Lane("compute", "compute", (within(0),)), Lane("copy", "copy", (within(4),))
    machine = dataclasses.replace(tiny(), fork_us=10.0, sources=tiny().sources | {"fork_us": "made up"})
    assert ends(simulate(of_one_rank(*lanes), machine), "copy") == [3.0, 22.0]


@pytest.mark.parametrize(("cols", "by", "end"), [((0, 8), "kernel", 3.0), ((0, 4), "kernel", 7.5), ((0, 4), "engine", 2.0)])
def test_a_strided_copy_waits_for_the_sms_of_a_gemm(cols: tuple[int, int], by: str, end: float) -> None:
    """The GEMM's one wave ends at 4.5: a copy of whole rows does not care, one of some columns does where it is a kernel.
    Within a GPU such machines launch either, for 3 us; engines copy in 2."""
    part = Part(Region("a", 0, (0, 8), (0, 8)), Region("out", 0, (0, 8), (0, 4)))
    gemm = Gemm(Region("b", 0, (0, 8), (0, 4)), (part,))
    lanes = Lane("compute", "compute", (gemm,)), Lane("copy", "copy", (within(0, cols),))
    spans = simulate(of_one_rank(*lanes), tiny(strided=by))
    assert (ends(spans, "gemm"), ends(spans, "copy")) == ([4.5], [end])


def test_a_lookup_goes_at_the_pace_of_its_stores() -> None:
    """Launched at 3.5, behind a wait. The peer's 128 bytes take 2 us on the way, gathering them less; the way there and back is
    half a us. Where gathering is longer, half of the 2 us comes on top of it; the own part is written, too."""
    (end,) = ends(simulate(build(LOOKUP, "direct_store", 1), with_memory(1e6)), "lookup")
    assert end == 0.5 + 3 + 2 + 0.5
    gathered = gathered_bytes(LOOKUP, 32, H200)
    (end,) = ends(simulate(build(LOOKUP, "direct_store", 1), with_memory(0.032)), "lookup")
    assert end == pytest.approx(0.5 + 3 + gathered / 32 + 1 + 0.5 + (gathered + 128) / 32, abs=0.002)


def test_rows_that_start_anywhere_take_their_neighbours_bytes_along() -> None:
    whole, ragged = (LookupProblem.of(batch=4, dims=((dim,),), pooling=3) for dim in (32, 92))
    assert gathered_bytes(whole, 32, H200) * 1.04 == pytest.approx(3 * 32 * 4)
    assert gathered_bytes(ragged, 92, H200) * 1.04 == pytest.approx(3 * (92 * 4 + 48))
