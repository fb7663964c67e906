"""Models by their static sizes, and the operator calls of one of their layers.

A decoder layer under tensor and sequence parallelism calls four operators: two gather rows before a matmul, and two sum and
scatter its result.

    call            operator                 N                                  K
    attention QKV   all_gather_matmul        (heads + 2 * kv_heads) * head_dim  hidden
    attention out   matmul_reduce_scatter    hidden                             heads * head_dim
    MLP gate/up     all_gather_matmul        2 * intermediate                   hidden        ("MLP up", N = intermediate,
    MLP down        matmul_reduce_scatter    hidden                             intermediate   where the MLP has no gate)

M is the number of tokens. In decode, tokens are few and activations are not sharded, so matmul_all_reduce takes the place of
matmul_reduce_scatter (`decode_calls`). Experts spread over ranks add two calls with an all-to-all of rows. M is then a rank's
tokens, counted once for each expert that a token visits; every rank receives an equal share:

    expert dispatch + gate/up   all_to_all_matmul   2 * expert_intermediate   hidden
    expert down + combine       matmul_all_to_all   hidden                    expert_intermediate

Embedding tables are distributed over ranks, each table whole on one rank (`split`). They call embedding_bag_all_to_all, and a
token is a sample.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from weft.core import codec
from weft.core.problem import EXCHANGES
from weft.planner.models.config import read_config, read_transformers_config
from weft.planner.models.values import EmbeddingCall, ExpertsCall, Model, OperatorCall, Place, Uncovered, place_calls

__all__ = [
    "EmbeddingCall",
    "ExpertsCall",
    "Model",
    "OperatorCall",
    "Place",
    "Uncovered",
    "choose_expert_calls",
    "config_path",
    "decode_calls",
    "load_model",
    "operator_calls",
    "place_calls",
    "preset_names",
    "read_transformers_config",
]

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""The name of a model on the Hugging Face Hub is OWNER/NAME."""


def operator_calls(model: Model) -> tuple[OperatorCall, ...]:
    """Return the operator calls of a layer in the order of a forward pass. If layers differ, return those of every kind.

    >>> [str(call) for call in operator_calls(load_model("llama3-8b"))][:2]
    ['attention QKV: all_gather_matmul N=6144 K=4096', 'attention out: matmul_reduce_scatter N=4096 K=4096']
    """
    if model.read:
        return model.read
    found: list[OperatorCall] = []
    if model.tables:
        found.append(_lookup(model))
    if model.heads:
        found += _attention(model)
    if model.intermediate:
        found += _mlp(model, "shared expert" if model.experts else "MLP")
    if model.experts:
        found += _experts(model)
    return tuple(found)


def choose_expert_calls(
    model: Model, calls: Sequence[OperatorCall], ranks: int, *, even: str = "", nodes: tuple[int, ...] = ()
) -> tuple[Model, tuple[OperatorCall, ...]]:
    """Return the calls, with those of experts as weft.ExpertParallel makes them, and the model with a note that says so.

    Where it does not make them, they stay all-to-alls of even shares, and the note says why. even: a reason of the caller's.
    nodes: as Problem.nodes; another note then says what weft has between nodes."""
    if nodes:
        between = "between nodes weft has the schedules sequential and node_slices, and their predictions were not measured"
        model = replace(model, notes=(between, *model.notes))
        even = even or "weft.ExpertParallel needs one node, as all calls with splits"
    if not any(call.op in EXCHANGES for call in calls):
        return model, tuple(calls)
    if not even and model.read and not model.places:
        even = "it is not known whether weft.ExpertParallel takes this model"
    if not even and model.experts % ranks:
        even = f"weft.ExpertParallel refuses {model.experts} experts on {ranks} ranks"
    note = f"experts are all-to-alls of even shares: {even}"
    if not even:
        note = (
            "experts are calls with splits, as weft.ExpertParallel makes them, predicted for an even routing; their sequential "
            "time is that of NCCL and a grouped matmul, whose host waits for counts"
        )
        calls = [ExpertsCall(**vars(call), experts=model.experts) if call.op in EXCHANGES else call for call in calls]
    return replace(model, notes=(note, *model.notes)), tuple(calls)


