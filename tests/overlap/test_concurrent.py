"""weft.concurrent on CPU ranks: results, choices, agreement, nesting, exceptions, mistakes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from concurrent_work import OPS, Exchange, Products
from conftest import RankFixture
from rank_pools import on_ranks
from weft_log import logged

import weft
from weft.core.concurrent import ConcurrentProblem, OpaqueCollective
from weft.overlap.concurrent import ConcurrentChoice, calls
from weft.overlap.concurrent.executor import CollectivePart, Executor, Program
from weft.runtime.autotune import Measurement
from weft.schedules.concurrent import Abilities

CPU = torch.device("cpu")
METHODS = ("sequential", "nccl", "nccl+late", "copy_engine", "copy_engine+late+ctas=2")
pytestmark = pytest.mark.ranks


def _every_method() -> int:
    """Run each collective by each method, as a call and as a context, with new data. Every third use is late on one rank."""
    weft.close()
    turn = 0
    for op in OPS:
        exchange, products = Exchange(op, CPU), Products(CPU)
        for method in (
            *METHODS,
            *(["copy_engine+pull", "copy_engine+late+pull"] if op in ("all_gather", "all_reduce") else []),
        ):
            for delayed in range(3):
                turn += 1
                exchange.fill(turn)
                if delayed == 2 and dist.get_rank() == 0:
                    time.sleep(0.01)
                if delayed:
                    products.check(weft.concurrent(products, exchange.collective, method=method))
                else:
                    with weft.concurrent(collectives=[exchange.collective], key="any", method=method) as context:
                        out = products()
                    assert context.method == method
                    products.check(out)
                exchange.check(turn)
    weft.close()
    return turn


def test_every_way_is_right(ranks: RankFixture) -> None:
    assert ranks(3).run(_every_method) == [72] * 3


Choices = list[tuple[str, str, dict[str, float]]]


def _choices() -> Choices:
    """Times to a nanosecond: those in use are ratios to one of them."""
    choices = weft.concurrent_choices()
    return [(each.key, each.method, {method: round(us, 3) for method, us in each.us.items()}) for each in choices]


class Scripted(Executor):
    """A CPU on which each method takes what the script says. script: (method, rank, use) -> us."""

    def __init__(self, script: Callable[[str, int, int], float], abilities: Abilities) -> None:
        super().__init__(CPU)
        self.script, self.found = script, abilities
        self.uses, self.last = 0, ""

    def abilities(self, collectives: Sequence[Any]) -> Abilities:
        return self.found

    def prepare(self, program: Program, collectives: Sequence[Any]) -> None:
        if self.script(program.name, dist.get_rank(), 0) < 0:
            raise ValueError(f"this rank has no {program.name}")

    def running(self, program: Program, collectives: Sequence[Any]) -> Any:
        self.last = program.name
        self.uses += 1
        before = tuple(CollectivePart(number) for number in range(len(collectives)))
        return super().running(Program(name="sequential", computation=program.computation, before=before), collectives)

    def timer(self, call: Callable[[], object], calls: int) -> int:
        self.last = ""
        call()
        return round(1000 * self.script(self.last or "computation", dist.get_rank(), self.uses))


@contextmanager
def _on(device: Scripted) -> Iterator[None]:
    """Let groups run what is concurrent on this device, and time it by its script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_make_executor", lambda where: device)
        patch.setattr(calls, "time_on_host", device.timer)
        yield


def _scripted(script: Callable[[str, int, int], float], uses: int) -> tuple[Choices, int, list[str]]:
    """What is measured and chosen on a scripted device; how often the computation ran; what was warned of."""
    weft.close()
    abilities = Abilities(priority=True, ctas=True, left=True, copy_engine=True)
    exchange, products = Exchange("all_reduce", CPU), Products(CPU)
    try:
        with logged() as seen, _on(Scripted(script, abilities)):
            for turn in range(uses):
                exchange.fill(turn)
                products.check(weft.concurrent(products, exchange.collective, key="k", repeatable=True))
                exchange.check(turn)
        return _choices(), products.calls, seen
    finally:
        weft.close()


FAIR, LACKING = "copy_engine+priority+ctas=32", "nccl+priority+ctas=16"


