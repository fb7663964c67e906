"""A rank on a GPU that raises no flags of its peers, for tests of what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

import weft
from weft.core.errors import WeftError


@contextmanager
def on_the_slow_path() -> Iterator[None]:
    """No call within is warm. A warm call issues launches that were prepared before a test replaced their functions."""
    from weft.runtime.groups import GROUPS

    remembered = GROUPS.remembered
    find, get = remembered.find, remembered.get
    remembered.clear()
    remembered.find = lambda *_: (None, None)  # type: ignore[method-assign, assignment]
    remembered.get = lambda *_: None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        remembered.find, remembered.get = find, get  # type: ignore[method-assign]
        remembered.clear()  # also what was prepared within


@contextmanager
def muted(rank: int) -> Iterator[None]:
    """What the calls within raise at peers is left out on this rank."""
    from weft.runtime.bindings import Bindings
    from weft.runtime.cuda import CudaProgram
    from weft.runtime.launch_plan import LaunchPlan
    from weft.runtime.launches import FlagOperations

    issuing: list[CudaProgram] = []

    def note(self: CudaProgram, bindings: Bindings) -> LaunchPlan:
        issuing[:] = [self]
        return plan(self, bindings)

    def mute(self: FlagOperations, call: object, stream: int) -> None:
        (program,) = issuing
        peers = [base for peer, base in enumerate(program._addresses) if peer != program.rank]
        remaining = [w for w in self.words if not any(base <= w.address < base + 4 * program.flags.words for base in peers)]
        program.driver.words(remaining)(stream)

    plan, issue = CudaProgram.plan_of, FlagOperations.issue
    if dist.get_rank() == rank:
        CudaProgram.plan_of, FlagOperations.issue = note, mute  # type: ignore[method-assign, assignment]
    try:
        with on_the_slow_path():
            yield
    finally:
        CudaProgram.plan_of, FlagOperations.issue = plan, issue  # type: ignore[method-assign]


@contextmanager
def before_launches(strike: Callable[[int], None]) -> Iterator[None]:
    """Call `strike` before each launch within, with its number, counted from 1."""
    from weft.runtime.launches import Launch

    seen = 0

    def struck(issue: Callable[..., None]) -> Callable[..., None]:
        def issued(*arguments: object) -> None:
            nonlocal seen
            seen += 1
            strike(seen)
            issue(*arguments)

        return issued

    originals = {kind: kind.issue for kind in Launch.__subclasses__()}
    for kind, issue in originals.items():
        kind.issue = struck(issue)  # type: ignore[method-assign]
    try:
        with on_the_slow_path():
            yield
    finally:
        for kind, issue in originals.items():
            kind.issue = issue  # type: ignore[method-assign]


def told_of(call: Callable[[], object]) -> str:
    """What this rank is told of a call: "right", or the error that the call or weft.synchronize raises. A result that the call
    itself finds to be wrong must come with such an error."""
    wrong: AssertionError | None = None
    try:
        try:
            call()
        except AssertionError as error:
            wrong = error
        weft.synchronize()
        torch.cuda.synchronize()
    except (WeftError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    if wrong is not None:
        raise wrong
    return "right"


def told_without(rank: int, call: Callable[[], object]) -> str:
    """What this rank is told of a call in which `rank` is muted."""
    with muted(rank):
        return told_of(call)
