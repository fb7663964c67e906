"""A Launcher launches a kernel again without Triton's argument binding. A RecordedLaunch launches it with less work still."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from weft.compat.triton_kernels import finished, launcher_of, relaunch


def _nowhere(address: int) -> None:
    return None


class RecordedLaunch(NamedTuple):
    """A RecordedLaunch is a launch that a Launcher would have made.

    compiled: the compiled kernel. None if it has not been launched with such arguments, and for the interpreter.
    arguments: all arguments, including constants.
    """

    compiled: Any
    blocks: int
    arguments: tuple[object, ...]

    def prepare(
        self, number: Callable[[int], int | None] = _nowhere, addresses: Sequence[int] = ()
    ) -> Callable[[int], None] | None:
        """Return a function that makes this launch on a stream. Return None if it needs what was not recorded.

        number: for an address that changes, returns the index in `addresses` at which it is when the function is called. For a
            fixed address it returns None.
        """
        arguments, changing, held = list(self.arguments), [], []
        for index, argument in enumerate(arguments):
            for tensor in argument if isinstance(argument, tuple) else (argument,):
                if hasattr(tensor, "block_shape"):  # a descriptor, which contains its tensor
                    return None
                if not isinstance(tensor, torch.Tensor):
                    continue
                found = number(tensor.data_ptr())
                if found is None:
                    held.append(tensor)
                elif tensor is argument:
                    changing.append((index, found))
                else:
                    return None
            if isinstance(argument, torch.Tensor):
                arguments[index] = argument.data_ptr()
        if self.compiled is None:
            return None
        start = launcher_of(self.compiled, self.blocks)

        def launch(stream: int, held: object = held) -> None:
            for index, found in changing:
                arguments[index] = addresses[found]
            start(stream, arguments)

        return launch


class Launcher:
    """A Launcher launches one kernel on one device.

    From the second launch with the same key on, it calls the compiled kernel directly. Triton's own launch binds and
    specialises every argument each time.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}
        self._recorded: list[RecordedLaunch] | None = None

    def __call__(
        self,
        blocks: int,
        arguments: Sequence[object],
        constants: Mapping[str, object],
        *,
        key: Hashable,
        stream: int | None = None,
        **options: int,
    ) -> None:
        """Launch `blocks` blocks.

        constants: the constexpr arguments, in the kernel's order.
        key: everything that Triton specialises on and that may differ between launches: the alignment of pointers, the integers
            that it folds in, the constants.
        stream: by default torch's current stream. A first launch accepts no other.
        """
        compiled = self._compiled.get(key)
        if self._recorded is not None:
            self._recorded.append(RecordedLaunch(compiled, blocks, (*arguments, *constants.values())))
        elif compiled is None:
            self._compiled[key] = finished(self._kernel[(blocks,)](*arguments, **constants, **options))
        else:
            relaunch(compiled, blocks, (*arguments, *constants.values()), stream)

    def record(self, launch: Callable[[], None]) -> list[RecordedLaunch]:
        """Return the launches that a function makes by this launcher. They are not made."""
        found: list[RecordedLaunch] = []
        self._recorded = found
        try:
            launch()
        finally:
            self._recorded = None
        return found
