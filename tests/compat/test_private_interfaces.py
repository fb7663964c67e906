"""Private and version-dependent parts of torch and Triton that weft uses: each is there, and does what weft relies on.

A failure here names what a new version has changed; weft/compat/ is then the only place to mend.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from rank_pools import on_ranks
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from weft.compat import TESTED, dtensors, minor, streams, warn_of_untested_versions
from weft.compat.c10d import (
    LIVING_GROUPS,
    FlatCollectives,
    _Numbered,
    backend_of,
    connections,
    exchange_messages,
    group_named,
    nameless_group,
    nccl_connections,
    registered,
    store_of,
)
from weft.compat.cublas import carveout, has_carveout, matmul_settings, needs_torch, set_carveout
from weft.compat.device import living_storage, mapped, reference_of, release_storage, users, weak_storage
from weft.compat.dispatch import (
    NO_BACKWARD,
    all_reduced,
    apply_of,
    at_end_of_backward,
    autocast_enabled,
    backward_pass,
    call_backward_directly,
    forward_mode,
    graph_break,
    grouped_mm,
    has_tangent,
    in_functional_gradient,
    is_batch_of_gradients,
    layout_check,
    make_empty,
    multiplies,
    observed,
    set_grad_enabled,
    thread_state,
    traced_graph,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    variable,
    without_autocast,
    without_inference_mode,
    writes_to,
)
from weft.compat.dtensors import differentiable_dtensor_of, dtensor_of, local_tensor_of, run_first, spec_of
from weft.compat.inductor import CustomGraphPass, cache_hits, inductor_options
from weft.compat.streams import Driver
from weft.runtime.groups import GROUPS

ROOT = Path(__file__).parents[2]


def test_what_the_end_of_a_backward_pass_calls_raises_there() -> None:
    order: list[str] = []

    def ends() -> None:
        order.append("end")
        raise KeyError("planted")

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: at_end_of_backward(ends))
    x.register_hook(lambda grad: order.append("x"))
    with pytest.raises(KeyError, match="planted"):
        y.sum().backward()
    assert order == ["x", "end"]


def test_a_backward_pass_has_a_number_and_a_checkpoint_sees_it() -> None:
    seen: list[int] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        seen.append(backward_pass())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    y = checkpoint(work, x, use_reentrant=False)
    assert seen == [NO_BACKWARD]
    assert isinstance(y, torch.Tensor)
    y.sum().backward()
    assert len(seen) == 2
    assert seen[1] != NO_BACKWARD
    assert backward_pass() == NO_BACKWARD


def test_a_group_has_a_store_of_which_parts_are_taken_on_a_connection_of_their_own(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        first, second = store_of(group, "one"), store_of(group, "one")
        first.set("key", "value")
        assert second.get("key") == b"value"
        assert (first.add("count", 1), second.add("count", 0)) == (1, 1)
        assert not store_of(group, "another").check(["key"])
    finally:
        dist.destroy_process_group()


def test_a_group_is_found_by_its_name_and_has_a_backend_that_can_be_aborted(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        assert group_named(group.group_name) is group
        assert callable(backend_of(group, torch.device("cpu")).abort)
        assert group in LIVING_GROUPS
        other = dist.new_group([0])
        assert other in LIVING_GROUPS
        dist.destroy_process_group(other)
        assert other not in LIVING_GROUPS
    finally:
        dist.destroy_process_group()
    assert group not in LIVING_GROUPS
    assert None not in LIVING_GROUPS


class _Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Calling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_and_transforms_are_seen_where_they_act_on_every_operator() -> None:
    seen: list[bool] = []

    def square(x: torch.Tensor) -> torch.Tensor:
        seen.append(observed())
        return (x * x).sum()

    x = torch.ones(3)
    for mode in (_Dispatching(), _Calling(), forward_ad.dual_level()):
        with mode:
            square(x)
    for transform in (torch.func.grad, torch.vmap):
        transform(square)(x)
    torch.func.jvp(square, (x,), (x,))
    assert seen == [True] * 6
    square(x.requires_grad_()).backward()
    assert not seen[-1]


def test_tangents_are_seen_in_forward_mode() -> None:
    x = torch.ones(3)
    assert not forward_mode()
    with forward_ad.dual_level():
        assert forward_mode()
        assert has_tangent(forward_ad.make_dual(x, x))
        assert not has_tangent(x)
        assert not has_tangent("x")
    assert not forward_mode()


def test_a_functional_gradient_is_told_from_other_transforms() -> None:
    found = []

    def square(x: torch.Tensor) -> torch.Tensor:
        found.append(in_functional_gradient())
        return (x * x).sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.vmap):
        transform(square)(torch.ones(3))
    torch.func.vjp(square, torch.ones(3))
    square(torch.ones(3, requires_grad=True)).backward()
    assert found == [True, True, False, True, False]


def test_a_trace_and_a_batch_of_gradients_are_seen() -> None:
    seen: list[bool] = []

    def square(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda grad: seen.append(is_batch_of_gradients(grad)))
        return x * x

    x = torch.ones(3, requires_grad=True)
    for batched, grads in ((True, torch.eye(3)), (False, torch.ones(3))):
        torch.autograd.grad(square(x.clone()), x, grads, is_grads_batched=batched)
    assert seen == [True, False]
    assert traced_graph() is None
    trace: Any = torch.jit.trace
    trace(lambda x: (seen.append(traced_graph() is not None), x)[1], (torch.ones(1),), check_trace=False)
    assert seen[-1]


def test_what_an_eager_call_depends_on_is_read_in_one_frame() -> None:
    """It is what several functions of weft.compat and torch say."""
    found = thread_state(torch.float32)
    assert found == thread_state(torch.float32)
    assert found is not None
    hash(found)
    assert set(found[:1]) == {torch.is_grad_enabled()}
    with torch.no_grad():
        assert thread_state(torch.float32) != found
    for mode in (_Calling(), forward_ad.dual_level()):
        with mode:
            assert thread_state(torch.float32) is None


def test_layouts_of_tensors_and_what_observes_them_are_compared_in_one_call() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    check: Any = layout_check([a, b])
    assert check(torch.zeros(2, 3), b)
    for other in (
        torch.ones(3, 2).t(),
        torch.ones(2, 4),
        a.double(),
        a.to("meta"),
        nn.Parameter(a),
        a.clone().requires_grad_(),
    ):
        assert not check(other, b)
    seen: list[object] = []
    with _Dispatching():
        seen += [check(a, b), layout_check([a])]
    trace: Any = torch.jit.trace
    trace(lambda x: (seen.append(check(a, b)), seen.append(layout_check([a])), x)[-1], (torch.ones(1),), check_trace=False)
    torch.func.grad(lambda x: (seen.append(check(a, b)), seen.append(layout_check([a])), x.sum())[-1])(torch.ones(1))
    with torch.autocast("cpu"):
        seen.append(check(a, b))
    with torch.inference_mode():
        seen.append(check(a, b))
    assert [bool(one) for one in seen] == [False] * 8
    assert layout_check([a.to_sparse()]) is layout_check([torch._neg_view(a)]) is None


@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (2, 0, 3), (2, 3, 4)])
def test_tensors_are_allocated_as_by_torch(shape: tuple[int, ...]) -> None:
    like = torch.ones(0, dtype=torch.bfloat16)
    made, expected = make_empty(shape, like)(), torch.empty(shape, dtype=torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype, made.device) == (shape, expected.stride(), like.dtype, like.device)
    assert type(made) is torch.Tensor
    assert not made.requires_grad


def test_a_function_of_autograd_is_called_without_torchs_own_python() -> None:
    calls: list[str] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return 2 * grads[0] + 0 * x

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("autograd/function.py"):
            calls.append(frame.f_code.co_name)

    call_backward_directly(Twice)
    x = torch.ones(3, requires_grad=True)
    sys.setprofile(note)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            apply_of(Twice)(x).sum().backward()
    finally:
        sys.setprofile(None)
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    assert calls == ["save_for_backward"], "which the test's own forward calls"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fp32_precision", ("ieee", "tf32")),
        ("allow_bf16_reduced_precision_reduction", (False, True)),
        ("allow_fp16_reduced_precision_reduction", (False, True)),
        ("allow_fp16_accumulation", (True, False)),
    ],
)
def test_how_matmuls_run_is_a_part_of_what_a_call_depends_on(name: str, values: tuple[object, object]) -> None:
    dtype = torch.bfloat16 if "bf16" in name else torch.float16
    settings: Any = torch.backends.cuda.matmul
    before, found = getattr(settings, name), []
    try:
        for value in values:
            setattr(settings, name, value)
            found.append((thread_state(dtype), matmul_settings(dtype)))
    finally:
        setattr(settings, name, before)
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


def test_the_environment_is_read_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_SCHEDULE", raising=False)
    assert variable(b"WEFT_SCHEDULE") is None
    monkeypatch.setenv("WEFT_SCHEDULE", "sequential")
    assert variable(b"WEFT_SCHEDULE") == b"sequential"
    monkeypatch.delenv("WEFT_SCHEDULE")
    assert variable(b"WEFT_SCHEDULE") is None


def test_inference_mode_is_left() -> None:
    with torch.inference_mode():
        with without_inference_mode():
            assert not torch.is_inference_mode_enabled()
            made = torch.empty(2)
        assert torch.is_inference_mode_enabled()
        assert torch.empty(2).is_inference()
    assert not made.is_inference()


def test_autocast_is_seen_and_left() -> None:
    x = torch.ones(2, 2)
    assert not autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_enabled()
        assert (x @ x).dtype == torch.bfloat16
        with without_autocast():
            assert not autocast_enabled()
            assert (x @ x).dtype == torch.float32
        assert autocast_enabled()


def test_writes_to_a_tensor_are_counted_also_through_a_view() -> None:
    x = torch.zeros(4)
    before = writes_to(x)
    x[1:].add_(1)
    assert writes_to(x) == before + 1
    x.add(1)
    assert writes_to(x) == before + 1


def test_a_graph_break_has_its_reason() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        graph_break("because of this")
        return x + 1

    with pytest.raises(RuntimeError, match="because of this"):
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2))
    assert torch.equal(torch.compile(broken, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))


def test_nested_lists_of_tensors_are_flattened_and_made_again() -> None:
    x, y = torch.ones(1), torch.ones(2)
    nested = (x, [None, y], None)
    leaves, structure = tree_flatten(nested)
    assert leaves == tree_leaves(nested)
    assert [leaf for leaf in leaves if leaf is not None] == [x, y]
    assert tree_unflatten(leaves, structure) == nested


def _all_reduced() -> list[list[float]]:
    """Plain, and in a graph of torch.compile's."""
    world = dist.group.WORLD
    assert world is not None
    name, x = world.group_name, torch.full((2, 3), float(world.rank() + 1)).t()

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * all_reduced(x, name, GROUPS.await_work)

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    return [all_reduced(x, name, GROUPS.await_work).unique().tolist(), compiled(x).unique().tolist()]


