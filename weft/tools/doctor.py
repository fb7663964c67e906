"""`weft doctor` finds out which of weft's requirements this machine fulfils, and says how to fix the others.

It tries everything: it imports packages, creates shared memory, and lets every pair of GPUs exchange data and compares the
data, because a link can exist and deliver wrong bytes: one with an IOMMU that remaps, or a switch without its fabric manager,
may report success and deliver zeros. Then it compares the rate of each transport with that of the links, and times one operator
to see whether overlap pays. It leaves the machine unchanged.

The rates of transports come from the probes of `weft calibrate`, in one rank process per GPU, within BOUND_S seconds. The rates
of links come from nvidia-smi's matrix, the GPUs' generation and PCIe slots. NVn in that matrix is a bond of n NVLinks. If the
bonds to all peers have more links than the GPU, they go through a switch and share the GPU's links. The rates of PCIe are those
of a lane by generation, after encoding. Sources: NVIDIA's NVLink pages and whitepapers; PCI-SIG.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from weft.tools.requirements import Finding, State, environment_findings, host_findings, software_findings

if TYPE_CHECKING:
    from weft.tools.calibrate import ProbeResults
    from weft.tools.calibrate.common import ProbeSample

WITHOUT_GPU = "weft run --device cpu, weft plan and weft schedules work without; for GPUs, see that nvidia-smi lists them"
PATTERN = 1 << 20
PEER_CURE = (
    "see `nvidia-smi topo -p2p rw`; in a virtual machine pass all GPUs of the host through, on bare metal turn the IOMMU or "
    "PCIe ACS off; until then leave one of the two out by CUDA_VISIBLE_DEVICES"
)
_NVLINK_GBPS = {6: 20.0, 7: 25.0, 8: 25.0, 9: 25.0, 10: 50.0, 12: 50.0}
"""The rate of one NVLink in one direction, by major compute capability."""
_NVLINKS = {6: 4, 7: 6, 8: 12, 9: 18, 10: 18, 12: 18}
"""The largest number of NVLinks of one GPU, by major compute capability."""
_PCIE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""The rate of one PCIe lane in one direction, by generation."""
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


def diagnose(*, quick: bool = False, progress: Callable[[str, int, int], None] = lambda *_: None) -> tuple[Finding, ...]:
    """Return all findings, in the order in which a user would fix them.

    This takes some seconds to import PyTorch, and about 20 s on two or more GPUs. quick: whether to skip timing transports.
    progress: called before each group of findings as progress(what, groups done, groups)."""
    groups: dict[str, Callable[[], Iterable[Finding]]] = {
        "importing PyTorch and other packages": software_findings,
        "environment variables": environment_findings,
        "memory and processes of the host": host_findings,
        "GPUs and links" if quick else "GPUs, links and transports": lambda: gpu_findings(quick=quick),
    }
    found: list[Finding] = []
    for at, (what, findings) in enumerate(groups.items()):
        progress(what, at, len(groups))
        found += findings()
    return tuple(found)


def gpu_findings(*, quick: bool = True) -> tuple[Finding, ...]:
    """Examine CUDA, the GPUs and their links. Unless quick, also measure each transport.

    Without a GPU, the finding says what still works. Without PyTorch there are no findings."""
    try:
        import torch
    except Exception:  # software_findings reports this
        return ()
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        return (_no_gpu(torch),)
    count = torch.cuda.device_count()
    devices = tuple(device_finding(torch, index) for index in range(count))
    cuda = Finding(what="CUDA (of PyTorch)", state="ok", detail=str(torch.version.cuda or torch.version.hip))
    found = (cuda, _nccl(torch), _bindings(count), *devices)
    if count < 2:
        detail = "one GPU: overlap on GPUs needs two or more"
        return (
            *found,
            Finding(what="GPU pairs", state="warn", detail=detail, cure="weft run --device cpu works with any number"),
        )
    topology = _run("nvidia-smi", "topo", "-m")
    found = (*found, links_finding(topology), *peer_findings(torch, count))
    if quick or any(finding.state == "missing" for finding in found):
        return found
    return (*found, *transport_findings(count, _rates(torch, topology)))


def device_finding(torch: ModuleType, index: int) -> Finding:
    """Report a GPU's name, SMs, memory and copy engines."""
    device = torch.cuda.get_device_properties(index)
    engines = _copy_engines(index)
    copies = f"{engines} copy engines" if engines is not None else "copy engines not known without cuda-bindings"
    memory = device.total_memory / 2**30
    detail = f"{device.name}, {device.multi_processor_count} SMs, {memory:.0f} GiB, sm_{device.major}{device.minor}, {copies}"
    return Finding(what=f"GPU {index}", state="ok", detail=detail)


