"""Serves metrics over HTTP at a socket that somebody else opened. Has room for a few clients, of whom the
oldest makes room for the newest: neither who says nothing nor who does not read keeps anybody waiting.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

_AT_ONCE = 16
_MOST_ASKED = 64 * 1024
"""Bytes of a request that are read."""
_PATHS = ("/", "/metrics")
_Start = Callable[..., Any]


class _Asked(io.BufferedReader):
    """A request, of which what is too long is not read."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self._left = _MOST_ASKED

    def readline(self, size: int | None = -1) -> bytes:
        least = self._left if size is None or size < 0 else min(size, self._left)
        line = super().readline(least)
        self._left -= len(line)
        return line


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds of silence
    rbufsize = 0

    def setup(self) -> None:
        super().setup()
        self.rfile = _Asked(self.rfile)  # type: ignore[arg-type]  # unbuffered, so it is raw

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        host, port = listening.getsockname()[:2]
        self.server_name, self.server_port = str(host), int(port)  # as bound: asks no name server
        self.setup_environ()
        self._room = threading.Semaphore(_AT_ONCE)
        self._there: dict[socket.socket, None] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._make_room()
        self._room.acquire()
        with self._lock:
            self._there[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._there.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away."""

    def _make_room(self) -> None:
        """The thread of the oldest ends as soon as its client can neither say nor hear anything more."""
        with self._lock:
            if len(self._there) >= _AT_ONCE:
                with contextlib.suppress(OSError):  # it has gone
                    next(iter(self._there)).shutdown(socket.SHUT_RDWR)


def serve(
    listening: socket.socket, collector: Collector, lock: threading.Lock, look: float = 3600.0
) -> WSGIServer:
    """From now on, in threads of its own; what is collected is collected under the lock. It looks each `look`
    seconds whether it was shut down.
    """
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        if environ["PATH_INFO"] not in _PATHS:
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"See /metrics.\n"]
        with lock:
            answered: Iterable[bytes] = metrics(environ, start)
        return answered

    server = _Server(listening)
    server.set_app(answer)
    threading.Thread(target=server.serve_forever, args=(look,), daemon=True).start()
    return server