@pytest.mark.ranks
def test_sums_over_ranks_are_traced(ranks: RankFixture) -> None:
    assert ranks(2).run(_all_reduced) == [[[3.0], [6.0]]] * 2


def test_groups_of_rows_are_multiplied_and_what_lies_past_them_is_not_read() -> None:
    a, b = torch.randn(8, 16).bfloat16(), torch.randn(8, 24).bfloat16()
    a[6:] = float("nan")
    found = grouped_mm(a.t(), b, torch.tensor([2, 2, 6]))
    wanted = torch.stack([a[begin:end].float().t() @ b[begin:end].float() for begin, end in ((0, 2), (2, 2), (2, 6))])
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)


def test_flat_collectives_move_whole_tensors(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        flat, found = FlatCollectives(group, dist.ReduceOp.SUM), torch.zeros(3)
        flat.all_gather(found, torch.ones(3))
        assert found.tolist() == [1.0] * 3
        flat.reduce_scatter(found, torch.full((3,), 2.0))
        assert found.tolist() == [2.0] * 3
        flat.all_reduce(found)
        assert found.tolist() == [2.0] * 3
    finally:
        dist.destroy_process_group()


def test_messages_are_one_coalesced_group() -> None:
    """The calls on the backend, in their order; NCCL's has them all."""
    asked: list[Any] = []

    class Backend:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: asked.append((name, *arguments[1:])) or SimpleNamespace(wait=lambda: None)

    one = torch.zeros(1)
    exchange_messages(Backend(), [(one, 1)], [(one, 2)])
    assert asked == [("_start_coalescing",), ("send", 1, 0), ("recv", 2, 0), ("_end_coalescing",)]
    assert all(hasattr(dist.distributed_c10d.ProcessGroupGloo, name) for name, *_ in asked)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_has_what_messages_need() -> None:
    options: Any = dist.ProcessGroupNCCL.Options()
    assert all(hasattr(options.config, name) for name in ("max_ctas", "cga_cluster_size"))
    assert all(hasattr(options, name) for name in ("is_high_priority_stream", "global_ranks_in_group", "group_name"))
    assert callable(dist.ProcessGroupNCCL._set_sequence_number_for_group)
    assert callable(nccl_connections)


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA")
def test_the_current_stream_has_a_number_and_may_be_captured() -> None:
    assert callable(torch._C._cuda_getCurrentRawStream)
    assert streams.capturing is torch._C._cuda_isCurrentStreamCapturing


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA")
def test_a_graph_is_replayed_without_the_method_of_torch() -> None:
    assert streams.replay_graph is torch._C._CUDAGraph.replay
    assert issubclass(torch.cuda.CUDAGraph, torch._C._CUDAGraph)


def test_the_driver_is_called_without_frames() -> None:
    """The functions and their arguments are those that Driver's own methods call."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    driver = Driver()
    function, attribute = driver.memory_number
    assert (function, attribute) == (
        driver.api.cuPointerGetAttribute,
        driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID,
    )
    assert driver.record_event == driver.api.cuEventRecord


def test_what_decides_how_matmuls_run_can_be_read() -> None:
    assert matmul_settings() == matmul_settings()
    torch.use_deterministic_algorithms(True)
    try:
        assert needs_torch(torch.bfloat16)
        assert matmul_settings()[1] is True
    finally:
        torch.use_deterministic_algorithms(False)
    assert needs_torch(torch.float16) == bool(torch._C._get_cublas_allow_fp16_accumulation())


def test_a_launch_within_triton_async_compile_is_finished() -> None:
    """Triton returns a future for what it compiles in other threads; the interpreter returns nothing."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from concurrent.futures import Future

    from triton.runtime._async_compile import FutureKernel

    from weft.compat.triton_kernels import finished

    compiled, future, order = object(), Future[object](), list[object]()
    future.set_result(compiled)
    assert finished(FutureKernel(order.append, future)) is compiled
    assert order == [compiled]
    assert finished(compiled) is compiled
    assert finished(None) is None


def test_a_compiled_kernel_is_launched_with_all_its_arguments() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.compiler.compiler import CompiledKernel

    from weft.compat.triton_kernels import relaunch

    launches: list[Any] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *arguments, stream: launches.append((grid, arguments, stream))

    relaunch(Compiled(), 7, (1, 2), 3)
    assert launches == [((7, 1, 1), (1, 2), 3)]
    assert callable(CompiledKernel.__getitem__)


def test_gradients_are_switched_off_without_a_context() -> None:
    set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        set_grad_enabled(True)
    assert torch.is_grad_enabled()


def test_a_cpu_says_which_dtypes_it_multiplies() -> None:
    assert multiplies(torch.float32)
    assert all(isinstance(multiplies(dtype), bool) for dtype in (torch.bfloat16, torch.float16))


def test_the_sms_of_gemms_are_set_and_read() -> None:
    assert has_carveout()
    before = carveout()
    set_carveout(8)
    assert carveout() == 8
    set_carveout(before)
    assert carveout() == before


@pytest.mark.slow
def test_inductor_hands_graphs_to_a_pass() -> None:
    class Counts(CustomGraphPass):
        graphs = 0

        def __call__(self, graph: torch.fx.Graph) -> None:
            self.graphs += 1

        def uuid(self) -> str:
            return "counts graphs"

    counts, before = Counts(), cache_hits()
    with fresh_cache():
        torch.compile(lambda x: x.sin() + 1, options=inductor_options(counts))(torch.ones(3))
    assert counts.graphs == 1
    assert cache_hits() == before


def test_untested_versions_are_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.1.0+cu130")
    warn_of_untested_versions.cache_clear()
    for _ in range(2):
        warn_of_untested_versions()
    assert [record.getMessage().split(" has")[0] for record in caplog.records] == ["torch 9.1.0+cu130"]
    warn_of_untested_versions.cache_clear()


def test_the_tested_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["weft"]
    assert {name: list(versions) for name, versions in TESTED.items()} == {
        name: project[f"tested-{name}"] for name in ("torch", "triton")
    }
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
    )
    assert all(minor(pins[name]) in versions for name, versions in TESTED.items())


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()  # type: ignore[no-any-return]


