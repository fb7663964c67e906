"""A Launcher launches a kernel again without Triton's argument binding. A RecordedLaunch launches it with less work still."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch

from weft.compat.triton_kernels import finished, launcher_of, relaunch


class MovingTensors(Protocol):
    """MovingTensors has the caller's tensors, whose addresses differ from launch to launch.

    addresses, views: their addresses, and the tensors, at the time of a launch.
    """

    addresses: list[int]
    views: list[Any]

    def address(self, address: int) -> int | None:
        """Return the number in `addresses` of what is at this address now, or None if that does not move."""
        ...

    def view(self, part: torch.Tensor) -> int:
        """Return the number of a tensor in `views`."""
        ...


class RecordedLaunch(NamedTuple):
    """A RecordedLaunch is a launch that a Launcher would have made.

    compiled: the compiled kernel. None if it has not been launched with such arguments, and for the interpreter.
    arguments: all arguments, including constants. Integers may be addresses.
    """

    compiled: Any
    blocks: int
    arguments: tuple[object, ...]

    def prepare(self, moving: MovingTensors | None = None) -> Callable[[int], None] | None:
        """Return a function that makes this launch on a stream, or None if it cannot be prepared.

        moving: the tensors whose addresses change from launch to launch. By default none do.
        """
        if self.compiled is None:
            return None
        find = (lambda address: None) if moving is None else moving.address
        held: list[object] = []  # tables, which live as long as the function
        arguments = [_without_tensor(one, find, held) for one in self.arguments]
        changing = [(index, one.number) for index, one in enumerate(arguments) if isinstance(one, _Moved)]
        groups = [
            (index, list(one), [(at, part.number) for at, part in enumerate(one) if isinstance(part, _Moved)])
            for index, one in enumerate(arguments)
            if isinstance(one, tuple) and any(isinstance(part, _Moved) for part in one)
        ]
        # A descriptor contains its tensor.
        found = {id(one): one for one in arguments if hasattr(one, "block_shape") and find(one.base.data_ptr()) is not None}
        descriptors = [(one, moving.view(one.base)) for one in found.values() if moving is not None]
        for one, _ in descriptors:
            one.base = None
        addresses, views = ([], []) if moving is None else (moving.addresses, moving.views)
        start = launcher_of(self.compiled, self.blocks)

        def launch(stream: int, held: object = held) -> None:
            for index, number in changing:
                arguments[index] = addresses[number]
            for index, parts, within in groups:
                for at, number in within:
                    parts[at] = addresses[number]
                arguments[index] = tuple(parts)
            for one, number in descriptors:
                one.base = views[number]
            start(stream, arguments)
            for one, _ in descriptors:
                one.base = None

        return launch


class _Moved(NamedTuple):
    """An address that changes. number: its number among the addresses of a launch."""

    number: int

    @staticmethod
    def at(find: Callable[[int], int | None], address: Any) -> Any:
        """Return the argument for an address: itself, if it does not change."""
        number = find(address)
        return address if number is None else _Moved(number)


_LEAST_ADDRESS = 1 << 32
"""An integer argument from this on is taken for an address, which moves if it lies in a tensor of the caller. Sizes and strides
are smaller."""


def _without_tensor(argument: Any, find: Callable[[int], int | None], held: list[object]) -> Any:
    """Return an argument with the addresses of its tensors instead of these."""
    if isinstance(argument, torch.Tensor):
        found = _Moved.at(find, argument.data_ptr())
        if not isinstance(found, _Moved):
            held.append(argument)
        return found
    if isinstance(argument, int) and argument >= _LEAST_ADDRESS:
        return _Moved.at(find, argument)
    if isinstance(argument, tuple) and any(isinstance(part, torch.Tensor) for part in argument):
        return tuple([_without_tensor(part, find, held) for part in argument])
    return argument


class Launcher:
    """A Launcher launches kernels on one device.

    From the second launch with the same key on, it calls the compiled kernel directly. Triton's own launch binds and
    specialises every argument each time.
    """

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        kernel: Any,
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
            that it folds in, the constants; and the kernel, if this launcher launches several.
        stream: by default torch's current stream. A first launch accepts no other.
        """
        compiled = self._compiled.get(key)
        recorded = _RECORDED.get(get_ident()) if _RECORDED else None
        if recorded is not None:
            recorded.append(RecordedLaunch(compiled, blocks, (*arguments, *constants.values())))
        elif compiled is None:
            self._compiled[key] = finished(kernel[(blocks,)](*arguments, **constants, **options))
        else:
            relaunch(compiled, blocks, (*arguments, *constants.values()), stream)


_RECORDED: dict[int, list[RecordedLaunch]] = {}
"""The launches of each thread that is in `record_launches`. Other threads may launch meanwhile."""


def record_launches(launch: Callable[[], None]) -> list[RecordedLaunch]:
    """Return the launches that a function makes in this thread by any Launcher. They are not made."""
    found = _RECORDED[get_ident()] = list[RecordedLaunch]()
    try:
        launch()
    finally:
        del _RECORDED[get_ident()]
    return found