def peer_findings(torch: ModuleType, count: int) -> tuple[Finding, ...]:
    """Return one finding if every pair delivers correct data, and otherwise one for each pair that does not."""
    pairs = [(src, dst) for src in range(count) for dst in range(count) if src != dst]
    bad = tuple(finding for src, dst in pairs if (finding := _bad_pair(torch, src, dst)))
    if bad:
        return bad
    detail = f"{len(pairs)} ordered pairs, {PATTERN * 4 >> 20} MiB there and back, every value right"
    return (Finding(what="peer access", state="ok", detail=detail),)


def links_finding(topology: str | None) -> Finding:
    """Report the number of pairs of GPUs by kind of link. topology: the output of `nvidia-smi topo -m`."""
    kinds = link_kinds(topology) if topology else {}
    if not kinds:
        return Finding(what="links", state="warn", detail="not known", cure="run nvidia-smi topo -m; is it installed?")
    detail = ", ".join(f"{kind} between {count} pair{'s' * (count > 1)}" for kind, count in sorted(kinds.items()))
    slow = [kind for kind in kinds if not kind.startswith("NV")]
    cure = f"{' and '.join(sorted(slow))} go over PCIe: expect less than a tenth of NVLink's rate" if slow else ""
    return Finding(what="links", state="warn" if slow else "ok", detail=detail, cure=cure)


def link_kinds(topology: str) -> dict[str, int]:
    """Return the number of unordered pairs of GPUs by kind of link, from the matrix that nvidia-smi prints.

    >>> link_kinds("\\tGPU0\\tGPU1\\tNIC0\\nGPU0\\t X \\tNV18\\tPHB\\nGPU1\\tNV18\\t X \\tPHB\\n")
    {'NV18': 1}
    """
    kinds: dict[str, int] = {}
    for index, row in enumerate(link_matrix(topology)):
        for kind in row[index + 1 :]:
            kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def link_matrix(topology: str) -> list[list[str]]:
    """Return the matrix of kinds of link between GPUs, with X on the diagonal."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology.splitlines()]
    matrix = [row[1:] for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and "X" in row[1:]]
    return [row[: len(matrix)] for row in matrix]


def _rates(torch: ModuleType, topology: str | None) -> Rates | None:
    """Return the rates that the links should give. Links of the visible GPUs are assumed to equal those of all in the host."""
    slots = _run("nvidia-smi", "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader")
    return rates(link_matrix(topology or ""), torch.cuda.get_device_properties(0).major, (slots or "").partition("\n")[0])


def _bad_pair(torch: ModuleType, src: int, dst: int) -> Finding | None:
    what = f"peer access GPU {src} -> GPU {dst}"
    try:
        direct = torch.cuda.can_device_access_peer(src, dst)
        wrong = _wrong_values(torch, src, dst)
    except RuntimeError as error:
        return Finding(what=what, state="missing", detail=f"the copy failed: {str(error).splitlines()[0]}", cure=PEER_CURE)
    if wrong:
        return Finding(what=what, state="missing", detail=f"{wrong} of {PATTERN} values arrive wrong", cure=PEER_CURE)
    if not direct:
        detail = "copies are right, but go through the host: no direct access"
        return Finding(what=what, state="missing", detail=detail, cure=PEER_CURE)
    return None


def _wrong_values(torch: ModuleType, src: int, dst: int) -> int:
    """Count wrong values, on the peer or after the copy back. The pattern differs from pair to pair."""
    sent = torch.arange(PATTERN, dtype=torch.int32) * 2654435 + 1 + src * 64 + dst
    there = torch.full((PATTERN,), -1, dtype=torch.int32, device=f"cuda:{dst}")
    back = torch.full((PATTERN,), -1, dtype=torch.int32, device=f"cuda:{src}")
    there.copy_(sent.to(f"cuda:{src}"))
    back.copy_(there)
    return max(int((there.cpu() != sent).sum()), int((back.cpu() != sent).sum()))


def _no_gpu(torch: ModuleType) -> Finding:
    if torch.version.cuda is None and "GPU" in (_run("nvidia-smi", "-L") or ""):
        cure = "install PyTorch's CUDA wheel; the one that is installed is for CPUs"
        return Finding(what="GPUs", state="warn", detail="there, but this PyTorch cannot use them", cure=cure)
    return Finding(what="GPUs", state="warn", detail="none found", cure=WITHOUT_GPU)


def _nccl(torch: ModuleType) -> Finding:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        cure = "install a PyTorch that is built with NCCL"
        return Finding(what="NCCL (sequential, collectives)", state="missing", detail="not in this PyTorch", cure=cure)
    return Finding(what="NCCL (sequential, collectives)", state="ok", detail=".".join(map(str, torch.cuda.nccl.version())))


def _bindings(count: int) -> Finding:
    what = "cuda-bindings (stream waits, copy engines)"
    if _driver() is None:
        state: State = "missing" if count > 1 else "warn"
        cure = "pip install cuda-bindings, of the same CUDA version as PyTorch"
        return Finding(what=what, state=state, detail="not installed", cure=cure)
    return Finding(what=what, state="ok", detail=importlib.metadata.version("cuda-bindings"))


def _copy_engines(index: int) -> int | None:
    driver = _driver()
    if driver is None:
        return None
    driver.cuInit(0)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT
    status, engines = driver.cuDeviceGetAttribute(attribute, index)
    return int(engines) if int(status) == 0 else None


def _driver() -> Any | None:
    """Return the driver module of cuda-bindings, or None if it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None


