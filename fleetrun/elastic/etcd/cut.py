"""A pair of scissors: one thread reads from a connection, another ends that."""

from __future__ import annotations

import os
import socket
import threading


class Cut:
    """Ends a stream from another thread."""

    def __init__(self) -> None:
        self.used = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def use(self) -> None:
        with self._lock:
            self.used = True
            self._shut_down()

    def arm(self, fd: int) -> None:
        with self._lock:
            self._socket = socket.socket(fileno=os.dup(fd))
            if self.used:
                self._shut_down()

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None

    def _shut_down(self) -> None:
        if self._socket is not None:
            try:
                self._socket.shutdown(
                    socket.SHUT_RDWR
                )  # the connection, not this descriptor: its reader wakes
            except OSError:
                return  # it is gone already
