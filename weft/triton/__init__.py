"""Functions and memory for your own Triton kernels that exchange data between ranks.

docs/triton.md describes each. examples/triton/ leads from one flag to a fused operator in five steps.
"""

from __future__ import annotations

from weft.triton.functions import (
    call_number,
    end_call,
    get,
    last_of,
    peer_pointer,
    put,
    put_signal,
    reduce_add,
    remote_first,
    signal,
    wait,
)
from weft.triton.peers import Peers, SymmetricTensor

__all__ = [
    "Peers",
    "SymmetricTensor",
    "call_number",
    "end_call",
    "get",
    "last_of",
    "peer_pointer",
    "put",
    "put_signal",
    "reduce_add",
    "remote_first",
    "signal",
    "wait",
]