@on_ranks(2)
def test_fully_shard_from_within() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = _Layers()
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "score")
    dtensors.prepare_fully_sharded(model)
    assert dtensors.state_of(model)._is_root
    assert not dtensors.state_of(model.first)._is_root
    assert dtensors.param_groups(model) == ()  # its layers have them all
    (first,) = dtensors.param_groups(model.first)
    calls: list[bool] = []
    dtensors.before_registered_methods(model, lambda module: calls.append(dtensors.forward_has_begun(module)))
    x = torch.ones(2, 4)
    model.score(x).backward()
    assert calls == [False]
    assert dtensors.reshards_after_forward(first)
    state = dtensors.state_of(model.first)
    assert dtensors.prefetched(state) == []
    dtensors.set_prefetched(state, [dtensors.state_of(model.second)])
    assert dtensors.prefetched(state) == [dtensors.state_of(model.second)]
    model(x).sum().backward()


def test_memory_is_referred_to_without_being_kept() -> None:
    """Also where only a view of the tensor is left."""
    whole = torch.zeros(4, 3)
    view = whole[1:]
    references = weak_storage(whole), reference_of(view.untyped_storage())
    del whole
    for reference in references:
        storage = living_storage(reference)
        assert storage.data_ptr() == view.untyped_storage().data_ptr()
        del storage
    del view
    assert [living_storage(reference) for reference in references] == [None, None]
    for reference in references:
        release_storage(reference)


