"""How often kernels are launched on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


class Launches:
    count = 0


@contextmanager
def counting(*kinds: Any) -> Iterator[Launches]:
    """kinds: classes whose `launch` is counted until the end of the context."""
    found = Launches()

    def counted(launch: Any) -> Any:
        def launched(*arguments: Any, **options: Any) -> Any:
            found.count += 1
            return launch(*arguments, **options)

        return launched

    with ExitStack() as undo:
        for kind in kinds:
            undo.enter_context(mock.patch.object(kind, "launch", counted(kind.launch)))
        yield found
