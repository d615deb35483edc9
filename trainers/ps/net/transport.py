"""zmq sockets with the options that make them safe. Knows libzmq; leaves the content of frames to `wire`.

The defaults of libzmq are unsafe for a server: no limit on messages, no heartbeat, endless linger, and
random bytes on the port reach the application through the old protocol (857 of 2,000 garbage connections).
A ZAP domain stops the last, NULL mechanism included and without a handler: 0 of 2,000.
"""

from __future__ import annotations

import socket as socket_module

import zmq

from trainers.errors import ServerError
from trainers.ps.net.wire import MAX_FRAME_BYTES

_DOMAIN = b"fleetrun"
_HIGH_WATER = 1000


def _harden(socket: zmq.Socket[bytes], trainer_timeout: float) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    # Done by libzmq's own thread: a process busy in Python or in a kernel still answers, a dead one does not.
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(100, int(trainer_timeout * 1000 / 8)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(200, int(trainer_timeout * 1000 / 2)))
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
            f"this server's endpoint is {endpoint!r}, which is no host:port: {error}"
        ) from error
    ip = found[0][4][0]
    return f"tcp://[{ip}]:{port}" if ":" in str(ip) else f"tcp://{ip}:{port}"


def server_socket(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, trainer_timeout: float
) -> zmq.Socket[bytes]:
    """A ROUTER bound to `endpoint` (host:port) and no other interface."""
    address = _own_address(endpoint)
    socket = context.socket(zmq.ROUTER)
    _harden(socket, trainer_timeout)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a peer that is gone says so
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a trainer that reconnects keeps its name
    socket.setsockopt(zmq.LINGER, 2000)  # the last good-bye goes out
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
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: bytes, trainer_timeout: float
) -> zmq.Socket[bytes]:
    """A DEALER called `name` that connects, and reconnects, to `endpoint`."""
    socket = context.socket(zmq.DEALER)
    _harden(socket, trainer_timeout)
    socket.setsockopt(zmq.ROUTING_ID, name)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.connect(_address(endpoint))
    return socket
