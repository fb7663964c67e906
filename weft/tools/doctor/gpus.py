"""Examines the GPUs, their links, and whether data arrives at peers.

Each ordered pair of GPUs copies its own pattern to the peer, the peer copies it back, and the host compares both with the
pattern. A broken link (an IOMMU that remaps, a switch without its fabric manager) may report success and deliver zeros.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shutil
import subprocess
from types import ModuleType
from typing import Any

from weft.tools.doctor.finding import Finding, State
from weft.tools.doctor.rates import Rates, rates
from weft.tools.doctor.transports import transport_findings

WITHOUT_GPU = "weft run --device cpu, weft plan and weft schedules work without; for GPUs, see that nvidia-smi lists them"
PATTERN = 1 << 20
PEER_CURE = (
    "see `nvidia-smi topo -p2p rw`; in a virtual machine pass all GPUs of the host through, on bare metal turn the IOMMU or "
    "PCIe ACS off; until then leave one of the two out by CUDA_VISIBLE_DEVICES"
)


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
    found = (_cuda(torch), _nccl(torch), _bindings(count), *devices)
    if count < 2:
        detail = "one GPU: overlap on GPUs needs two or more"
        return (
            *found,
            Finding(what="GPU pairs", state="warn", detail=detail, cure="weft run --device cpu works with any number"),
        )
    topology = _topology()
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
    if torch.version.cuda is None and _has_driver():
        cure = "install PyTorch's CUDA wheel; the one that is installed is for CPUs"
        return Finding(what="GPUs", state="warn", detail="there, but this PyTorch cannot use them", cure=cure)
    return Finding(what="GPUs", state="warn", detail="none found", cure=WITHOUT_GPU)


def _cuda(torch: ModuleType) -> Finding:
    return Finding(what="CUDA (of PyTorch)", state="ok", detail=str(torch.version.cuda or torch.version.hip))


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


def _has_driver() -> bool:
    return "GPU" in (_run("nvidia-smi", "-L") or "")


def _topology() -> str | None:
    return _run("nvidia-smi", "topo", "-m")


def _run(*command: str) -> str | None:
    """Return the output of a command, or None if it does not exist, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
