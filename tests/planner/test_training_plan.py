"""The prediction of a layer's training step: which calls it has, what else, and what it leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.core.machine import load
from weft.core.problem import Problem, RaggedProblem
from weft.perf.ragged import program_us
from weft.perf.terms import gemm_us, whole_collective_us, whole_gemm_us
from weft.planner import plan, plan_training
from weft.planner.models import Model, load_model, operator_calls
from weft.planner.models.values import Uncovered
from weft.planner.training import BACKWARD_ATTENTION, BACKWARD_FLOPS, FORWARD_ATTENTION

H200 = load("h200x8")
LLAMA = load_model("llama3-8b")


def test_a_step_has_the_calls_that_autograd_makes() -> None:
    """tests/models/test_overlap_report.py compares them with those of a real step."""
    found = {call.name: call for call in plan_training(LLAMA, H200, tokens=2048, ranks=2).calls}
    gate, down = found["MLP gate/up"], found["MLP down"]
    assert gate.forward.problem == Problem(op="all_gather_matmul", m=2048, n=28672, k=4096, world_size=2, return_gathered=True)
    sizes = {"m": 2048, "n": 4096, "k": 28672, "world_size": 2}
    both = Problem(op="matmul_reduce_scatter", **sizes, products=2, weight_gradients="whole")
    assert gate.backward.problem == both
    assert gate.gradient_us == 0, "the call has the products of the weights' gradients"
    assert found["attention QKV"].backward.problem.products == 3
    sizes = {"m": 2048, "n": 14336, "k": 4096, "world_size": 2}
    assert down.backward.problem == Problem(op="all_gather_matmul", **sizes, return_gathered=True)
    assert down.gradient_us == gemm_us(H200, 7168, 4096, 2048, "bfloat16")


def test_an_input_that_is_gathered_again_takes_time_in_place_of_memory() -> None:
    kept, again = (plan_training(LLAMA, H200, tokens=8192, ranks=2, keep_gathered=keep) for keep in (True, False))
    assert (kept.kept_bytes, again.kept_bytes) == (2 * 8192 * 4096 * 2, 0)
    assert again.calls[0].backward.problem.weight_gradients == "shard"
    assert again.step().sequential_us > kept.step().sequential_us
    assert again.step().computation_us == kept.step().computation_us


def test_computation_alone_is_the_products_and_everything_else() -> None:
    found = plan_training(LLAMA, H200, tokens=8192, ranks=2)
    products = [(6144 // 2, 4096), (4096, 4096 // 2), (28672 // 2, 4096), (4096, 14336 // 2)]
    flops_us = sum(3 * 2 * 8192 * n * k for n, k in products) / 989e6
    step = found.step()
    assert 1.2 < (step.computation_us - sum(found.elsewhere_us)) / flops_us < 1.5, (
        "cuBLAS reaches 0.79 of the peak, sustained 0.7"
    )
    assert step.weft_us < step.sequential_us
    assert step.computation_us < step.weft_us
    assert step.hidden == pytest.approx(1 - step.exposed_us[1] / step.exposed_us[0])
    assert found.step(compiled=True).computation_us < step.computation_us


def test_attention_grows_with_the_square_of_the_sequence() -> None:
    forward, backward = (1 / FORWARD_ATTENTION, BACKWARD_FLOPS / BACKWARD_ATTENTION)
    more = plan_training(LLAMA, H200, tokens=16384, ranks=2), plan_training(LLAMA, H200, tokens=8192, ranks=2)
    squares_us = 2 * 8192**2 * 32 * 128 / 2 / 989e6
    launches = [7 + 7 + 1, 9 + 9 + 4]
    for at, factor in enumerate((forward, backward)):
        (large, small), least = (one.elsewhere_us[at] for one in more), 2 * squares_us * factor
        assert large - 2 * small > least - 2 * H200.launch_us * sum(launches)
        assert large - 2 * small < least


def test_checkpointing_repeats_the_forward_pass_but_for_the_last_product() -> None:
    found = plan_training(LLAMA, H200, tokens=8192, ranks=2)
    once, again = found.step(), found.step(checkpointing=True)
    forward = [call.forward for call in found.calls]
    more_us = found.elsewhere_us[0]
    assert again.weft_us - once.weft_us == pytest.approx(more_us + sum(one.chosen.predicted_us for one in forward[:-1]))
    assert again.computation_us - once.computation_us == pytest.approx(
        more_us + sum(one.computation_us for one in forward[:-1])
    )
    assert again.sequential_us - once.sequential_us == pytest.approx(more_us + sum(one.sequential_us for one in forward[:-1]))


def test_experts_exchange_rows_in_both_passes_and_all_are_made_again() -> None:
    found = plan_training(load_model("mixtral-8x7b"), H200, tokens=2048, ranks=2)
    *_, dispatch, combine = found.calls
    for call, back in ((dispatch, combine), (combine, dispatch)):
        forward, backward = call.forward.problem, call.backward.problem
        assert isinstance(backward, RaggedProblem)
        assert (backward.op, backward.n, backward.k) == (back.forward.problem.op, forward.k, forward.n)
        assert call.gradient_us == gemm_us(H200, 4 * forward.k, forward.n, 2048 // 4, "bfloat16")
        assert isinstance(forward, RaggedProblem)
        assert call.forward.sequential_us == program_us(H200, forward, known=False)
        assert call.backward.sequential_us == program_us(H200, backward, known=True), "the host has learnt the counts"
    assert dispatch.forward.problem.return_received
    once, again = found.step(), found.step(checkpointing=True)
    repeated = sum(call.forward.sequential_us for call in found.calls)
    assert again.sequential_us - once.sequential_us == pytest.approx(found.elsewhere_us[0] + repeated)


def test_calls_that_some_layers_have_count_in_part() -> None:
    read = tuple(replace(call, layers=8 if "MLP" in call.name else 32) for call in operator_calls(LLAMA))
    found = plan_training(replace(LLAMA, read=read), H200, tokens=2048, ranks=2)
    assert [call.count for call in found.calls] == [1, 1, 0.25, 0.25]
    assert found.kept_bytes == 1.25 * 2048 * 4096 * 2


def test_other_matmuls_and_norms_of_queries_and_keys_count() -> None:
    plain = plan_training(LLAMA, H200, tokens=2048, ranks=2)
    router = Uncovered(name="router", n=4096, k=4096, layers=16, share=0.1)
    more = plan_training(replace(LLAMA, uncovered=(router,)), H200, tokens=2048, ranks=2)
    us = gemm_us(H200, 1024, 4096, 4096, "bfloat16") / 2
    assert more.elsewhere_us == pytest.approx((plain.elsewhere_us[0] + us, plain.elsewhere_us[1] + 2 * us))
    normed = plan_training(replace(LLAMA, qk_norm=True), H200, tokens=2048, ranks=2)
    assert normed.elsewhere_us > plain.elsewhere_us


def test_matmuls_that_run_without_weft_count_and_whole_experts_are_refused() -> None:
    """weft.parallelize runs no operator for DeepSeek V3's latent projections and shared expert."""
    deepseek = load_model("deepseek-v3")
    names = [call.name for call in deepseek.without_operator]
    assert names == ["attention q_b_proj", "attention kv_b_proj", "shared expert gate/up", "shared expert down"]
    forgotten = replace(deepseek, without_operator=())
    whole, less = (plan_training(each, H200, tokens=2048, ranks=8).step().computation_us for each in (deepseek, forgotten))
    matmuls = [(call.layers / 61, gemm_us(H200, 256, call.n, call.k, "bfloat16")) for call in deepseek.without_operator]
    assert whole - less == pytest.approx(3 * sum(share * us for share, us in matmuls))
    with pytest.raises(ValueError, match="gpt-oss-20b, whose experts run whole on every rank"):
        plan_training(load_model("gpt-oss-20b"), H200, tokens=2048, ranks=8)


def test_models_without_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="model is dlrm-mlperf"):
        plan_training(load_model("dlrm-mlperf"), H200, tokens=2048, ranks=2)
    with pytest.raises(ValueError, match="heads and head_dim"):
        plan_training(Model(name="x", source="", hidden=64, intermediate=96), H200, tokens=64, ranks=2)


def test_the_ideal_of_a_call_has_the_gradients_of_weights() -> None:
    sizes = {"op": "matmul_reduce_scatter", "m": 8192, "n": 4096, "k": 28672, "world_size": 2, "products": 2}
    bare, whole, shard = (Problem(**sizes, weight_gradients=given) for given in ("", "whole", "shard"))
    gradients = 2 * gemm_us(H200, 28672 // 4, 4096, 8192, "bfloat16")
    assert whole_gemm_us(H200, whole) == whole_gemm_us(H200, shard) == pytest.approx(whole_gemm_us(H200, bare) + gradients)
    assert whole_collective_us(H200, whole) == whole_collective_us(H200, bare)
    assert whole_collective_us(H200, shard) > 1.9 * whole_collective_us(H200, bare)
    assert plan(whole, H200).share_of_ideal <= 1
