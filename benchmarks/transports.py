"""How fast are chunks moved, by size?

An all-gather of 64 KiB to 256 MiB a rank, in bf16 rows of 8192, by each transport alone:

    copy engine        weft's shard_p2p: a copy for each peer on one stream, with all its flags; b has no columns, so that
                       nothing is multiplied
    copy engine, 1/4   the same in four chunks a peer (hetero_unfused_1d:4)
    stores, N SMs      weft.kernels.push on N SMs, a counted flag at each peer
    NCCL ...           its ways (collectives.py)

Protocol: measure.py's; graphs; what was gathered is compared with NCCL's, bit by bit, before anything is timed. gbps is what
leaves a rank: (world_size - 1) shards in the time of a call. Traps: weft's transports leave the own shard where it is, while
NCCL copies it; small calls are repeated more often, since the common start is only known to some microseconds.

    torchrun --nproc-per-node 4 benchmarks/transports.py --json benchmarks/results/transports.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from collectives import REGISTERED, Way, ways
from measure import Failed, Job, Work, WrongResult, bytes_text, lines_of_bytes, parser, say, start, stop, together, trial
from parts import run_jobs

import weft

ROUNDS = 15
COLS = 8192
ROW_BYTES = 2 * COLS
SIZES = tuple(1 << power for power in range(16, 29, 2))
SMS = (8, 16, 32)
SCHEDULES = {"copy engine": "shard_p2p", "copy engine, 1/4": "hetero_unfused_1d:4"}
REPEAT, REPEAT_SMALL = 4, 20
SMALL_BYTES = 1 << 22


class SmPush:
    """An all-gather by stores from SMs: pushes to every peer, and one word in which all peers count.

    A call's word is lowered once all have counted, so two take turns: a peer that is a call ahead counts in the other one,
    and none is two ahead, for it waits for this rank's pushes of the call between, which follow the lowering.

        rank 0                                          rank 1
        push, count word 0 at rank 1  ~~~~~~~~~~~~~~~>  wait word 0
        wait word 0, lower it                           lower word 0
        push, count word 1 at rank 1  ~~~~~~~~~~~~~~~>  wait word 1 ...
    """

    def __init__(self, shard: torch.Tensor) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.shard, self.rank, self.size = shard, dist.get_rank(), dist.get_world_size()
        self.area, self._area_handle = _symmetric(self.size * shard.nbytes, group)
        self.words, self._words_handle = _symmetric(8, group)
        self.calls = 0

    def work(self, sms: int) -> Work:
        """A call by so many SMs. Raises ImportError where this tree has no such kernel."""
        from weft.compat.streams import Driver, Word
        from weft.kernels.push import push

        turns = [self._plan(turn) for turn in (0, 1)]
        driver = Driver()
        at = [int(self._words_handle.buffer_ptrs[self.rank]) + 4 * turn for turn in (0, 1)]
        waits = [
            driver.words([Word("wait", at[turn], total), Word("write", at[turn], 0)]) for turn, (_, total) in enumerate(turns)
        ]

        def call() -> torch.Tensor:
            turn = self.calls % 2
            self.calls += 1
            push(turns[turn][0], sms=sms)
            waits[turn](torch.cuda.current_stream().cuda_stream)
            return self.area

        return call

    def _plan(self, turn: int) -> tuple[Any, int]:
        """(the copies for the kernel, what the peers together count at this rank)."""
        from weft.core.schedule import Flag, Region
        from weft.kernels.push import push_tables, tiles_of_copy

        rows, device = self.shard.shape[0], self.shard.device
        src = Region("a", self.rank, (0, rows), (0, COLS))
        own = (self.rank * rows, (self.rank + 1) * rows)
        peers = [(self.rank + i) % self.size for i in range(1, self.size)]
        plan = push_tables(
            [(src, Region("a_full", peer, own, (0, COLS)), Flag("arrived", peer, turn)) for peer in peers],
            device=device,
            itemsize=2,
            address=self._address,
            stride=lambda _: ROW_BYTES,
            count_address=lambda flag: int(self._words_handle.buffer_ptrs[flag.rank]) + 4 * flag.index,
        )
        return plan, len(peers) * tiles_of_copy(src, itemsize=2, device=device)

    def _address(self, region: Any) -> int:
        if region.buffer == "a":
            return self.shard.data_ptr()
        area: int = self._area_handle.buffer_ptrs[region.rank]
        return area + ROW_BYTES * int(region.rows[0])

    def gathered(self) -> torch.Tensor:
        """What has arrived, with the own shard put in its place."""
        whole = self.area.view(torch.bfloat16).view(-1, COLS)
        whole.view(self.size, -1, COLS)[self.rank].copy_(self.shard)
        return whole


def _symmetric(nbytes: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """Zeroed memory of every rank, and its handle. Collective."""
    area = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
    handle = symmetric_memory.rendezvous(area, group)
    area.zero_()
    torch.cuda.synchronize()
    dist.barrier()
    return area, handle


def weft_work(shard: torch.Tensor, spec: str) -> tuple[Work, Callable[[], torch.Tensor]]:
    """(a schedule's copies and flags alone, the same with the gathered rows handed out)."""
    nothing = shard.new_empty(COLS, 0)

    def gathered() -> torch.Tensor:
        return weft.all_gather_matmul(shard, nothing, schedule=spec, return_gathered=True)[1]

    return lambda: weft.all_gather_matmul(shard, nothing, schedule=spec), gathered


def methods(shard: torch.Tensor, found: Sequence[Way]) -> tuple[dict[str, Work], dict[str, Callable[[], Any]], dict[str, str]]:
    """(what is timed, what proves it right where its own result does not, why methods are missing)."""
    works: dict[str, Work] = {}
    proofs: dict[str, Callable[[], Any]] = {}
    missing: dict[str, str] = {}
    for way in found:
        mine, whole = way.shard(*shard.shape).copy_(shard), way.whole(dist.get_world_size() * shard.shape[0], COLS)
        works[f"NCCL {way.name}"] = lambda way=way, mine=mine, whole=whole: way.all_gather(whole, mine)  # type: ignore[misc]
    for name, spec in SCHEDULES.items():
        works[name], proofs[name] = weft_work(shard, spec)
    try:
        works |= together("stores", lambda: _stores(shard, proofs))
    except Failed as failed:
        missing["stores"] = failed.reason
        say(f"LEFT OUT {failed}", file=sys.stderr)
    return works, proofs, missing


def _stores(shard: torch.Tensor, proofs: dict[str, Callable[[], Any]]) -> dict[str, Work]:
    pushes = SmPush(shard)
    works = {f"stores, {sms} SMs": pushes.work(sms) for sms in SMS}
    proofs |= dict.fromkeys(works, pushes.gathered)
    return works


def measured(nbytes: int, found: Sequence[Way], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One size: its JSON lines."""
    torch.manual_seed(dist.get_rank() + nbytes)
    size = dist.get_world_size()
    shard = torch.randn(nbytes // ROW_BYTES, COLS, device="cuda", dtype=torch.bfloat16)
    expected = torch.empty(size * shard.shape[0], COLS, device="cuda", dtype=torch.bfloat16)
    dist.all_gather_into_tensor(expected, shard)
    works, proofs, missing = methods(shard, found)

    def check(name: str, result: object) -> None:
        torch.cuda.synchronize()
        gathered = proofs[name]() if name in proofs else result
        if not torch.equal(gathered, expected):  # type: ignore[arg-type]
            raise WrongResult(f"{name}: what rank {dist.get_rank()} gathered of {nbytes} bytes a rank is not what NCCL did")

    times, failed = trial(
        works,
        arguments.modes.split(","),
        check=check,
        needed=("NCCL default",),
        rounds=arguments.rounds,
        repeat=REPEAT_SMALL if nbytes <= SMALL_BYTES else REPEAT,
    )
    lines = lines_of_bytes("transports", "all_gather", nbytes, (size - 1) * nbytes, times, arguments)
    return [line | {"missing": missing | failed} for line in lines]


def sentence(line: Mapping[str, Any]) -> str:
    figures = (f"{name} {us:.0f} us {line['gbps'][name]:.0f} GB/s" for name, us in line["us"].items())
    return f"{line['case']:8} {line['mode']:5} {' | '.join(figures)}"


def main() -> None:
    options = parser(__doc__, rounds=ROUNDS, modes="graph")
    options.add_argument("--sizes", default="", help="only these bytes a rank, with commas")
    options.add_argument("--nccl", default=",".join(REGISTERED), help="NCCL's ways beside the default (%(default)s)")
    arguments = options.parse_args()
    sizes = [int(text) for text in arguments.sizes.split(",") if text] or list(SIZES)
    if any(nbytes <= 0 or nbytes % ROW_BYTES for nbytes in sizes):
        raise ValueError(f"--sizes is {arguments.sizes!r}; each must be a multiple of {ROW_BYTES}, a row")
    start()
    found, missing = ways(arguments.nccl, max(sizes), max(sizes) * dist.get_world_size())
    jobs = [Job(name=bytes_text(nbytes), run=partial(measured, nbytes, found, arguments)) for nbytes in sizes]
    _, left_out = run_jobs(jobs, sentence, arguments, missing=missing)
    for way in found:
        way.close()
    stop(left_out)


if __name__ == "__main__":
    main()
