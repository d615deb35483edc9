"""Send progress reports to the launcher through a datagram socket. Sending never blocks."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time

from fleetrun.aliases import Texts
from fleetrun.envs.channels import CONTAINER_VARIABLE, PROGRESS_VARIABLE

_PIECE = 0.05  # seconds


class Channel:
    """A channel to the socket at this path. It opens itself, and again after the launcher's end was
    missing.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None

    def send(self, datagram: bytes) -> bool:
        """Send a datagram, and return True if it was sent. A full, missing or dead socket loses the
        report.
        """
        try:
            if self._socket is None:
                self._socket = _connected(self._path)
            self._socket.send(datagram)
        except BlockingIOError:
            return False  # the launcher is busy or stopped, and the connection is still good
        except OSError:
            self.close()
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until the launcher accepts datagrams again. Return False if it does not, or has ended.

        It waits in short pieces, because the kernel does not wake a sender every time that the receiver makes
        room.
        """
        if self._socket is None:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        deadline = time.monotonic() + seconds
        while not poll.poll(min(_PIECE, max(0.0, deadline - time.monotonic())) * 1000):
            if time.monotonic() >= deadline:
                return False
        return True

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


def channel_of(environ: Texts) -> Channel | None:
    """Return the channel, or None without a launcher."""
    path = environ.get(PROGRESS_VARIABLE, "")
    return Channel(path) if path and environ.get(CONTAINER_VARIABLE) else None


def is_child() -> bool:
    """Return True if multiprocessing made this process, because DataLoader workers report nothing."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _connected(path: str) -> socket.socket:
    """Connect through a descriptor of the directory, because a socket's address has at most 108 bytes.

    Raises OSError, and PermissionError for a directory of another user.
    """
    parent, name = os.path.split(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        folder = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_uid not in (os.geteuid(), 0):
                raise PermissionError(f"{parent} belongs to another user")
            sock.connect(f"/proc/self/fd/{folder}/{name}")
        finally:
            os.close(folder)
    except OSError:
        sock.close()
        raise
    return sock
