"""Serves metrics over HTTP at a socket that somebody else opened. Takes a few requests at a time, and waits
for no slow client for long.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

_AT_ONCE = 16
_PATHS = ("/", "/metrics")
_Start = Callable[..., Any]


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds of silence

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

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away."""


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
