"""Chakra traces and ASTRA-sim's files: read back, by a schema of weft's own and by MLCommons' package."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machine_tiny import tiny

from weft.core.machine import load
from weft.core.problem import Problem
from weft.report import chakra
from weft.report.astra import network, system, write_astra
from weft.report.chakra_nodes import graph
from weft.schedules import build

pytest.importorskip("google.protobuf", reason="protobuf is not installed; it comes with weft[chakra]")

SCHEDULE = build(Problem(op="matmul_reduce_scatter", m=24, n=24, k=24, world_size=3), "direct_store", 2)
Reader = Callable[[Path], tuple[Any, list[Any]]]


def own(path: Path) -> tuple[Any, list[Any]]:
    """(the metadata, the nodes), by the schema that writes them."""
    data, at, found = path.read_bytes(), 0, list[bytes]()
    while at < len(data):
        length = shift = 0
        while True:
            byte, at = data[at], at + 1
            length, shift = length | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        found, at = [*found, data[at : at + length]], at + length
    messages = chakra._messages()
    return messages["GlobalMetadata"].FromString(found[0]), [messages["Node"].FromString(one) for one in found[1:]]


def theirs(path: Path) -> tuple[Any, list[Any]]:
    """The same by mlc-chakra."""
    pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="mlc-chakra is not installed")
    schema = importlib.import_module("chakra.schema.protobuf.et_def_pb2")
    protolib = importlib.import_module("chakra.src.third_party.utils.protolib")
    metadata, nodes = schema.GlobalMetadata(), []
    with protolib.openFileRd(path) as file:
        assert protolib.decodeMessage(file, metadata)
        while protolib.decodeMessage(file, node := schema.Node()):
            nodes.append(node)
    return metadata, nodes


@pytest.mark.filterwarnings("ignore:Protobuf gencode version")
@pytest.mark.parametrize("read", [own, theirs])
def test_what_is_written_is_read_back(read: Reader, tmp_path: Path) -> None:
    written = chakra.write_chakra(SCHEDULE, tiny(world_size=3), tmp_path, prefix="call")
    assert [path.name for path in written] == ["call.0.et", "call.1.et", "call.2.et"]
    for rank, (path, expected) in enumerate(zip(written, graph(SCHEDULE, tiny(world_size=3)), strict=True)):
        metadata, nodes = read(path)
        assert {one.name: one.string_val for one in metadata.attr}["schedule"] == "direct_store"
        assert [node.id for node in nodes] == [node.id for node in expected]
        for got, node in zip(nodes, expected, strict=True):
            attributes = {one.name: getattr(one, one.WhichOneof("value")) for one in got.attr}
            assert got.type == chakra.TYPES[node.kind]
            assert tuple(got.ctrl_deps) == node.after
            assert {*got.data_deps} == {*node.after, *node.needs}
            assert attributes.pop("is_cpu_op") is False
            if node.kind == "compute":
                assert attributes == {"num_ops": node.flops, "tensor_size": node.bytes, "duration_ns": round(1e3 * node.us)}
                assert got.duration_micros == round(node.us)
            else:
                src, dst = (rank, node.peer) if node.kind == "send" else (node.peer, rank)
                assert attributes == {"comm_size": node.bytes, "comm_src": src, "comm_dst": dst, "comm_tag": node.tag}


@pytest.mark.parametrize(("op", "number"), [("all_gather_matmul", 2), ("matmul_reduce_scatter", 7), ("matmul_all_reduce", 0)])
def test_collectives_have_their_type_and_size(op: Any, number: int, tmp_path: Path) -> None:
    problem = Problem(op=op, m=24, n=24, k=24, world_size=3)
    path, *_ = chakra.write_chakra(build(problem, "sequential"), load("h200x8"), tmp_path)
    (node,) = (node for node in own(path)[1] if node.type == chakra.TYPES["collective"])
    attributes = {one.name: getattr(one, one.WhichOneof("value")) for one in node.attr}
    given = {"all_gather_matmul": 8 * 24, "matmul_reduce_scatter": 24 * 24, "matmul_all_reduce": 24 * 24}[op]
    assert (attributes["comm_type"], attributes["comm_size"]) == (number, 2 * given)


def test_the_network_is_the_machines(tmp_path: Path) -> None:
    machine = load("mi300x8")
    written = write_astra(SCHEDULE, machine, tmp_path)
    assert [path.name for path in written[3:]] == ["network.yml", "system.json", "memory.json"]
    lines = dict(line.split(": ") for line in (tmp_path / "network.yml").read_text(encoding="utf-8").splitlines())
    assert (lines["topology"], lines["bandwidth"]) == ("[ FullyConnected ]", f"[ {machine.links.gbps} ]")
    assert json.loads((tmp_path / "system.json").read_text(encoding="utf-8"))["local-mem-bw"] == machine.gpu.hbm_gbps
    assert json.loads((tmp_path / "memory.json").read_text(encoding="utf-8")) == {"memory-type": "NO_MEMORY_EXPANSION"}


def test_nodes_are_a_dimension() -> None:
    machine = load("h200x8")
    schedule = build(Problem(op="all_gather_matmul", m=16, n=16, k=16, world_size=4, nodes=(2, 2)), "node_slices", 1)
    assert network(schedule, machine).splitlines()[:2] == ["topology: [ Switch, Switch ]", "npus_count: [ 2, 2 ]"]
    assert system(schedule, machine)["all-gather-implementation"] == ["direct", "direct"]
    uneven = build(Problem(op="all_gather_matmul", m=12, n=12, k=12, world_size=3, nodes=(2, 1)), "node_slices", 1)
    with pytest.raises(ValueError, match=r"nodes is \(2, 1\)"):
        network(uneven, machine)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder is "):
        chakra.write_chakra(SCHEDULE, load("h200x8"), tmp_path / "none")
