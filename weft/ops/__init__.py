"""The operators: what a PyTorch user calls in place of a collective and a matmul.

All ranks of the group call the same operator in the same order. The first call of a group connects its ranks. The first call of
a problem plans, checks and binds a schedule, which later calls run. In every call the ranks agree on what they call before
anything moves; RankMismatch shows the difference. Results have their arguments' dtype: torch.autocast changes no operator, as
it changes no collective. Modules of weft.models cast what they multiply, as torch's own do.

Each file has its operators from the public function to the backward; common.py has what they share, and says in which order.

    tensor_parallel.py        all_gather_matmul, matmul_reduce_scatter
    all_reduce.py             matmul_all_reduce
    all_to_all.py             matmul_all_to_all, all_to_all_matmul, of rows in even shares
    all_to_all_columns.py     the same two between parts of rows and parts of columns
    ragged_all_to_all.py      the same two with splits
    embedding.py              embedding_bag_all_to_all; its arguments in embedding_arguments.py, optimizers.py for its backward
    column_parallel.py        linears of a replicated input, for weft.models; replicated.py has such tensors' gradients
    quantised_linears.py      the same with FP8 weights, for inference
    experts.py                the operations around the matmuls of experts, for weft.models
    collective.py             a collective alone, for weft.collectives
"""

from __future__ import annotations

import torch.distributed as dist

from weft.ops import collective, column_parallel, experts, quantised_linears  # noqa: F401 - saved graphs find these operators, too
from weft.ops.all_reduce import matmul_all_reduce
from weft.ops.all_to_all import all_to_all_matmul, matmul_all_to_all
from weft.ops.common import resolve_group
from weft.ops.embedding import embedding_bag_all_to_all
from weft.ops.optimizers import SGD, RowwiseAdagrad
from weft.ops.tensor_parallel import all_gather_matmul, matmul_reduce_scatter
from weft.runtime.autotune import Choices
from weft.runtime.groups import GROUPS

__all__ = [
    "SGD",
    "RowwiseAdagrad",
    "all_gather_matmul",
    "all_to_all_matmul",
    "choices",
    "close",
    "embedding_bag_all_to_all",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "synchronize",
]


def close(group: dist.ProcessGroup | None = None) -> None:
    """Give back what weft holds for a group: segments, threads, programs. Without a group, for all groups that this process has
    used. The next call starts anew. Not collective: peers whose calls of a closed group come later get PeerLost.

    After an error, every rank of the group calls this before the group is used again. Raises PeerLost or WaitTimeout, once all
    is given back, if a call that was still under way on a GPU could not end, and no call has raised that: what it returned is
    invalid.
    """
    name = resolve_group(group)[0]
    if group is None:
        GROUPS.close_all()
    else:
        GROUPS.close(name)


def synchronize(group: dist.ProcessGroup | None = None) -> None:
    """Wait until all that this rank has called in a group has ended on its device, and raise what has failed. Not collective.

    On GPUs a call returns before it has ended. If a peer is lost then, or a flag does not come within WEFT_TIMEOUT_S, weft logs
    the error at once (logger "weft"), lets the GPU go on, and fills the floating-point results of unfinished calls with NaN;
    integer results stay as they are, and are invalid. The next call of the group raises the error, and so does this function:
    call it before results leave the program, as before a checkpoint is written.

    Raises PeerLost, WaitTimeout or RankMismatch. Where the group has made no call, there is nothing to wait for.
    """
    GROUPS.synchronize(resolve_group(group)[0])


def choices(group: dist.ProcessGroup | None = None) -> Choices:
    """What schedule="auto" has stood for in a group so far: a list with a choice for each problem, which prints a line each.
    A choice has a spec, and on GPUs the measured times in us by spec. The same on every rank. Empty where no call was made.
    Not collective.
    """
    return Choices(GROUPS.choices(resolve_group(group)[0]))
