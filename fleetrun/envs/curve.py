"""Derive the CURVE keys of a job from its token, and make sockets that only processes with these keys reach.

The embedded store and the parameter servers both use this module. Every process with the token can derive all
keys of the job, so the token alone decides which processes take part. A server accepts only the one public
key of its clients. A client connects only to the one public key of the servers. The module imports zmq, so a
launch on one node never imports it.

The defaults of libzmq are unsafe for a server. Messages have no limit, and linger is endless. Random bytes on
the port reach the application through the old protocol (857 of 2,000 garbage connections). A ZAP domain stops
these bytes, even with the NULL mechanism and without a handler (0 of 2,000).
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import itertools
import socket as tcp
import struct
import termios
import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils import z85

from fleetrun.envs.contract import derive_key, token_flaw
from fleetrun.frozen import frozen

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

HANDSHAKE_MS = 5000
_STRANGER_BYTES = 64 << 10  # a handshake and a greeting have about a kilobyte
_CHECK_S, _CHECKS_A_SECOND = 0.01, 10_000
_COUNTS = struct.Struct("=120xQQ")  # tcpi_bytes_acked and tcpi_bytes_received in linux/tcp.h
_UNREAD = struct.Struct("i")
_RESET = struct.pack("ii", 1, 0)
MONITOR_EVENT = struct.Struct("=HI")
"""The first frame of a message of `monitor_socket`: the event, and its descriptor or errno."""
CURVE_READY_BYTES = 247
"""Bytes that only a peer with the keys gets. Others get at most 246: greeting 64, WELCOME 170, ERROR 12."""
_monitor_numbers = itertools.count()
_DOMAIN = b"fleetrun"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


@frozen
class KeyPair:
    """A pair of Z85-encoded keys, as libzmq expects them."""

    public: bytes
    secret: bytes


@frozen
class CurveKeys:
    """The CURVE keys of all servers and of all clients (rfc.zeromq.org/spec/26)."""

    server: KeyPair
    client: KeyPair


def curve_keys(token: str, server: bytes, client: bytes) -> CurveKeys | None:
    """Return the keys of two parties of a job, each named as in `derive_key`, or None without a token.

    Raises ValueError if the token is too short.
    """
    if not token:
        return None
    flaw = token_flaw(token)
    if flaw is not None:
        raise ValueError(flaw)
    return CurveKeys(_key_pair(token, server), _key_pair(token, client))


def _key_pair(token: str, party: bytes) -> KeyPair:
    secret = z85.encode(derive_key(token, party))
    return KeyPair(zmq.curve_public(secret), secret)


def limit(socket: Socket, max_frame_bytes: int) -> None:
    """Set limits against peers that send too much, never finish the handshake, or never read."""
    socket.maxmsgsize = max_frame_bytes
    socket.handshake_ivl = HANDSHAKE_MS
    socket.linger = 0


def secure_server(socket: Socket, keys: CurveKeys | None) -> None:
    """Secure a server's socket before it is bound. With `keys`, its context needs a handler that answers with
    `zap_reply`.
    """
    if keys is not None:
        socket.curve_server = True
        socket.curve_secretkey = keys.server.secret
    socket.zap_domain = _DOMAIN


def secure_client(socket: Socket, keys: CurveKeys | None) -> None:
    """Secure a client's socket before it connects."""
    if keys is not None:
        socket.curve_serverkey = keys.server.public
        socket.curve_publickey = keys.client.public
        socket.curve_secretkey = keys.client.secret


def zap_socket(context: Context) -> Socket:
    """Return the socket at which libzmq requests permission for each client of this context's servers. Bind
    it before these servers.
    """
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind(_ZAP_ADDRESS)
    return socket


def zap_reply(request: Sequence[bytes], keys: CurveKeys) -> list[bytes]:
    """Return all frames of the answer to a request at `zap_socket` (rfc.zeromq.org/spec/27): 200 for a client
    with the job's key, else 400.
    """
    start = request.index(b"") + 1
    version, number, domain, _, _, mechanism, *credentials = request[start:]
    accepted = (
        version == _ZAP_VERSION
        and domain == _DOMAIN
        and mechanism == b"CURVE"
        and len(credentials) == 1
        and hmac.compare_digest(credentials[0], z85.decode(keys.client.public))
    )
    return [*request[:start], _ZAP_VERSION, number, b"200" if accepted else b"400", b"", b"", b""]


def monitor_socket(socket: Socket, events: int) -> Socket:
    """Return a socket that receives the events of a socket's connections, in order. Call
    `socket.disable_monitor()` before you close either socket.
    """
    address = f"inproc://monitor-{next(_monitor_numbers)}"
    socket.monitor(address, events)
    pair: Socket = socket.context.socket(zmq.PAIR)
    pair.rcvhwm = 0  # without this, libzmq's thread blocks while many events wait
    pair.linger = 0
    pair.connect(address)
    return pair


class Strangers:
    """The connections of a server to strangers, peers that are not `known(fd, acked)`. Each may send 64 KiB.

    libzmq limits only the size of frames. A stranger may send a frame of this size as its handshake, or a
    message without an end. Each part of such a message takes at least 64 bytes of memory.
    """

    EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

    def __init__(self, known: Callable[[int, int], bool]) -> None:
        self._known = known
        self._fds: set[int] = set()
        self._due = 0.0

    def happened(self, event: int, fd: int) -> None:
        """Record one of EVENTS of the server's socket. Then call `check`."""
        (self._fds.add if event == zmq.EVENT_ACCEPTED else self._fds.discard)(fd)

    def recognize(self, fd: int) -> bool:
        """Record that the peer of this connection is known. Return True if it was a stranger."""
        new = fd in self._fds
        self._fds.discard(fd)
        return new

    def check(self, waits: Callable[[], int] = lambda: 0) -> float:
        """Close connections of strangers that sent too much, unless a message `waits`, perhaps from one of
        them.

        Return the seconds until the next check, or 0 if no check is necessary.
        """
        now = time.monotonic()
        if now >= self._due:
            for fd in tuple(self._fds):
                with contextlib.suppress(OSError), tcp.fromfd(fd, tcp.AF_INET, tcp.SOCK_STREAM) as peer:
                    acked, received = _COUNTS.unpack(peer.getsockopt(tcp.IPPROTO_TCP, tcp.TCP_INFO, 136))
                    (unread,) = _UNREAD.unpack(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
                    if self._known(fd, acked):
                        self._fds.discard(fd)
                    elif received - unread > _STRANGER_BYTES and not waits():
                        peer.setsockopt(tcp.SOL_SOCKET, tcp.SO_LINGER, _RESET)
                        peer.shutdown(tcp.SHUT_RDWR)  # libzmq closes the connection then
            self._due = now + max(_CHECK_S, len(self._fds) / _CHECKS_A_SECOND)
        return self._due - now if self._fds else 0.0
