"""The system calls that Python has no name for. Knows libc and numbers; decides nothing.

Every call fails with OSError, as those of `os` do.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FALLOC_FL_KEEP_SIZE = 0x01
_FALLOC_FL_PUNCH_HOLE = 0x02
_FALLOC_FL_COLLAPSE_RANGE = 0x08


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def become_subreaper() -> None:
    """From now on orphaned descendants of this process become its children (prctl(2), Linux 3.4)."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def die_with_parent(number: int) -> None:
    """The kernel sends this process that signal when its parent's thread ends; exec keeps that (prctl(2)).

    A parent that has died before is not noticed: compare getppid afterwards.
    """
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "PR_SET_PDEATHSIG")


def set_comm(name: str) -> None:
    """The name that `ps -o comm` and `top` show; at most 15 bytes."""
    Path("/proc/self/comm").write_text(name[:15])


def collapse_range(fd: int, length: int) -> None:
    """Take `length` bytes (a multiple of the file system's block) out of the head of a file; the rest moves
    down.
    """
    _fallocate(fd, _FALLOC_FL_COLLAPSE_RANGE, length)


def punch_hole(fd: int, length: int) -> None:
    """Free the blocks of the first `length` bytes; the size stays and they read as zeros."""
    _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, length)


def _fallocate(fd: int, mode: int, length: int) -> None:
    call = _libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    _checked(call(fd, mode, 0, length), "fallocate")
