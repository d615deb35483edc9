"""CURVE over zmq: keys derived from a job's secret, and sockets that only processes with these keys reach.

The embedded store and the parameter servers both use it. Every process with the secret can derive all keys of
the job, so the secret alone decides which processes take part: a server accepts the one public key of its
clients and no other, a client connects to the one public key of the servers. Imports zmq, so a launch on one
machine never imports this module.

The defaults of libzmq are unsafe for a server: no limit on messages, endless linger, and random bytes on the
port reach the application through the old protocol (857 of 2,000 garbage connections). A ZAP domain stops the
last, even with the NULL mechanism and without a handler: 0 of 2,000.
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
"""At most 246 bytes are sent to a peer without the keys: 64 of greeting, 170 of WELCOME and 12 of ERROR."""
_monitor_numbers = itertools.count()
_DOMAIN = b"fleetrun"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


@frozen
class KeyPair:
    """Z85-encoded, as libzmq expects them."""

    public: bytes
    secret: bytes


@frozen
class CurveKeys:
    """CURVE keys of all servers and of all clients (rfc.zeromq.org/spec/26)."""

    server: KeyPair
    client: KeyPair


def curve_keys(token: str, server: bytes, client: bytes) -> CurveKeys | None:
    """The keys of two parties of a job, each named as in `derive_key`; None without a secret. Raises
    ValueError for a secret that is too short.
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
    """Limits against peers that send too much, never finish the handshake, or never read."""
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.LINGER, 0)


def secure_server(socket: Socket, keys: CurveKeys | None) -> None:
    """Before the socket is bound. With `keys`, its context needs a handler that answers with `zap_reply`."""
    if keys is not None:
        socket.curve_server = True
        socket.curve_secretkey = keys.server.secret
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)


def secure_client(socket: Socket, keys: CurveKeys | None) -> None:
    """Before the socket connects."""
    if keys is not None:
        socket.curve_serverkey = keys.server.public
        socket.curve_publickey = keys.client.public
        socket.curve_secretkey = keys.client.secret


def zap_socket(context: Context) -> Socket:
    """The socket at which libzmq asks whether a client may connect to a server of this context. It must be
    bound before those servers are.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(_ZAP_ADDRESS)
    return socket


def zap_reply(request: Sequence[bytes], keys: CurveKeys) -> list[bytes]:
    """All frames of the answer to a request at `zap_socket` (rfc.zeromq.org/spec/27): 200 for a client with
    the job's key, 400 for any other.
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
    """Receives what happens to the connections of a socket, in order. Call `socket.disable_monitor()` before
    you close either.
    """
    address = f"inproc://monitor-{next(_monitor_numbers)}"
    socket.monitor(address, events)
    pair: Socket = socket.context.socket(zmq.PAIR)
    pair.setsockopt(zmq.RCVHWM, 0)  # else libzmq's thread blocks while many events wait
    pair.setsockopt(zmq.LINGER, 0)
    pair.connect(address)
    return pair


class Strangers:
    """The connections of a server whose peers are not `known(fd, acked)` yet. Each may send 64 KiB.

    libzmq limits the size of frames only. A stranger may send a frame of that size as its handshake, or a
    message without an end, each part of which takes at least 64 bytes of memory.
    """

    EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

    def __init__(self, known: Callable[[int, int], bool]) -> None:
        self._known = known
        self._fds: set[int] = set()
        self._due = 0.0

    def happened(self, event: int, fd: int) -> None:
        """Note one of EVENTS of the server's socket. Call `check` then."""
        (self._fds.add if event == zmq.EVENT_ACCEPTED else self._fds.discard)(fd)

    def heard(self, fd: int) -> bool:
        """Note that the peer of this connection is known. Return True if it was not."""
        new = fd in self._fds
        self._fds.discard(fd)
        return new

    def check(self, waits: Callable[[], int] = lambda: 0) -> float:
        """Close connections that sent more, unless a message `waits`, perhaps from one of them.

        Return the seconds until the next check; 0: none is needed.
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
                        peer.shutdown(tcp.SHUT_RDWR)  # libzmq closes it then
            self._due = now + max(_CHECK_S, len(self._fds) / _CHECKS_A_SECOND)
        return self._due - now if self._fds else 0.0
