"""The texts by which ranks describe their calls and failures. Ranks compare them, and users read them
(weft.comm.rank_group)."""

from __future__ import annotations

import hashlib

import torch.distributed as dist


class Remembered:
    """A table of texts by number, from `lowest` to `end` - 1.

    A text's number is a digest of it, so all ranks give a text the same number, whatever the order of texts. Two texts get the
    same number only by a hash collision.

    most: the number of the newest texts that the table has.
    """

    def __init__(self, lowest: int, end: int, *, most: int = 4096) -> None:
        self._lowest, self._end, self._most = lowest, end, most
        self._texts: dict[int, str] = {}

    def number(self, text: str) -> int:
        """Add a text to the table, and return its number."""
        number = self.number_of(text)
        self._texts.pop(number, None)
        self._texts[number] = text
        if len(self._texts) > self._most:
            del self._texts[next(iter(self._texts))]
        return number

    def number_of(self, text: str) -> int:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return self._lowest + int.from_bytes(digest, "little") % (self._end - self._lowest)

    def text(self, number: int | None) -> str:
        """Return the text of a number, or "" if the table does not have it."""
        return self._texts.get(number or 0, "")


def clipped(text: str, nbytes: int) -> str:
    """Return a text as ranks compare it, in at most `nbytes` bytes. If it is longer, its digest comes first, and its end is
    cut.

    >>> clipped("op: all_gather_matmul", 4096)
    'op: all_gather_matmul'
    """
    data = text.encode()
    if len(data) > nbytes:
        data = f"sha256 of all: {hashlib.sha256(data).hexdigest()}\n".encode() + data
    return data[:nbytes].decode(errors="ignore")  # the last character may have been cut


def kind_and_words(error: BaseException, nbytes: int) -> str:
    """Return an error's type and message, for other ranks, in at most `nbytes` bytes.

    >>> kind_and_words(ValueError("b is a list"), 100), kind_and_words(ValueError("b is a list"), 20)
    ('ValueError: b is a list', 'ValueError: b is ...')
    >>> kind_and_words(MemoryError(), 100)
    'MemoryError'
    """
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    data = text.encode()
    return text if len(data) <= nbytes else data[: nbytes - 3].decode(errors="ignore") + "..."


def reason(error: BaseException) -> str:
    """Return why a rank ended: the error's message, or its type if it has none.

    >>> reason(KeyboardInterrupt()), reason(ValueError("M is 3"))
    ('KeyboardInterrupt', 'M is 3')
    """
    return str(error) or type(error).__name__


def difference(rank: int, mine: str, peer: int, theirs: str) -> str:
    """Return the lines in which two descriptions differ.

    >>> difference(0, "op: gather\\nM: 64", 1, "op: scatter\\nM: 64")
    '  op: rank 0 has gather, rank 1 has scatter'
    """
    left, right = dict(_fields(mine)), dict(_fields(theirs))
    if not (mine or theirs):
        return f"  rank {rank} makes one, rank {peer} another, and both were agreed on too long ago to name them"
    if not theirs:
        return f"  rank {rank} makes this one, rank {peer} another, which it describes itself:\n{mine}"
    keys = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    lines = [
        f"  {key}: rank {rank} has {left.get(key, 'nothing')}, rank {peer} has {right.get(key, 'nothing')}" for key in keys
    ]
    return "\n".join(lines)


def _fields(text: str) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (line.partition(": ") for line in text.splitlines())]


def no_group(group: object, what: str) -> str:
    """Return what is wrong with a `group` that is not a process group. torch has a constant for groups that a rank is not
    in."""
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        return f"group: this rank is not in it; {what} on the group's ranks only"
    return f"group is a {type(group).__name__}; use a ProcessGroup (a mesh's is mesh.get_group()), or None for all ranks"