def _run(*command: str) -> str | None:
    """Return the output of a command, or None if it does not exist, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates from one GPU to one other (`pair_gbps`) and to all others at once (`port_gbps`).

    kind: the kind of link of the slowest pair."""

    kind: str
    pair_gbps: float
    port_gbps: float


def rates(matrix: list[list[str]], major: int, pcie: str) -> Rates | None:
    """Return the rates that the links should give, or None if a kind of link is not known.

    matrix: the kinds of link between GPUs as nvidia-smi prints them, with X on the diagonal.
    major: the major compute capability. pcie: "generation, lanes" of the slots, as nvidia-smi's query prints them.

    >>> rates([["X", "NV18"], ["NV18", "X"]], 9, "5, 16")
    Rates(kind='NV18', pair_gbps=450.0, port_gbps=450.0)
    """
    found = [_row(kinds, major, pcie) for kinds in matrix]
    if not found or any(row is None for row in found):
        return None
    known = [row for row in found if row is not None]
    slowest = min(known, key=lambda row: row.pair_gbps)
    return Rates(kind=slowest.kind, pair_gbps=slowest.pair_gbps, port_gbps=min(row.port_gbps for row in known))


def _row(kinds: list[str], major: int, pcie: str) -> Rates | None:
    """Return the rates of one GPU's links to all others, or None if a kind of link is not known."""
    links = {kind: int(kind[2:]) for kind in kinds if re.fullmatch(r"NV\d+", kind)}
    others = [kind for kind in kinds if kind != "X"]
    if others and len(links) == len(set(others)) and major in _NVLINKS:
        fewest = min(links, key=lambda kind: links[kind])
        together = min(sum(links[kind] for kind in others), max(_NVLINKS[major], links[fewest]))
        one = _NVLINK_GBPS[major]
        return Rates(kind=fewest, pair_gbps=one * links[fewest], port_gbps=one * together)
    slow = [kind for kind in others if kind not in links]
    gbps = pcie_gbps(pcie)
    return Rates(kind=slow[0], pair_gbps=gbps, port_gbps=gbps) if slow and gbps else None


def pcie_gbps(slot: str) -> float | None:
    """Return the rate of a PCIe slot described as "generation, lanes"; None for any other text.

    >>> pcie_gbps("4, 16")
    31.504
    """
    match = re.match(r"\s*(\d+)\s*,\s*(\d+)", slot)
    lane = _PCIE_GBPS.get(int(match[1])) if match else None
    return lane * int(match[2]) if match and lane else None


