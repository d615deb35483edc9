"""Who is at an address, and why nobody: what libzmq does not tell. Knows plain sockets."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from fleetrun.elastic.embedded.resolver import Address
from fleetrun.pod.loop import WRITE, Loop

GREETING = b"\xff"
"""What everybody who speaks zmq says first (rfc.zeromq.org/spec/23)."""


class Probe:
    """Connects once, and waits for the first byte; `then(why, number)` from the loop, unless it was closed.
    `why` is empty when zmq is spoken there; `number` is the errno, or 0.
    """

    def __init__(
        self, loop: Loop, address: Address, seconds: float, then: Callable[[str, int], None]
    ) -> None:
        family, where = address
        self._loop = loop
        self._seconds = seconds
        self._then = then
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        number = self._socket.connect_ex(where)
        if number in (0, errno.EINPROGRESS):
            loop.add(self._socket.fileno(), self._connected, WRITE)
            number = errno.ETIMEDOUT
            self._timer = loop.after(seconds, lambda: self._end(os.strerror(number), number))
        else:
            self._timer = loop.after(0.0, lambda: self._end(os.strerror(number), number))

    def close(self) -> None:
        self._timer.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove(self._socket.fileno())
            self._socket.close()

    def _end(self, why: str, number: int) -> None:
        self.close()
        self._then(why, number)

    def _connected(self) -> None:
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._end(os.strerror(number), number)
            return
        self._timer.cancel()
        self._timer = self._loop.after(
            self._seconds, lambda: self._end("a program there takes connections and says nothing", 0)
        )
        self._loop.remove(self._socket.fileno())
        self._loop.add(self._socket.fileno(), self._heard)

    def _heard(self) -> None:
        try:
            said = self._socket.recv(1)
        except OSError as error:
            self._end(os.strerror(error.errno or 0), 0)
        else:
            self._end("" if said == GREETING else "what answers there is no fleetrun", 0)
