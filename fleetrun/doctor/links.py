"""Measure the links between this node and the others: the protocol of a connection, and the threads that
measure. `judge_group.py` interprets the results.
"""

from __future__ import annotations

import hmac
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from fleetrun.aliases import Callback, Clock
from fleetrun.doctor.facts import Link

if TYPE_CHECKING:
    from fleetrun.doctor.node_records import NodeRecord

# ---- The protocol of two nodes while one measures the link to the other, over one blocking connection.
#
# The measuring side sends one letter: p (send your time), u (count the data that I send), d (send data), q
# (end). Data goes in chunks with their length before them, and an empty chunk is the last.

PINGS = 30
CHUNK = 256 << 10
LONGEST = 0.5
"""Seconds of sending in each direction."""

MOST = 256 << 20
"""Bytes in each direction."""

_LENGTH = struct.Struct("!I")
_TIME = struct.Struct("!d")
_COUNTED = struct.Struct("!Qd")


class LinkError(Exception):
    """The other side has closed the connection, or sent something invalid."""


def measure_link(sock: socket.socket, clock: Clock = time.time, longest: float = LONGEST) -> Link:
    """Measure a link.

    Each side sends for at most `longest` seconds. Raises LinkError, and OSError of the socket.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trip, ahead = min(_ping(sock, clock) for _ in range(PINGS))
    sock.sendall(b"u")
    _send(sock, longest)
    amount, seconds = _COUNTED.unpack(_exactly(sock, _COUNTED.size))
    sock.sendall(b"d")
    back = _count(sock)
    sock.sendall(b"q")
    return Link(round_trip=trip, there=_speed(amount, seconds), back=_speed(*back), ahead=ahead)


def serve_link(sock: socket.socket, clock: Clock = time.time, longest: float = LONGEST) -> None:
    """Serve the other side of `measure_link`. Raises LinkError, and OSError of the socket."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(10 * PINGS):
        match _exactly(sock, 1):
            case b"p":
                sock.sendall(_TIME.pack(clock()))
            case b"u":
                sock.sendall(_COUNTED.pack(*_count(sock)))
            case b"d":
                _send(sock, longest)
            case b"q":
                return
            case other:
                raise LinkError(f"{other!r} is not a request")
    raise LinkError("its request is too large")


def _ping(sock: socket.socket, clock: Clock) -> tuple[float, float]:
    """Return the seconds of a round trip, and by how many seconds the other clock is ahead.

    The best estimate is that the answer was made in the middle of the trip (RFC 5905 with one stamp for
    arrival and departure). The shortest trip is the most exact.
    """
    sent, began = clock(), time.perf_counter()
    sock.sendall(b"p")
    (theirs,) = _TIME.unpack(_exactly(sock, _TIME.size))
    trip = time.perf_counter() - began
    if not math.isfinite(theirs):
        raise LinkError(f"its clock shows {theirs}")
    return trip, theirs - (sent + trip / 2)


def _send(sock: socket.socket, longest: float) -> None:
    chunk = _LENGTH.pack(CHUNK) + bytes(CHUNK)
    began, sent = time.perf_counter(), 0
    while not sent or (sent < MOST and time.perf_counter() - began < longest):  # may block here
        sock.sendall(chunk)
        sent += CHUNK
    sock.sendall(_LENGTH.pack(0))


def _count(sock: socket.socket) -> tuple[int, float]:
    """Receive chunks. Return the bytes, and the seconds from the first chunk on."""
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


# ---- Measuring in threads. This node visits others one after the other, and serves its visitors one after
# the other.

MOST_VISITS = 4
"""Each node measures the links to at most this many others, and as many nodes measure the links to it."""

ALLOWED = 20.0
"""Seconds in which a node starts to serve a visitor. It may have other visitors."""

_MOST_VISITORS = 32
_GREETING = 200
_POLITE = 5.0
_REACHED = 4.0
"""Seconds in which a node accepts connections, long enough for two lost attempts."""


