"""Who is told of a failure, and how: an error that another thread raises in those that wait for what will not come.

A call runs on after it returns, so its error cannot be raised by it: it is raised in the thread that made it, wherever that is
by then. A thread that Python did not start works for another one: autograd's makes the calls of a backward pass, and has often
gone to sleep when whoever called backward() reads the gradients. So the threads that made other calls are told in its place.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable

from weft.core.errors import WeftError


def addressed(waiting: Iterable[int], callers: Iterable[int]) -> set[int]:
    """Of the threads for which calls are under way, those in which an error reaches somebody. callers: all that made calls."""
    started = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    waiting, callers = set(waiting), set(callers)
    if waiting <= started:
        return waiting
    return waiting & started | (callers & started or {threading.main_thread().ident or 0})


def raise_in(error: WeftError, thread: int) -> None:
    """Raise an error like this one in a thread, as soon as it runs Python again."""
    raised = type(type(error).__name__, (type(error),), {"__str__": lambda _: str(error), "__module__": "weft.core.errors"})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(raised))
