"""A Launch enqueues one thing on a lane. A plan of launches is made once, and each call issues them with its own tensors.

FlagOperations     waits for flags and writes of flags, at addresses that never change
CopyLaunch         one copy between two regions
KernelLaunch       a step as one kernel
TorchLaunch        work of torch or of a library: matmuls and sums without a kernel of weft, collectives, messages
Site               where they run: the rank, its device, the addresses of flags
StepKernel         what a KernelLaunch launches

A lane is a stream on a GPU, and a thread on CPUs. Both issue the same launches. For calls whose tensors have one layout, a
launch can be prepared further (`prepare`): then a call only fills in addresses (weft.runtime.straight).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from weft.compat.streams import Word
from weft.core.errors import warn_once
from weft.core.machine import Machine
from weft.core.schedule import Collective, Flag, Region, Schedule, SendReceive, Wait, waits
from weft.kernels.launch import Launcher, record_launches
from weft.kernels.tables import DeviceTables
from weft.runtime.bindings import Bindings, CallTensors, FactorScales, Issue, NotPreparedError, Where, in_turn
from weft.runtime.mailboxes import SharedMailbox
from weft.runtime.products import Products

T = TypeVar("T")
Place = tuple[str, int]
"""The place of a step of a rank: the lane's name, and the position in the lane."""


class Matmul(Protocol):
    """A Matmul computes out = a @ b, or out += a @ b, on a device. out may be float32 when a and b are not.

    scales: the scales of FP8 operands.
    """

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulate: bool, scales: FactorScales | None = None
    ) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedCall:
    """An IssuedCall has what the launches of one call need.

    rehearses: the call neither waits for flags nor raises them.
    loads: the call is captured and never replayed, which loads its kernels.
    skips_outputs: the call must not write the caller's outputs, as in the rehearsal of a call that may work in place.
    matmuls: the function that multiplies, by lane.
    products: the products of each lane, for calls that are prepared.
    on_kernel_done: called with each kernel that has ended, on devices where a launch returns when its kernel has ended.
    """

    bindings: Bindings
    rehearses: bool = False
    loads: bool = False
    skips_outputs: bool = False
    matmuls: Mapping[str, Matmul] = field(default_factory=dict)
    products: Mapping[str, Products] = field(default_factory=dict)
    on_kernel_done: Callable[[StepKernel], None] | None = None


@dataclass(kw_only=True, slots=True)
class Launch:
    """A Launch is one thing to enqueue.

    stage: the stage of the step, as weft.runtime.launch_plan numbers them. All launches are ordered by it.
    by_torch: whether the lane's stream must be torch's current stream during `issue`. torch uses the current stream, and so
        does the first launch of a kernel.
    """

    where: Where
    stage: int = 0
    by_torch: ClassVar[bool] = True

    def issue(self, call: IssuedCall, stream: int) -> None:
        """Enqueue this launch on `stream`."""
        raise NotImplementedError

    def prepare(self, call: IssuedCall, tensors: CallTensors) -> Issue:
        """Return a function that enqueues this launch, on a stream, for the tensors that `tensors` holds by then.

        call: the first such call, which is over. It was no rehearsal. Its bindings are those of `tensors`.
        Raises NotPreparedError if only `issue` can find the tensors.
        """
        raise NotPreparedError("only `issue` enqueues it")


class FlagSubmitter(Protocol):
    """A FlagSubmitter enqueues the flag operations of a program."""

    def prepare(self, operations: FlagOperations) -> Callable[[int], None]:
        """Return a function that enqueues these operations on a stream."""
        ...

    def aside(self, stream: int) -> int:
        """Return a side stream for signals, ordered after the work that `stream` has now.

        Later work on `stream` does not wait for these signals.
        """
        ...


@dataclass(kw_only=True, slots=True)
class FlagOperations(Launch):
    """FlagOperations are memory operations on flags, done in order.

    aside: they go to a side stream, so that later work of the lane does not wait for them.
    """

    by_torch: ClassVar[bool] = False
    words: tuple[Word, ...]
    aside: bool = False
    submitter: FlagSubmitter | None = field(default=None, compare=False, repr=False)
    _submit: Callable[[int], None] | None = field(default=None, init=False, compare=False, repr=False)

    def load(self) -> Callable[[int], None]:
        """Make the function that `issue` calls. This loads a kernel if a kernel does the operations."""
        if self._submit is None:
            assert self.submitter is not None, "flag operations of no program"
            self._submit = self.submitter.prepare(self)
        return self._submit

    def issue(self, call: IssuedCall, stream: int) -> None:
        submit = self._submit or self.load()
        if call.rehearses:
            return
        if self.aside:
            assert self.submitter is not None
            stream = self.submitter.aside(stream)
        submit(stream)

    def prepare(self, call: IssuedCall, tensors: CallTensors) -> Issue:
        submit = self.load()
        if not self.aside:
            return submit
        assert self.submitter is not None
        aside = self.submitter.aside
        return lambda stream: submit(aside(stream))


