"""`weft run`: predict every communicating layer of a model on a machine, then run its schedules here and check the results.

The planner chooses a schedule for each layer on the named machine. CPU ranks run schedules of the same family and chunk count
at sizes that CPUs can handle. One call is compared with the sequential program, and one is recorded. GPUs run the schedule that
is fastest by measurement, and are also timed. The checker proves every schedule.

Each rank draws its inputs from (seed, layer, rank). The reference is the sequential program in float32 over torch.distributed,
which shares no code with weft's executors. Every time is the median over rounds of the slowest rank's time. The times of
computation and communication alone are those of the two steps of a sequential call, which is recorded in each round:

    round 1: sequential | overlapped | sequential, recorded      round 2: sequential | overlapped | ...

So all methods run under the same conditions. Recording slows a call on a GPU, so no call is both timed and recorded.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist

from weft import schedules
from weft.checker import check
from weft.checker.families import import_families
from weft.comm.membership import cut
from weft.core.machine import Machine
from weft.core.problem import ITEMSIZE, LOOKUP_OPS, OPS, REDUCTIONS, DType, LookupProblem, Problem, Scaling
from weft.core.schedule import Schedule
from weft.core.span import Span
from weft.planner import plan
from weft.planner.accuracy import accuracy_notes
from weft.planner.models import Model, decode_calls, operator_calls
from weft.planner.values import Plan
from weft.runtime.autotune import Choice
from weft.runtime.calls import Call, MatmulCall, ScaledOperands
from weft.runtime.choose import fans_out
from weft.runtime.groups import GROUPS
from weft.runtime.plan_cache import versions
from weft.runtime.ranks import Ranks
from weft.tools.results import LayerRun, Run, Speeds
from weft.tools.run_inputs import LookupInputs, ScaledInputs

Inputs = tuple[torch.Tensor, torch.Tensor] | ScaledInputs | LookupInputs
"""One rank's inputs of a layer."""
Progress = Callable[[str, int, int], None]
ROUNDS = {"cpu": 3, "cuda": 20}
_BLOCK = 4096


def run_model(
    model: Model,
    *,
    ranks: int,
    device: str,
    tokens: int,
    op: str | None,
    schedule: str,
    machine: Machine,
    machine_ranks: int,
    machine_tokens: int,
    dtype: str,
    seed: int,
    progress: Progress,
    scaling: Scaling | None = None,
    imports: Sequence[str] = (),
) -> Run:
    """Predict, prove, run and check the communicating layers of `model` on `ranks` processes of this machine.

    device: "cpu" or "cuda". op: runs only layers of this operator. schedule: "auto", or a name that schedules.parse accepts.
    machine, machine_ranks, machine_tokens: the predictions are for these. CPU ranks run the schedules that "auto" chooses
        there, with the copy lanes of that machine. GPUs choose by measurement and use their own lanes. Only they are timed.
    progress: called as progress(what, done, total). scaling: the scaling of FP8 operands. dtype is then that of results.
    imports: modules that every rank imports first, which register families of schedules.
    Raises ValueError for invalid arguments, and RankFailed if a rank is lost.
    """
    _check_request(ranks=ranks, device=device, tokens=tokens, op=op, schedule=schedule, dtype=dtype)
    element = cast(DType, dtype)
    found = decode_calls(model) if op == "matmul_all_reduce" else operator_calls(model)
    chosen = [s for s in found if op in (None, s.op)]
    for layer in chosen:
        schedules.check_op(schedule.partition(":")[0], layer.op)
    like, rounds = (machine.fans_out, 0) if device == "cpu" else (None, ROUNDS[device])
    done: list[LayerRun] = []
    with Ranks(ranks if chosen else 0, device=device) as pool:
        if imports:
            pool.run(import_families, imports)
        for index, layer in enumerate(chosen):
            progress(f"{layer.name}: predicting on {machine.name}", 2 * index, 2 * len(chosen))
            there = _predict(layer.problem(machine_tokens, machine_ranks, element, scaling), schedule, machine)
            _build_proved(there.problem, there.chosen.spec, machine.fans_out)
            problem = replace(layer.problem(tokens, ranks, element, scaling), nodes=cut(ranks))
            spec = _choose(problem, schedule, there, machine, device)
            if spec != "auto":
                _build_proved(problem, spec, bool(like))
            progress(f"{layer.name}: running {spec} on {ranks} ranks", 2 * index + 1, 2 * len(chosen))
            seeds = seed + zlib.crc32(layer.name.encode())
            measured = pool.run(measure_layer, problem, spec, seeds, device, like, rounds)
            done.append(_layer_run(layer.name, _build_proved(problem, measured[0].spec, bool(like)), measured, there))
        progress("done", 2 * len(chosen), 2 * len(chosen))
    return Run(
        model=model.name,
        device=device,
        world_size=ranks,
        tokens=tokens,
        dtype=dtype if scaling is None else f"{scaling}, to {dtype}",
        seed=seed,
        machine=machine.name,
        machine_words=machine.description,
        machine_ranks=machine_ranks,
        machine_tokens=machine_tokens,
        layers=tuple(done),
        versions=versions(device),
        accuracy=accuracy_notes(machine, [(layer.name, layer.plan) for layer in done]),
    )


