"""A PyTorch user calls these operators in place of a collective and a matmul.

All ranks of the group call the same operator in the same order. The first call of a group connects its ranks. The first call of
a problem plans, checks and binds a schedule, which later calls run. In every call the ranks agree on what they call before any
data moves. If they differ, RankMismatch shows the difference. Results have their arguments' dtype: like collectives, operators
ignore torch.autocast. Modules of weft.models cast their operands, like torch's own modules.

Each file has its operators from the public function to the backward. common.py has shared code, and describes that order. A
public function returns an OperatorRequest, which front.py runs and remembers. operator.py defines torch.library's operators.

    tensor_parallel.py        all_gather_matmul, matmul_reduce_scatter
    all_reduce.py             matmul_all_reduce, matmul_all_reduce_norm, all_reduce_norm
    all_to_all.py             matmul_all_to_all, all_to_all_matmul, of rows in even shares, also cut by columns
    ragged_all_to_all.py      these two operators with splits
    embedding.py              embedding_bag_all_to_all; its arguments, also optimizers, are in embedding_arguments.py
    column_parallel.py        linears of a replicated input, also with FP8 weights, for weft.models
    parts.py                  cuts, gathers, and sums of gradients, of tensors that every rank has whole, for weft.models
    experts.py                the operations around the matmuls of experts, for weft.models
    collective.py             a collective alone, for weft.collectives
"""

from __future__ import annotations

import torch.distributed as dist

from weft.ops import collective, column_parallel, experts  # noqa: F401 - saved graphs find these operators, too
from weft.ops.all_reduce import all_reduce_norm, matmul_all_reduce, matmul_all_reduce_norm
from weft.ops.all_to_all import all_to_all_matmul, matmul_all_to_all
from weft.ops.common import resolve_group
from weft.ops.embedding import embedding_bag_all_to_all
from weft.ops.embedding_arguments import SGD, RowwiseAdagrad
from weft.ops.tensor_parallel import all_gather_matmul, matmul_reduce_scatter
from weft.runtime.autotune import Choices
from weft.runtime.groups import GROUPS

__all__ = [
    "SGD",
    "RowwiseAdagrad",
    "all_gather_matmul",
    "all_reduce_norm",
    "all_to_all_matmul",
    "choices",
    "close",
    "embedding_bag_all_to_all",
    "matmul_all_reduce",
    "matmul_all_reduce_norm",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "synchronize",
]


def close(group: dist.ProcessGroup | None = None) -> None:
    """Release what weft holds for a group: shared memory, threads, programs. The next call of the group starts anew.

    Without a group, it releases all groups that this process has used. It is not collective. Peers that later call an operator
    of a closed group get PeerLost.

    After an error, every rank of the group calls this before the group is used again.

    Raises PeerLost or WaitTimeout, after everything is released, if a call on a GPU could not end and no call has raised that.
    The results of that call are invalid.
    """
    name = resolve_group(group)[0]
    if group is None:
        GROUPS.close_all()
    else:
        GROUPS.close(name)


def synchronize(group: dist.ProcessGroup | None = None) -> None:
    """Wait until all calls of this rank in a group have ended on its device, and raise their errors. It is not collective.

    On GPUs a call returns before it has ended. If a peer is lost after that, or a flag does not come within WEFT_TIMEOUT_S,
    weft logs the error at once (logger "weft"), releases the waits on the GPU, and fills the floating-point results of
    unfinished calls with NaN. Integer results are invalid, but keep their values. The next call of the group raises the error,
    and so does this function. Call it before results leave the program, for example before you write a checkpoint.

    Raises PeerLost, WaitTimeout or RankMismatch. If the group has made no call, it returns at once.
    """
    GROUPS.synchronize(resolve_group(group)[0])


def choices(group: dist.ProcessGroup | None = None) -> Choices:
    """Return the schedules that schedule="auto", or "planned", has chosen in a group so far.

    The list has a choice for each problem and prints one line for each. A choice has a spec, and on GPUs the measured times in
    us by spec, or the name of the machine profile for which the planner has predicted it. The list is the same on every rank,
    and empty if no call was made. This is not collective.
    """
    return Choices(GROUPS.choices(resolve_group(group)[0]))
