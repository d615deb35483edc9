"""A network between two sockets that fails on request."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from types import TracebackType


class Proxy:
    """Forwards connections to `target` from a port of its own, in a thread. `heard` is all that clients sent,
    by connection.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._told = socket.socketpair()
        self._selector.register(self._told, selectors.EVENT_READ)
        self._others: dict[socket.socket, socket.socket] = {}
        self._clients: dict[socket.socket, bytearray] = {}
        self._lock = threading.Lock()
        self._frozen: list[socket.socket] = []
        self._cut = False
        self._closing = False
        self.heard: list[bytearray] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._closing = True
        self._wake.send(b"x")
        self._thread.join(60)
        for each in (*self._others, *self._frozen, self._listener, self._wake, self._told):
            each.close()
        self._selector.close()

    def cut(self) -> None:
        """Nothing gets through, no connection is accepted, and no error is sent."""
        with self._lock:
            self._cut = True
            for each in (self._listener, *self._others):
                self._selector.unregister(each)

    def heal(self) -> None:
        with self._lock:
            self._cut = False
            for each in (self._listener, *self._others):
                self._selector.register(each, selectors.EVENT_READ)
        self._wake.send(b"x")

    def freeze(self) -> None:
        """Nothing more gets through over the connections that there are; others can be made."""
        with self._lock:
            for each in self._others:
                self._selector.unregister(each)
            self._frozen += self._others
            self._others.clear()
            self._clients.clear()

    def reset(self) -> None:
        """A RST to both ends of every connection."""
        with self._lock:
            for each in list(self._others):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._close(each)

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                with self._lock:
                    self._ready(key.fileobj)  # type: ignore[arg-type]

    def _ready(self, ready: socket.socket) -> None:
        if ready is self._told:
            ready.recv(100)
        elif self._cut:
            return
        elif ready is self._listener:
            self._accept()
        elif ready in self._others:
            self._forward(ready)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        heard = self._clients[client] = bytearray()
        self.heard.append(heard)
        for one, other in ((client, server), (server, client)):
            self._others[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            if source in self._clients:
                self._clients[source] += data
            self._others[source].sendall(data)
        except OSError:
            data = b""
        if not data:
            for each in (self._others[source], source):
                self._close(each)

    def _close(self, one: socket.socket) -> None:
        if self._others.pop(one, None) is not None:
            self._clients.pop(one, None)
            if not self._cut:
                self._selector.unregister(one)
            one.close()