def _check_request(*, ranks: int, device: str, tokens: int, op: str | None, schedule: str, dtype: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; use cpu or cuda")
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; it must be at least 1")
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}; it must be at least 1")
    if op is not None and op not in (*OPS, *LOOKUP_OPS):
        raise ValueError(f"op is {op!r}; weft has {', '.join((*OPS, *LOOKUP_OPS))}")
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype is {dtype!r}; weft overlaps {', '.join(ITEMSIZE)}")
    if schedule != "auto":
        schedules.parse(schedule)
    gpus = torch.cuda.device_count() if device == "cuda" else ranks
    if ranks > gpus:
        raise ValueError(
            f"ranks is {ranks}, but this machine has {gpus} GPUs; use --ranks {gpus} or --device cpu"
            if gpus
            else f"ranks is {ranks} with --device cuda, but this machine has no GPU; use --device cpu"
        )


def _choose(problem: Problem, schedule: str, there: Plan, machine: Machine, device: str) -> str:
    """Return the schedule to run: on CPU ranks the one predicted for the machine, on GPUs the requested one or "auto"."""
    if device == "cpu" and not problem.nodes:
        return there.chosen.spec
    if schedule != "auto":
        built = schedules.build(problem, *schedules.parse(schedule))
        return schedules.spec(built.name, built.chunks)
    if device == "cuda":
        return "auto"
    # Few families can serve ranks on several nodes, and the named machine is one node. CPU ranks may be more than it has GPUs.
    enough = replace(machine, world_size=max(machine.world_size, problem.world_size))
    return plan(problem, enough).chosen.spec


def _build_proved(problem: Problem, spec: str, fan_out: bool) -> Schedule:
    """Build a schedule and prove it. Raises ScheduleError if the checker cannot prove it."""
    built = schedules.build(problem, *schedules.parse(spec), fan_out=fan_out)
    check(built)
    return built


def _predict(problem: Problem, schedule: str, machine: Machine) -> Plan:
    if schedule == "auto":
        return plan(problem, machine)
    name, chunks = schedules.parse(schedule)
    return plan(problem, machine, only=name, chunks=chunks)