@dataclass(kw_only=True, slots=True)
class CopyLaunch(Launch):
    """A CopyLaunch copies one region to another.

    copy: the device's copy function.
    prepare_copy: returns the same copy for calls of one layout.
    to_output: whether dst is an output of the caller.
    """

    by_torch: ClassVar[bool] = False
    src: Region
    dst: Region
    copy: Callable[[Bindings, int], None]
    to_output: bool
    prepare_copy: Callable[[CallTensors], Issue] | None = None

    def issue(self, call: IssuedCall, stream: int) -> None:
        if not (self.to_output and call.skips_outputs):
            self.copy(call.bindings, stream)

    def prepare(self, call: IssuedCall, tensors: CallTensors) -> Issue:
        return Launch.prepare(self, call, tensors) if self.prepare_copy is None else self.prepare_copy(tensors)


@dataclass(kw_only=True, slots=True)
class TorchLaunch(Launch):
    """A TorchLaunch runs work of torch, or of a library, on torch's current stream.

    prepare_work: returns the same work for calls of one layout.
    """

    work: Callable[[IssuedCall], None]
    prepare_work: Callable[[IssuedCall, CallTensors], Issue] | None = None

    def issue(self, call: IssuedCall, stream: int) -> None:
        self.work(call)

    def prepare(self, call: IssuedCall, tensors: CallTensors) -> Issue:
        return Launch.prepare(self, call, tensors) if self.prepare_work is None else self.prepare_work(call, tensors)


