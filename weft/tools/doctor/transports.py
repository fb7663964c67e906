"""Compares the rate of each transport with the rate that the links should give, and finds out whether overlap pays.

The probes are those of `weft calibrate`. They run in one rank process per GPU, so a probe that hangs or crashes can be ended
and reported as a finding. All probes together take at most BOUND_S seconds. Probes that did not run are reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from weft.tools.doctor.finding import Finding
from weft.tools.doctor.rates import Rates

if TYPE_CHECKING:
    from weft.tools.calibrate.samples import ProbeSample

BOUND_S = 20.0
PROBE_S = 8.0
"""The timeout of one probe in seconds."""
M, N, K = 8192, 28672, 8192
"""The shape for which overlap is measured: the up projection of an MLP of Llama-3 70B with 8192 tokens."""
SPEC = "shard_p2p"
"""This schedule uses copy engines and cuBLAS, so no kernel must be compiled. Other schedules may hide more."""
_BYTES = 1 << 26
_SLOW_CURE = (
    "see that nothing else uses the GPUs (nvidia-smi), and their links (nvidia-smi nvlink --status, nvidia-smi topo -m); "
    "NCCL_DEBUG=INFO says what NCCL chose"
)
Answer: TypeAlias = "list[ProbeSample] | str"
"""The samples of a probe, or the reason why there are none."""


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Transport describes how to measure a transport.

    probe, arguments: the probe of weft.tools.calibrate and its arguments.
    sample: the name of the samples that are used.
    moved: returns the bytes that a GPU sends in a sample, by the sample's key and the number of ranks.
    least: the share of the links' rate below which a warning is given. Shares measured on 8 x H200 are from 0.6 to 0.8.
    alone: whether each GPU sends to one peer only."""

    name: str
    probe: str
    arguments: tuple[Any, ...]
    sample: str
    moved: Callable[[tuple[int, ...], int], int]
    least: float
    cure: str
    alone: bool = False


def _to_all(key: tuple[int, ...], ranks: int) -> int:
    return key[0] * (ranks - 1)


def _there_and_back(key: tuple[int, ...], ranks: int) -> int:
    return 2 * key[0] * (ranks - 1)


def _to_one(key: tuple[int, ...], ranks: int) -> int:
    return key[0] * (key[1] if len(key) > 1 else 1)


_PEER_CURE = "see the findings on peer access; CUDA's symmetric memory needs it, and a container needs --ipc=host or --shm-size"
_NCCL_CURE = "run with NCCL_DEBUG=WARN, which names the cause; a container needs --ipc=host or --shm-size"
_STORE_CURE = f"kernels need Triton and a C compiler (gcc); {_PEER_CURE}"
_COPY: dict[str, Any] = {"probe": "copies", "moved": _to_one, "least": 0.5, "cure": _PEER_CURE, "alone": True}
_NCCL: dict[str, Any] = {"probe": "collectives", "moved": _to_all, "least": 0.4, "cure": _NCCL_CURE}
TRANSPORTS = (
    Transport(name="copy engine, push to one peer", arguments=("push",), sample="copy push", **_COPY),
    Transport(name="copy engine, pull from one peer", arguments=("pull",), sample="copy pull", **_COPY),
    Transport(
        name="copy engine, push to all peers",
        probe="several",
        arguments=(),
        sample="several",
        moved=_to_all,
        least=0.4,
        cure=_PEER_CURE,
    ),
    Transport(
        name="stores from kernels to all peers",
        probe="stores",
        arguments=(),
        sample="stores",
        moved=_to_all,
        least=0.3,
        cure=_STORE_CURE,
    ),
    Transport(name="NCCL all_gather", arguments=("all_gather", (_BYTES,)), sample="all_gather", **_NCCL),
    Transport(name="NCCL reduce_scatter", arguments=("reduce_scatter", (_BYTES,)), sample="reduce_scatter", **_NCCL),
    Transport(
        name="NCCL all_reduce", arguments=("all_reduce", (_BYTES,)), sample="all_reduce", **{**_NCCL, "moved": _there_and_back}
    ),
    Transport(name="NCCL all_to_all", arguments=("all_to_all", (_BYTES,)), sample="all_to_all", **_NCCL),
)


def transport_findings(count: int, links: Rates | None) -> tuple[Finding, ...]:
    """Return a finding for each transport between `count` GPUs, and one on overlap. Errors of the GPUs become findings."""
    answers = dict(tried(count, [*((t.name, _probe, (t.probe, *t.arguments)) for t in TRANSPORTS), ("overlap", overlap, ())]))
    return (
        *(judged(transport, answers[transport.name], count, links) for transport in TRANSPORTS),
        verdict(answers["overlap"]),
    )


Work = tuple[str, Callable[..., Any], tuple[Any, ...]]