def open_door(address: str, port: int) -> socket.socket:
    """Open a socket at a port of this job, which this process may have reserved. Raises OSError."""
    rows = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    # a name may have both families
    family, _, _, _, place = min(rows, key=lambda row: row[0] is not socket.AF_INET)
    return socket.create_server(place, family=family, backlog=_MOST_VISITORS)


def greeting(sock: socket.socket) -> bytes:
    """Read the first line of a visitor. It is shorter if the visitor disconnects or sends too much."""
    text = b""
    while not text.endswith(b"\n") and len(text) < _GREETING:
        data = sock.recv(1)
        if not data:
            break
        text += data
    return text.strip()


def partners(count: int, me: int) -> list[int]:
    """Return the nodes that this one of `count` nodes visits. Each pair meets at most once."""
    steps = range(1, min(MOST_VISITS, count // 2) + 1)
    return [(me + step) % count for step in steps if 2 * step < count or me < step]


class Surveyor:
    """Measures the links of this node in threads.

    `links` holds the measured links, by the other node's ID. `done` is True once no more will follow. The
    file `news` then becomes readable. `close` ends everything.
    """

    def __init__(self, door: socket.socket, ticket: str) -> None:
        self._door = door
        self._ticket = ticket
        self._visitors = threading.Semaphore(_MOST_VISITORS)
        self._serving = threading.Lock()
        self._closed = False
        self.links: dict[str, Link] = {}
        self.done = False
        self.news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._threads: list[threading.Thread] = []
        self._start(self._answer)

    def survey(self, cards: Sequence[NodeRecord], me: int) -> None:
        """Start measuring. `cards` are in the same order on all nodes, with this node at index `me`."""
        self._start(lambda: self._visit_all([cards[each] for each in partners(len(cards), me)]))

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._door.close()
        for thread in self._threads:
            thread.join(_POLITE)
        os.close(self.news)

    def _start(self, act: Callback) -> None:
        thread = threading.Thread(target=act, daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- visits

    def _visit_all(self, cards: Sequence[NodeRecord]) -> None:
        for card in cards:
            if not self._closed:
                self.links = {**self.links, card.id: self._visit(card)}
        self.done = True
        if not self._closed:
            os.eventfd_write(self.news, 1)

    def _visit(self, card: NodeRecord) -> Link:
        try:
            with socket.create_connection((card.address, card.port), timeout=_REACHED) as sock:
                sock.settimeout(ALLOWED)
                sock.sendall(f"{card.ticket}\n".encode())
                if sock.recv(1) != b"!":
                    return Link(error="it hung up")
                sock.settimeout(_POLITE)
                return _measured(sock)
        except TimeoutError:
            return Link(error=f"no answer from port {card.port}")
        except OSError as error:
            return Link(error=f"port {card.port}: {error.strerror or error}")
        except LinkError as error:
            return Link(error=str(error))

    # ---- visitors

    def _answer(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._door.accept()
            except OSError:
                return  # the door was closed
            if not self._visitors.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._receive, args=(sock,), daemon=True).start()

    def _receive(self, sock: socket.socket) -> None:
        with suppress(OSError, LinkError), sock:
            sock.settimeout(_POLITE)
            if hmac.compare_digest(greeting(sock), self._ticket.encode()):
                with self._serving:  # two measurements at once would share the speed of this node
                    sock.sendall(b"!")
                    serve_link(sock)
        self._visitors.release()


def _measured(sock: socket.socket) -> Link:
    """Measure a link.

    The ports are open, so a link too slow to measure must not be reported as closed. Raises as
    `measure_link`.
    """
    try:
        return measure_link(sock)
    except TimeoutError:
        raise LinkError(
            f"it answered, and then sent nothing for {_POLITE:g} s: the link loses data, or is very slow"
        ) from None
