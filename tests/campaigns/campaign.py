"""What campaigns share: their options, the number of ranks, the file of JSON lines, and what ranks of all of them do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.runtime.plan_cache import versions

Call = Callable[[], torch.Tensor]


class Options(argparse.ArgumentParser):
    """Options of a campaign. device: the default; nothing for a campaign that runs on CPUs alone."""

    def __init__(self, doc: str | None, *, device: str = "") -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--json", type=appended, help="a file that JSON lines are appended to")
        self.add_argument("--commit", default="", help="commit of the tree, for the lines")
        if device:
            self.add_argument("--seed", type=int, default=1)
            self.add_argument("--device", choices=("cpu", "cuda"), default=device)
            self.add_argument("--ranks", type=int, default=0, help="default: 3; on GPUs one for each, 4 at most")

    def ranks(self, given: argparse.Namespace, *, may_share: bool = False) -> int:
        """The number of ranks. may_share: with --ranks, several ranks may share one GPU."""
        if given.device == "cpu":
            return given.ranks or 3
        gpus = torch.cuda.device_count()
        if gpus < 2 and not (may_share and gpus and given.ranks):
            self.error(f"--device cuda needs two GPUs or more, this machine has {gpus}; use cpu")
        return given.ranks or min(4, gpus)


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def appended(text: str) -> Path:
    """A file that can be written. A campaign of hours must not fail at its end."""
    try:
        with open(text, "a", encoding="utf-8"):
            return Path(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot append to {text!r}: {error.strerror}") from None


def append(given: argparse.Namespace, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append lines to the file that --json names, if any, with the versions of what ran and the commit."""
    if given.json:
        about = {"versions": versions(getattr(given, "device", "cpu")), "commit": given.commit}
        with given.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**line, **about}) + "\n" for line in lines)


def on_any_rank(mine: bool) -> bool:
    """Whether it is so on any rank. All ranks ask at the same places."""
    found = torch.tensor([float(mine)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def captured(call: Callable[[], torch.Tensor]) -> Call:
    """The call as a CUDA graph. It was called eagerly before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay
