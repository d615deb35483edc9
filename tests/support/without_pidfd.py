"""Runs a command where the kernel refuses pidfd_open, as old container runtimes and kernels do:
`python without_pidfd.py ERRNO COMMAND ...`.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_PIDFD_OPEN = 434  # on all processors
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x00050000, 0x7FFF0000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(code: int) -> None:
    """Install a filter (seccomp(2)) for this process and its children."""
    steps = [(_LOAD, 0, 0, 0), (_JUMP_IF_EQUAL, 0, 1, _PIDFD_OPEN), (_RETURN, 0, 0, _REFUSE | code)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in steps))
    program = _Program(len(steps), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    refuse(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