def _contrary(method: str, rank: int, use: int) -> float:
    """Alone, each rank would choose a method that is fast there and slow elsewhere; one is fair on all."""
    fair = {"sequential": 300.0, "computation": 200.0, FAIR: 220.0}
    return fair.get(method, 100.0 if len(method) % 2 == rank else 280.0)


def _never_faster(method: str, rank: int, use: int) -> float:
    return {"sequential": 300.0, "computation": 200.0}.get(method, 299.0 + use % 3)


def test_ranks_settle_on_what_is_fast_on_all(ranks: RankFixture) -> None:
    answers = ranks(2).run(_scripted, _contrary, 3)
    assert all(answer == answers[0] for answer in answers)
    ((key, method, us),), calls, seen = answers[0]
    assert (key, method) == ("k", FAIR)
    assert us[FAIR] == 220.0
    assert set(us.values()) == {300.0, 280.0, 220.0}
    assert not [text for text in seen if "concurrent" in text]
    assert calls > 40


def test_a_slower_way_is_never_chosen(ranks: RankFixture) -> None:
    answers = ranks(2).run(_scripted, _never_faster, 3)
    ((_, method, us),), *_ = answers[0]
    assert method == "sequential"
    assert len(us) >= 5
    assert FAIR in us


def _planned() -> list[tuple[str, str, str]]:
    """Return key, method and reason of each choice. One computation takes no time; one cannot be predicted."""
    weft.close()
    exchange, products = Exchange("all_reduce", CPU), Products(CPU)
    sends = weft.SendReceive(send=torch.ones(4), to=1 - dist.get_rank(), receive=torch.ones(4), source=1 - dist.get_rank())
    for turn in range(3):
        for key, compute_us in (("as long", None), ("none", 0.0)):
            exchange.fill(turn)
            with weft.concurrent(collectives=exchange.collective, key=key, compute_us=compute_us):
                out = products()
            products.check(out)
            exchange.check(turn)
        weft.concurrent(products, sends, key="sends")
    found = [(choice.key, choice.method, choice.why) for choice in weft.concurrent_choices()]
    assert products.calls == 9
    weft.close()
    return found


def test_contexts_take_the_planners_choice_and_measure_nothing(ranks: RankFixture) -> None:
    answers = ranks(2).run(_planned)
    assert answers[0] == answers[1]
    long, none, sends = answers[0]
    assert long[1] in ("nccl", "nccl+late")
    assert long[2].startswith(f"the planner chose it: {long[1]} ")
    assert none[1:] == ("sequential", none[2])
    assert sends[1:] == ("nccl", sends[2])
    assert sends[2].startswith("nothing can be predicted here: communication_us is None")


def _drifting(method: str, rank: int, use: int) -> float:
    """The first uses are slow, whatever they do: a GPU that warms up."""
    return {"sequential": 300.0, "computation": 200.0}.get(method, 310.0) * (1.0 if use > 17 else 2.0)


def test_sequential_is_measured_again_beside_the_best(ranks: RankFixture) -> None:
    """Timed first alone, sequential took 600 us, and all others 310."""
    for choices, *_ in ranks(2).run(_scripted, _drifting, 1):
        ((_, method, us),) = choices
        assert (method, us["sequential"]) == ("sequential", 300.0)


class Moving(Scripted):
    """The same, on which methods run as they are."""

    def running(self, program: Program, collectives: Sequence[Any]) -> Any:
        self.last = program.name
        return Executor.running(self, program, collectives)


def _left_bound(fastest: str) -> list[str]:
    """The schedules that are bound after an autotuning run that a method has won; one of them had been bound before."""
    from weft.runtime.groups import GROUPS

    weft.close()
    device = Moving(lambda method, *_: 100.0 if method == fastest else 300.0, Abilities(copy_engine=True, pull=True))
    exchange, products = Exchange("all_reduce", CPU), Products(CPU)
    try:
        with _on(device):
            weft.concurrent(products, weft.AllReduce(torch.zeros(8)), method="copy_engine")
            for turn in range(3):
                exchange.fill(turn)
                products.check(weft.concurrent(products, exchange.collective, key="k", repeatable=True))
                exchange.check(turn)
            assert [method for _, method, _ in _choices()] == [fastest]
            state = GROUPS.state(dist.group.WORLD.group_name)  # type: ignore[union-attr]
            return [f"{schedule.name} of {schedule.problem.m}" for schedule in state.schedules()]
    finally:
        weft.close()