def tried(count: int, works: Sequence[Work], *, device: str = "cuda", bound_s: float = BOUND_S) -> Iterator[tuple[str, Answer]]:
    """Run each work in rank processes, and yield its samples or the reason why there are none.

    The last work runs first, because it says most. If a rank does not answer, the ranks cannot be used again, and the remaining
    works are not tried.
    """
    from weft.runtime.ranks import RankFailed, Ranks

    until, lost = time.monotonic() + bound_s, ""
    try:
        pool = Ranks(count, device=device, environment={"WEFT_CACHE_DIR": "", "WEFT_TIMEOUT_S": "5"}, start_s=bound_s)
    except RankFailed as failed:
        yield from ((name, f"ranks do not start: {_first(failed)}") for name, _, _ in works)
        return
    try:
        for name, work, arguments in [works[-1], *works[:-1]]:
            left_s = min(PROBE_S, until - time.monotonic())
            if lost or left_s < 1:
                yield name, lost or f"not tried within {bound_s:g} s; weft calibrate takes longer, and measures all"
                continue
            try:
                yield name, pool.run(work, device, *arguments, timeout_s=left_s)[0]
            except RankFailed as failed:
                yield name, _first(failed)
                lost = f"not tried, after {name} failed" if failed.lost else ""
    finally:
        pool.close(grace_s=0 if lost else 2)


def _first(failed: Exception) -> str:
    return str(failed).splitlines()[0]


def _probe(device: str, probe: str, *arguments: Any) -> list[ProbeSample]:
    """Run one rank's part of a probe of weft.tools.calibrate."""
    from weft.tools.calibrate import common, gpu_probes

    found: list[ProbeSample] = getattr(common if probe == "collectives" else gpu_probes, probe)(device, *arguments)
    return found


def overlap(device: str) -> list[ProbeSample]:
    """Measure all-gather and matmul of one shape, each alone, and weft's operator with SPEC."""
    import torch
    import torch.distributed as dist

    from weft.core.problem import Problem
    from weft.ops import all_gather_matmul, close
    from weft.tools.calibrate import common
    from weft.tools.calibrate.clock import Clock

    clock, size = Clock(device), dist.get_world_size()
    problem = Problem(op="all_gather_matmul", m=M, n=N, k=K, world_size=size)
    rows, cols = problem.shards[dist.get_rank()], problem.columns(dist.get_rank())
    gathered = common.collectives(device, "all_gather", (-(-M // size) * K * problem.itemsize,))
    multiplied = common.gemms(device, ((M, cols, K),), problem.dtype)
    a = torch.randn(rows[1] - rows[0], K, device=clock.device, dtype=torch.bfloat16)
    b = torch.randn(K, cols, device=clock.device, dtype=torch.bfloat16)
    whole = clock.sample(SPEC, (M, N, K), lambda: all_gather_matmul(a, b, rows=M, schedule=SPEC), repeat=4)
    clock.barrier()
    close()
    return [*gathered, *multiplied, whole]


def judged(transport: Transport, answer: Answer, ranks: int, links: Rates | None) -> Finding:
    """Compare a transport's fastest sample with the rate of the links."""
    what = f"transport: {transport.name}"
    if isinstance(answer, str):
        return Finding(what=what, state="warn", detail=answer, cure=transport.cure)
    gbps = max(transport.moved(s.key, ranks) / s.median_us / 1e3 for s in answer if s.what == transport.sample)
    if links is None:
        return Finding(what=what, state="ok", detail=f"{gbps:.0f} GB/s a GPU; what the links should give is not known")
    full = links.pair_gbps if transport.alone else links.port_gbps
    detail = f"{gbps:.0f} GB/s a GPU, {gbps / full:.0%} of {full:.0f} ({links.kind})"
    slow = gbps < transport.least * full
    return Finding(what=what, state="warn" if slow else "ok", detail=detail, cure=_SLOW_CURE if slow else "")


def verdict(answer: Answer) -> Finding:
    """Report whether overlap pays: how much of the time could be hidden, and how much one schedule hides."""
    what = f"overlap (all_gather + matmul, {M} x {N} x {K}, bfloat16)"
    if isinstance(answer, str):
        return Finding(what=what, state="warn", detail=answer, cure=_STORE_CURE)
    gathered, multiplied, whole = (sample.median_us for sample in answer)
    sequential, hidden = gathered + multiplied, min(gathered, multiplied)
    detail = (
        f"NCCL {gathered:.0f} us, matmul {multiplied:.0f} us: {hidden / sequential:.0%} could be hidden at most; "
        f"{answer[2].what} takes {whole:.0f} us and hides {max(0.0, (sequential - whole) / sequential):.0%}, "
        "others may hide more"
    )
    if whole < sequential:
        return Finding(what=what, state="ok", detail=f"{detail}: it pays")
    cure = "leave schedule='auto', which measures and keeps the sequential program; weft plan says what other shapes gain"
    return Finding(what=what, state="warn", detail=f"{detail}: it does not pay for this shape", cure=cure)
