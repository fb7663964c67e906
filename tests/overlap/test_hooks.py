"""weft's collectives under PyTorch's data parallelism, on CPU ranks: the same training in every way; steps that try them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.overlap.concurrent import ConcurrentChoice
from weft.overlap.concurrent.steps import most_steps
from weft.overlap.concurrent.tuning import STEPS, Sample, UseTurn, in_blocks
from weft.overlap.hooks import data_parallel
from weft.overlap.hooks.data_parallel import WAYS as DDP_WAYS
from weft.overlap.hooks.fully_sharded import KEPT
from weft.overlap.hooks.fully_sharded import WAYS as FSDP_WAYS
from weft.schedules.concurrent import Method, parse

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(33, 130), nn.GELU(), nn.Linear(130, 33))
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.02)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model  # type: ignore[no-any-return]


def _hooked(kind: str, model: nn.Module, **options: Any) -> Any:
    return weft.hooks.ddp(model, **options) if kind == "ddp" else weft.hooks.fsdp(model, **options)  # type: ignore[arg-type]


def _losses(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(steps):
        x = torch.randn(8, 33, generator=draw)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(float(loss))
    return seen


def _trained(kind: str, ways: list[str]) -> list[list[float]]:
    weft.close()
    found = [_losses(_model(kind), 6)]
    for way in ways:
        model = _model(kind)
        trial = _hooked(kind, model, way=way)
        found.append(_losses(model, 6))
        assert str(trial.way) == way
    weft.close()
    return found


@pytest.mark.parametrize(
    ("kind", "ways", "world_size"),
    [("ddp", ["sequential", "vendor", "copy_engine"], 2), ("fsdp", ["vendor", "copy_engine+ahead=2", "vendor+keep"], 3)],
)
def test_training_is_as_pytorchs(ranks: RankFixture, kind: str, ways: list[str], world_size: int) -> None:
    for plain, *others in ranks(world_size).run(_trained, kind, ways):
        assert len(set(plain)) == 6
        for mine in others:
            assert mine == pytest.approx(plain, rel=1e-5)


def _first_steps() -> list[list[tuple[str, int]]]:
    """Of each of three steps the ways, and elements, of its buckets."""
    weft.close()
    model = _model("ddp")
    trial = _hooked("ddp", model, way="copy_engine")
    steps: list[list[tuple[str, int]]] = []
    model.register_forward_hook(lambda *_: steps.append([]))
    executor = trial.tuner.executor
    future = executor.future

    def noting(way: Any, collective: Any, result: torch.Tensor) -> Any:
        steps[-1].append((str(way), result.numel()))
        return future(way, collective, result)

    executor.future = noting
    _losses(model, 3)
    weft.close()
    return steps


def test_the_bucket_of_all_gradients_is_the_vendors(ranks: RankFixture) -> None:
    for first, *others in ranks(2).run(_first_steps):
        assert {way for way, _ in first} == {"vendor"}
        for step in others:
            assert {way for way, _ in step} == {"copy_engine"}
            assert sum(elements for _, elements in step) == sum(elements for _, elements in first)


def _left_free(ends: tuple[bool, ...]) -> list[str]:
    """What buckets ask the device for, in steps of two buckets; of one where a pass ends early."""
    events: list[str] = []

    @contextmanager
    def limits(method: Method) -> Iterator[None]:
        events.append(f"leave {method.left}")
        yield
        events.append("take back")

    executor = SimpleNamespace(limits=limits, future=lambda way, *_: events.append(f"bucket, ctas={way.ctas}"))
    calls = SimpleNamespace(method=lambda spec, _: parse(spec))
    tuner: Any = SimpleNamespace(way=parse("vendor+ctas=3+left=4"), turn=lambda: None, executor=executor, calls=calls)
    steps = data_parallel.Averaging(tuner, cast(dist.ProcessGroup, dist.group.WORLD))
    for whole in ends:
        for at in range(1 + whole):
            bucket = SimpleNamespace(index=lambda at=at: at, is_last=lambda at=at: at == 1, buffer=lambda: torch.zeros(2))  # type: ignore[misc]
            steps.average(cast(Any, bucket))
    return events


@pytest.mark.parametrize("ends", [(True, True, True), (True, False, True)])
def test_sms_are_left_free_from_the_first_bucket_to_the_last(ranks: RankFixture, ends: tuple[bool, ...]) -> None:
    expected = []
    for step, whole in enumerate(ends):
        if step and not ends[step - 1]:
            expected.append("take back")
        left, ctas = (4, 3) if step else (0, 0)
        expected += [f"leave {left}", f"bucket, ctas={ctas}"] + (["take back", "bucket, ctas=0"] if whole else [])
    assert ranks(2).run(_left_free, ends) == [expected] * 2


def _tried(slow: str) -> tuple[list[str], list[tuple[str, str, dict[str, float]]]]:
    """The way of every step, and what was chosen, on a clock by which `slow` takes twice as long."""
    weft.close()
    model = _model("ddp")
    trial = _hooked("ddp", model, key="mine")
    now = [0]

    def mark() -> int:
        now[0] += 2_000_000 if str(trial.tuner.way) == slow else 1_000_000
        return now[0]

    trial.tuner.executor.mark = mark
    taken = []
    model.register_forward_hook(lambda *_: taken.append(str(trial.way)))
    _losses(model, 6 + most_steps(2))
    assert trial.settled
    found = [(choice.key, choice.way, choice.us) for choice in weft.concurrent_choices()]
    weft.close()
    return taken, found


def _shown() -> tuple[list[str], list[str]]:
    """What a hook prints, and what is listed of it: given a way; while ways are tried; once one is chosen."""
    weft.close()
    printed, listed = [], []
    for way, counts in (("copy_engine", (3,)), ("auto", (5, most_steps(2)))):
        model = _model("ddp")
        hook = _hooked("ddp", model, way=way, key=way)
        for count in counts:
            _losses(model, count)
            printed.append(repr(hook))
            listed.append(str(weft.concurrent_choices()[-1]))
    assert hook.settled
    weft.close()
    return printed, listed


def test_a_hook_says_what_it_does_and_is_listed(ranks: RankFixture) -> None:
    for printed, listed in ranks(2).run(_shown):
        title = "weft.hooks.ddp: gradients are averaged bucket by bucket among 2 ranks; "
        given, trying, chosen = printed
        head, *buckets = given.splitlines()
        assert head == f"{title}copy_engine: copy_engine (it was given)"
        assert buckets
        assert all(line.startswith(f"  bucket {i}: all_reduce of [") for i, line in enumerate(buckets))
        assert all(line.endswith(" float32 among 2, copy_engine") for line in buckets)
        assert trying.startswith(f"{title}auto: vendor (step 5 of at most {2 + most_steps(2)} in which 2 ways are tried)")
        assert " us is the least of 2 ways" in chosen or "nothing is faster" in chosen
        assert listed[0] == "copy_engine: copy_engine, because it was given (not measured)"
        assert listed[1].startswith("auto: vendor, because step 5 of at most")
        assert listed[2].startswith("auto: ")
        assert "vendor" in listed[2].partition("(")[2]


_SCREENING = ["vendor"] * (2 + STEPS.counted) + ["sequential"] * (2 + STEPS.counted)
_FINAL = ["sequential"] * (1 + STEPS.counted) + ["vendor"] * (1 + STEPS.counted)


@pytest.mark.parametrize(
    ("slow", "chosen", "blocks"),
    [("sequential", "vendor", _SCREENING), ("vendor", "sequential", _SCREENING + STEPS.rounds * _FINAL)],
)
def test_blocks_of_steps_take_ways_in_turn_and_keep_the_fastest(
    ranks: RankFixture, slow: str, chosen: str, blocks: list[str]
) -> None:
    for taken, found in ranks(2).run(_tried, slow):
        ((key, way, us),) = found
        assert (key, way) == ("mine", chosen)
        assert us == {"sequential": 1000.0, "vendor": 1000.0, slow: 2000.0}
        assert list(us) == [spec for spec in DDP_WAYS if spec in ("sequential", "vendor")]
        assert taken[3 : 3 + len(blocks)] == blocks
        assert set(taken[3 + len(blocks) :]) == {chosen}


class _Clock:
    """A judge of one rank. us(way, how many of its blocks came before): a step's time. A way's first two steps, and the first
    after another way, take ten more."""

    key = "clock"

    def __init__(self, us: Callable[[str, int], float]) -> None:
        self._us = us

    def slowest_us(self, text: str, spans: Sequence[tuple[float, float]]) -> float:
        return max(end - begin for begin, end in spans)

    def settle(self, ways: list[str]) -> tuple[ConcurrentChoice, int]:
        """What is chosen, and after how many steps."""
        turns, now, taken = in_blocks(cast(Any, self), STEPS, ways), 0.0, list[str]()
        way = next(turns)
        try:
            while True:
                changes = sum(before != way == after for before, after in pairwise(["", *taken, way]))
                fresh = taken.count(way) < 2 or taken[-1] != way
                begin, now = now, now + self._us(way, changes - 1) * (11 if fresh else 1)
                taken.append(way)
                way = turns.send(UseTurn(Sample(begin, begin, now), ()))
        except StopIteration as end:
            return end.value, len(taken)


def test_a_way_has_to_be_faster_twice() -> None:
    lucky = _Clock(lambda way, block: 95.0 if way == "b" and block == 0 else 100.0)
    slower_after = _Clock(lambda way, block: {"a": 100.0, "b": 98.0 if block == 0 else 103.0, "c": 98.5}[way])
    within = _Clock(lambda way, block: 99.1 if way == "b" else 100.0)
    assert lucky.settle(["a", "b"])[0].way == within.settle(["a", "b"])[0].way == "a"
    settled, _ = slower_after.settle(["a", "b", "c"])
    assert (settled.way, settled.us) == ("c", {"a": 100.0, "b": pytest.approx(103.0), "c": pytest.approx(98.5)})


def test_a_machine_that_slows_down_does_not_choose() -> None:
    drifting = iter(range(10**6))
    assert _Clock(lambda way, block: 100.0 + 0.05 * next(drifting)).settle(["a", "b", "c"])[0].way == "a"


def test_what_noise_hides_is_not_chosen() -> None:
    """Blocks differ by up to 6%: what saves 15% is chosen always; what loses 2%, or saves 2%, is not, but for luck."""
    chosen = []
    for seed in range(200):
        draw = random.Random(seed)
        true = {"a": 100.0, "slower": 102.0, "little": 98.0}
        factors: dict[tuple[str, int], float] = {}

        def us(way: str, block: int, true: Any = true, draw: Any = draw, factors: Any = factors) -> float:
            return true[way] * factors.setdefault((way, block), draw.uniform(0.97, 1.03))  # type: ignore[no-any-return]

        noisy = _Clock(us)
        chosen.append(noisy.settle(["a", "slower", "little"])[0].way)
        true["little"] = 85.0
        factors.clear()
        assert noisy.settle(["a", "slower", "little"])[0].way == "little"
    assert chosen.count("slower") <= 2
    assert chosen.count("a") > 150


@pytest.mark.parametrize(("ways", "near"), [(1, 0), (2, 0), (2, 1), (4, 3), (7, 6)])
def test_trials_have_a_bound(ways: int, near: int) -> None:
    names = [f"w{at}" for at in range(ways)]
    clock = _Clock(lambda way, block: 100.0 if int(way[1:]) <= near else 120.0)
    settled, steps = clock.settle(names) if ways > 1 else (None, 0)
    assert steps <= most_steps(ways)
    assert (steps == most_steps(ways)) == (near >= min(3, ways - 1))
    assert settled is None or settled.way == "w0"


def _movers(model: Any) -> tuple[Any, Any]:
    """What gathers and what scatters for the first layer now."""
    group = model[0]._get_fsdp_state()._fsdp_param_group
    return group._all_gather_comm, group._reduce_scatter_comm


def _gathers(way: str) -> tuple[list[str], list[str], list[str]]:
    """What happens, in order, in the third step, and in two passes without gradients: gathers, and passes of the two layers."""
    weft.close()
    model: Any = _model("fsdp")
    _hooked("fsdp", model, way=way)
    events: list[str] = []
    stock = type(_movers(model)[0])
    gather = stock.__call__

    def noting(*args: Any, **options: Any) -> Any:
        events.append("gather")
        return gather(*args, **options)

    for at in (0, 2):
        model[at].register_forward_pre_hook(lambda *_, at=at: events.append(f"layer {at}"))  # type: ignore[misc]
    stock.__call__ = noting
    found = []
    try:
        _losses(model, 2)
        for run in (lambda: _losses(model, 1), *[torch.no_grad()(lambda: model(torch.ones(8, 33)))] * 2):
            events.clear()
            run()
            found.append(list(events))
    finally:
        stock.__call__ = gather
    weft.close()
    return tuple(found)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("way", "events"),
    [
        ("vendor", ["gather", "layer 0", "gather", "layer 2", "gather", "gather"]),
        ("vendor+ahead=1", ["gather", "gather", "layer 0", "layer 2", "gather", "gather"]),
        ("vendor+keep", ["gather", "layer 0", "gather", "layer 2"]),
    ],
)
def test_parameters_are_gathered_as_the_way_says(ranks: RankFixture, way: str, events: list[str]) -> None:
    plain = ["gather", "layer 0", "gather", "layer 2"]
    assert ranks(2).run(_gathers, way) == [(events, plain, plain)] * 2


def _moved_by(way: str) -> list[bool]:
    """Whether a hooked model's bytes are moved by fully_shard's own: before its first step, in a trial, after that."""
    weft.close()
    model: Any = _model("fsdp")
    own, found = _movers(model), []
    trial = _hooked("fsdp", model, way=way)
    while True:
        found.append(_movers(model) == own)
        settled = trial.settled
        _losses(model, 1)
        if settled:
            break
    found.append(_movers(model) == own)
    assert trial.way == parse("vendor") or way != "vendor"
    weft.close()
    return [found[0], any(found[1:-1]), found[-1] == (trial.way.transport == "vendor" and not trial.way.ctas)]


def test_what_fully_shard_does_by_itself_it_does_itself(ranks: RankFixture) -> None:
    assert ranks(2).run(_moved_by, "vendor") == [[True, False, True]] * 2
    assert ranks(2).run(_moved_by, "copy_engine") == [[False, False, True]] * 2
    assert ranks(2).run(_moved_by, "auto") == [[False, False, True]] * 2


def _replicated(options: dict[str, Any]) -> tuple[list[float], bool, int]:
    """Losses; whether gradients lie in buckets; the bytes of one."""
    weft.close()
    torch.manual_seed(0)
    made = weft.hooks.replicate(nn.Sequential(nn.Linear(33, 130), nn.GELU(), nn.Linear(130, 33)), way="vendor", **options)
    found = _losses(made, 6)
    views = made.gradient_as_bucket_view
    weft.close()
    return found, views, made.bucket_bytes_cap


def test_replicated_models_train_as_pytorchs(ranks: RankFixture) -> None:
    plain = ranks(2).run(_trained, "ddp", [])
    for options, views, mib in (({}, True, 25), ({"bucket_cap_mb": 3, "gradient_as_bucket_view": False}, False, 3)):
        for rank, (losses, has_views, bucket) in enumerate(ranks(2).run(_replicated, options)):
            assert losses == plain[rank][0]
            assert (has_views, bucket) == (views, mib << 20)


def _tried_over() -> list[tuple[str, ...]]:
    """What is tried of a model sharded over all ranks, without and with room for it, and of one replicated by halves."""
    from weft.overlap.hooks.fully_sharded import _tried as tried

    halves: Any = nn.Linear(8, 8)
    fully_shard(halves, mesh=dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    whole = _model("fsdp")
    nbytes = 4 * (33 * 130 + 130 + 130 * 33 + 33)
    return [tried(whole, nbytes - 1), tried(whole, nbytes), tried(halves, 0)]


def test_what_is_tried_depends_on_the_room_and_the_mesh(ranks: RankFixture) -> None:
    for tight, roomy, halves in ranks(2).run(_tried_over):
        assert tight == FSDP_WAYS
        assert roomy == FSDP_WAYS + KEPT
        assert halves == tuple(way for way in FSDP_WAYS if not way.startswith("vendor+ctas"))


def _concurrent(model: nn.Module, *, way: str) -> None:
    weft.concurrent(lambda: None, weft.AllReduce(torch.zeros(4)), way=way)


def _refused() -> list[str]:
    weft.close()
    plain, told = nn.Linear(4, 4), []
    ddp, sharded = DistributedDataParallel(nn.Linear(4, 4)), _model("fsdp")
    weft.hooks.fsdp(sharded, way="copy_engine")
    for hook, model, way in (
        (weft.hooks.ddp, plain, "auto"),
        (weft.hooks.ddp, ddp, "vendor+left=8"),
        (weft.hooks.ddp, ddp, "vendor+late"),
        (weft.hooks.ddp, ddp, "vendor+keep"),
        (weft.hooks.ddp, ddp, "vendor+ctas=8"),
        (weft.hooks.ddp, ddp, "fast"),
        (weft.hooks.replicate, ddp, "auto"),
        (weft.hooks.replicate, _model("fsdp"), "auto"),
        (weft.hooks.fsdp, plain, "auto"),
        (weft.hooks.fsdp, _model("fsdp"), "vendor+priority"),
        (weft.hooks.fsdp, _model("fsdp"), "sequential"),
        (_concurrent, plain, "vendor+ahead=1"),
        (weft.hooks.fsdp, sharded, "vendor"),
        (weft.hooks.ddp, ddp, None),
    ):
        try:
            hook(model, way=way)  # type: ignore[operator]
            told.append("")
        except ValueError as error:
            told.append(str(error))
    weft.close()
    return told


def test_mistakes_name_the_argument(ranks: RankFixture) -> None:
    expected = [
        "model is a Linear; wrap it in torch.nn.parallel.DistributedDataParallel",
        "way is vendor+left=8; left needs a GPU",
        "way is 'vendor+late'; late is not to be had here",
        "way is 'vendor+keep'; keep is not to be had here",
        "way is vendor+ctas=8; ctas needs a GPU",
        "way is 'fast'; use auto, sequential",
        "module is a DistributedDataParallel already",
        "module has DTensors (0.weight), which DistributedDataParallel does not take; for tensor and data",
        "model has no module of fully_shard's",
        "way is 'vendor+priority'; priority is not to be had here",
        "way is 'sequential', but fully_shard overlaps by itself",
        "way is 'vendor+ahead=1'; ahead is for weft.hooks.fsdp",
        "model communicates by weft already; call weft.hooks.fsdp once a model",
        "way is a NoneType; use auto, or a way such as vendor+priority",
    ]
    for told in ranks(2).run(_refused):
        assert [text[: len(start)] for text, start in zip(told, expected, strict=True)] == expected
