"""Run the zmq sockets of the embedded store in the launcher's event loop.

`envs/curve.py` defines keys and limits. `wire.py` defines the content of frames.

The sockets do not use libzmq's own heartbeats. A heartbeat ends the process if the other end of the
connection has closed while messages wait to be read (4.3.5, "Assertion failed: !_io_error"). Leases detect
silent peers, and the kernel closes dead connections.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import zmq

from fleetrun.aliases import Callback
from fleetrun.elastic.embedded.wire import MAX_FRAME_BYTES
from fleetrun.envs.curve import (
    MONITOR_EVENT,
    Context,
    CurveKeys,
    Socket,
    curve_keys,
    limit,
    monitor_socket,
    secure_client,
    secure_server,
    zap_reply,
    zap_socket,
)
from fleetrun.errors import UsageError
from fleetrun.pod.loop import Loop, Timer

_BACKLOG = 4096
_WAITING_MESSAGES = 10_000
_MESSAGES_AT_ONCE = 1000

Frames = list[zmq.Frame]


def store_keys(token: str) -> CurveKeys | None:
    """Return the keys of the job's store and its nodes, or None without a token.

    Raises UsageError for a token that is too short.
    """
    try:
        return curve_keys(token, b"store", b"node")
    except ValueError as error:
        raise UsageError(str(error)) from None


def _harden(socket: Socket, lease: float) -> None:
    limit(socket, MAX_FRAME_BYTES)
    # Some time after the lease of a silently vanished peer, the kernel closes its connection.
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = max(1, int(lease))
    socket.tcp_keepalive_intvl = max(1, int(lease / 4))
    socket.tcp_keepalive_cnt = 4
    socket.tcp_maxrt = max(1000, int(lease * 2000))


def store_socket(context: Context, lease: float, keys: CurveKeys | None) -> Socket:
    """Return a ROUTER socket to bind.

    With `keys` and a CurveAuthenticator in the same context, only clients with these keys can connect.
    """
    socket = context.socket(zmq.ROUTER)
    _harden(socket, lease)
    socket.backlog = _BACKLOG
    socket.sndhwm = _WAITING_MESSAGES
    secure_server(socket, keys)
    # Sending to a peer that has left, or that does not read, is an error.
    socket.router_mandatory = 1
    socket.router_handover = 1
    return socket


def node_socket(context: Context, lease: float, keys: CurveKeys | None, connect_ms: int) -> Socket:
    """Return a DEALER socket that connects once. It does not reconnect, and it drops messages that it could
    not send.
    """
    socket = context.socket(zmq.DEALER)
    _harden(socket, lease)
    socket.sndhwm = 0
    socket.reconnect_ivl = -1
    socket.connect_timeout = connect_ms
    secure_client(socket, keys)
    return socket


class Watched:
    """A zmq socket in a loop. `receive` is called for each message, and `rest` after each batch of messages.

    The descriptor of a zmq socket is edge-triggered. After an event, and after every use of the socket, the
    socket must be read until it is empty. Call `look_again` after sending. Another thread may call `send`,
    too.
    """

    def __init__(
        self,
        loop: Loop,
        socket: Socket,
        receive: Callable[[Frames], None],
        rest: Callback = lambda: None,
    ) -> None:
        self.socket = socket
        self._loop = loop
        self._receive = receive
        self._rest = rest
        self._lock = threading.Lock()
        self._again = Timer()
        self._fd = int(socket.getsockopt(zmq.FD))
        loop.add(self._fd, self._look)
        self.look_again()

    def send(self, frames: Sequence[bytes | zmq.Frame], *, copy: bool = True) -> None:
        """Send a message now. Raises ZMQError if it cannot be sent completely. No part of it is then sent."""
        with self._lock:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)

    def look_again(self) -> None:
        """Read the socket at the loop's next turn."""
        if not self.socket.closed and not self._again.pending:
            self._again = self._loop.after(0.0, self._look)

    def close(self, linger_ms: int = 0) -> None:
        if not self.socket.closed:
            self._loop.remove(self._fd)
            with self._lock:
                self.socket.close(linger=linger_ms)
        self._again.cancel()

    def _look(self) -> None:
        for _ in range(_MESSAGES_AT_ONCE):  # after these, the loop handles its other events
            if self.socket.closed:
                return
            try:
                with self._lock:
                    frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._receive(frames)
        if not self.socket.closed:
            self._rest()
        if not self.socket.closed and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.look_again()


_SLOWEST = 60.0
"""Seconds of waiting for a file after which a launcher counts as lost."""


class Pulse:
    """Call `beat` from a thread, eight times per lease, while a handler blocks the loop.

    This keeps a node in the job while it waits for the disk of its log directory. Calls `then` in the loop
    afterwards.
    """

    def __init__(self, loop: Loop, lease: float, beat: Callback, then: Callback) -> None:
        self.lease = lease
        self._loop = loop
        self._beat = beat
        self._then = then
        self._has_beaten = False
        self._closed = threading.Event()
        self._turn()
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def close(self) -> None:
        self._timer.cancel()
        self._closed.set()

    def _turn(self) -> None:
        self._seen = self._loop.clock()
        if self._has_beaten:
            self._has_beaten = False
            self._then()
        self._timer = self._loop.after(self.lease / 8, self._turn)

    def _run(self) -> None:
        while not self._closed.wait(self.lease / 8):
            if self.lease / 4 < self._loop.clock() - self._seen < _SLOWEST:
                self._beat()
                self._has_beaten = True


class Monitor:
    """Call `handle(event, value)` for each event of a socket's connections, in order."""

    def __init__(self, loop: Loop, socket: Socket, events: int, handle: Callable[[int, int], None]) -> None:
        self._socket = socket
        self._handle = handle
        self._watched = Watched(loop, monitor_socket(socket, events), self._receive)

    def close(self) -> None:
        """Stop monitoring. Call this before the socket is closed."""
        if not self._watched.socket.closed:
            self._socket.disable_monitor()
            self._watched.close()

    def _receive(self, frames: Frames) -> None:
        self._handle(*MONITOR_EVENT.unpack(frames[0].bytes))


class CurveAuthenticator:
    """Admit only nodes with the job's keys to the sockets of a context. Create it before the sockets bind."""

    def __init__(self, loop: Loop, context: Context, keys: CurveKeys) -> None:
        self._keys = keys
        self._watched = Watched(loop, zap_socket(context), self._answer)

    def close(self) -> None:
        self._watched.close()

    def _answer(self, frames: Frames) -> None:
        self._watched.socket.send_multipart(zap_reply([frame.bytes for frame in frames], self._keys))
        self._watched.look_again()
