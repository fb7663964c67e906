"""Predicts a training step of a decoder's layer, forward and backward, on a machine.

    plan_training(model, "h200x8", tokens=8192, ranks=2).step(checkpointing=True).weft_us

A step is the calls of weft's operators, by the planner, and everything else, by closed forms:

    a layer's calls              forward pass             backward pass
    all_gather_matmul            itself                   matmul_reduce_scatter with the weights' gradients, in one call
    matmul_reduce_scatter        itself                   all_gather_matmul, and the product of the weight's gradient
    experts' all-to-alls         itself                   the other one, and the product of the weights' gradients

    everything else              time
    attention                    FLOPs of a causal mask over the matrix rate times FORWARD_ATTENTION or BACKWARD_ATTENTION
    norms, rotary positions,     bytes over the memory rate times a share of it (`Pass`), and launches
    activation, residual adds
    matmuls without an operator  cuBLAS's time for the rows of a rank, three times: forward and two gradients

All constants of this file were measured once, in the trace docs/traces/training_torch.json.gz (one layer of Llama 3 70B, 8192
tokens, 2 x H200), or are assumed; none was fitted to a step's time. With shorter sequences attention reaches a smaller share of
the rate than in that trace. Embeddings, the loss, the optimizer, gradients of norms that ranks sum and the
host's time are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from weft.core.machine import Machine, as_machine
from weft.core.problem import BACKWARD, EXCHANGES, GATHERS, ITEMSIZE, DType, Problem, RaggedProblem
from weft.core.schedule import Schedule
from weft.perf import run
from weft.perf.terms import gemm_us, hbm_us
from weft.planner.choose import plan
from weft.planner.models import Model, OperatorCall, Uncovered, choose_expert_calls, operator_calls
from weft.planner.simulated import predict_sequential_us
from weft.planner.values import Plan
from weft.schedules import build

FORWARD_ATTENTION = 0.55
"""Attention's share of the matrix rate in the forward pass: cuDNN's kernel took 1016 us for 0.55 TFLOP (the trace)."""
BACKWARD_ATTENTION = 0.45
"""The same in the backward pass: cuDNN's four kernels took 3053 us for 2.5 times the forward pass's FLOPs (the trace)."""
BACKWARD_FLOPS = 2.5
"""The FLOPs of attention's backward pass over those of its forward pass: five products, of which one is made again, to two
(FlashAttention-2, arXiv 2307.08691)."""


class Pass(NamedTuple):
    """Pass is an elementwise computation, such as a norm.

    forward, backward: how often a tensor's elements are read or written. launches: kernels of both passes.
    share: its share of the memory rate."""

    forward: float
    backward: float
    launches: tuple[int, int]
    share: float

    def us(self, machine: Machine, nbytes: float) -> tuple[float, float]:
        """Return the times of the forward and the backward pass over a tensor of nbytes."""
        times = (hbm_us(machine, passes * nbytes) / self.share for passes in (self.forward, self.backward))
        forward, backward = (us + n * machine.launch_us for us, n in zip(times, self.launches, strict=True))
        return forward, backward


CONTIGUOUS = 0.98
"""The share of the memory rate of vectorised kernels: adds, SiLU and its gradient, products (the trace)."""
NORM = Pass(2, 5, (1, 2), 0.58)
"""torch's RMS norm. Its backward reads x and the gradient for the input's gradient, and again for the weight's (the trace)."""
ADD = Pass(3, 3, (1, 1), CONTIGUOUS)
"""A residual connection, whose backward adds two gradients."""
ROTARY = Pass(10, 10, (5, 6), 0.34)
"""Of queries and keys as eager models write it: x * cos + cat(-right, left) * sin, with strided and broadcast kernels (the
trace)."""
SWIGLU = Pass(5, 9, (2, 3), CONTIGUOUS)
"""silu(gate) * up as two kernels, in columns of one of both (the trace)."""
ACTIVATION = Pass(2, 3, (1, 1), CONTIGUOUS)
"""An activation without a gate."""
FUSED_ROTARY, FUSED_SWIGLU = Pass(2, 2, (1, 1), CONTIGUOUS), Pass(3, 5, (1, 1), CONTIGUOUS)
"""The same as one kernel each way, as torch.compile makes them; weft's experts have such a SwiGLU. The share is assumed."""
ROUTING = Pass(3, 5, (4, 4), CONTIGUOUS)
"""The rows of tokens copied for their experts, and summed by weights afterwards; sorting is launches only. Assumed."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """StepTimes has the predicted times of a layer's training step in us, in the average of the model's layers.

    computation_us: of a rank, with no communication. sequential_us: with each matmul and NCCL's collective in turn.
    weft_us: with the schedules that the planner chooses."""

    computation_us: float
    sequential_us: float
    weft_us: float

    @property
    def exposed_us(self) -> tuple[float, float]:
        """The exposed communication of the sequential step, and of weft's."""
        return self.sequential_us - self.computation_us, self.weft_us - self.computation_us

    @property
    def hidden(self) -> float:
        """The share of the sequential step's exposed communication that weft hides."""
        before, after = self.exposed_us
        return 1 - after / before if before > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class TrainedCall:
    """TrainedCall is an operator call of a layer, with the call of its backward pass.

    count: how many of it an average layer has. gradient_us: the product of the weights' gradients, if no call has it."""

    name: str
    count: float
    forward: Plan
    backward: Plan
    gradient_us: float

    @property
    def kept_bytes(self) -> int:
        return kept_bytes(self.forward.problem)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """TrainingPlan is the planner's answer for a training step of a model's layer.

    calls: by name, weft's. elsewhere_us: of everything else, the time forward and backward, and fused_us the same if rotary
    positions and SwiGLU are one kernel each, as torch.compile makes them."""

    machine: str
    calls: tuple[TrainedCall, ...]
    elsewhere_us: tuple[float, float]
    fused_us: tuple[float, float]

    @property
    def kept_bytes(self) -> float:
        """The memory of a rank for gathered inputs that a layer keeps from its forward to its backward pass."""
        return sum(call.count * call.kept_bytes for call in self.calls)

    def steps(self) -> dict[str, StepTimes]:
        """Return the times of all programs that `step` predicts, by name."""
        return {
            f"{name}{', checkpointing' * checkpointing}": self.step(checkpointing=checkpointing, compiled=name == "compiled")
            for name in ("eager", "compiled")
            for checkpointing in (False, True)
        }

    def step(self, *, checkpointing: bool = False, compiled: bool = False) -> StepTimes:
        """Return the times of a step.

        checkpointing: the forward pass is computed again in the backward pass (torch.utils.checkpoint). PyTorch stops that
            when the inputs of the layer's last matmul are known.
        compiled: rotary positions and SwiGLU are one kernel each.
        """
        forward_us, backward_us = self.fused_us if compiled else self.elsewhere_us
        again = 2 if checkpointing else 1
        gradients_us = sum(call.count * call.gradient_us for call in self.calls)
        elsewhere_us = again * forward_us + backward_us + gradients_us

        def total(us: Sequence[tuple[float, float]]) -> float:
            found = elsewhere_us + sum(
                call.count * (again * forward + backward) for call, (forward, backward) in zip(self.calls, us, strict=True)
            )
            stops = checkpointing and self.calls[-1].forward.problem.op == "matmul_reduce_scatter"
            return found - self.calls[-1].count * us[-1][0] if stops else found

        plans = [(call.forward, call.backward) for call in self.calls]
        return StepTimes(
            computation_us=total([(one.computation_us, other.computation_us) for one, other in plans]),
            sequential_us=total([(one.sequential_us, other.sequential_us) for one, other in plans]),
            weft_us=total([(one.chosen.predicted_us, other.chosen.predicted_us) for one, other in plans]),
        )