def test_a_memory_reference_that_was_released_keeps_nothing() -> None:
    """Releasing it before the memory is freed leaves the memory to its tensor."""
    whole = torch.ones(4)
    for _ in range(100):
        release_storage(weak_storage(whole))
    assert users(whole) == 1
    assert whole.tolist() == [1.0] * 4


def _nameless() -> list[float]:
    """Collectives and messages on connections that torch has no name for."""
    world = dist.group.WORLD
    assert world is not None
    rank, size = world.rank(), world.size()
    store = dist.PrefixStore("nameless", world.get_group_store())  # type: ignore[attr-defined]
    backend = connections(store, rank, size, 60.0)
    group, summed, meant = (
        nameless_group(store, rank, size, backend),
        torch.full((3,), float(rank)),
        torch.full((3,), float(rank)),
    )
    works = [dist.all_reduce(summed, group=group, async_op=True)]
    works.append(dist.all_reduce(meant, dist.ReduceOp.AVG, group=group, async_op=True))
    got = torch.zeros(3)
    for work in (*works, backend.recv([got], 1 - rank, 0), backend.send([summed], 1 - rank, 0)):
        assert work is not None
        work.wait()
    return [float(summed[0]), float(meant[0])]


@pytest.mark.ranks
def test_gloo_connects_ranks_without_a_name(ranks: RankFixture) -> None:
    assert ranks(2).run(_nameless) == [[1.0, 0.5]] * 2