@pytest.mark.parametrize(
    ("fastest", "bound"),
    [(method, [method] * (method != "nccl")) for method in ("nccl", "copy_engine+ctas=64", "copy_engine+pull+ctas=32")],
)
def test_what_lost_keeps_no_memory(ranks: RankFixture, fastest: str, bound: list[str]) -> None:
    for first, *others in ranks(2).run(_left_bound, fastest):
        assert first == "copy_engine of 8"
        assert [name.split()[0] for name in others] == bound


def _lacking(method: str, rank: int, use: int) -> float:
    """Rank 1 cannot do what would be fastest."""
    times = {"sequential": 300.0, "computation": 200.0, LACKING: -1.0 if rank else 100.0}
    return times.get(method, 250.0)


def test_what_one_rank_lacks_all_leave_out(ranks: RankFixture) -> None:
    answers = ranks(2).run(_scripted, _lacking, 3)
    assert answers[0][0] == answers[1][0]
    ((_, method, us),), *_ = answers[0]
    assert us[method] == 250.0
    assert LACKING not in us
    for rank, reason in enumerate(["another rank cannot", f"this rank has no {LACKING}"]):
        assert any(LACKING in text and reason in text for text in answers[rank][2])


def _real_trial() -> Choices:
    """On this CPU's own clock: results are right in and after an autotuning run, whatever it finds."""
    weft.close()
    exchange, products = Exchange("reduce_scatter", CPU), Products(CPU)
    for turn in range(3):
        exchange.fill(turn)
        products.check(weft.concurrent(lambda: products(), [exchange.collective], repeatable=True))
        exchange.check(turn)
    found = _choices()
    weft.close()
    return found


def test_a_trial_on_this_clock(ranks: RankFixture) -> None:
    answers = ranks(2).run(_real_trial)
    assert answers[0] == answers[1]
    ((key, method, us),) = answers[0]
    assert key.startswith("test_concurrent._real_trial.<locals>.<lambda>:")
    assert set(us) == {"sequential", "nccl", "nccl+late"}
    assert us[method] <= us["sequential"]


@on_ranks(2)
def test_a_trial_changes_no_result_in_place() -> None:
    """An autotuning run restores what collectives read and write in place."""
    weft.close()
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(8.0 * size)
    part = whole[8 * rank : 8 * (rank + 1)]
    gathered = torch.zeros(8 * size)
    gathered[8 * rank : 8 * (rank + 1)] = rank
    mine = [weft.ReduceScatter(part, whole), weft.AllGather(gathered, gathered[8 * rank : 8 * (rank + 1)])]
    expected = size * part.clone()
    weft.concurrent(Products(CPU), mine, key="in place", repeatable=True)
    assert torch.equal(part, expected)
    assert torch.equal(gathered, torch.arange(float(size)).repeat_interleave(8))
    weft.close()


class _Stop(Exception):
    pass


def _raised() -> int:
    """An exception in the computation passes; peers' collectives and the next use are right."""
    weft.close()
    exchange, products = Exchange("all_reduce", CPU), Products(CPU)
    for turn, method in enumerate([*METHODS, "auto"]):
        exchange.fill(turn)
        with suppress(_Stop), weft.concurrent(collectives=exchange.collective, key="raised", method=method):
            if dist.get_rank() == 1:
                raise _Stop
        exchange.check(turn)
        exchange.fill(turn + 100)
        products.check(weft.concurrent(products, exchange.collective, method=method, key="after"))
        exchange.check(turn + 100)
    weft.close()
    return products.calls


def test_exceptions_leave_peers_and_later_uses_right(ranks: RankFixture) -> None:
    assert ranks(2).run(_raised) == [6, 6]


def _nested() -> Choices:
    """Uses within uses: of the same key, of another, and of another group that has other ranks; two groups in one use."""
    weft.close()
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    outer, inner, products = Exchange("all_reduce", CPU), Exchange("all_gather", CPU), Products(CPU)
    pair = Exchange("all_to_all", CPU, group=pairs[0]) if rank < 2 else None
    for turn in range(6):
        outer.fill(turn)
        inner.fill(turn)
        with weft.concurrent(collectives=outer.collective, key="outer"):
            products.check(weft.concurrent(products, inner.collective, key="inner"))
            inner.check(turn)
            if pair is not None:
                pair.fill(turn)
                products.check(weft.concurrent(products, pair.collective, key="pair"))
                pair.check(turn)
        outer.check(turn)
    both = [Exchange("all_reduce", CPU, group=group) for group in pairs if isinstance(group, dist.ProcessGroup)]
    for exchange in both:
        exchange.fill(0)
        products.check(weft.concurrent(products, exchange.collective, method="nccl"))
        exchange.check(0)
    found = _choices() + ([(c.key, c.method, c.us) for c in weft.concurrent_choices(pairs[0])] if rank < 2 else [])
    for group in pairs:
        if isinstance(group, dist.ProcessGroup):
            weft.close(group)
    weft.close()
    assert size == 3
    return found


