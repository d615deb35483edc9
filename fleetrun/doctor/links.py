"""Measure the links between this node and the others: the turns of the pairs, the protocol of a connection,
and the threads that measure. `judge_group.py` interprets the results.
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

from fleetrun.aliases import Callback, Clock
from fleetrun.doctor.node_records import Link, NodeRecord

# ---- The protocol of two nodes while one measures the link to the other, over one blocking connection. The
# order of turns and the store are handled elsewhere.
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
    raise LinkError("it asks too much")


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
        raise LinkError(f"its clock says {theirs}")
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


# ---- The turns of the pairs

MOST_TURNS = 8
"""With more nodes than turns, each node is measured with this many others, spread over the whole network."""

Turn = tuple[tuple[int, int], ...]
"""Pairs without common nodes. The first node of a pair measures."""


def turns(count: int) -> list[Turn]:
    """Plan the turns as a round robin (circle method). Each node is at most once in a turn, and each pair
    occurs at most once.

    A node therefore takes part in one measurement at a time. `count` nodes need `count - 1` turns, or one
    more.
    """
    players = [*range(count), *([-1] if count % 2 else [])]
    found: list[Turn] = []
    for _ in range(min(MOST_TURNS, len(players) - 1)):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        found.append(tuple((one, other) for one, other in pairs if -1 not in (one, other)))
        players = [players[0], players[-1], *players[1:-1]]
    return found


def partner(turn: Turn, me: int) -> tuple[int, bool] | None:
    """Return the partner of this node in a turn, and True if this side measures. None without a partner."""
    for one, other in turn:
        if me == one:
            return other, True
        if me == other:
            return one, False
    return None


# ---- Measuring in threads. This node answers others and visits them in turn.

ALLOWED = 10.0
"""Seconds for a turn, from its start. A node that waits for a dead node does not delay the others."""

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
    door = socket.socket(family, socket.SOCK_STREAM)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(place)
        door.listen(_MOST_VISITORS)
    except OSError:
        door.close()
        raise
    return door


def greeting(sock: socket.socket) -> bytes:
    """Read the first line of a visitor. It is shorter if the visitor disconnects or sends too much."""
    text = b""
    while not text.endswith(b"\n") and len(text) < _GREETING:
        data = sock.recv(1)
        if not data:
            break
        text += data
    return text.strip()


class Surveyor:
    """Measures the links of this node in threads.

    `links` holds the measured links, by the other node's ID. `done` is True once no more will follow. The
    file `news` becomes readable at the end, and when a link could not be measured. `excuse` reports that
    failure to the other end. `close` ends everything.
    """

    def __init__(self, door: socket.socket, ticket: str) -> None:
        self._door = door
        self._ticket = ticket
        self._changed = threading.Condition()
        self._now = -1
        """The turn whose visitors are admitted."""
        self._served: set[int] = set()
        self._ends = 0.0
        self._visitors = threading.Semaphore(_MOST_VISITORS)
        self._closed = False
        self.links: dict[str, Link] = {}
        self.done = False
        self._excused: set[str] = set()
        self.news: int = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._threads: list[threading.Thread] = []
        self._start(self._answer)

    def survey(self, cards: Sequence[NodeRecord], me: int) -> None:
        """Start measuring. `cards` are in the same order on all nodes, with this node at index `me`."""
        self._start(lambda: self._take_turns(cards, me))

    def excuse(self, id_: str) -> None:
        """Stop waiting for the node with this ID, because it could not connect."""
        with self._changed:
            self._excused.add(id_)
            self._changed.notify_all()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._door.close()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_POLITE)
        os.close(self.news)

    def _start(self, act: Callback) -> None:
        thread = threading.Thread(target=act, daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- visits

    def _take_turns(self, cards: Sequence[NodeRecord], me: int) -> None:
        began = time.monotonic()
        for number, turn in enumerate(turns(len(cards))):
            found = partner(turn, me)
            if found is None or self._closed:
                continue
            other, visits = found
            ends = began + ALLOWED * (number + 1)
            if visits:
                way = self._visit(cards[other], number, ends)
                self.links = {**self.links, cards[other].id: way}
                if way.error and not self._closed:
                    os.eventfd_write(self.news, 1)
            else:
                self._let_in(cards[other].id, number, ends)
        self.done = True
        if not self._closed:
            os.eventfd_write(self.news, 1)

    def _visit(self, card: NodeRecord, turn: int, ends: float) -> Link:
        patience = max(0.1, ends - time.monotonic())
        try:
            reached = min(_REACHED, patience)
            with socket.create_connection((card.address, card.port), timeout=reached) as sock:
                sock.settimeout(patience)
                sock.sendall(f"{card.ticket} {turn}\n".encode())
                answer = sock.recv(1)
                if answer != b"!":
                    return Link(error="it hung up")
                sock.settimeout(_POLITE)
                return _measured(sock)
        except TimeoutError:
            return Link(error=f"no answer from port {card.port}")
        except OSError as error:
            return Link(error=f"port {card.port}: {error.strerror or error}")
        except LinkError as error:
            return Link(error=str(error))

    def _let_in(self, id_: str, turn: int, ends: float) -> None:
        """Wait until the other node has visited, or its time is up."""
        with self._changed:
            self._now, self._ends = turn, ends
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: turn in self._served or id_ in self._excused or self._closed,
                max(0.0, ends - time.monotonic()),
            )
            self._now = -1

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
            turn = self._greeted(sock)
            if turn is not None and self._wait_for(turn):
                sock.sendall(b"!")
                serve_link(sock)
                with self._changed:
                    self._served.add(turn)
                    self._changed.notify_all()
        self._visitors.release()

    def _greeted(self, sock: socket.socket) -> int | None:
        """Return the turn of a visitor, or None if it has no valid ticket."""
        ticket, _, turn = greeting(sock).decode(errors="replace").partition(" ")
        if not hmac.compare_digest(ticket.encode(), self._ticket.encode()):
            return None
        return int(turn) if turn.isascii() and turn.isdigit() and len(turn) < 6 else None

    def _wait_for(self, turn: int) -> bool:
        """Wait for a turn on this node. Return False if the turn never comes."""
        with self._changed:
            return (
                self._changed.wait_for(lambda: self._now == turn or self._closed, ALLOWED * (turn + 2))
                and not self._closed
            )


def _measured(sock: socket.socket) -> Link:
    """Measure a link.

    The ports are open, so a link too slow to measure must not be reported as closed. Raises as
    `measure_link`.
    """
    try:
        return measure_link(sock)
    except TimeoutError:
        raise LinkError(
            f"it answered, and then nothing came for {_POLITE:g} s: the way loses data, or is very slow"
        ) from None
