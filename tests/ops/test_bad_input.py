"""What a caller may get wrong is a ValueError that names the argument, whatever its type: no error of Python's or torch's own,
no endless work, no broken group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft.core.machine import load
from weft.core.problem import OPS, Op
from weft.perf.ranking import heuristic
from weft.runtime.groups import GroupState
from weft.schedules import MOST_CHUNKS, names

GATHER = weft.Problem(op="all_gather_matmul", m=64, n=64, k=64, world_size=2)
SHARDS = weft.schedule.build(GATHER, "shard_p2p")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    weft.close()
    dist.destroy_process_group()


def test_a_destroyed_group_is_named(alone: None) -> None:
    group = dist.new_group([0])
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    torch.testing.assert_close(weft.all_gather_matmul(a, b, group=group), a @ b)
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="group: its process group was destroyed"):
        weft.all_gather_matmul(a, b, group=group)
    torch.testing.assert_close(weft.all_gather_matmul(a, b), a @ b)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: weft.plan(None, "h200x8"), "problem is a NoneType; use a weft.Problem"),
        (lambda: weft.plan(GATHER, None), "machine is a NoneType; use a weft.Machine, a name of weft machines"),
        (lambda: weft.plan(GATHER, "nope"), "machine is 'nope'; weft has a100x8"),
        (lambda: weft.plan(GATHER, "h200x8", schedules=(s for s in [SHARDS])), "schedules is a generator; use a list of"),
        (lambda: weft.plan(GATHER, "h200x8", schedules=["shard_p2p"]), "schedules is a str; use a list of weft.schedule"),
        (lambda: weft.explain(GATHER, 3), "machine is a int"),
        (lambda: weft.explain("x"), "problem is a str"),
        (lambda: weft.schedule.build("x", "sequential"), "problem is a str"),
        (lambda: weft.schedule.check(GATHER), "schedule is a Problem; use a weft.schedule.Schedule"),
        (lambda: weft.schedule.simulate(GATHER, "h200x8"), "schedule is a Problem"),
        (lambda: weft.schedule.simulate(SHARDS, None), "machine is a NoneType"),
        (lambda: weft.schedule.timeline(None), "schedule is a NoneType"),
        (lambda: weft.schedule.timeline(SHARDS, width="80"), "width is a str"),
        (lambda: dataclasses.replace(GATHER, nodes=(1.0, 1)), r"nodes is \(1.0, 1\); it must be a tuple of whole"),
        (
            lambda: dataclasses.replace(GATHER, m=10**400),
            "m is 10{39}; it must be a whole number of at least 0, and at most 9223372036854775807",
        ),
        (lambda: weft.CollectiveProblem(op="all_gather", m=10**400, world_size=2), "m is 10{39}; it must"),
        (lambda: dataclasses.replace(GATHER, world_size=10**9), "world_size is 1000000000; it must be .* at most 65536"),
        (lambda: dataclasses.replace(GATHER, nodes=2), "nodes is 2; it must be a tuple"),
        (lambda: dataclasses.replace(GATHER, b_sizes=[32, 32]), r"b_sizes is \[32, 32\]; it must be a tuple"),
        (lambda: weft.LookupProblem.of(batch=4, dims=(("x",), (4,))), "dims is .*; it must have a list of whole numbers"),
        (lambda: weft.LookupProblem.of(batch=4, dims=None), "dims is None; it must have a list"),
        (lambda: weft.SGD(lr="x"), "lr is 'x'; it must be a number of at least 0"),
        (lambda: weft.RowwiseAdagrad(lr=float("inf")), "lr is inf; .* finite"),
        (lambda: weft.CompilePass(schedule=3), "schedule is a int; use a schedule's name"),
        (lambda: weft.ExpertParallel(capacity="x"), "capacity is 'x'; it must be above 0"),
        (lambda: weft.SharedInput(["w"], input_layouts="x"), "input_layouts is a str; use Replicate"),
        (lambda: weft.overlap_report(None), "model is a NoneType; pass the model"),
    ],
)
def test_a_value_of_another_type_is_named(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize("op", OPS)
def test_the_largest_extents_have_a_heuristic_and_a_reason(op: Op) -> None:
    """Products of the largest extents overflow no float; what takes too long to simulate says so."""
    most = 2**63 - 1
    problem = weft.Problem(op=op, m=most, n=most, k=most, world_size=2)
    assert heuristic(problem, load("h200x8"))
    with pytest.raises(ValueError, match="takes more than 104 days"):
        weft.plan(problem, "h200x8")


def test_machines_go_by_name_or_by_value() -> None:
    machine = load("h200x8")
    assert weft.plan(GATHER, "h200x8") == weft.plan(GATHER, machine)
    assert weft.schedule.simulate(SHARDS, "h200x8") == weft.schedule.simulate(SHARDS, machine)


def test_more_chunks_than_can_be_proved_soon_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks is 1000000000; use at most 512"):
        weft.schedule.build(GATHER, "flag_gated", 10**9)
    with pytest.raises(ValueError, match="chunks is 513"):
        weft.plan(GATHER, "h200x8", only="flag_gated", chunks=MOST_CHUNKS + 1)
    assert weft.schedule.build(GATHER, "flag_gated", MOST_CHUNKS).chunks == MOST_CHUNKS


@pytest.mark.parametrize("op", OPS)
def test_a_result_without_elements_is_predicted_by_every_family(op: Op) -> None:
    for sizes in ({"m": 8, "n": 0}, {"m": 0, "n": 8}):
        problem = weft.Problem(op=op, k=16, world_size=2, **sizes)
        for name in names(op):
            weft.schedule.simulate(weft.schedule.build(problem, name), "h200x8")
        assert "no elements" in weft.plan(problem, "h200x8").why


A, B, C = torch.ones(4, 8), torch.ones(8, 2), torch.ones(9)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: weft.all_gather_matmul(A, None), "b is a NoneType; pass a matrix, or several in a list"),
        (lambda: weft.all_gather_matmul(A.to_sparse(), B), "a is torch.sparse_coo; weft takes strided tensors"),
        (lambda: weft.all_gather_matmul(torch.nested.nested_tensor([A, A]), B), "a is a nested tensor; .*to_padded_tensor"),
        (lambda: weft.matmul_all_reduce(A, torch.nested.nested_tensor([B, B])), "b is a nested tensor"),
        (lambda: weft.matmul_all_reduce(A, B.to_sparse()), "b is torch.sparse_coo"),
        (lambda: weft.matmul_all_reduce(A, B, bias=torch.ones(2).to_sparse()), "bias is torch.sparse_coo; .* bias.to_dense"),
        (lambda: weft.all_gather_matmul(A, B.to("meta")), "b is torch.float32 on meta, a is torch.float32 on cpu"),
        (lambda: weft.all_gather_matmul(A, B, "x"), r"group is a str; use a ProcessGroup .* or None"),
        (lambda: weft.all_gather_matmul(A, B, dist.GroupMember.NON_GROUP_MEMBER), "group: this rank is not in it"),
        (lambda: weft.AllReduce(A, 3), "group is a int; use a ProcessGroup"),
        (lambda: weft.concurrent(lambda: 0, [weft.AllReduce(A)], method=3), "method is a int"),
        (lambda: weft.concurrent(lambda: 0, [weft.AllReduce(A)], kernels=3), "kernels is a int"),
        (lambda: weft.SendReceive(send=A, to="x"), "to is 'x'; use another rank"),
        (lambda: weft.collectives.empty(2.5), r"shape is \(2.5,\)"),
        (lambda: weft.collectives.empty(True), r"shape is \(True,\)"),
        (lambda: weft.collectives.empty(1 << 62), r"shape is .* of torch.float32; no memory has 2\^63 bytes"),
        (lambda: weft.collectives.empty(4, dtype="float32"), "dtype is a str"),
        (lambda: weft.collectives.empty(4, device="banana"), "device is 'banana'; weft runs on cpu and cuda"),
        (lambda: weft.all_gather_matmul(A, B, rows="8"), "rows is a str; it must be a whole number"),
        (lambda: weft.all_gather_matmul(A, B, gather_dim=None), "gather_dim is a NoneType; it must be in 0 to 0"),
        (lambda: weft.matmul_reduce_scatter(A, B, scatter_dim=0.0), "scatter_dim is a float"),
        (lambda: weft.matmul_all_to_all(A, B, split_dim=torch.zeros(2)), "split_dim is tensor"),
        (lambda: weft.collectives.all_to_all_single(A.clone(), A, [5], [5]), r"output_split_sizes is \[5\]; .* here 1 times 4"),
        (lambda: weft.collectives.all_to_all_single(A.clone(), A, [4], [1, 3]), r"input_split_sizes is \[1, 3\]; weft exch"),
        (lambda: weft.collectives.all_to_all_single(A.clone(), A, torch.ones(1)), "output_split_sizes is a Tensor"),
        (lambda: weft.concurrent(lambda: 0, None), "collectives is a NoneType; pass weft.AllReduce"),
        (lambda: weft.concurrent(lambda: 0, [weft.AllReduce(A)], key=[1]), "key is a list; pass a string"),
        (lambda: weft.concurrent(lambda: 0, [weft.AllReduce(A)], residents="x"), "residents has 'x'"),
        (lambda: weft.concurrent(lambda: 0, [weft.AllReduce(A)], residents=3), "residents is a int; pass numbers"),
        (lambda: weft.AllReduce(A, reduction=[]), "reduction is a list; use 'sum' or 'avg'"),
        (lambda: weft.AllGather(C[:8], C[1:]), "output overlaps input; all_gather allows input as this rank's part"),
        (lambda: weft.ReduceScatter(C[1:], C[:8]), "output overlaps input; reduce_scatter allows output as this rank's part"),
        (
            lambda: weft.embedding_bag_all_to_all(torch.arange(4), torch.arange(5), [A], dims=8),
            "dims is 8; it must have a list",
        ),
        (lambda: weft.embedding_bag_all_to_all(torch.arange(4), torch.arange(5), [A], dims=["a"]), r"dims is \['a'\]; it must"),
        (lambda: weft.collectives.reduce_scatter(A, A), "op is a Tensor; use 'sum' or 'avg'"),
        (lambda: weft.embedding_bag_all_to_all(torch.arange(4), torch.arange(5), None), "tables is a NoneType"),
        (lambda: weft.embedding_bag_all_to_all(torch.arange(4), torch.arange(5), [None]), r"tables\[0\] is a NoneType"),
        (
            lambda: weft.embedding_bag_all_to_all(torch.arange(4), torch.arange(4), [A, A]),
            "has 3 bags .offsets has one entry more.; 2 tables of 1 samples need 2",
        ),
    ],
)
def test_an_operand_that_is_none_is_named(alone: None, call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_a_mesh_of_two_dimensions_is_refused_by_every_style(alone: None) -> None:
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    styles = (
        weft.ColwiseParallel(input_layouts=Shard(0)),
        weft.RowwiseParallel(),
        weft.SharedInput(["0"]),
        weft.ExpertParallel(),
    )
    for style in styles:
        module = nn.Sequential(nn.Linear(4, 4)) if isinstance(style, weft.SharedInput) else nn.Linear(4, 4)
        with pytest.raises(ValueError, match=r"device_mesh has 2 dimensions; slice one of them"):
            parallelize_module(module, mesh, style)


@pytest.mark.parametrize("name", ["a_rows", "limit", "sum"])
@pytest.mark.parametrize("operator", [weft.matmul_all_to_all, weft.all_to_all_matmul])
def test_an_argument_that_an_operator_does_not_have_is_refused(
    alone: None, monkeypatch: pytest.MonkeyPatch, operator: Any, name: str
) -> None:
    """Also one that weft's own experts pass within. No rank exchanges anything before."""
    monkeypatch.setattr(GroupState, "exchange_numbers", lambda *given: pytest.fail("exchanged"))
    columns = {"split_dim" if operator is weft.matmul_all_to_all else "gather_dim": -1}
    for options in ({"splits": torch.tensor([4]), "max_rows": 4}, columns, {}):
        with pytest.raises(TypeError, match=rf"{operator.__name__}\(\) got an unexpected keyword argument '{name}'"):
            operator(torch.ones(4, 4), torch.ones(4, 4), **options, **{name: 4})