def test_uses_nest_over_groups(ranks: RankFixture) -> None:
    answers = ranks(3).run(_nested)
    assert answers[0] == answers[1]
    assert [key for key, _, _ in answers[0]] == ["outer", "inner", "pair"]
    assert answers[2] == answers[0][:2]


def _two_groups_in_one_use() -> Choices:
    weft.close()
    second = dist.new_group([0, 1])
    exchanges = [Exchange("all_reduce", CPU), Exchange("all_gather", CPU, group=second)]
    products = Products(CPU)
    for turn in range(6):
        for exchange in exchanges:
            exchange.fill(turn)
        products.check(weft.concurrent(products, [exchange.collective for exchange in exchanges], key="both"))
        for exchange in exchanges:
            exchange.check(turn)
    found = _choices()
    weft.close(second)
    weft.close()
    return found


def test_one_use_may_have_two_groups(ranks: RankFixture) -> None:
    answers = ranks(2).run(_two_groups_in_one_use)
    assert answers[0] == answers[1]
    assert [key for key, _, _ in answers[0]] == ["both"]


def _differ() -> str:
    weft.close()
    size = 64 + dist.get_rank()
    try:
        with weft.concurrent(collectives=weft.AllReduce(torch.zeros(size)), key="differ"):
            pass
    except weft.RankMismatch as error:
        return str(error)
    finally:
        dist.barrier()
        weft.close()
    return ""


def test_ranks_that_mean_different_things_are_told(ranks: RankFixture) -> None:
    for text in ranks(2).run(_differ):
        assert "collective 0: rank " in text
        assert "all_reduce of [64] float32 among 2" in text
        assert "all_reduce of [65] float32 among 2" in text


def _pipeline() -> list[float]:
    """Each rank adds its number to what comes from the one before, a microbatch a tick, while the next one is on its way. Two
    buffers take turns: at each tick one is received into, and the other one is read."""
    weft.close()
    rank, size = dist.get_rank(), dist.get_world_size()
    given, arriving, leaving = (torch.zeros(4) for _ in range(3))
    results = []
    for tick in range(30):
        given = given if rank else torch.full((4,), float(tick))
        sends = {"send": leaving, "to": rank + 1} if rank + 1 < size else {}
        takes = {"receive": arriving, "source": rank - 1} if rank else {}
        with weft.concurrent(collectives=weft.SendReceive(**sends, **takes), key="tick"):
            leaving = given + rank
        given, arriving = arriving, given if rank else arriving
        results.append(float(leaving[0]))
    weft.close()
    return results


def test_a_pipeline_sends_beside_computation(ranks: RankFixture) -> None:
    first, last = ranks(2).run(_pipeline)
    assert first == [float(tick) for tick in range(30)]
    assert last[2:] == [1.0 + value for value in first[:-2]]