def plan_training(
    model: Model,
    machine: Machine | str | Path,
    *,
    tokens: int,
    ranks: int,
    dtype: DType = "bfloat16",
    keep_gathered: bool = True,
) -> TrainingPlan:
    """Plan the calls of a training step of a layer under tensor and sequence parallelism, and predict everything else.

    Args:
        model: from `weft.planner.models.load_model`. If layers differ, the step is that of the average layer.
        machine: a Machine, a shipped profile's name, or a JSON file's path.
        tokens: those of all ranks, in one sequence.
        ranks: those that share a layer. More than the machine has GPUs are on several such nodes.
        dtype: of activations and weights.
        keep_gathered: whether gathered inputs are kept for the backward pass, as `weft.parallelize` does by default. Otherwise
            they are gathered again.

    Raises ValueError as `weft.plan` does, for a model without the sizes of its attention, and for one whose experts no operator
    runs.
    """
    if not model.heads:
        raise ValueError(f"model is {model.name}, whose attention has no known sizes; a training step needs heads and head_dim")
    if any(call.op in EXCHANGES for call in model.without_operator):
        raise ValueError(f"model is {model.name}, whose experts run whole on every rank; a training step needs sharded experts")
    machine = as_machine(machine)
    nodes = machine.nodes_for(ranks)
    _, calls = choose_expert_calls(model, operator_calls(model), ranks, nodes=nodes)
    plans: dict[Problem, Plan] = {}

    def planned(problem: Problem) -> Plan:
        return plans.setdefault(problem, plans.get(problem) or plan(problem, machine))

    def planned_backward(problem: Problem) -> Plan:
        """The host has learnt the counts of experts in the forward pass."""
        if not isinstance(problem, RaggedProblem):
            return planned(problem)
        return replace(planned(problem), sequential_us=predict_sequential_us(problem, machine, known=True))

    found = []
    for call in calls:
        problem = replace(call.problem(tokens, ranks, dtype), nodes=nodes)
        forward = forward_problem(problem, keep_gathered=keep_gathered)
        backward = backward_problem(forward, call.weights)
        found.append(
            TrainedCall(
                name=call.name,
                count=call.layers / model.layers if call.layers else 1.0,
                forward=planned(forward),
                backward=planned_backward(backward),
                gradient_us=0.0 if backward.weight_gradients else _gradient_us(machine, forward),
            )
        )
    eager, fused = (list(_elsewhere(model, machine, tokens, ranks, dtype, fused=fused)) for fused in (False, True))
    return TrainingPlan(
        machine=machine.name,
        calls=tuple(found),
        elsewhere_us=(sum(us for us, _ in eager), sum(us for _, us in eager)),
        fused_us=(sum(us for us, _ in fused), sum(us for _, us in fused)),
    )