@dataclass(frozen=True, kw_only=True)
class Round:
    """Round has one round's times on one rank, and the spans of a sequential call."""

    sequential_us: float
    overlapped_us: float
    sequential_spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured has one rank's results of a layer. `spec` is the schedule that ran, `spans` those of one call.

    tried: the time of each candidate in us, if the schedule was chosen by measurement."""

    spec: str
    max_error: float
    rounds: tuple[Round, ...]
    spans: tuple[Span, ...]
    tried: dict[str, float]


def measure_layer(
    problem: Problem, spec: str, seed: int, device: str, fan_out: bool | None = None, rounds: int | None = None
) -> Measured:
    """Draw one rank's inputs, check the result, time the schedule and the sequential one, and record a call.

    fan_out: whether the schedule has a copy lane for each peer. By default the device's profile decides.
    rounds: the number of timed rounds. By default that in ROUNDS."""
    rounds = ROUNDS[device] if rounds is None else rounds
    rank = dist.get_rank()
    on = torch.device(device, rank) if device == "cuda" else torch.device(device)
    inputs = _inputs(problem, rank, seed, on)
    asked, _held = _resolve_schedule(problem, spec, on, fan_out)
    out = _run(problem, asked, inputs)
    tried: dict[str, float] = {}
    if spec == "auto":
        choice = _find_choice(problem)
        asked = spec = choice.spec
        tried = choice.us
    error = _error(problem, inputs, out, rank)
    timed = tuple(_round(problem, asked, inputs, on) for _ in range(rounds + bool(rounds)))[1:]  # the first one warms up
    return Measured(spec=spec, max_error=error, rounds=timed, spans=_spans(problem, asked, inputs), tried=tried)


def _resolve_schedule(problem: Problem, spec: str, on: torch.device, fan_out: bool | None) -> tuple[str, Schedule | None]:
    """Return the name of the schedule for calls. It is `spec`, unless this device would build another schedule from it.

    Then the schedule is also returned, and the caller must keep it as long as it uses the name."""
    if fan_out in (None, fans_out(on)):
        return spec, None
    name: str = dist.group.WORLD.group_name  # type: ignore[union-attr]
    here = replace(problem, nodes=GROUPS.state(name).rank_group.nodes)
    plain, built = (schedules.build(here, *schedules.parse(spec), fan_out=fan) for fan in (not fan_out, bool(fan_out)))
    return (spec, None) if built == plain else (GROUPS.keep(built), built)


def _find_choice(problem: Problem) -> Choice:
    """Return the choice that "auto" has made in a call of this problem."""
    found = GROUPS.choices(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    return next(choice for choice in found if choice.problem == problem)


def _round(problem: Problem, spec: str, inputs: Inputs, on: torch.device) -> Round:
    """Time both schedules once, and record a sequential call. If both are the same, one call is timed."""
    us: dict[str, float] = {}
    for name in dict.fromkeys(("sequential", spec)):
        us[name] = _time_call(lambda name=name: _run(problem, name, inputs), on)  # type: ignore[misc]
    spans = _spans(problem, "sequential", inputs)
    return Round(sequential_us=us["sequential"], overlapped_us=us[spec], sequential_spans=spans)


def _inputs(problem: Problem, rank: int, seed: int, on: torch.device) -> Inputs:
    """Draw this rank's a and b, which are quantised if operands are FP8, or its tables and bags.

    a and b are normally distributed. b is scaled so that results are of order one."""
    if isinstance(problem, LookupProblem):
        return LookupInputs.draw(problem, rank, seed, on)
    generator = torch.Generator(device=on).manual_seed((seed * 1009 + rank) % 2**62)
    dtype = getattr(torch, problem.dtype)
    a = torch.randn(problem.a_rows(rank), problem.inner(rank), generator=generator, device=on)
    b = torch.randn(problem.inner(rank), problem.columns(rank), generator=generator, device=on) * problem.k**-0.5
    return (a.to(dtype), b.to(dtype)) if problem.scaling is None else ScaledInputs.of(a, b, problem.scaling)


def _run(problem: Problem, spec: str, inputs: Inputs, spans: list[Span] | None = None) -> torch.Tensor:
    return GROUPS.run(dist.group.WORLD.group_name, _call(problem, spec, inputs, spans))["out"][0]  # type: ignore[union-attr]


def _call(problem: Problem, spec: str, inputs: Inputs, spans: list[Span] | None) -> Call:
    if isinstance(inputs, LookupInputs):
        return inputs.call(spec, spans)
    a, b, *scales = inputs
    scaled = None
    if problem.scaling is not None:
        scaled = ScaledOperands(scales[0], [scales[1]], problem.scaling, getattr(torch, problem.dtype))
    return MatmulCall(op=problem.op, a=a, bs=[b], rows=problem.m, row_multiple=1, schedule=spec, spans=spans, scales=scaled)


def _time_call(work: Callable[[], object], on: torch.device) -> float:
    """Return the time of `work` in us after a barrier. On GPUs a second call is timed, which is enqueued during the first."""
    dist.barrier()
    if on.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        work()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e6


def _spans(problem: Problem, spec: str, inputs: Inputs) -> tuple[Span, ...]:
    found: list[Span] = []
    dist.barrier()
    _run(problem, spec, inputs, found)
    return tuple(found)


def _error(problem: Problem, inputs: Inputs, out: torch.Tensor, rank: int) -> float:
    """Return the largest difference from the sequential program in float32, relative to the reference's largest element."""
    if isinstance(inputs, LookupInputs):
        return inputs.error(out, rank)
    a, b = inputs.dequantised(cast(Scaling, problem.scaling)) if isinstance(inputs, ScaledInputs) else inputs
    if problem.op == "all_gather_matmul":
        full = _gathered(problem, a).float()
        rows = slice(0, problem.m)
    elif problem.op == "all_to_all_matmul":
        full = _exchanged(problem, a.float(), rank)
        rows = slice(0, problem.out_rows(rank))
    else:
        full = a.float()
        rows = slice(*problem.shards[rank]) if problem.op == "matmul_reduce_scatter" else slice(0, problem.m)
    worst = torch.zeros((), dtype=torch.float64)
    largest = torch.zeros((), dtype=torch.float64)
    for low in range(0, out.shape[1], _BLOCK):
        expected = full @ b[:, low : low + _BLOCK].float()
        if problem.op in REDUCTIONS:
            expected = expected.cpu()
            dist.all_reduce(expected)
        if problem.op == "matmul_all_to_all":
            expected, rows = _exchanged(problem, expected, rank), slice(0, problem.out_rows(rank))
        expected, got = expected[rows].cpu(), out[:, low : low + _BLOCK].float().cpu()
        if expected.numel():
            difference = (got - expected).abs().max().double()
            worst = torch.maximum(worst, torch.nan_to_num(difference, nan=float("inf")))
            largest = torch.maximum(largest, expected.abs().max().double())
    return float(worst / largest) if largest > 0 else float(worst)