def test_tensors_on_one_memory_are_counted() -> None:
    area = torch.zeros(8)
    assert users(area) == 1
    part = area[2:4].view(torch.int32)
    assert users(area) == 2
    del part
    assert users(area) == 1


def test_a_group_that_is_registered_is_found_by_its_name_and_asks_its_own_store(tmp_path: Path) -> None:
    """What torch's rendezvous is given: a group of no backend, whose keys are numbered anew."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    numbered = _Numbered(store)
    with registered("a name", dist.ProcessGroup(numbered, 0, 1)):
        found = _resolve_process_group("a name")  # type: ignore[arg-type]
        assert (found.rank(), found.size()) == (0, 1)
        asked = found.get_group_store()
        asked.set("Symmetric/7/0", "one")
        asked.set("Symmetric/9/0", "two")
        assert asked.multi_get(["Symmetric/9/0", "Symmetric/7/0"]) == [b"two", b"one"]
    assert [store.get(f"Symmetric/{number}/0") for number in range(2)] == [b"one", b"two"]
    with pytest.raises(RuntimeError):
        _resolve_process_group("a name")  # type: ignore[arg-type]


def test_a_file_is_mapped_without_a_descriptor_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(4096))
    descriptor = os.open(path, os.O_RDWR)
    mapping = mapped(descriptor, 4096)
    os.close(descriptor)
    held = {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    assert str(path) not in held
    mapping[:4] = b"weft"
    assert path.read_bytes()[:4] == b"weft"
    with pytest.raises(OSError, match="Bad file descriptor"):
        mapped(descriptor, 4096)


def test_a_dtensor_is_taken_apart_and_made_again(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for placement in (Shard(0), Replicate()):
            given = distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [placement])
            local, spec = local_tensor_of(given), spec_of(given)
            assert local.data_ptr() == given.to_local().data_ptr()
            assert (spec.mesh, spec.placements, spec.shape) == (mesh, (placement,), (2, 3))
            made = dtensor_of(local + 1, spec)
            assert made.full_tensor().equal(local + 1)
            assert (made.placements, made.shape, made.stride(), made.requires_grad) == ((placement,), (2, 3), (3, 1), False)
            turned = torch.ones(3, 2).t().requires_grad_()
            made = differentiable_dtensor_of(turned, mesh, (placement,), (2, 3))
            assert (made.shape, made.stride(), made.requires_grad) == ((2, 3), (1, 2), True)
    finally:
        dist.destroy_process_group()


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: list[str]) -> torch.Tensor:
        ctx.order = order
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.order.append("kept")
        return grad, None


def test_a_node_that_stays_runs_as_soon_as_its_gradients_are_there() -> None:
    """Also in a second pass, and after its input has changed; otherwise it would run last, as the oldest."""
    order: list[str] = []
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    kept = _Kept.apply(x, order)  # type: ignore[no-untyped-call]
    run_first(kept.grad_fn)
    for _ in range(2):
        other = y * 2
        other.register_hook(lambda grad: order.append("other"))
        (other * kept).sum().backward()
        with torch.no_grad():
            x.add_(1)
    assert order == ["kept", "other"] * 2
    assert x.grad is not None
    assert x.grad.equal(torch.full((2,), 4.0))
