"""The host's side of kernels that exchange data: it allocates symmetric tensors, and bounds and reports waits.

    with Peers(group) as peers:                          collective
        x = peers.tensor((64, 64), torch.float16)        collective: one on every rank, each with all addresses
        arrived = peers.tensor(8, torch.int32, name="arrived")
        kernel[(peers.resident_blocks,)](x.local, x.peers, arrived.local, arrived.peers, peers.tries, peers.status)
        peers.check()                                    raises WaitTimeout if a wait ended at its bound

On GPUs the memory is torch's symmetric memory, without multicast. Under Triton's interpreter (TRITON_INTERPRET=1, set before
Triton is imported) ranks are processes on CPUs and the memory is POSIX shared memory; the same kernels run on both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType

import torch
import torch.distributed as dist
import triton

from weft.comm.membership import timeout_from_environment
from weft.comm.rank_group import RankGroup
from weft.comm.symmetric_heap import Allocation, heap_of
from weft.comm.texts import no_group
from weft.core.errors import WaitTimeout, WeftError, require

_LOOKS_PER_S = {"cuda": 1_500_000, "cpu": 1_000}
"""The approximate looks of a block at a flag per second: acquiring loads from its own memory, or the interpreter's atomics."""
_FLAG, _EXPECTED, _SEEN = range(3)
_CLOSED = "these Peers are closed; make new ones on every rank"
_REMEDIES = ("these Peers have failed ({}); close them, and make new ones on every rank", _CLOSED)
"""The errors of calls after a failure, and after `close`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricTensor:
    """A tensor that every rank has, with the same shape and dtype.

    name: its name in errors. local: this rank's tensor, contiguous. peers: the addresses of the first elements on all ranks,
    this one included, as int64 [world_size] on the device; `peer_pointer` takes it. Addresses are multiples of 16 bytes.
    backing: the allocation that holds the memory.
    """

    name: str
    local: torch.Tensor
    peers: torch.Tensor
    backing: Allocation = field(repr=False)

    def holds(self, address: int) -> bool:
        """Return whether an address is in the local tensor."""
        return 0 <= address - self.local.data_ptr() < self.local.numel() * self.local.element_size()


class Peers:
    """The ranks of a group on one host, and the memory that their kernels share.

    Collective, and so are `tensor` and `settle`. It is a context manager, which settles at its end if nothing has failed.

    group: the process group. The default is all ranks. timeout_s: the approximate timeout of a kernel's wait. The default is
    WEFT_TIMEOUT_S, or 60 s. The host waits four times as long for other ranks, so that the wait that is the cause ends first.
    Raises ValueError for ranks on several hosts, and if kernels cannot run: without a GPU and without TRITON_INTERPRET=1.

    Peers and weft's operators share weft's state of a process group. So all ranks must make their calls on one group in the
    same order, and a failure of either ends both.

    rank, world_size: those of the group. device: where tensors belong. status, tries: arguments for `wait`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float | None = None) -> None:
        if timeout_s is not None:
            require("timeout_s", timeout_s, (int, float), "it must be a number of seconds")
            if not 0 < timeout_s < math.inf:
                raise ValueError(f"timeout_s is {timeout_s}; it must be a number of seconds above 0")
        self.device = _device()
        timeout_s = timeout_from_environment() if timeout_s is None else timeout_s
        self.status = torch.zeros(3, dtype=torch.int64, device=self.device)
        self._rank_group = RankGroup.acquire(_process_group(group))
        if nodes := self._rank_group.nodes:
            self._rank_group.release()
            raise ValueError(
                f"group is on nodes of {nodes} ranks; kernels reach the memory of one node: pass a group within one"
            )
        self._heap = heap_of(self._rank_group, self.device)
        self.rank, self.world_size = self._rank_group.rank, self._rank_group.world_size
        self.tries = min(2**31 - 1, math.ceil(timeout_s * _LOOKS_PER_S[self.device.type]))
        self._host_timeout_s = 4 * timeout_s
        self._tensors: list[SymmetricTensor] = []
        self._made = 0
        self._closed = self._ended_well = False

    @property
    def broken(self) -> bool:
        """True if these peers have failed, here or on another rank. Then they cannot be used any more."""
        return self._rank_group.broken is not None

    @property
    def resident_blocks(self) -> int:
        """The number of blocks of any kernel that run at once: one for each SM, or one under the interpreter.

        A grid of at most this many blocks cannot starve itself, unless another waiting kernel holds SMs at the same time.
        """
        if self.device.type == "cpu":
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def tensor(self, shape: int | tuple[int, ...], dtype: torch.dtype, *, name: str = "") -> SymmetricTensor:
        """Allocate a zeroed tensor on every rank. name: its name in errors. The default is "tensor 0" and so on.

        Raises ValueError for a size below 0 or of 2^63 bytes and more, and for a quantised dtype; RankMismatch if the arguments
        differ between ranks.
        """
        require("shape", shape, (int, tuple, list), "it must be a whole number, or several")
        require("dtype", dtype, torch.dtype, "it must be one of torch's, as torch.int32")
        require("name", name, str, "it must be a word or two, for errors")
        if str(dtype).startswith(("torch.q", "torch.bits")):
            raise ValueError(f"dtype is {dtype}; use torch.uint8 for bytes of any kind")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(not isinstance(extent, int) or isinstance(extent, bool) or extent < 0 for extent in shape):
            raise ValueError(f"shape is {shape}; every extent must be a whole number of 0 or more")
        if math.prod(shape) * dtype.itemsize >= 1 << 63:
            raise ValueError(f"shape is {shape}, of {dtype}; no memory has 2^63 bytes")
        name = name or f"tensor {self._made}"
        with self._rank_group.calling:
            self._enter(f"call: symmetric tensor\nname: {name}\nshape: {shape}\ndtype: {dtype}")
            made = self._allocate(name, shape, dtype)
            self._tensors.append(made)
            self._made += 1
            self.settle()
        return made

    def _enter(self, text: str) -> None:
        """Begin a collective operation, and wait until all ranks have begun it."""
        if self._ended_well:
            raise WeftError(_CLOSED)
        self._rank_group.check_usable(_REMEDIES)
        with self._rank_group.calling:
            self._rank_group.agree_on_call(text, within_s=self._host_timeout_s)

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        nbytes = math.prod(shape) * dtype.itemsize
        piece = self._heap.allocate(nbytes)
        local = piece.local[:nbytes].view(dtype).view(shape)
        peers = torch.tensor(piece.addresses, dtype=torch.int64, device=self.device)
        return SymmetricTensor(name=name, local=local, peers=peers, backing=piece)

    def calls(self) -> torch.Tensor:
        """Allocate the local counters of one kernel for `call_number` and `end_call`: two zeros of 64 bits. With 32 bits, a
        number would be negative after 2^31 calls."""
        return torch.zeros(2, dtype=torch.int64, device=self.device)

    def settle(self) -> None:
        """Wait until every rank has called this and its device has ended all its work. Raises as `check` does, and PeerLost."""
        self.check()
        self._enter("call: settle")

    def check(self) -> None:
        """Wait for this rank's device, and raise WaitTimeout if a kernel's wait has timed out.

        Peers that are in `settle`, `tensor` or at the end of the context, or come there, get PeerLost with the reason.
        """
        if self.device.type == "cuda":  # kernels may run on any stream
            torch.cuda.synchronize(self.device)
        status = self.status.tolist()
        if status[_FLAG]:
            flag = self._flag(status[_FLAG])
            raise self._rank_group.fail(
                WaitTimeout(
                    f"rank {self.rank}, kernel, flag {flag}: expected at least {status[_EXPECTED]}, seen {status[_SEEN]} "
                    f"after {self.tries} looks; no rank has signalled it so often"
                )
            )

    def _flag(self, address: int) -> str:
        """Return the name of a flag."""
        for tensor in self._tensors:
            if tensor.holds(address):
                return f"{tensor.name}[{(address - tensor.local.data_ptr()) // tensor.local.element_size()}]"
        return f"at address {address:#x}, in no symmetric tensor of this rank"

    def drop(self, tensors: Iterable[SymmetricTensor]) -> None:
        """Free some tensors, which no kernel of any rank may use any more. Collective. It first settles; raises as `settle`.

        Raises ValueError for a tensor that does not belong to these peers, or that was already freed.
        """
        require("tensors", tensors, Iterable, "pass what `tensor` returned, in a list")
        tensors = list(dict.fromkeys(tensors))
        for tensor in tensors:
            require("one of tensors", tensor, SymmetricTensor, "pass what `tensor` returned")
            if tensor not in self._tensors:
                raise ValueError(f"tensors has {tensor.name}, which these peers do not have, or have dropped")
        self.settle()
        for tensor in tensors:
            self._tensors.remove(tensor)
            self._heap.free(tensor.backing)

    def close(self) -> None:
        """Leave the group. No kernel of any rank may use the tensors any more, so call `settle` first. Ranks that then wait for
        this one get PeerLost, unless something else uses the group."""
        if not self._closed:
            self._closed, self._ended_well = True, not self.broken
            self._rank_group.release()
        for tensor in self._tensors:
            self._heap.free(tensor.backing)
        self._tensors = []

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is not None:
                self._rank_group.fail(error)
            elif self._rank_group.broken is None:
                self.settle()
        finally:
            self.close()


def _device() -> torch.device:
    """Return the device on which kernels run in this process."""
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "TRITON_INTERPRET is not set and there is no GPU: set it to 1 before Triton is imported, to run on CPUs"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, or the group of all ranks for None. Raises ValueError for anything else."""
    if not dist.is_initialized():
        raise ValueError("group: torch.distributed has no process group yet; call init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(no_group(group, "make Peers"))
    return group
