"""The kernel's log: which processes it has killed for lack of memory, and which errors of GPUs it has seen.
Readable by root, or by everyone where kernel.dmesg_restrict is 0; elsewhere it says nothing. Reads only.
"""

from __future__ import annotations

import contextlib
import os
import re
import time

_MAX_RECORDS = 20_000
_KILLED = rb"Killed process (\d+) \("
_GPU_ERROR = rb"^\d+,\d+,(\d+),[^;]*;NVRM: Xid \(([^)]*)\): (\d+)([^\n]*)"


class KernelLog:
    """What it says of killed processes from now on."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._killed: set[int] = set()
        with contextlib.suppress(OSError):
            self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def names(self, pid: int) -> bool:
        """Whether a record since the start says that this process was killed."""
        for _ in range(_MAX_RECORDS):
            record = self._next()
            if record is None:
                break
            found = re.search(_KILLED, record)
            if found:
                self._killed.add(int(found.group(1)))
        return pid in self._killed

    def _next(self) -> bytes | None:
        if self._fd is None:
            return None
        try:
            return os.read(self._fd, 8192)
        except BrokenPipeError:
            return b""  # records were overwritten before we read them: the next is there
        except OSError:
            return None


def gpu_errors(since: float) -> list[str]:
    """The errors (Xid) of NVIDIA GPUs since that moment, in seconds since the epoch, each once."""
    booted = time.time() - time.monotonic()
    found: dict[str, None] = {}
    for record in _all_records():
        error = re.search(_GPU_ERROR, record)
        if error is not None and booted + int(error[1]) / 1e6 >= since:
            device, number, words = (each.decode("utf-8", "backslashreplace") for each in error.groups()[1:])
            found[f"GPU {device.removeprefix('PCI:')}: Xid {number}{words}"] = None
    return list(found)


def _all_records() -> list[bytes]:
    records: list[bytes] = []
    with contextlib.suppress(OSError):
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while len(records) < _MAX_RECORDS:
                with contextlib.suppress(BrokenPipeError):  # records were overwritten meanwhile
                    records.append(os.read(fd, 8192))
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
    return records