class WaiterWords:
    """WaiterWords holds the words of a schedule's flags.

    slot: the word on the flag's rank, by (flag, lane, position of the waiting step). The words of one step are adjacent, and
        gates on previous calls come last.
    slots: all words of each flag.
    words: the number of words of the rank that has most.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.slot: dict[tuple[Flag, str, int], int] = {}
        self.slots: dict[Flag, tuple[int, ...]] = dict.fromkeys(schedule.flags, ())
        self._signals = schedule.signals_per_call
        used = [0] * len(schedule.ranks)
        for rank, lane, position, step in schedule:
            for wait in sorted(waits(step), key=lambda wait: wait.on_previous_call):
                key = (wait.flag, lane.name, position)
                if key not in self.slot:
                    self.slot[key] = used[rank]
                    self.slots[wait.flag] += (used[rank],)
                    used[rank] += 1
        self.words = max(used, default=0)

    def raised(self, flag: Flag) -> bool:
        """Return whether any step signals a flag."""
        return self._signals[flag] > 0


class Site(ABC):
    """A Site is where the launches of one rank's part of a schedule run: its device, and the addresses of its flags.

    Kernels and launch plans know of a program only what is here. weft.runtime.bound adds the memory of buffers and the calls.

    schedule, rank, device, machine: the schedule, this rank, its device and the profile of that.
    dtype: the dtype of the problem.
    flags: the numbers of the words for which lanes wait.
    kernels: the kernels of this rank's steps.
    tries: how often a kernel reads a flag before it gives up.
    blocks: the SMs of the device.
    sms_for_kernels, sms_for_pushes: those that GEMMs may use, and those that are left for pushes on lanes of blocks.
    writers: who signals each flag.
    """

    schedule: Schedule
    rank: int
    device: torch.device
    machine: Machine
    dtype: torch.dtype
    flags: WaiterWords
    kernels: dict[Place, StepKernel]
    tries: int
    blocks: int
    sms_for_kernels: int
    sms_for_pushes: int
    writers: Mapping[Flag, str]
    ragged: Any = None
    """The state that the kernels of a call with splits share (weft.runtime.ragged_kernels.RaggedKernels), on devices that run
    kernels."""
    _signal_values: Mapping[Flag, int] = {}

    @abstractmethod
    def dtype_of(self, buffer: str) -> torch.dtype:
        """Return the dtype of a buffer's elements."""

    @abstractmethod
    def loading(self) -> AbstractContextManager[None]:
        """Return a context in which kernels may be loaded."""

    @property
    @abstractmethod
    def submitter(self) -> FlagSubmitter:
        """The object that submits flag operations to lanes."""

    def buffers_of(self, kind: str) -> set[str]:
        """Return the names of the buffers of a kind."""
        return {buffer.name for buffer in self.schedule.buffers if buffer.kind == kind}

    @abstractmethod
    def waiters(self, flag: Flag) -> list[int]:
        """Return the addresses of the words that a signal raises."""

    @abstractmethod
    def gate_address(self, flag: Flag, where: Where) -> int:
        """Return the address of the word that a step of this rank waits for."""

    @abstractmethod
    def progress_word(self, where: Where) -> Word:
        """Return the operation by which a lane records that it has reached a step, before the step waits."""

    def end_words(self, lane: str) -> tuple[Word, ...]:
        """Return the operations by which a lane records that it has passed its last wait of a call. None if nobody reads it."""
        return ()

    @abstractmethod
    def copier(self, src: Region, dst: Region) -> Callable[[Bindings, int], None]:
        """Return a function that copies one region to another, with the tensors of a call, on a stream."""

    def prepare_copy(self, src: Region, dst: Region) -> Callable[[CallTensors], Issue] | None:
        """Return CopyLaunch.prepare_copy for what `copier` returns. None if the device prepares nothing."""
        return None

    @abstractmethod
    def collective(self, step: Collective, where: Where) -> Callable[[IssuedCall], None]:
        """Return a function that runs a collective."""

    def prepare_collective(self, step: Collective) -> Callable[[IssuedCall, CallTensors], Issue] | None:
        """Return TorchLaunch.prepare_work for what `collective` returns. None if the device prepares nothing."""
        return None

    @abstractmethod
    def messages(self, step: SendReceive, where: Where) -> Callable[[IssuedCall], None]:
        """Return a function that sends and receives between nodes."""

    @property
    def row_counts(self) -> Any:
        """The HostRows (weft.runtime.host_resources) with the row counts of all ranks, for steps that do not run as kernels."""
        raise AssertionError("the steps of calls with splits are kernels here, or the problem has no splits")

    def count_address(self, flag: Flag) -> int:
        """Return the address of the word that a kernel of this rank adds to. A flag that a kernel counts has one waiter."""
        (address,) = self.waiters(flag)
        return address

    def gate_need(self, wait: Wait) -> int:
        """Return the value of its word that opens a gate. It is 0 for a gate that is passed before the kernel starts."""
        return 0 if wait.on_previous_call else self.signal_value(wait.flag)

    @abstractmethod
    def mailbox(self, nbytes: int) -> tuple[list[int], torch.Tensor]:
        """Allocate zeroed bytes on every rank that all ranks can address. Collective.

        Return the addresses by rank, and this rank's bytes.
        """

    @abstractmethod
    def shared_mailbox(self, copy_bytes: int) -> SharedMailbox:
        """Return the mailbox that kernels of all programs with this capacity of a copy share, until the program is closed.
        Collective."""

    def signal_value(self, flag: Flag) -> int:
        """Return the value of a flag's word once it is signalled: the number of tiles if a kernel counts, or else 1."""
        return self._signal_values.get(flag, 1)

    def raiser(self, flag: Flag) -> str:
        """Return a text that says which lane signals a flag."""
        return f"{self.writers.get(flag, 'nobody')} raises it"


_TABLES = 64
"""A kernel caches its tables for this many sets of addresses, besides those that graphs read."""


class KernelTables(Generic[T]):
    """KernelTables caches what a kernel reads besides the tensors of a call, by what it depends on.

    key: returns the addresses, strides and alignments in a call that are in the tables.
    """

    def __init__(self, site: Site, key: Callable[[Bindings], Hashable], make: Callable[[Bindings], T]) -> None:
        self._device, self._key, self._make = site.device, key, make
        self._made: DeviceTables[T] = DeviceTables(_TABLES)

    def of(self, bindings: Bindings) -> T:
        return self._made.get(self._key(bindings), self._device, lambda: self._make(bindings))


def addresses_of(regions: Iterable[Region]) -> Callable[[Bindings], tuple[int, ...]]:
    """Return the key of tables with addresses of these regions' buffers.

    Symmetric memory never moves on a GPU. On a CPU it may grow and move.
    """
    buffers = dict.fromkeys((region.buffer, region.rank) for region in regions)
    return lambda bindings: tuple([bindings.tensors[key][0][0].data_ptr() for key in buffers])


