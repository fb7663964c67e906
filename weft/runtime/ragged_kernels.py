"""The steps of a call with splits run as kernels on any device whose memory has addresses (weft.kernels.exchange).

    ShareCounts     layout_kernel: exchanges counts, and computes where all rows are stored
    GroupedGemm     dispatch_kernel or combine_kernel, copies included
    SegmentCopies   push_kernel, pull_kernel, or collect_kernel, which copies the received rows to the caller
    Wait            await_kernel, with the waits that follow it

The schedule says what each part does, waits for and signals, and in which order (weft.runtime.ragged_steps). The counts and the
flags are stored in symmetric memory that only these kernels use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.compat.device import capabilities
from weft.compat.streams import Word
from weft.core.errors import WaitTimeout
from weft.core.problem import RaggedProblem
from weft.core.schedule import GroupedGemm, SegmentCopies, ShareCounts, Step, Wait
from weft.kernels.exchange import MOST_SEGMENTS, RaggedExchange, RaggedScales, Shape, symmetric_bytes
from weft.kernels.segments import CUT, IN_A, LATE, NEGATIVE
from weft.kernels.shapes import shapes_for
from weft.runtime.bindings import Bindings, Where, scales_name
from weft.runtime.host_rows import below_zero, no_room
from weft.runtime.launches import Site, StepKernel
from weft.runtime.ragged_steps import RankOrders

_RAISED = 0x3FFFFFFF
"""Every word is set to this value after a failure. It is more than any wait needs, and less than where the comparison wraps."""


class RaggedStepKernel(StepKernel):
    """A RaggedStepKernel is the kernel of one step. All ranks rehearse it by running it.

    The first step of a program allocates the memory that all share, which is collective.
    """

    manages_own_flags = True

    def __init__(self, site: Site, where: Where, step: Step) -> None:
        super().__init__(site, where)
        self._kernels = site.ragged = site.ragged or RaggedKernels(site)

    def launch(self, bindings: Bindings, *, silent: bool, tries: int, sms: int, stream: int | None = None) -> None:
        self._kernels.launch(self.where.step, self.where, bindings)

    def can_be_prepared(self, bindings: Bindings) -> bool:
        return self._kernels.can_be_prepared(bindings)

    def missing(self) -> str:
        return self._kernels.missing() if isinstance(self.where.step, ShareCounts) else ""


class RaggedKernels:
    """RaggedKernels holds the kernels of one rank's steps. Collective, because it allocates memory on all ranks.

    Raises ValueError for a problem or a schedule that the kernels cannot run.
    """

    def __init__(self, site: Site) -> None:
        problem, rank, device = site.schedule.problem, site.rank, site.device
        assert isinstance(problem, RaggedProblem), f"{problem} has no segments"
        _check_kernels(problem, site.dtype, device)
        self._problem, self._rank, self._plan = problem, rank, RankOrders(site.schedule, rank)
        shape = Shape(
            rank=rank,
            world_size=problem.world_size,
            experts=problem.experts,
            max_rows=problem.m,
            a_rows=problem.capacity,
            n=problem.n,
            k=problem.k,
            dtype=site.dtype,
            dispatch=problem.dispatches,
            gated=problem.gated,
            scaling=problem.scaling,
            device=device,
            machine=site.machine,
        )
        addresses, words = site.mailbox(symmetric_bytes(shape))
        self.exchange = RaggedExchange(shape, self._plan.orders, addresses, words, sms=site.blocks, tries=site.tries)
        self._waits = {
            at: torch.tensor(waited, dtype=torch.int32, device=device) for at, waited in self._plan.waits.items() if waited
        }
        self._seen = self.exchange.host_notes.numpy()
        self._launches: dict[type, Callable[[Any, int, Bindings], None]] = {
            Wait: self._wait,
            ShareCounts: self._share,
            SegmentCopies: self._copy,
            GroupedGemm: self._multiply,
        }
        """The function that launches a step, by type of step. Its arguments are the step, its position and a call's tensors."""

    @property
    def has_error(self) -> bool:
        """Whether kernels of an earlier call have written an error to the host's memory: wrong splits, or a late peer."""
        return bool(self._seen[LATE] or self._seen[CUT])

    def check_before(self, a: torch.Tensor) -> None:
        """Raise the errors of earlier calls, and check the number of rows. It is called before each call.

        Products of a combine are stored in shared memory whose size the first call fixed. Raises ValueError if a has more rows.
        """
        self.raise_noted()
        if not self._problem.dispatches and a.shape[0] > self._problem.capacity:
            raise ValueError(
                f"a has {a.shape[0]} rows, but the first call with max_rows={self._problem.m} reserved memory for "
                f"{self._problem.capacity}; make the first call with the largest number of rows that a will have on any rank"
            )

    def launch(self, step: Step, where: Where, bindings: Bindings) -> None:
        """Run one step, on torch's current stream."""
        self._launches[type(step)](step, where.position, bindings)

    def _matrix(self, name: str, bindings: Bindings) -> torch.Tensor:
        ((matrix, _),) = bindings.tensors[name, self._rank]
        return matrix

    def can_be_prepared(self, bindings: Bindings) -> bool:
        """Return whether the kernels read the caller's operands themselves, and no copies."""
        (b,), scales = bindings.loose["b"], bindings.scales.get(("a", self._rank), ())
        rows = [self._matrix("a", bindings), *scales]
        pairs = [(b, _unit_stride(b)), *[(one, _aligned(one)) for one in rows if one.shape[0]]]
        return all(one.data_ptr() == read.data_ptr() for one, read in pairs)

    def _wait(self, step: Wait, at: int, bindings: Bindings) -> None:
        if at in self._waits:
            self.exchange.wait_for_flags(self._waits[at])

    def _share(self, step: ShareCounts, at: int, bindings: Bindings) -> None:
        (splits,), (counts,) = bindings.loose["splits"], bindings.loose["counts"]
        self.exchange.start(splits.contiguous(), counts, a_rows=self._matrix("a", bindings).shape[0])

    def _multiply(self, step: GroupedGemm, at: int, bindings: Bindings) -> None:
        a, out, (b,) = self._matrix("a", bindings), self._matrix("out", bindings), bindings.loose["b"]
        self._pass_addresses(bindings)
        number, a, b, scales = self._plan.steps[at], _aligned(a), _unit_stride(b), self._scales(bindings)
        if self._problem.dispatches:
            self.exchange.dispatch(number, a, b, out, keep_own=self._problem.return_received, scales=scales)
        else:
            self.exchange.combine(number, a, b, out, scales=scales)

    def _scales(self, bindings: Bindings) -> RaggedScales | None:
        """Return the scales of FP8 operands, or None for other operands."""
        if self._problem.scaling is None:
            return None
        (of_a,), (of_b,) = bindings.scales["a", self._rank], bindings.loose[scales_name("b")]
        return RaggedScales(_aligned(of_a), of_b)

    def _copy(self, step: SegmentCopies, at: int, bindings: Bindings) -> None:
        number = self._plan.steps[at]
        self._pass_addresses(bindings)
        if not self._problem.dispatches:
            self.exchange.pull(number, self._matrix("out", bindings))
        elif step.parts[0].dst.buffer == "received":
            of_rows = bindings.scales.get(("received", self._rank))
            self.exchange.collect(number, self._matrix("received", bindings), of_rows[0] if of_rows else None)
        else:
            a, scales = _aligned(self._matrix("a", bindings)), self._scales(bindings)
            scale_a = None if scales is None else scales.a
            self.exchange.push(number, a, keep_own=self._problem.return_received, scale_a=scale_a)

    def _pass_addresses(self, bindings: Bindings) -> None:
        """Pass the address of every rank's buffer for rows or products to the kernels. On CPUs it may change between calls."""
        name = "landing" if self._problem.dispatches else "product"
        ranks = range(self._problem.world_size)
        scales = [scale for rank in ranks for scale in bindings.scales.get((name, rank), ())]
        self.exchange.lay_out([bindings.tensors[name, rank][0][0] for rank in ranks], scales)

    def raise_cut(self) -> None:
        """Raise the ValueError of wrong splits if a call has noted them. Every rank notes the same."""
        if self._seen[CUT]:
            self.raise_noted()

    def raise_noted(self, *, ended: bool = False) -> None:
        """Raise what earlier calls have noted: ValueError for wrong splits, WaitTimeout for a peer that did not arrive.

        ended: the calls have ended on the device, so the notes are read from the device.
        """
        if not (ended or self.has_error):
            return
        notes = (self.exchange.notes if ended else self.exchange.host_notes).tolist()
        if notes[CUT]:
            self.exchange.host_notes.zero_()
            self.exchange.notes.zero_()
            raise ValueError(_describe_wrong_splits(self._problem, *notes[CUT : CUT + 4]))
        if notes[LATE]:
            raise WaitTimeout(f"rank {self._rank}: {self._name_word(notes[LATE])}: expected {notes[1]}, seen {notes[2]}")

    def _name_word(self, address: int) -> str:
        """Return a text that says what the word at an address counts."""
        rank = (address - self.exchange.notified.local.data_ptr()) // 4
        if 0 <= rank < self._problem.world_size:
            return f"counts of rank {rank}"
        arrived = (address - self.exchange.arrived.local.data_ptr()) // 4
        return f"rows of rank {self._plan.counted_from[arrived]}"

    def missing(self) -> str:
        """Return a text that says what the call in flight waits for, or "" if it does not wait. It needs copies, but no SM."""
        call, calls_of_ranks = int(self.exchange.calls.cpu()), self.exchange.notified.local.cpu().tolist()
        # A call is counted once it has the counts of all ranks.
        late = [rank for rank, seen in enumerate(calls_of_ranks) if seen <= call and calls_of_ranks[self._rank] > call]
        if late:
            return f"rank {self._rank}: call {call + 1} with splits: rank {late[0]} has not shared its counts"
        arrived, goals = self.exchange.arrived.local.cpu(), self.exchange.goals.cpu()
        short = (goals - arrived > 0).nonzero().flatten().tolist()
        if short:
            source = self._plan.counted_from[short[0]]
            return f"rank {self._rank}: call {call} with splits: not all rows of rank {source} have arrived"
        return ""

    def releases(self) -> list[Word]:
        """Return the operations that end all waits of the kernels, now and later.

        The first one sets the note by which peers know that later data is invalid. The others raise the words that kernels wait
        for.
        """
        words = [Word("signal", self.exchange.notes.data_ptr() + 8 * LATE, 1)]
        for memory in (self.exchange.notified.local, self.exchange.arrived.local):
            words += [Word("signal", memory.data_ptr() + 4 * at, _RAISED) for at in range(memory.numel())]
        return words


