"""Chakra execution traces of a schedule: one file a rank, PREFIX.RANK.et, for the simulators that read them.

The format is MLCommons' (schema of mlc-chakra 1.0: package ChakraProtoMsg, a GlobalMetadata and then Nodes, each behind its
length as a varint). Its numbers are written down here, since the package that ships the schema brings a hundred others along.

| node | type | attributes |
| --- | --- | --- |
| computes | COMP_NODE | num_ops, tensor_size; duration in whole microseconds, duration_ns exactly |
| sends, receives | COMM_SEND_NODE, COMM_RECV_NODE | comm_src, comm_dst, comm_tag, comm_size |
| collective | COMM_COLL_NODE | comm_type, comm_size: what the rank gives |

The order of a lane is in ctrl_deps, and everything that a node waits for in data_deps: some readers follow these alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.machine import Machine
from weft.core.schedule import Schedule
from weft.report.chakra_nodes import Node, graph

if TYPE_CHECKING:
    from google.protobuf.message import Message

SCHEMA = "1.0.2-chakra.1.0.0"
PACKAGE = "ChakraProtoMsg"
TYPES = {"compute": 4, "send": 5, "receive": 6, "collective": 7}
PREFIXES = {"compute": "COMP_NODE", "send": "COMM_SEND_NODE", "receive": "COMM_RECV_NODE", "collective": "COMM_COLL_NODE"}
"""What names begin with, by which Chakra's own tools tell nodes apart."""
COLLECTIVES = {"all_reduce": 0, "all_gather": 2, "all_to_all": 6, "all_to_all_columns": 6, "reduce_scatter": 7}
STRING, INT64, INT32, UINT64, BOOL, ENUM, MESSAGE = 9, 3, 5, 4, 8, 14, 11
"""Field types, as protobuf's descriptors number them."""
ATTRIBUTES = {
    "int32_val": (7, INT32),
    "int64_val": (9, INT64),
    "uint64_val": (13, UINT64),
    "bool_val": (27, BOOL),
    "string_val": (29, STRING),
}
"""Of an attribute's value, those that are written."""


def write_chakra(schedule: Schedule, machine: Machine, folder: Path, *, prefix: str = "rank") -> list[Path]:
    """Write the traces of one call, and return their paths. Raises ValueError if one cannot be written, for a schedule that
    never ends, and without the protobuf package."""
    messages = _messages()
    written = []
    for rank, nodes in enumerate(graph(schedule, machine)):
        path = folder / f"{prefix}.{rank}.et"
        data = b"".join(_framed(message) for message in _of(messages, schedule, nodes, rank))
        try:
            path.write_bytes(data)
        except OSError as error:
            raise ValueError(f"folder is {str(folder)!r}; traces need a folder that can be written to: {error}") from None
        written.append(path)
    return written


def _of(messages: dict[str, Any], schedule: Schedule, nodes: Sequence[Node], rank: int) -> Iterator[Message]:
    metadata = messages["GlobalMetadata"](version=SCHEMA)
    for name, text in (("schedule", schedule.name), ("problem", str(schedule.problem))):
        metadata.attr.add(name=name, string_val=text)
    yield metadata
    for node in nodes:
        made = messages["Node"](id=node.id, name=f"{PREFIXES[node.kind]} {node.name}", type=TYPES[node.kind])
        made.ctrl_deps.extend(node.after)
        made.data_deps.extend(dict.fromkeys((*node.needs, *node.after)))
        made.duration_micros = round(node.us)
        for name, kind, value in _attributes(node, rank):
            made.attr.add(name=name, **{kind: value})
        yield made


def _attributes(node: Node, rank: int) -> Iterator[tuple[str, str, int | bool]]:
    """(name, field of the value, value)."""
    yield "is_cpu_op", "bool_val", False
    if node.kind == "compute":
        yield "num_ops", "uint64_val", node.flops
        yield "tensor_size", "uint64_val", node.bytes
        yield "duration_ns", "uint64_val", round(1e3 * node.us)
        return
    yield "comm_size", "int64_val", node.bytes
    if node.kind == "collective":
        yield "comm_type", "int64_val", COLLECTIVES[node.op]
        return
    ends = (rank, node.peer) if node.kind == "send" else (node.peer, rank)
    for name, value in zip(("comm_src", "comm_dst", "comm_tag"), (*ends, node.tag), strict=True):
        yield name, "int32_val", value


def _framed(message: Message) -> bytes:
    """A message behind its length, seven bits a byte, the lowest first."""
    data: bytes = message.SerializeToString()
    length, left = b"", len(data)
    while left > 127:
        length, left = length + bytes((left & 127 | 128,)), left >> 7
    return length + bytes((left,)) + data


def require_protobuf() -> None:
    """Raises ValueError without the package."""
    try:
        import google.protobuf  # noqa: F401
    except ImportError:
        raise ValueError("Chakra traces need the protobuf package; pip install protobuf") from None


def _messages() -> dict[str, Any]:
    """The classes of the schema's messages, in a pool of their own. Raises ValueError without protobuf."""
    require_protobuf()
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="weft_et_def.proto", package=PACKAGE, syntax="proto3")
    kinds = file.enum_type.add(name="NodeType")
    for name, number in (("INVALID_NODE", 0), *((PREFIXES[kind], number) for kind, number in TYPES.items())):
        kinds.value.add(name=name, number=number)
    attribute = file.message_type.add(name="AttributeProto")
    attribute.oneof_decl.add(name="value")
    _fields(attribute, {"name": (1, STRING)})
    _fields(attribute, ATTRIBUTES, oneof_index=0)
    _fields(file.message_type.add(name="GlobalMetadata"), {"version": (1, STRING), "attr": (2, MESSAGE)})
    node = file.message_type.add(name="Node")
    _fields(
        node, {"id": (1, UINT64), "name": (2, STRING), "type": (3, ENUM), "duration_micros": (7, UINT64), "attr": (10, MESSAGE)}
    )
    _fields(node, {"ctrl_deps": (4, UINT64), "data_deps": (5, UINT64)}, label=3)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in names}


def _fields(message: Any, fields: dict[str, tuple[int, int]], **options: int) -> None:
    """Fields of a message's descriptor: name -> (number, type). Messages are lists of attributes; the enum is a node's type."""
    for name, (number, kind) in fields.items():
        of = {"label": 3 if kind == MESSAGE else 1} | options
        named = {MESSAGE: f".{PACKAGE}.AttributeProto", ENUM: f".{PACKAGE}.NodeType"}.get(kind)
        message.field.add(name=name, number=number, type=kind, **of, **({"type_name": named} if named else {}))