@dataclass(frozen=True, kw_only=True)
class Transport:
    """How to measure a transport.

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


_PEER_CURE = "see the findings on peer access; CUDA's symmetric memory needs it, and a container needs --ipc=host or --shm-size"
_NCCL_CURE = "run with NCCL_DEBUG=WARN, which names the cause; a container needs --ipc=host or --shm-size"
_STORE_CURE = f"kernels need Triton and a C compiler (gcc); {_PEER_CURE}"
_TO_ALL: Callable[[tuple[int, ...], int], int] = lambda key, ranks: key[0] * (ranks - 1)  # noqa: E731
_ALL_PEERS: dict[str, Any] = {"arguments": (), "moved": _TO_ALL}
_COPY: dict[str, Any] = {
    "probe": "copies",
    "moved": lambda key, ranks: key[0] * key[1],
    "least": 0.5,
    "cure": _PEER_CURE,
    "alone": True,
}
TRANSPORTS = (
    Transport(name="copy engine, push to one peer", arguments=("push",), sample="copy push", **_COPY),
    Transport(name="copy engine, pull from one peer", arguments=("pull",), sample="copy pull", **_COPY),
    Transport(
        name="copy engine, push to all peers", probe="several", sample="several", least=0.4, cure=_PEER_CURE, **_ALL_PEERS
    ),
    Transport(
        name="stores from kernels to all peers", probe="stores", sample="stores", least=0.3, cure=_STORE_CURE, **_ALL_PEERS
    ),
    *(
        Transport(
            name=f"NCCL {op}",
            probe="collectives",
            arguments=(op, (_BYTES,)),
            sample=op,
            moved=(lambda key, ranks: 2 * _TO_ALL(key, ranks)) if op == "all_reduce" else _TO_ALL,
            least=0.4,
            cure=_NCCL_CURE,
        )
        for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    ),
)


def transport_findings(count: int, links: Rates | None) -> tuple[Finding, ...]:
    """Return a finding for each transport between `count` GPUs, and one on overlap. Errors of the GPUs become findings."""
    from weft.runtime.ranks import RankFailed
    from weft.tools.calibrate import Probe, ProbeResults, common, gpu_probes, run_probes

    todo = [Probe(name="overlap", work=overlap)]  # it runs first, because it says most
    for each in TRANSPORTS:
        module: Any = common if each.probe == "collectives" else gpu_probes
        todo.append(Probe(name=each.name, work=getattr(module, each.probe), arguments=each.arguments))
    environment = {"WEFT_CACHE_DIR": "", "WEFT_TIMEOUT_S": "5"}
    try:
        results = run_probes("cuda", count, todo, probe_s=PROBE_S, total_s=BOUND_S, start_s=BOUND_S, environment=environment)
    except RankFailed as failed:
        results = ProbeResults(
            failed=dict.fromkeys((probe.name for probe in todo), f"ranks do not start: {failed}".splitlines()[0])
        )
    return (*(judged(transport, results, count, links) for transport in TRANSPORTS), verdict(results))


def overlap(device: str) -> list[ProbeSample]:
    """Measure all-gather and matmul of one shape, each alone, and weft's operator with SPEC."""
    import torch
    import torch.distributed as dist

    from weft.core.problem import Problem
    from weft.ops import all_gather_matmul, close
    from weft.tools.calibrate import common

    clock, size = common.Clock(device), dist.get_world_size()
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


def judged(transport: Transport, results: ProbeResults, ranks: int, links: Rates | None) -> Finding:
    """Compare a transport's fastest sample with the rate of the links."""
    what = f"transport: {transport.name}"
    if transport.name in results.failed:
        return Finding(what=what, state="warn", detail=results.failed[transport.name], cure=transport.cure)
    samples = (sample for sample in results.samples[transport.name] if sample.what == transport.sample)
    gbps = max(transport.moved(sample.key, ranks) / sample.median_us / 1e3 for sample in samples)
    if links is None:
        return Finding(what=what, state="ok", detail=f"{gbps:.0f} GB/s a GPU; what the links should give is not known")
    full = links.pair_gbps if transport.alone else links.port_gbps
    detail = f"{gbps:.0f} GB/s a GPU, {gbps / full:.0%} of {full:.0f} ({links.kind})"
    slow = gbps < transport.least * full
    return Finding(what=what, state="warn" if slow else "ok", detail=detail, cure=_SLOW_CURE if slow else "")


def verdict(results: ProbeResults) -> Finding:
    """Report whether overlap pays: how much of the time could be hidden, and how much one schedule hides."""
    what = f"overlap (all_gather + matmul, {M} x {N} x {K}, bfloat16)"
    if "overlap" in results.failed:
        return Finding(what=what, state="warn", detail=results.failed["overlap"], cure=_STORE_CURE)
    gathered, multiplied, whole = (sample.median_us for sample in results.samples["overlap"])
    sequential, hidden = gathered + multiplied, min(gathered, multiplied)
    detail = (
        f"NCCL {gathered:.0f} us, matmul {multiplied:.0f} us: {hidden / sequential:.0%} could be hidden at most; "
        f"{SPEC} takes {whole:.0f} us and hides {max(0.0, (sequential - whole) / sequential):.0%}, "
        "others may hide more"
    )
    if whole < sequential:
        return Finding(what=what, state="ok", detail=f"{detail}: it pays")
    cure = "leave schedule='auto', which measures and keeps the sequential program; weft plan says what other shapes gain"
    return Finding(what=what, state="warn", detail=f"{detail}: it does not pay for this shape", cure=cure)