def _gathered(problem: Problem, a: torch.Tensor) -> torch.Tensor:
    """Gather a over torch.distributed. Shards may be uneven, so each is broadcast."""
    pieces = []
    for rank, (low, high) in enumerate(problem.shards):
        piece = (
            a.contiguous() if rank == dist.get_rank() else torch.empty(high - low, problem.k, dtype=a.dtype, device=a.device)
        )
        dist.broadcast(piece, src=rank)
        pieces.append(piece)
    return torch.cat(pieces)


def _exchanged(problem: Problem, rows: torch.Tensor, rank: int) -> torch.Tensor:
    """Exchange rows by all-to-all over torch.distributed."""
    sent = [high - low for low, high in problem.shards]
    received = rows.new_empty(problem.out_rows(rank), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), [sent[rank]] * problem.world_size, sent)
    return received


def tolerance(schedule: Schedule) -> float:
    """Return the largest error that rounding allows, relative to the largest element.

    It includes one rounding of the result to the dtype, one of each partial product that is summed outside a matmul, and
    float32 accumulation over K inside it."""
    problem = schedule.problem
    unit = torch.finfo(getattr(torch, problem.dtype)).eps / 2
    partials = problem.world_size if problem.op in REDUCTIONS else 0
    if problem.op == "all_gather_matmul" and schedule.name == "uniform_fused_2d":
        partials = schedule.chunks
    return float((1 + partials) * unit + 4 * problem.k**0.5 * torch.finfo(torch.float32).eps)


def _layer_run(name: str, built: Schedule, measured: list[Measured], there: Plan) -> LayerRun:
    return LayerRun(
        name=name,
        problem=built.problem,
        schedule=built.name,
        chunks=built.chunks,
        max_error=max(m.max_error for m in measured),
        tolerance=tolerance(built),
        plan=there,
        spans=_from_zero([s for m in measured for s in m.spans]),
        speeds=_speeds(measured) if measured[0].rounds else None,
    )


def _speeds(measured: list[Measured]) -> Speeds:
    def median(time_us: Callable[[tuple[Round, ...]], float]) -> float:
        """Return the median over rounds of a time that is computed from one round of all ranks."""
        return statistics.median(map(time_us, zip(*(m.rounds for m in measured), strict=True)))

    return Speeds(
        sequential_us=median(lambda ranks: max(r.sequential_us for r in ranks)),
        overlapped_us=median(lambda ranks: max(r.overlapped_us for r in ranks)),
        computation_us=median(lambda ranks: _gemm_us([s for r in ranks for s in r.sequential_spans])),
        communication_us=median(lambda ranks: _collective_us([s for r in ranks for s in r.sequential_spans])),
        tried=measured[0].tried,
    )


def _gemm_us(spans: list[Span]) -> float:
    """Return the slowest rank's time of the matmul, or of the lookup, alone."""
    return max((s.duration_us for s in spans if s.kind in ("gemm", "lookup")), default=0.0)


def _collective_us(spans: list[Span]) -> float:
    """Return the time of the collective alone, from the moment at which the last rank starts it."""
    collectives = [s for s in spans if s.kind == "collective"]
    return max(0.0, max(s.end_us for s in collectives) - max(s.start_us for s in collectives)) if collectives else 0.0


def _from_zero(spans: list[Span]) -> tuple[Span, ...]:
    """Return the spans of all ranks with times relative to the first start."""
    zero = min((s.start_us for s in spans), default=0.0)
    return tuple(replace(s, start_us=s.start_us - zero, end_us=s.end_us - zero) for s in spans)