def _refused() -> list[str]:
    """The message of each mistake."""
    weft.close()
    flat, size = torch.zeros(8), dist.get_world_size()
    rank = dist.get_rank()
    mistakes: list[Callable[[], object]] = [
        lambda: weft.concurrent(Products(CPU), []),
        lambda: weft.concurrent(Products(CPU), [flat]),  # type: ignore[list-item]
        lambda: weft.concurrent(flat, weft.AllReduce(flat)),  # type: ignore[call-overload]
        lambda: weft.concurrent(collectives=weft.AllReduce(flat)),  # type: ignore[call-overload]
        lambda: weft.concurrent(collectives=weft.AllReduce(flat), key="k", repeatable=True),  # type: ignore[call-overload]
        lambda: weft.concurrent(Products(CPU), weft.AllReduce(flat), method="fast"),
        lambda: weft.concurrent(Products(CPU), weft.AllReduce(flat), method="nccl+priority"),
        lambda: weft.concurrent(Products(CPU), weft.AllReduce(flat), method="nccl+ctas=8"),
        lambda: weft.concurrent(Products(CPU), weft.AllReduce(flat), residents=(1,)),
        lambda: weft.AllReduce(torch.zeros(4, 4).t()),
        lambda: weft.AllReduce(flat, reduction="max"),  # type: ignore[arg-type]
        lambda: weft.AllReduce(flat.int(), reduction="avg"),
        lambda: weft.AllReduce([1.0]),  # type: ignore[arg-type]
        lambda: weft.AllGather(flat, flat),
        lambda: weft.AllGather(torch.zeros(8 * size, dtype=torch.int32), flat),
        lambda: weft.AllToAll(flat, flat),
        lambda: weft.ReduceScatter(flat, torch.zeros(8 * size + 1)),
        lambda: weft.SendReceive(),
        lambda: weft.SendReceive(send=flat),
        lambda: weft.SendReceive(send=flat, to=rank),
        lambda: weft.concurrent(Products(CPU), weft.SendReceive(send=flat, to=1 - rank), method="copy_engine"),
        lambda: weft.concurrent(Products(CPU), weft.ReduceScatter(flat, torch.zeros(8 * size)), method="copy_engine+pull"),
    ]
    messages = []
    for mistake in mistakes:
        try:
            mistake()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    with weft.concurrent(collectives=weft.AllReduce(flat), key="twice", method="nccl") as context:
        pass
    with suppress(ValueError):
        context.__enter__()
        messages.append("entered twice")
    dist.barrier()
    weft.close()
    return messages


def test_mistakes_name_the_argument(ranks: RankFixture) -> None:
    expected = [
        "collectives is empty",
        "collectives[0] is a Tensor; use weft.AllReduce",
        "compute is a Tensor; pass a callable, or a torch.cuda.CUDAGraph",
        "key is None; pass a string",
        "repeatable is for a callable",
        "method is 'fast'; use auto, sequential",
        "method is nccl+priority; priority needs a GPU",
        "method is nccl+ctas=8; ctas needs a GPU",
        "residents is given without kernels",
        "tensor is [4, 4] with strides (1, 4); it must be contiguous",
        "reduction is 'max'; use 'sum' or 'avg'",
        "reduction is 'avg', of torch.int32, of which gloo has no mean; use sum",
        "tensor is a list; it must be a tensor",
        "output has 8 elements; 2 ranks give 8 each: it needs 16",
        "output is torch.int32 on cpu, input torch.float32 on cpu; they must agree",
        "output overlaps input; all_to_all allows no overlap",
        "input has 17 elements; 2 ranks get 8 each: it needs 16",
        "send and receive are None",
        "send and to belong together; to is None",
        "to is ",
        "method is 'copy_engine'; copy engines do not run send_receive",
        "method is 'copy_engine+pull'; reduce_scatter is not pulled",
    ]
    for messages in ranks(2).run(_refused):
        assert len(messages) == len(expected)
        for text, start in zip(messages, expected, strict=True):
            assert text.startswith(start), text


def test_a_choice_says_why() -> None:
    opaque = (OpaqueCollective(name="sends"),)
    load = ConcurrentProblem(collectives=opaque, world_size=2, compute_us=100.0, communication_us=50.0)
    measurements = (Measurement(spec="sequential", us=150.0), Measurement(spec="nccl", us=120.0))
    assert ConcurrentChoice(key="k", method="nccl", problem=load, measurements=measurements).why == (
        "its 120 us are the least of 2 methods; sequential takes 150 us. That is 0.50 of the ideal speed-up"
    )
    slow = (measurements[0], Measurement(spec="nccl", us=149.0))
    assert ConcurrentChoice(key="k", method="sequential", problem=load, measurements=slow).why == (
        "nothing is faster by more than 1%: nccl takes 149 us, sequential 150"
    )
    assert ConcurrentChoice(key="k", method="sequential", measurements=measurements).why == (
        "nothing is faster by more than 1% each time it is measured: nccl takes 120 us, sequential 150"
    )
    assert "nothing to hide" in ConcurrentChoice(key="k", method="sequential", problem=load).why
    assert str(ConcurrentChoice(key="k", method="nccl", note="x")) == "k uses nccl, because x. Nothing was measured."