def _describe_wrong_splits(problem: RaggedProblem, kind: int, rows: int, capacity: int, rank: int) -> str:
    if kind == NEGATIVE:
        return below_zero(rows, problem, f"on rank {rank} in an earlier call")
    if kind == IN_A:
        cut = f"but a had {capacity} rows; {rows - capacity} were not sent"
        return f"splits of an earlier call add up to {rows} on rank {rank}, {cut}"
    return no_room(problem, rows, f"at rank {rank} in an earlier call")


def _check_kernels(problem: RaggedProblem, dtype: torch.dtype, device: torch.device) -> None:
    """Check what the kernels need in addition to the checks of every call. It is the same on every rank. Raises ValueError."""
    if dtype not in (torch.float16, torch.bfloat16):
        name = "a" if problem.scaling is None else "output_dtype"
        raise ValueError(f"{name} is {dtype}; with splits on GPUs, use bfloat16 or float16")
    if problem.scaling is not None and device.type == "cuda" and not shapes_for(capabilities(device), problem.scaling):
        raise ValueError(f"a is {problem.scaling.a}; with splits, {device} needs tensor cores for FP8, which it does not have")
    for name, extent, of in (("K", problem.k, 8), ("N", problem.n * (2 if problem.gated else 1), 16 if problem.gated else 8)):
        if extent % of:
            raise ValueError(f"{name} is {extent}; with splits on GPUs it must be a multiple of {of}")
    if problem.experts * problem.world_size > MOST_SEGMENTS:
        raise ValueError(
            f"b has {problem.experts} experts on each of {problem.world_size} ranks; "
            f"with splits, at most {MOST_SEGMENTS} in all"
        )


def _aligned(a: torch.Tensor) -> torch.Tensor:
    """Return a as a contiguous matrix at a multiple of 16 bytes, with at least one row."""
    if not a.shape[0]:
        return a.new_zeros(1, a.shape[1])
    a = (a[0][None] if a.shape[0] == 1 else a).contiguous()
    return a if a.data_ptr() % 16 == 0 else a.clone()


def _unit_stride(b: torch.Tensor) -> torch.Tensor:
    """Return b with one of the last two dimensions contiguous, and all other strides at multiples of 16 bytes.

    For FP8 the dimension of the rows is contiguous.
    """
    if b.shape[0] == 1:
        b = b[0][None]  # the stride between experts is arbitrary for one expert, and contiguous() does not change it
    (expert_stride, *strides), unit = b.stride(), 16 // b.element_size()
    fits = (
        1 in strides
        and all(s == 1 or (s > 0 and s % unit == 0) for s in strides)
        and expert_stride > 0
        and expert_stride % unit == 0
    )
    if fits and b.data_ptr() % 16 == 0:
        return b
    by_columns = b.element_size() == 1
    copied = (b.mT if by_columns else b).clone(memory_format=torch.contiguous_format)
    return copied.mT if by_columns else copied
