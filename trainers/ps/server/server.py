"""Server: one endpoint, one loop. Knows sockets, signals and the clock; leaves every answer to `service`."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import zmq

from trainers.errors import ServerError
from trainers.glog import glog
from trainers.ps.net.transport import server_socket
from trainers.ps.net.wire import Field, Kind, Message, WireError, bytes_part, decode, encode
from trainers.ps.server.members import Members
from trainers.ps.server.service import Outgoing, Service
from trainers.ps.tables.spec import job_words
from trainers.strategy import PsConfigs

_LOOK_EVERY_S = 0.5
_PROBE = encode(Message(kind=Kind.PROBE))


class Server:
    """Binds at construction, serves in `run`."""

    def __init__(
        self, endpoints: Sequence[str], index: int, trainers: int, *, sync: bool, configs: PsConfigs
    ) -> None:
        self._index = index
        self._endpoint = endpoints[index]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = server_socket(self._context, self._endpoint, configs.trainer_timeout_s)
        except ServerError:
            self._context.term()
            raise
        # Half of the timeout goes to noticing a silent connection (heartbeats), half to waiting for another.
        members = Members(trainers, configs.trainer_timeout_s / 2, configs.join_timeout_s, time.monotonic())
        self._service = Service(members, sync=sync, job=job_words(sync, trainers, len(endpoints), index))

    @property
    def dismissed(self) -> bool:
        """Whether every trainer has left."""
        return self._service.over

    def run(self) -> None:
        """Serve until every trainer has left or SIGTERM arrives."""
        glog(f"running server with rank id: {self._index}, endpoint: {self._endpoint}")
        try:
            with _termination() as ended:
                self._serve(ended)
        finally:
            self._socket.close()
            self._context.term()

    def _serve(self, ended: socket.socket) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(ended, zmq.POLLIN)
        look_at = time.monotonic() + _LOOK_EVERY_S
        while not self._service.over:
            wait = None if self._service.idle else max(0, round((look_at - time.monotonic()) * 1000))
            ready = dict(poller.poll(wait))
            if ended.fileno() in ready:
                return
            if self._socket in ready:
                self._receive()
            now = time.monotonic()
            if now >= look_at and not self._service.idle:
                self._send(self._service.tick(self._reachable, now))
                look_at = time.monotonic() + _LOOK_EVERY_S

    def _receive(self) -> None:
        route, *frames = self._socket.recv_multipart(copy=False)
        try:
            message = decode([frame.buffer for frame in frames])
        except WireError as error:
            text = bytes_part(Field.TEXT, str(error).encode())
            refused = Message(kind=Kind.REFUSED, code=error.code, parts=(text,))
            self._send([(route.bytes, refused)])
            return
        self._send(self._service.handle(route.bytes, message, self._reachable))

    def _send(self, outgoing: Sequence[Outgoing]) -> None:
        for route, message in outgoing:
            self._sent([route, *encode(message)])

    def _reachable(self, route: bytes) -> bool:
        return self._sent([route, *_PROBE])

    def _sent(self, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Whether the peer still has a connection. A reply that it did not get, it will ask for again."""
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return True  # connected, and slow to read
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


@contextlib.contextmanager
def _termination() -> Iterator[socket.socket]:
    """A socket that becomes readable on SIGTERM. Signals reach the main thread only; elsewhere it never
    does.
    """
    readable, writable = socket.socketpair()
    with readable, writable:
        if threading.current_thread() is not threading.main_thread():
            yield readable
            return
        previous = signal.signal(signal.SIGTERM, lambda number, frame: writable.send(b"\0"))
        try:
            yield readable
        finally:
            signal.signal(signal.SIGTERM, previous)
