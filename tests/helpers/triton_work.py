"""What ranks do in the tests of weft.triton, interpreted and on GPUs: documented examples, protocols, mistakes."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft

DOCUMENT = Path(__file__).parents[2] / "docs" / "triton.md"
MORE = Path(__file__).with_name("triton_examples.md")
"""Examples of functions that the document describes in words."""
_BLOCK = re.compile(r"^```py ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def documented() -> dict[str, str]:
    """By name, the source of each example, with the imports that the document says they begin with."""
    (_, imports), *named = _BLOCK.findall(DOCUMENT.read_text(encoding="utf-8") + MORE.read_text(encoding="utf-8"))
    return {name: f"{imports}\n\n{code}" for name, code in named}


def load(path: str) -> Any:
    """A module from a file: Triton reads a kernel's source there."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(path: str) -> None:
    """One documented example on this rank."""
    from weft.triton import Peers

    example: Callable[[Peers], None] = load(path).example
    try:
        with Peers() as peers:
            example(peers)
    finally:
        weft.close()  # one example's wait ends at its bound, which is a failure of the group


def run_protocol(name: str, size: int, dtype: str, calls: int, late_s: float) -> None:
    """Calls on new data, none of which waits for the host of a peer. Late once: rank 0 before its launch, rank 1 after it."""
    from triton_kernels import PROTOCOLS

    from weft.triton import Peers

    with Peers() as peers:
        protocol = PROTOCOLS[name](peers, size, getattr(torch, dtype))
        peers.settle()
        for call in range(calls):
            protocol.fill(call)
            time.sleep(late_s * (call == 2 and peers.rank == 0))
            protocol.launch()
            time.sleep(late_s * (call == 4 and peers.rank == 1))
            peers.check()
            protocol.check(call)


def run_protocol_in_a_graph(name: str, size: int, dtype: str, calls: int) -> None:
    """The same on a GPU, replayed: the graph's arguments stay what they were, the kernels count."""
    from triton_kernels import PROTOCOLS

    from weft.triton import Peers

    with Peers() as peers:
        protocol = PROTOCOLS[name](peers, size, getattr(torch, dtype))
        protocol.fill(0)
        protocol.launch()
        peers.settle()
        protocol.check(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            protocol.launch()
        for call in range(1, calls):
            protocol.fill(call)
            graph.replay()
            peers.check()
            protocol.check(call)


def hammer(dtype: str, times: int) -> None:
    """Additions and signals of all ranks to the same words at once."""
    from triton_kernels import hammer_kernel

    from weft.triton import Peers

    with Peers() as peers:
        total, flag = peers.tensor(16, getattr(torch, dtype)), peers.tensor(1, torch.int32)
        size = peers.world_size
        hammer_kernel[(1,)](total.local, total.peers, flag.local, flag.peers, size, times, peers.tries, peers.status, N=16)
        peers.check()
        assert flag.local.tolist() == [2 * times * size]
        assert total.local.tolist() == [times * size * (at + 1) for at in range(16)]


def numbers() -> None:
    """Where a kernel has no tile, but one number."""
    from triton_kernels import numbers_kernel

    from weft.triton import Peers

    with Peers() as peers:
        words, total = peers.tensor(2, torch.float16), peers.tensor(1, torch.int32)
        numbers_kernel[(1,)](words.local, words.peers, total.local, total.peers, peers.rank, peers.world_size)
        peers.settle()
        assert words.local.tolist() == [7.0, (peers.rank - 1) % peers.world_size]
        assert total.local.tolist() == [3]


def wrap_around() -> None:
    """A flag that passes 2^31 - 1 opens its waits as before it, and not the next one."""
    from triton_kernels import wrapping_kernel

    from weft.triton import Peers

    with Peers() as peers:
        flag = peers.tensor(1, torch.int32)
        flag.local.fill_(2**31 - 3)
        out = torch.zeros(2, dtype=torch.int32, device=peers.device)
        for call in range(1, 6):
            need = 2**31 - 3 + call
            wrapping_kernel[(1,)](flag.local, out, need, need + 1, peers.tries, peers.status)
            assert out.tolist() == [1, 0], call
            peers.status.zero_()
        assert flag.local.tolist() == [-(2**31) + 2]


def calls_without_end() -> None:
    """The number of a call stays a number that kernels can take turns by."""
    from triton_kernels import turns_kernel

    from weft.triton import Peers

    with Peers() as peers:
        calls, out = peers.calls(), torch.zeros(2, dtype=torch.int64, device=peers.device)
        calls[0] = 2**31 - 2
        for call in range(2**31 - 1, 2**31 + 3):
            turns_kernel[(1,)](calls, out)
            assert out.tolist() == [call, call % 2]


def example_with_a_slow_rank(folder: str, name: str) -> None:
    """An example's own main, where rank 0 is slow in its fifth call, behind what it sends to rank 1."""
    sys.path.insert(0, folder)
    example = importlib.import_module(name)
    order, calls, check = example.remote_first, [0], example.Peers.check

    def slowly(step: Any, tiles: Any, rank: Any, world_size: Any) -> tuple[Any, Any]:
        dst_rank, tile = order(step, tiles, rank, world_size)
        if (calls[0], int(rank), int(dst_rank.handle.data[0]), int(tile.handle.data[0])) == (4, 0, 2, 0):
            time.sleep(1.0)
        return dst_rank, tile

    def counted(peers: Any) -> None:
        check(peers)
        calls[0] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "remote_first", slowly)
        patch.setattr(example.Peers, "check", counted)
        example.main()
    assert calls[0] >= 6