@pytest.mark.parametrize(
    ("splits", "says"), [([-1], "splits has -1"), ([10**12], "splits add up to 1000000000000 on rank 0, but a has 4 rows")]
)
def test_splits_that_cannot_be_take_no_memory(alone: None, splits: list[int], says: str) -> None:
    for operator in (weft.matmul_all_to_all, weft.all_to_all_matmul):
        with pytest.raises(ValueError, match=says):
            operator(A, B, splits=torch.tensor(splits), max_rows=4)


def test_a_tensor_of_several_ranks_is_no_ranks_part(alone: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    a, b = (DTensor.from_local(part, mesh, [Shard(0)]) for part in (A, B))
    for name, call in {
        "a": lambda: weft.all_gather_matmul(a, B),
        "b": lambda: weft.matmul_reduce_scatter(A, b),
        r"b\[1\]": lambda: weft.all_gather_matmul(A, [B, b]),
        "residual": lambda: weft.matmul_all_reduce(A, B, residual=DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)])),
        r"tables\[0\]": lambda: weft.embedding_bag_all_to_all(torch.arange(4), torch.arange(5), [a]),
    }.items():
        with pytest.raises(ValueError, match=f"{name} is a DTensor; .* use {name}.to_local"):
            call()
    assert torch.equal(weft.all_gather_matmul(a.to_local(), b.to_local()), A @ B)
