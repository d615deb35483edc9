"""A network between clients and one server, as a TCP proxy in the process of the tests: it can swallow what
is sent, in silence, as a firewall or a pulled cable does.
"""

from __future__ import annotations

import selectors
import socket
import threading
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _End:
    socket: socket.socket
    other: _End | None = None
    swallowed: bool = False
    received: bytearray = field(default_factory=bytearray)


class Link:
    """`endpoint` leads to the server's. Connections that were swallowed once stay dead; new ones are only
    swallowed while `swallowing`.
    """

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._ends: list[_End] = []
        self._swallowing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def swallow(self, containing: bytes = b"") -> None:
        """From now on nothing passes through the connections there are, or those of them through which a
        client has sent this; without it also nothing through new ones.
        """
        with self._lock:
            self._swallowing = not containing
            for end in self._ends:
                if containing in end.received:
                    end.swallowed = True

    def heal(self) -> None:
        with self._lock:
            self._swallowing = False

    def close(self) -> None:
        self._closed = True
        socket.create_connection(self._listener.getsockname()).close()  # wakes it
        self._thread.join()
        self._listener.close()
        for end in self._ends:
            end.socket.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                with self._lock:
                    if key.data is None:
                        self._accept()
                    else:
                        self._pass_on(key.data)

    def _accept(self) -> None:
        client = _End(self._listener.accept()[0], swallowed=self._swallowing)
        try:
            server = _End(socket.create_connection(self._server), client, self._swallowing)
        except OSError:
            client.socket.close()
            return
        client.other = server
        for end in (client, server):
            self._ends.append(end)
            self._selector.register(end.socket, selectors.EVENT_READ, end)

    def _pass_on(self, end: _End) -> None:
        assert end.other is not None
        try:
            data = end.socket.recv(1 << 16)
            end.received += data
            if data and not (end.swallowed or end.other.swallowed):
                end.other.socket.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(end.socket)
            if not (end.swallowed or end.other.swallowed):
                _shut_down(end.other.socket)


def _shut_down(ended: socket.socket) -> None:
    try:
        ended.shutdown(socket.SHUT_WR)
    except OSError:
        return  # it is gone already
