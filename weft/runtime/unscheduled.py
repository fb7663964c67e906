"""Work of all ranks that no schedule describes: a collective of the process group, and what goes along with it.

On GPUs it is watched as a first call is. On CPUs ranks meet first, as in calls: a rank that does not come has begun no
collective of the group, which goes on being of use, and the one that waits looks after its peers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from weft.comm.team import Team
from weft.runtime.cuda_space import CudaSpace

T = TypeVar("T")


def watched(team: Team, space: Any, what: str, alike: str, work: Callable[[], T]) -> T:
    """Run it. what: in an error's words; alike: what ranks must have in common, a line each. What it raises ends all ranks'."""
    try:
        if isinstance(space, CudaSpace):
            return space.watched(what, work)
        team.enter(f"op: {what}\n{alike}")
        return work()
    except BaseException as error:
        raise team.fail(error) from error.__cause__


def wait(team: Team, space: Any, work: dist.Work) -> None:
    """Until a collective has ended, or a rank is lost; on GPUs the current stream waits."""
    if not isinstance(space, CudaSpace):
        team.until(work.is_completed, lambda: f"rank {team.rank}: expected rows of all ranks; not all have come")
    work.wait()
