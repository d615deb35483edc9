"""zmq sockets of servers and trainers, with the options and CURVE keys that make them safe.

The defaults of libzmq are unsafe for a server: no limit on messages, no heartbeat, endless linger, and random
bytes on the port reach the application through the old protocol (857 of 2,000 garbage connections). A ZAP
domain stops the last, even with the NULL mechanism and without a handler: 0 of 2,000.
"""

from __future__ import annotations

import hmac
import socket as socket_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from fleetrun.envs.contract import TOKEN, derive_key, token_flaw
from trainers.errors import ServerError, UsageError
from trainers.ps.wire import MAX_FRAME_BYTES, Buffer

# ---- CURVE keys from the job's secret.
#
# Every process with the secret can derive all four keys, so the secret alone decides which processes take
# part: a server accepts the trainers' one public key and no other, a trainer connects to the servers' one
# public key.

__all__ = ["TOKEN", "JobKeys", "KeyPair", "keys_of"]


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85-encoded, as libzmq expects them."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class JobKeys:
    """CURVE keys of a job (rfc.zeromq.org/spec/26)."""

    server: KeyPair
    trainer: KeyPair


def keys_of(environ: Mapping[str, str]) -> JobKeys | None:
    """The keys of this job; None when it has no secret. Raises UsageError for a secret that is too short."""
    token = environ.get(TOKEN, "")
    if not token:
        return None
    flaw = token_flaw(token)
    if flaw is not None:
        raise UsageError(flaw)
    return JobKeys(_pair(token, b"server"), _pair(token, b"trainer"))


def _pair(token: str, role: bytes) -> KeyPair:
    secret = z85.encode(derive_key(token, role))
    return KeyPair(zmq.curve_public(secret), secret)


_DOMAIN = b"fleetrun"
_HIGH_WATER = 1000
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """All frames of one message: recv_multipart without its extra calls to the socket."""
    frame = socket.recv(copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame)
    return frames


def send(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Send one whole message without waiting, or nothing: send_multipart without its second pass over the
    frames. Raises zmq.ZMQError.
    """
    *leading, last = frames
    for frame in leading:
        socket.send(frame, _MORE, copy=False)
    socket.send(last, _LAST, copy=False)


def _harden(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    socket.setsockopt(zmq.LINGER, 0)


def _address(endpoint: str) -> str:
    return f"tcp://{endpoint}"


def _own_address(endpoint: str) -> str:
    """libzmq binds to addresses, not to host names."""
    host, _, port = endpoint.rpartition(":")
    try:
        found = socket_module.getaddrinfo(host.strip("[]"), int(port), type=socket_module.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise ServerError(
            f"this server's endpoint is {endpoint!r}, which is not host:port: {error}"
        ) from error
    ip = found[0][4][0]
    return f"tcp://[{ip}]:{port}" if ":" in str(ip) else f"tcp://{ip}:{port}"


class CurveAuthenticator:
    """Tells libzmq whether a trainer's public key is that of the job (rfc.zeromq.org/spec/27)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: JobKeys) -> None:
        from zmq.auth.thread import (
            ThreadAuthenticator,  # late: 60 ms that a job without a secret need not pay
        )

        self._authenticator = ThreadAuthenticator(context)
        self._allowed = z85.decode(keys.trainer.public)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN.decode(), self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator's thread for each connection."""
        return hmac.compare_digest(z85.decode(key), self._allowed)

    def close(self) -> None:
        self._authenticator.stop()


def server_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    keys: JobKeys | None = None,
) -> zmq.Socket[bytes]:
    """A ROUTER bound to `endpoint` (host:port) and no other interface. With `keys` only trainers that have
    them can connect, checked by a CurveAuthenticator.
    """
    address = _own_address(endpoint)
    socket = context.socket(zmq.ROUTER)
    _harden(socket)
    if keys is not None:
        socket.curve_server = True
        socket.curve_secretkey = keys.server.secret
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a disconnected peer is an error
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a trainer that reconnects keeps its routing id
    socket.setsockopt(zmq.LINGER, 2000)  # the last reply is sent
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ServerError(
            f"this server cannot listen on {endpoint}: {error.strerror}; "
            "another process may have the port, or the address is not this host's"
        ) from error
    return socket


def client_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    name: bytes,
    trainer_timeout: float,
    keys: JobKeys | None = None,
) -> zmq.Socket[bytes]:
    """A DEALER called `name` that connects, and reconnects, to `endpoint`; with `keys`, encrypted."""
    socket = context.socket(zmq.DEALER)
    _harden(socket)
    # Sent by libzmq's own thread: a process busy in Python or in a kernel still answers, a dead one does not.
    # The server closes a connection on which nothing has come for the TTL. It sends no heartbeats itself: one
    # to a peer that has stopped reading ends the process (libzmq 4.3.5, "Assertion failed: !_io_error").
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(100, int(trainer_timeout * 1000 / 8)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(200, int(trainer_timeout * 1000 / 2)))
    socket.setsockopt(zmq.HEARTBEAT_TTL, max(200, int(trainer_timeout * 1000 / 2)))
    if keys is not None:
        socket.curve_serverkey = keys.server.public
        socket.curve_publickey = keys.trainer.public
        socket.curve_secretkey = keys.trainer.secret
    socket.setsockopt(zmq.ROUTING_ID, name)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.connect(_address(endpoint))
    return socket