class StepKernel:
    """A StepKernel runs one step of one rank as a kernel. Each call launches it.

    tables: what the kernel reads besides the tensors of a call.
    launched_by: the launcher of its kernel.
    """

    waits_in_kernel = False
    """True if the kernel itself waits for the gates of this call. The launch plan lowers them after the kernel."""
    manages_own_flags = False
    """True if the kernel keeps its flags in words of its own, and raises, waits for and lowers them itself."""
    tabled: tuple[str, ...] = ()
    """The names of the caller's tensors whose addresses are in tables of the kernel. These tensors seldom move."""

    def __init__(self, site: Site, where: Where) -> None:
        self.site, self.where = site, where
        self.tables: KernelTables[Any] = KernelTables(site, addresses_of(()), lambda bindings: None)
        self.launched_by = Launcher()
        self._logged: set[str] = set()

    def runs(self, bindings: Bindings) -> bool:
        """Return whether the kernel can load this call's operands. It is called before any part of a call is enqueued.

        It logs once for each reason that torch runs the step part by part, which overlaps less than one kernel.
        """
        reason = self.reason_against(bindings)
        if reason and reason not in self._logged:
            self._logged.add(reason)
            kind = type(self.where.step).__name__
            warn_once(f"lane {self.where.lane}: a {kind} runs part by part, by torch instead of one kernel: {reason}")
        return not reason

    def reason_against(self, bindings: Bindings) -> str:
        """Return why the kernel cannot run the tensors of a call, or "" if it can."""
        return ""

    def lay_out(self, bindings: Bindings) -> None:
        """Make the tables that the kernel reads in a call. It copies to the device, so call it outside of a graph capture."""
        self.tables.of(bindings)

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        """Launch the kernel.

        silent: it neither waits nor signals, for a rehearsal.
        tries: how often it reads a flag before it gives up.
        sms: the number of SMs that it may use.
        stream: by default torch's current stream.
        """
        raise NotImplementedError

    def prepare(self, tensors: CallTensors, *, tries: int, sms: int) -> Issue:
        """Return a function that launches the kernel for calls of one layout. Raises NotPreparedError if only `launch` can."""
        if not self.can_be_prepared(tensors.bindings):
            raise NotPreparedError(f"{self.where}: it reads tables that change, or copies")
        launches = record_launches(lambda: self.launch(tensors.bindings, silent=False, tries=tries, sms=sms))
        found = [one for one in (launch.prepare(tensors) for launch in launches) if one is not None]
        if len(found) < len(launches):
            raise NotPreparedError(f"{self.where}: a kernel was not launched with such arguments before")
        return in_turn(found)

    def can_be_prepared(self, bindings: Bindings) -> bool:
        """Return whether later launches only need new addresses. They need more if the kernel reads a copy, or a table on the
        device with addresses of the caller's tensors. Tables of `tabled` tensors are allowed, because a BoundCall compares
        their addresses."""
        return True

    def raise_if_late(self, describe: Callable[[Flag], str]) -> None:
        """Raise WaitTimeout if a wait of the last launch ended without its flag. describe: returns who signals a flag."""

    def missing(self) -> str:
        """Return a text that says what the kernel's own words still wait for, or "" if nothing. It needs copies, but no SM."""
        return ""

    def call_under_way(self) -> int:
        """Return the number of the call that the kernel has begun and not ended, or 0. It needs copies, but no SM.

        A kernel that counts no calls returns 0.
        """
        return 0

    def abort(self) -> None:
        """End every wait on the kernel's own words, now and later. It is enqueued on torch's current stream and needs no SM."""


@dataclass(kw_only=True, slots=True)
class KernelLaunch(Launch):
    """A KernelLaunch runs a step as one kernel on `sms` SMs.

    If the program pushes by kernels or sends messages between nodes, every other kernel leaves SMs free for these, because
    peers wait for them.
    """

    kernel: StepKernel
    sms: int
    tries: int

    def issue(self, call: IssuedCall, stream: int) -> None:
        self.kernel.launch(call.bindings, silent=call.rehearses, tries=self.tries, sms=self.sms, stream=stream)
        if call.on_kernel_done is not None:
            call.on_kernel_done(self.kernel)

    def prepare(self, call: IssuedCall, tensors: CallTensors) -> Issue:
        return self.kernel.prepare(tensors, tries=self.tries, sms=self.sms)
