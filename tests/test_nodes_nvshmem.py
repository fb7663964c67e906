"""Who may have NVSHMEM: asked for by name, on all ranks alike, by one group a process; and what the doctor says of it."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lone_ranks import teams

import weft
from weft.runtime import nvshmem
from weft.runtime.kept import KeptPlans
from weft.runtime.network import transport_from_environment
from weft.tools.doctor.nodes import nvshmem_finding


def _team(*others: int) -> Any:
    """Ranks that say what they have of NVSHMEM; this one is rank 0."""
    return SimpleNamespace(enter=lambda text, mine: (mine, *others), rank=0, world_size=1 + len(others), group=None)


def test_nvshmem_is_refused_on_all_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, mine, other, lacking = range(4)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(nvshmem, "missing", lambda: None)
    with pytest.raises(ValueError, match=r"which rank 1 has not \(see `weft doctor` there\); use nccl"):
        nvshmem.Heap.of(_team(lacking), device)
    for states in ((other,), (mine,)):
        with pytest.raises(ValueError, match="serves one group a process, and was started for another one; use nccl"):
            nvshmem.Heap.of(_team(*states), device)
    monkeypatch.setattr(nvshmem, "missing", lambda: "there is none")
    with pytest.raises(ValueError, match=r"which rank 0 has not \(there is none\)"):
        nvshmem.Heap.of(_team(fresh), device)


def test_transports_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_NODE_TRANSPORT", raising=False)
    assert transport_from_environment() == "nccl"
    monkeypatch.setenv("WEFT_NODE_TRANSPORT", "ib")
    with pytest.raises(ValueError, match="WEFT_NODE_TRANSPORT is 'ib'; use nccl or nvshmem"):
        transport_from_environment()


def test_a_plan_that_was_measured_is_of_its_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one node there are no messages, and plans are for all."""
    problem = weft.Problem(op="matmul_all_to_all", m=8, n=4, k=4, world_size=2)

    def keys(nodes: tuple[int, ...]) -> int:
        found = set()
        for transport in ("nccl", "nvshmem"):
            monkeypatch.setenv("WEFT_NODE_TRANSPORT", transport)
            plans = KeptPlans(SimpleNamespace(world_size=2, nodes=nodes))  # type: ignore[arg-type]
            found.add(repr(plans._key(problem, torch.device("cpu"))))
        return len(found)

    assert (keys((1, 1)), keys(())) == (2, 1)


@pytest.mark.parametrize(
    ("asked", "why", "state", "detail"),
    [
        ("nccl", "no", "ok", "no; NCCL carries them"),
        ("nvshmem", "no", "missing", "no"),
        ("nvshmem", None, "ok", "3.4.5; WEFT_NODE_TRANSPORT asks for it"),
        ("nccl", None, "ok", "3.4.5; NCCL carries them; WEFT_NODE_TRANSPORT=nvshmem would change that"),
        ("tcp", None, "missing", "WEFT_NODE_TRANSPORT is 'tcp'; use nccl or nvshmem"),
    ],
)
def test_the_doctor_says_whether_it_is_there(
    monkeypatch: pytest.MonkeyPatch, asked: str, why: str | None, state: str, detail: str
) -> None:
    monkeypatch.setenv("WEFT_NODE_TRANSPORT", asked)
    monkeypatch.setattr(nvshmem, "missing", lambda: why)
    monkeypatch.setattr(nvshmem, "version", lambda: "3.4.5")
    found = nvshmem_finding()
    assert (found.state, found.detail) == (state, detail)
    assert bool(found.cure) == (state == "missing")


def test_a_build_without_nvshmem_says_so() -> None:
    if torch.version.cuda:
        pytest.skip("this PyTorch is for GPUs, and may have it")
    assert nvshmem.missing() == "this PyTorch has none, or does not find its library"


def _taken(heap: Any, team: Any, into: list[Any]) -> None:
    into.append(heap.take(4096, team, lambda: None))


def test_memory_is_taken_again_only_where_all_ranks_would_take_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A team fails when one rank has taken memory of a program, and the other has not."""
    monkeypatch.setattr(nvshmem.Heap, "_made", lambda self, nbytes, team: torch.ones(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    heaps = [nvshmem.Heap.__new__(nvshmem.Heap) for _ in range(2)]
    for heap in heaps:
        heap._free, heap._number, heap._device = {}, {}, torch.device("cpu")
        heap._library = SimpleNamespace(nvshmem_quiet=lambda: None)

    def by_all() -> list[Any]:
        """One on each rank, and their numbers."""
        taken: list[list[Any]] = [[], []]
        threads = [Thread(target=_taken, args=args) for args in zip(heaps, teams(), taken, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [piece for (piece,) in taken]

    first, second = by_all(), by_all()
    for heap, *pieces in zip(heaps, first, second, strict=True):
        for piece in pieces:
            heap.give(piece)
    assert [piece is other for piece, other in zip(by_all(), second, strict=True)] == [True, True]
    heaps[0].give(second[0])  # rank 1 has not come to where it would have taken it, or does not give it back
    third = by_all()
    assert third[0] is not second[0]
    assert third[1] is not first[1]
    for heap, piece in zip(heaps, third, strict=True):
        heap.give(piece)
    assert [piece is other for piece, other in zip(by_all(), third, strict=True)] == [True, True]
