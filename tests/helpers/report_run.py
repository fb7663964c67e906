"""A run made by hand, for the tests of report and trace: known spans of every kind, and names that try to be markup."""

from __future__ import annotations

from weft.core.problem import Problem
from weft.core.span import Kind, Span
from weft.planner.values import Candidate, Plan
from weft.tools.results import LayerRun, Run, Speeds

HOSTILE = "<script>window.hacked = true</script>"
LANES = ("compute", "copy to 1", "blocks & <b>bold</b>")


def spans(ranks: int, chunks: int, scale: float) -> tuple[Span, ...]:
    """Per rank and chunk: a copy, its signal, the wait for it, a GEMM, a reduce; then one collective."""
    return tuple(s for rank in range(ranks) for s in (*_chunks(rank, chunks, scale), _last(rank, chunks, scale)))


def _chunks(rank: int, chunks: int, scale: float) -> list[Span]:
    steps: tuple[tuple[Kind, int, float, float], ...] = (
        ("copy", 1, 0.0, 0.8),
        ("signal", 1, 0.8, 0.8),
        ("wait", 0, 0.0, 0.3),
        ("gemm", 0, 0.3, 1.0),
        ("reduce", 2, 0.0, 0.5),
    )
    return [
        Span(
            rank=rank,
            lane=LANES[lane],
            kind=kind,
            name=f"{kind} {chunk} <i>",
            start_us=(chunk + rank / 10 + start) * scale,
            end_us=(chunk + rank / 10 + end) * scale,
            flops=chunk if kind == "gemm" else 0,
            bytes=chunk if kind == "copy" else 0,
        )
        for chunk in range(chunks)
        for kind, lane, start, end in steps
    ]


def _last(rank: int, chunks: int, scale: float) -> Span:
    start = (chunks + 1) * scale
    return Span(rank=rank, lane=LANES[0], kind="collective", name="all_gather", start_us=start, end_us=start + scale)


def layer(
    name: str, *, error: float, ranks: int = 4, chunks: int = 4, predicted_ranks: int = 8, speeds: Speeds | None = None
) -> LayerRun:
    problem = Problem(op="all_gather_matmul", m=64, n=128, k=96, world_size=ranks, dtype="float32")
    sizes = Problem(op="all_gather_matmul", m=8192, n=28672, k=4096, world_size=predicted_ranks)
    chosen = Candidate(
        schedule="flag_gated", chunks=8, predicted_us=512.5, computation_us=480.0, communication_us=300.0, over_ideal_us=32.5
    )
    plan = Plan(
        problem=sizes,
        machine="h200x8",
        candidates=(chosen,),
        sequential_us=790.25,
        computation_us=480.0,
        communication_us=300.0,
        why="Copies are hidden <u>whole</u> behind one GEMM.",
        spans=spans(predicted_ranks, chunks, 100.0),
    )
    return LayerRun(
        name=name,
        problem=problem,
        schedule="hetero_fused_1d",
        chunks=4,
        max_error=error,
        tolerance=1e-5,
        plan=plan,
        spans=spans(ranks, chunks, 4000.0),
        speeds=speeds,
    )


SPEEDS = Speeds(sequential_us=12345.6, overlapped_us=23456.7, computation_us=9000.0, communication_us=4000.0)


def make_run(*layers: LayerRun, device: str = "cpu", model: str = f"llama {HOSTILE}") -> Run:
    return Run(
        model=model,
        device=device,
        world_size=4,
        tokens=64,
        dtype="float32",
        seed=7,
        machine="h200x8",
        machine_words="8 x NVIDIA H200",
        machine_ranks=8,
        machine_tokens=8192,
        layers=layers,
        versions={"weft": "0.1.0", "torch": "2.13.0"},
    )
