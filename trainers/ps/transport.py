"""zmq sockets of servers and trainers. Keys and limits match the launcher's `envs/curve.py`."""

from __future__ import annotations

import math
import os
import socket as socket_module
import threading
from collections.abc import Sequence

import zmq

from fleetrun.aliases import Texts
from fleetrun.envs.contract import TOKEN, join_endpoint, split_endpoint
from fleetrun.envs.curve import (
    CURVE_READY_BYTES,
    MONITOR_EVENT,
    Context,
    CurveKeys,
    Socket,
    Strangers,
    curve_keys,
    limit,
    monitor_socket,
    secure_client,
    secure_server,
    zap_reply,
    zap_socket,
)
from trainers.errors import ServerError, UsageError
from trainers.ps.wire import MAX_FRAME_BYTES, Buffer

__all__ = ["TOKEN", "CurveKeys", "keys_of"]

_HIGH_WATER = 1000
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def keys_of(environ: Texts) -> CurveKeys | None:
    """Return the keys of this job's servers and trainers, or None without a token. Raises UsageError if the
    token is too short.
    """
    try:
        return curve_keys(environ.get(TOKEN, ""), b"server", b"trainer")
    except ValueError as error:
        raise UsageError(str(error)) from None


def receive(socket: Socket) -> list[zmq.Frame]:
    """Return all frames of one message. It replaces recv_multipart, which makes extra calls to the socket."""
    frame = socket.recv(copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame)
    return frames


def send(socket: Socket, frames: Sequence[Buffer]) -> None:
    """Send one whole message without waiting, or nothing. It replaces send_multipart, which passes over the
    frames twice. Raises zmq.ZMQError.
    """
    *leading, last = frames
    for frame in leading:
        socket.send(frame, _MORE, copy=False)
    socket.send(last, _LAST, copy=False)


def _harden(socket: Socket) -> None:
    limit(socket, MAX_FRAME_BYTES)
    socket.sndhwm = _HIGH_WATER
    socket.rcvhwm = _HIGH_WATER


class Authenticator:
    """Allows only trainers with the job's keys to connect to a socket. Create it before the socket is bound,
    and close the socket with it.

    It answers from its own thread, because a server that is busy with a request would delay the handshakes.
    """

    def __init__(self, socket: Socket, keys: CurveKeys) -> None:
        self._socket = socket
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        asked, events = zap_socket(socket.context), monitor_socket(socket, Strangers.EVENTS)
        self._thread = threading.Thread(
            target=self._run, args=(asked, events, keys), name="authenticator", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _run(self, asked: Socket, events: Socket, keys: CurveKeys) -> None:
        strangers = Strangers(lambda fd, acked: acked >= CURVE_READY_BYTES)
        poller = zmq.Poller()
        for each in (self._stop, asked, events):
            poller.register(each, zmq.POLLIN)
        while self._stop not in (ready := dict(poller.poll(math.ceil(strangers.check() * 1000) or None))):
            if asked in ready:
                asked.send_multipart(zap_reply(asked.recv_multipart(), keys))
            if events in ready:
                strangers.happened(*MONITOR_EVENT.unpack(events.recv_multipart()[0]))
        asked.close()
        events.close()


class Newcomers:
    """Closes connections to a server without keys that send 64 KiB before their first whole message.

    A trainer starts each connection with an empty message (PROBE_ROUTER), so its first request may be large.
    Create it before the socket is bound, and close the socket with it.
    """

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._strangers = Strangers(lambda fd, acked: False)
        self.events = monitor_socket(socket, Strangers.EVENTS)

    def greets(self, frames: Sequence[zmq.Frame]) -> bool:
        """Note the connection of a received message. Return True for the empty message that starts a
        connection.
        """
        self._update()  # first, because a new connection may have the descriptor of an old one
        new = self._strangers.recognize(int(frames[-1].get(zmq.SRCFD)))
        return new and not any(frame.buffer.nbytes for frame in frames)

    def check(self) -> float:
        """Check all connections, and return the most seconds that the next wait may take. 0 means any time.
        Call it before each wait.
        """
        self._update()
        # libzmq has parsed all bytes that it has read, so a trainer's first message would be readable by now.
        return self._strangers.check(lambda: _readable(self._socket))

    def _update(self) -> None:
        while _readable(self.events):
            self._strangers.happened(*MONITOR_EVENT.unpack(self.events.recv_multipart()[0]))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()
        self.events.close()


def _readable(socket: Socket) -> int:
    return int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN


def server_socket(context: Context, keys: CurveKeys | None = None) -> Socket:
    """Return a ROUTER for `bind_to`. With `keys`, only trainers with these keys can connect. An Authenticator
    checks the keys.
    """
    socket = context.socket(zmq.ROUTER)
    _harden(socket)
    secure_server(socket, keys)
    socket.router_mandatory = 1  # sending to a disconnected peer is an error
    socket.router_handover = 1  # a trainer that reconnects keeps its routing id
    socket.linger = 2000  # the last reply is sent
    return socket


def bind_to(socket: Socket, endpoint: str) -> None:
    """Bind to `endpoint` (host:port) and to no other interface. Raises ServerError."""
    # libzmq binds to addresses, not to host names.
    try:
        host, port = split_endpoint(endpoint)
        found = socket_module.getaddrinfo(host, port, type=socket_module.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise ServerError(
            f"The endpoint of this server is {endpoint!r}, which is not host:port: {error}"
        ) from error
    address = f"tcp://{join_endpoint(str(found[0][4][0]), port)}"
    socket.ipv6 = int("[" in endpoint)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ServerError(
            f"This server cannot listen on {endpoint}: {error.strerror}. Either another process uses the "
            "port, or the address belongs to another node."
        ) from error


def client_socket(
    context: Context,
    endpoint: str,
    name: bytes,
    trainer_timeout: float,
    keys: CurveKeys | None = None,
) -> Socket:
    """Return a DEALER called `name` that connects, and reconnects, to `endpoint`. `keys` encrypt it."""
    socket = context.socket(zmq.DEALER)
    _harden(socket)
    # libzmq's own thread sends heartbeats. A process that is busy in Python or in a kernel still answers, and
    # a dead process does not. The server closes a connection on which nothing arrives for the TTL. The server
    # sends no heartbeats itself. A heartbeat to a peer that has stopped reading ends the process (libzmq
    # 4.3.5, "Assertion failed: !_io_error").
    socket.heartbeat_ivl = max(100, int(trainer_timeout * 1000 / 8))
    socket.heartbeat_timeout = max(200, int(trainer_timeout * 1000 / 2))
    socket.heartbeat_ttl = max(200, int(trainer_timeout * 1000 / 2))
    secure_client(socket, keys)
    socket.probe_router = int(keys is None)  # see Newcomers
    socket.routing_id = name
    socket.ipv6 = int("[" in endpoint)
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 2000
    socket.connect(f"tcp://{endpoint}")
    return socket
