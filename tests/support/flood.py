"""Connections that send without end, and what the process takes for it."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

GREETINGS = {
    mechanism: b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03" + flag + mechanism.ljust(20, b"\0") + b"\0" * 32
    for mechanism, flag in ((b"NULL", b"\0"), (b"CURVE", b"\1"))
}
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
HANDSHAKE = GREETINGS[b"CURVE"] + b"\x06" + (60 << 20).to_bytes(8, "big")
"""A frame of 60 MiB, where a handshake of 200 bytes is due."""
ENDLESS = GREETINGS[b"NULL"] + READY
"""After it, parts of a message."""
EMPTY_PARTS = b"\x01\0" * (1 << 15)


class Flood:
    """Sends `first` and then `piece`, `times` times, over so many connections to `endpoint` from threads."""

    def __init__(self, endpoint: str, connections: int, first: bytes, piece: bytes, times: int) -> None:
        host, _, port = endpoint.rpartition(":")
        self._address = (host, int(port))
        self._sent = first, piece, times
        self.cut = 0
        """How many connections the server ended before all was sent."""
        self.most = self._before = resident()
        self._threads = [threading.Thread(target=self._send) for _ in range(connections)]
        for each in self._threads:
            each.start()

    @property
    def taken(self) -> int:
        """The most bytes that this process has grown by."""
        return self.most - self._before

    @property
    def over(self) -> bool:
        self.most = max(self.most, resident())
        return not any(each.is_alive() for each in self._threads)

    def _send(self) -> None:
        first, piece, times = self._sent
        try:
            with socket.create_connection(self._address) as connection:
                connection.sendall(first)
                if first == ENDLESS:
                    await_ready(connection)
                for _ in range(times):
                    connection.sendall(piece)
                    self.most = max(self.most, resident())
                connection.settimeout(20)
                with contextlib.suppress(TimeoutError):
                    while connection.recv(1000):
                        pass
        except OSError:
            self.cut += 1


def await_ready(connection: socket.socket) -> None:
    """What comes before the server is ready is no message: the handshake would fail."""
    seen = b""
    while b"READY" not in seen:
        data = connection.recv(1000)
        if not data:
            raise OSError("the server ended the connection")
        seen += data


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
