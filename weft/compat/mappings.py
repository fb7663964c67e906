"""This module maps memory by the C library, because Python's `mmap` keeps a file descriptor for each mapping."""

from __future__ import annotations

import ctypes
import mmap
import os

_MAP_FIXED = 0x10
"""Linux's value of MAP_FIXED, for which Python has no name."""


def mapped(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map an open file, so that every process that maps it shares its bytes. The mapping keeps no file descriptor.

    Python's own mapping of a file keeps one, and a group of 8 ranks with 128 cached problems has more mappings than a process
    may open files (1024, usually). So Python maps the same amount of anonymous memory, and the file then replaces it.
    """
    mapping = mmap.mmap(-1, nbytes)
    place = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size, offset = ctypes.c_size_t(nbytes), ctypes.c_long(0)
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(ctypes.c_void_p(place), size, access, flags, descriptor, offset) != place:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return mapping