def one_rank_stays_away() -> str:
    """Rank 0 waits for a rank that never launches; what each rank is told. Of few looks, which take any time: that rank waits
    for the others by the clock."""
    from triton_kernels import Exchange

    from weft.core.errors import WeftError
    from weft.triton import Peers

    try:
        with Peers(timeout_s=10.0) as peers:
            peers.tries = 200
            exchange = Exchange(peers, 77)
            if peers.rank != 1:
                exchange.launch()
    except WeftError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        weft.close()  # the group has failed, and other tests have the same ranks
    return "no error"


def mistakes() -> tuple[str, list[str], str]:
    """What wrong arguments raise: two by themselves, and several of which each leaves the peers whole."""
    from weft.triton import Peers

    messages = []
    for shape in ((-1,), (2, "rank")):
        with Peers() as peers:
            shape = tuple(peers.rank if extent == "rank" else extent for extent in shape)
            try:
                peers.tensor(shape, torch.float32, name="x")
            except ValueError as error:
                messages.append(str(error))
    bad = []
    with Peers() as peers:
        dropped = peers.tensor(4, torch.int32)
        peers.drop([dropped, dropped])
        wrong: list[tuple[Any, Any]] = [((True, 2), torch.int32), (1 << 61, torch.int32), (4, torch.quint8), (4, "int32")]
        named = partial(peers.tensor, 4, torch.int32, name=5)  # type: ignore[arg-type]
        drops = [partial(peers.drop, given) for given in ([dropped], [None], None)]
        outside = partial(Peers, dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
        for call in (*(partial(peers.tensor, *given) for given in wrong), named, *drops, outside):
            with pytest.raises(ValueError, match=r".") as caught:
                call()
            bad.append(str(caught.value))
        empty = peers.tensor((2, 0), torch.int8)
        assert (empty.name, empty.local.shape) == ("tensor 1", (2, 0))
    return messages[0], bad, messages[1]


def used_when_over() -> list[str]:
    """What Peers say that are closed, twice over, and that have failed."""
    from weft.core.errors import WeftError
    from weft.triton import Peers

    messages, closed, failed = [], Peers(), Peers()
    closed.close()
    closed.close()
    with pytest.raises(RuntimeError, match="planted"), failed:
        raise RuntimeError("planted")
    for peers in (closed, failed):
        for use in (peers.settle, partial(peers.tensor, 4, torch.int32)):
            with pytest.raises(WeftError) as caught:
                use()
            messages.append(str(caught.value))
    return messages


def beside_operators() -> list[str]:
    """Peers and operators of one group: each goes on when the other has ended, and a failure of Peers ends an operator's calls
    until the group is closed. What the operator and new Peers then raise."""
    import weft
    from weft.core.errors import WeftError
    from weft.triton import Peers

    a, b, raised = torch.ones(2, 4), torch.ones(4, 2), []
    with Peers() as first:
        weft.all_gather_matmul(a, b, schedule="sequential")
        first.settle()
        weft.close()
        first.settle()
        weft.all_gather_matmul(a, b, schedule="sequential")
    weft.all_gather_matmul(a, b, schedule="sequential")
    dist.barrier()
    with pytest.raises(RuntimeError, match="planted"), Peers():
        raise RuntimeError("planted")
    for call in (partial(weft.all_gather_matmul, a, b, schedule="sequential"), Peers):
        with pytest.raises(WeftError) as caught:
            call()
        raised.append(str(caught.value))
    weft.close()
    with Peers() as last:
        last.settle()
        weft.all_gather_matmul(a, b, schedule="sequential")
    weft.close()
    return raised
