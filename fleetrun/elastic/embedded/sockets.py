"""zmq sockets of the embedded store in our own event loop: the options that make them safe, the CURVE keys
that come from the job's secret, and the check that lets only nodes with these keys in. The content of frames
is `wire.py`'s.
"""

from __future__ import annotations

import hmac
import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from fleetrun.elastic.embedded.wire import MAX_FRAME_BYTES
from fleetrun.envs.contract import derive_key, token_flaw
from fleetrun.errors import UsageError
from fleetrun.pod.loop import Loop, Timer

# ---- CURVE keys from the secret of the job. Everything that has the secret can derive all of them: the
# store accepts one public key of nodes, a node one public key of the store


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85-encoded, as libzmq wants them."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """CURVE keys of a job's store (rfc.zeromq.org/spec/26)."""

    store: KeyPair
    node: KeyPair


def store_keys(token: str) -> StoreKeys | None:
    """None without a secret. Raises UsageError for one that is too short."""
    if not token:
        return None
    wrong = token_flaw(token)
    if wrong is not None:
        raise UsageError(wrong)
    return StoreKeys(_pair(token, b"store"), _pair(token, b"node"))


def _pair(token: str, person: bytes) -> KeyPair:
    secret = z85.encode(derive_key(token, person))
    return KeyPair(zmq.curve_public(secret), secret)


# ---- zmq sockets of the embedded store, with the options that make them safe, in a loop of our own. Knows
# libzmq; leaves the content of frames to others.
#
# The defaults of libzmq are unsafe: no limit on messages, endless linger, and random bytes on the port reach
# the application through the old protocol (857 of 2,000 garbage connections). A ZAP domain stops the last,
# NULL mechanism included and without a handler: 0 of 2,000.
#
# No socket here sends libzmq's own heartbeats: one over a connection whose other end has gone while messages
# wait to be read ends the process (4.3.5, "Assertion failed: !_io_error"). Nodes and store have leases to
# tell silence, and the kernel lets go of connections that lead nowhere.

DOMAIN = b"fleetrun"
HANDSHAKE_MS = 5000
_BACKLOG = 4096
_WAITING_MESSAGES = 10_000
_AT_ONCE = 1000
_EVENT = struct.Struct("=HI")
_names = itertools.count()

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
Frames = list[zmq.Frame]


def _harden(socket: Socket, lease: float) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.LINGER, 0)
    # A connection whose other end is gone without a word ends some time after its lease.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, int(lease)))
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, int(lease / 4)))
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 4)
    socket.setsockopt(zmq.TCP_MAXRT, max(1000, int(lease * 2000)))


def store_socket(context: Context, lease: float, keys: StoreKeys | None) -> Socket:
    """A ROUTER to bind. With `keys` and a CurveAuthenticator in the same context, only clients with them
    connect.
    """
    socket = context.socket(zmq.ROUTER)
    _harden(socket, lease)
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)
    socket.setsockopt(zmq.SNDHWM, _WAITING_MESSAGES)
    if keys is not None:
        socket.curve_server = True
        socket.curve_secretkey = keys.store.secret
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a peer that is gone, or does not read, says so
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return socket


def node_socket(context: Context, lease: float, keys: StoreKeys | None, connect_ms: int) -> Socket:
    """A DEALER to connect: once. It does not try again, and what it was given and could not send is gone."""
    socket = context.socket(zmq.DEALER)
    _harden(socket, lease)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, connect_ms)
    if keys is not None:
        socket.curve_serverkey = keys.store.public
        socket.curve_publickey = keys.node.public
        socket.curve_secretkey = keys.node.secret
    return socket


class Watched:
    """A zmq socket in a loop. `receive` is called for each message, `rest` after as many as came together.

    The descriptor of a zmq socket tells of a change, not of a state: after it, and after every use of the
    socket, one has to look until there is nothing left. So who sends calls `look_again`.
    """

    def __init__(
        self,
        loop: Loop,
        socket: Socket,
        receive: Callable[[Frames], None],
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        self.socket = socket
        self._loop = loop
        self._receive = receive
        self._rest = rest
        self._again: Timer | None = None
        self._fd = int(socket.getsockopt(zmq.FD))
        loop.add(self._fd, self._look)
        self.look_again()

    def look_again(self) -> None:
        if not self.socket.closed and (self._again is None or not self._again.pending):
            self._again = self._loop.after(0.0, self._look)

    def close(self, linger_ms: int = 0) -> None:
        if not self.socket.closed:
            self._loop.remove(self._fd)
            self.socket.close(linger=linger_ms)
        if self._again is not None:
            self._again.cancel()

    def _look(self) -> None:
        """At most so many messages at once: the loop has others to look after."""
        for _ in range(_AT_ONCE):
            if self.socket.closed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._receive(frames)
        if not self.socket.closed:
            self._rest()
        if not self.socket.closed and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.look_again()


class Monitor:
    """What happens to the connections of a socket: `tell(event, value)`, in order."""

    def __init__(self, loop: Loop, socket: Socket, events: int, tell: Callable[[int, int], None]) -> None:
        self._socket = socket
        self._tell = tell
        address = f"inproc://monitor-{next(_names)}"
        socket.monitor(address, events)
        pair = socket.context.socket(zmq.PAIR)
        pair.setsockopt(zmq.RCVHWM, 0)  # else libzmq's thread waits for us when there is much to tell
        pair.setsockopt(zmq.LINGER, 0)
        pair.connect(address)
        self._watched = Watched(loop, pair, self._receive)

    def close(self) -> None:
        """Before the socket is closed."""
        if not self._watched.socket.closed:
            self._socket.disable_monitor()
            self._watched.close()

    def _receive(self, frames: Frames) -> None:
        self._tell(*_EVENT.unpack(frames[0].bytes))


# ---- ZAP: whether the public key of a node is that of the job (rfc.zeromq.org/spec/27)

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class CurveAuthenticator:
    """Stands before all sockets of one context. Must be there before they are bound."""

    def __init__(self, loop: Loop, context: Context, keys: StoreKeys) -> None:
        self._allowed = z85.decode(keys.node.public)
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ADDRESS)
        self._watched = Watched(loop, socket, self._answer)

    def close(self) -> None:
        self._watched.close()

    def _answer(self, frames: Frames) -> None:
        asked = [frame.bytes for frame in frames]
        start = asked.index(b"") + 1
        version, number, domain, _, _, mechanism, *credentials = asked[start:]
        welcome = (
            version == _VERSION
            and domain == DOMAIN
            and mechanism == b"CURVE"
            and len(credentials) == 1
            and hmac.compare_digest(credentials[0], self._allowed)
        )
        verdict = [_VERSION, number, b"200" if welcome else b"400", b"", b"", b""]
        self._watched.socket.send_multipart([*asked[:start], *verdict])
        self._watched.look_again()
