"""What two machines say to each other while one measures the way to the other: over one connection, blocking.
Knows no turns and no store.

The one who measures asks: p (what time is it?), u (count what I send), d (send), q (enough). Data goes in
chunks with their length before them; an empty one is the last.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Callable

from fleetrun.doctor.card import Link

PINGS = 30
CHUNK = 256 << 10
LONGEST = 0.5
"""Seconds of sending in each direction."""

MOST = 256 << 20
"""Bytes in each direction."""

_LENGTH = struct.Struct("!I")
_TIME = struct.Struct("!d")
_COUNTED = struct.Struct("!Qd")

Clock = Callable[[], float]


class LinkError(Exception):
    """The other side has gone, or said what nobody understands."""


def measure(sock: socket.socket, clock: Clock = time.time) -> Link:
    """Raises LinkError, and OSError of the socket."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trip, ahead = min(_ping(sock, clock) for _ in range(PINGS))
    sock.sendall(b"u")
    _send(sock)
    amount, seconds = _COUNTED.unpack(_exactly(sock, _COUNTED.size))
    sock.sendall(b"d")
    back = _count(sock)
    sock.sendall(b"q")
    return Link(round_trip=trip, there=_speed(amount, seconds), back=_speed(*back), ahead=ahead)


def serve(sock: socket.socket, clock: Clock = time.time) -> None:
    """The other side of `measure`. Raises LinkError, and OSError of the socket."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(10 * PINGS):
        match _exactly(sock, 1):
            case b"p":
                sock.sendall(_TIME.pack(clock()))
            case b"u":
                sock.sendall(_COUNTED.pack(*_count(sock)))
            case b"d":
                _send(sock)
            case b"q":
                return
            case other:
                raise LinkError(f"{other!r} is no request")
    raise LinkError("it asks too much")


def _ping(sock: socket.socket, clock: Clock) -> tuple[float, float]:
    """Seconds of a round trip, and by how many the other clock is ahead: its answer was made, as far as one
    can know, in the middle of the trip (RFC 5905 with one stamp for arrival and departure). The shortest trip
    knows best.
    """
    sent, began = clock(), time.perf_counter()
    sock.sendall(b"p")
    (theirs,) = _TIME.unpack(_exactly(sock, _TIME.size))
    trip = time.perf_counter() - began
    if not math.isfinite(theirs):
        raise LinkError(f"its clock says {theirs}")
    return trip, theirs - (sent + trip / 2)


def _send(sock: socket.socket) -> None:
    chunk = _LENGTH.pack(CHUNK) + bytes(CHUNK)
    began, sent = time.perf_counter(), 0
    while not sent or (sent < MOST and time.perf_counter() - began < LONGEST):  # it may stand still here
        sock.sendall(chunk)
        sent += CHUNK
    sock.sendall(_LENGTH.pack(0))


def _count(sock: socket.socket) -> tuple[int, float]:
    """Bytes that came, and in how many seconds from the first chunk on."""
    buffer = memoryview(bytearray(CHUNK))
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    began, got = time.perf_counter(), 0
    while length:
        if length > CHUNK or got > MOST:
            raise LinkError("it sends too much")
        _fill(sock, buffer[:length])
        got += length
        (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return got, time.perf_counter() - began


def _speed(amount: int, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _fill(sock, memoryview(data))
    return bytes(data)


def _fill(sock: socket.socket, room: memoryview) -> None:
    while room:
        got = sock.recv_into(room)
        if not got:
            raise LinkError("it hung up")
        room = room[got:]