def decode_calls(model: Model) -> tuple[OperatorCall, ...]:
    """Return the operator calls of a layer whose activations are not sharded: every rank needs the whole result.

    >>> [str(call) for call in decode_calls(load_model("llama3-8b"))][:1]
    ['attention out: matmul_all_reduce N=4096 K=4096']
    """
    scattered = [call for call in operator_calls(model) if call.op == "matmul_reduce_scatter"]
    return tuple(replace(call, op="matmul_all_reduce") for call in scattered)


def preset_names() -> tuple[str, ...]:
    """Return the names of weft's presets."""
    return tuple(sorted(item.name.removesuffix(".json") for item in _folder().iterdir() if item.name.endswith(".json")))


def load_model(name_or_path: str) -> Model:
    """Load a preset by its name, or a Hugging Face config.json by its path.

    Raises ValueError for a name that is neither, for a file that cannot be read, and for a config without the needed sizes.
    """
    path = config_path(name_or_path)
    if path is None:
        return codec.loads(Model, (_folder() / f"{name_or_path}.json").read_text(encoding="utf-8"), name_or_path)
    if os.path.exists(path) or path.suffix == ".json":
        return read_config(path)
    if _HUB_ID.fullmatch(name_or_path):
        folder = name_or_path.partition("/")[2]
        raise ValueError(
            f"model is {name_or_path!r}, which is no local folder; weft does not download models. If it is on the Hugging Face "
            f"Hub, run hf download {name_or_path} config.json --local-dir {folder}, then pass {folder}/config.json"
        )
    if len(path.parts) > 1:
        return read_config(path)
    raise ValueError(_unknown(name_or_path))


def config_path(name_or_path: str) -> Path | None:
    """Return the file that `load_model` reads for this name; None for a preset."""
    if name_or_path in preset_names():
        return None
    path = Path(name_or_path)
    return path / "config.json" if os.path.isdir(path) else path  # isdir is also False for a folder without permission to read


def _folder() -> resources.abc.Traversable:
    return resources.files(__name__)


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), preset_names(), n=1)
    hint = f"; did you mean {close[0]}?" if close else ";"
    return f"model is {name!r}{hint} weft knows {', '.join(preset_names())}, or takes the path of a Hugging Face config.json"


def _lookup(model: Model) -> EmbeddingCall:
    dims = (model.embedding_dim,) * model.tables
    pooling = round(sum(model.pooling) / len(model.pooling)) if model.pooling else 1
    return EmbeddingCall(
        name="embedding tables", op="embedding_bag_all_to_all", n=sum(dims), k=pooling, dims=dims, pooling=model.pooling
    )


def _attention(model: Model) -> list[OperatorCall]:
    inner = model.heads * model.head_dim
    columns = inner + 2 * model.kv_heads * model.head_dim
    return [
        OperatorCall(name="attention QKV", op="all_gather_matmul", n=columns, k=model.hidden, weights=3),
        OperatorCall(name="attention out", op="matmul_reduce_scatter", n=model.hidden, k=inner),
    ]


def _mlp(model: Model, name: str) -> list[OperatorCall]:
    up, columns = ("gate/up", 2 * model.intermediate) if model.gated else ("up", model.intermediate)
    return [
        OperatorCall(name=f"{name} {up}", op="all_gather_matmul", n=columns, k=model.hidden, weights=2 if model.gated else 1),
        OperatorCall(name=f"{name} down", op="matmul_reduce_scatter", n=model.hidden, k=model.intermediate),
    ]


def _experts(model: Model) -> list[OperatorCall]:
    """Return the calls of experts that are spread evenly over ranks. A rank with several experts counts as if it had one."""
    up, columns = ("gate/up", 2 * model.expert_intermediate) if model.gated else ("up", model.expert_intermediate)
    visits = max(1, model.experts_per_token)
    dispatch = OperatorCall(name=f"expert dispatch + {up}", op="all_to_all_matmul", n=columns, k=model.hidden, visits=visits)
    width = model.expert_intermediate
    return [
        dispatch,
        OperatorCall(name="expert down + combine", op="matmul_all_to_all", n=model.hidden, k=width, visits=visits),
    ]