def forward_problem(problem: Problem, *, keep_gathered: bool) -> Problem:
    """Return the problem of a training step's forward pass, in which a gathered input may be kept. Experts keep their rows."""
    if isinstance(problem, RaggedProblem):
        return replace(problem, return_received=problem.dispatches)
    return replace(problem, return_gathered=keep_gathered) if problem.op == "all_gather_matmul" else problem


def backward_problem(problem: Problem, weights: int = 1) -> Problem:
    """Return the problem of the call that communicates in the backward pass of a call. weights: those that share its input."""
    op = BACKWARD[problem.op]
    back: dict[str, Any] = {"op": op, "n": problem.k, "k": problem.n}
    if isinstance(problem, RaggedProblem):
        return replace(problem, **back, return_received=not problem.dispatches)
    back["return_gathered"] = op in GATHERS
    if problem.op == "all_gather_matmul":
        back |= {"products": weights, "weight_gradients": "whole" if problem.return_gathered else "shard"}
    return replace(problem, **back)


def predict_call_us(schedule: Schedule, machine: Machine, *, own: bool = False) -> float:
    """Return the planner's time for a call. own: the schedule is the caller's. One of weft's is built as the machine has it:
    a device without the kernel of a FusedCollective runs a list of simpler steps."""
    name, chunks = schedule.name, schedule.chunks
    planned = schedule if own else build(schedule.problem, name, chunks, fan_out=machine.fans_out)
    return run(planned, machine).total_us


def kept_bytes(problem: Problem) -> int:
    """Return the memory of a rank for the gathered input, M x K, that a call of a forward pass keeps; 0 if it keeps none."""
    kept = problem.op == "all_gather_matmul" and problem.return_gathered
    return problem.m * problem.k * problem.operand_itemsize if kept else 0


def _gradient_us(machine: Machine, problem: Problem) -> float:
    """Return the time of a^T @ grad_out on a rank. Experts have one for each of them, in one kernel."""
    experts = problem.experts if isinstance(problem, RaggedProblem) else 1
    rows = -(-problem.product_rows(0) // experts)
    return gemm_us(machine, experts * problem.inner(0), problem.columns(0), rows, problem.rate_name, problem.itemsize)


def _elsewhere(
    model: Model, machine: Machine, tokens: int, ranks: int, dtype: DType, *, fused: bool
) -> Iterator[tuple[float, float]]:
    """Yield the forward and backward time of each computation of an average layer that is no call of weft's."""
    own, size = -(-tokens // ranks), ITEMSIZE[dtype]
    turned = tokens * (model.heads + model.kv_heads) * model.head_dim / ranks
    yield from 2 * [NORM.us(machine, own * model.hidden * size), ADD.us(machine, own * model.hidden * size)]
    yield (FUSED_ROTARY if fused else ROTARY).us(machine, turned * size)
    if model.qk_norm:
        yield NORM.us(machine, turned * size)
    yield _attention(model, machine, tokens, ranks, dtype)
    gate = (FUSED_SWIGLU if fused else SWIGLU) if model.gated else ACTIVATION
    if model.intermediate:
        yield gate.us(machine, tokens * model.intermediate / ranks * size)
    if model.experts:
        rows = own * max(1, model.experts_per_token)
        yield (FUSED_SWIGLU if model.gated else ACTIVATION).us(machine, rows * model.expert_intermediate * size)
        yield ROUTING.us(machine, rows * model.hidden * size)
    alone: tuple[Uncovered | OperatorCall, ...] = (*model.uncovered, *model.without_operator)
    for one in alone:
        us = one.layers / model.layers * gemm_us(machine, own * one.visits, one.n, one.k, dtype)
        yield us, 2 * us


def _attention(model: Model, machine: Machine, tokens: int, ranks: int, dtype: DType) -> tuple[float, float]:
    """Return the time of scaled_dot_product_attention over one sequence: two products, of which a causal mask leaves half."""
    full_us = 2 * tokens**2 * model.heads * model.head_dim / ranks / (machine.tflops(dtype) * 1e6)
    forward_us = machine.launch_us + full_us / FORWARD_ATTENTION
    return forward_us, 4 * machine.launch_us + BACKWARD_FLOPS * full_us / BACKWARD_ATTENTION
