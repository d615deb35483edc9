"""Connect a node to the embedded store. Resolve the store's name, connect, find the reason of a failure, and
reconnect whenever the connection breaks. `client.py` has the messages.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import socket
import socket as socket_module
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

from fleetrun.aliases import Callback
from fleetrun.elastic.embedded.sockets import (
    Frames,
    Monitor,
    Watched,
    node_socket,
)
from fleetrun.elastic.mailbox import Mailbox
from fleetrun.envs.contract import join_endpoint, split_endpoint
from fleetrun.envs.curve import HANDSHAKE_MS, Context, CurveKeys
from fleetrun.pod.loop import WRITE, Loop, Timer

Address = tuple[socket.AddressFamily, tuple[object, ...]]
"""An address family, and the argument of `connect`."""


class Resolver:
    """Resolve a host name in a thread, because the look-up may take 30 s. One look-up runs at a time."""

    def __init__(
        self, loop: Loop, host: str, port: int, look_up: Callable[..., Any] = socket.getaddrinfo
    ) -> None:
        self._loop = loop
        self._getaddrinfo = look_up
        self._host = host
        self._port = port
        self._mailbox: Mailbox | None = None

    def ask(self, then: Callable[[Sequence[Address], str], None]) -> None:
        """Call `then(addresses, "")` or `then((), reason)` from the loop. An address is returned without a
        thread.
        """
        if self._is_address():
            found, why = self._look_up()
            self._loop.after(0.0, lambda: then(found, why))
            return
        self.close()
        mailbox = self._mailbox = Mailbox(self._loop, self.close)

        def look_up() -> None:
            found, why = self._look_up()
            mailbox.post(lambda: then(found, why))

        threading.Thread(target=look_up, name="resolver", daemon=True).start()

    def close(self) -> None:
        """Drop the result of a running look-up."""
        if self._mailbox is not None:
            self._mailbox.close()

    def _is_address(self) -> bool:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(self._host)
            return True
        return False

    def _look_up(self) -> tuple[Sequence[Address], str]:
        try:
            found = self._getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            return (), str(error.strerror if isinstance(error, OSError) else error)
        return tuple(dict.fromkeys((family, tuple(address)) for family, _, _, _, address in found)), ""


GREETING = b"\xff"
"""The first byte that every zmq peer sends (rfc.zeromq.org/spec/23)."""


class Probe:
    """Find the reason of a failure, which libzmq does not report. Connect a plain socket once, and wait for
    the first byte.

    Calls `then(why, number)` from the loop, unless `close` is called first. `why` is empty if a zmq peer
    answered. `number` is the errno, or 0.
    """

    def __init__(
        self, loop: Loop, address: Address, seconds: float, then: Callable[[str, int], None]
    ) -> None:
        family, where = address
        self._loop = loop
        self._seconds = seconds
        self._then = then
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        number = self._socket.connect_ex(where)
        wait = 0.0
        if number in (0, errno.EINPROGRESS):
            loop.add(self._socket.fileno(), self._connected, WRITE)
            wait, number = seconds, errno.ETIMEDOUT
        self._timer = loop.after(wait, lambda: self._end(os.strerror(number), number))

    def close(self) -> None:
        self._timer.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove(self._socket.fileno())
            self._socket.close()

    def _end(self, why: str, number: int) -> None:
        self.close()
        self._then(why, number)

    def _connected(self) -> None:
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._end(os.strerror(number), number)
            return
        self._timer.cancel()
        self._timer = self._loop.after(
            self._seconds, lambda: self._end("a program there accepts connections but sends nothing", 0)
        )
        self._loop.remove(self._socket.fileno())
        self._loop.add(self._socket.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            greeting = self._socket.recv(1)
        except OSError as error:
            self._end(os.strerror(error.errno or 0), 0)
        else:
            self._end("" if greeting == GREETING else "the program that listens there is not fleetrun", 0)


# ---- The connection
#
# Each connection is a separate zmq socket, so a message for an earlier connection is never sent over a later
# one. libzmq reports neither why it cannot connect nor which side ended a handshake. A plain socket does.
# After a failure, a `Probe` therefore connects first, and waits for the first byte that every zmq peer sends.
#
#     resolve -> connect -> connected -> (it breaks) -> connect
#        ^          | it fails
#        |          v
#        +------- probe -> connect            a pause before each probe; the next address after each failure

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_LONGEST_QUICK_PAUSE_S = 0.2
_RESOLVER_S = 5.0
_OTHER_MECHANISM = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_ENDS = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILURES | _ENDS


class ConnectionListener(Protocol):
    """The user of a connection. Calls come from the loop."""

    def connected(self) -> None:
        """Handle a new connection, before anything is sent over it."""

    def received(self, frames: Sequence[bytes]) -> None: ...

    def settled(self) -> None:
        """Handle the end of a batch. All messages that arrived together were received."""

    def disconnected(self) -> None:
        """Handle a lost connection. The next one is under way."""

    def unreachable(self, why: str, number: int) -> None:
        """Handle a failed attempt to connect. Takes the reason, and the errno (0 if there is none)."""

    def denied(self, certain: bool) -> None:
        """Handle a handshake that the peer ended. If `certain`, the tokens differ. Otherwise any program may
        be listening there.
        """


class StoreConnection:
    """A connection to the store at `endpoint`, which reconnects until `close`."""

    def __init__(
        self,
        loop: Loop,
        endpoint: str,
        user: ConnectionListener,
        *,
        lease: float,
        keys: CurveKeys | None,
        context: Context,
    ) -> None:
        self.is_up = False
        self.nameless = ""
        self._loop = loop
        self._user = user
        self._lease = lease
        self._keys = keys
        self._context = context
        self._host, self._port = split_endpoint(endpoint)
        self._resolver = Resolver(loop, self._host, self._port)
        self._addresses: list[Address] = []
        self._connect_s = min(1.0, max(0.5, lease / 8))
        self._pause = _FIRST_PAUSE_S
        self._longest_pause = _LONGEST_PAUSE_S
        self._failed = False
        self._greeted = False
        self._connected_at: float | None = None
        self._closed = False
        self._watched: Watched | None = None
        self._monitor: Monitor | None = None
        self._probing: Probe | None = None
        self._probing_since = 0.0
        self._timer = Timer()

    def start(self) -> None:
        self._resolve()

    def send(self, *frames: bytes) -> None:
        """Send a message. If it cannot be sent, it is dropped, because the connection is about to break."""
        self.beat(*frames)
        self.look_again()

    def beat(self, *frames: bytes) -> None:
        """Send from any thread. Call `look_again` in the loop's thread afterwards."""
        if (watched := self._watched) is not None and self.is_up:
            with contextlib.suppress(zmq.ZMQError):
                watched.send(frames)

    def look_again(self) -> None:
        """Read the socket at the loop's next turn, which is due after each use of it."""
        if self._watched is not None:
            self._watched.look_again()

    def renew(self) -> None:
        """Replace this connection with a new one."""
        self._drop()
        self._after(_FIRST_PAUSE_S, self._connect)

    def retry_quickly(self) -> None:
        """Make only short pauses from now on."""
        self._longest_pause = _LONGEST_QUICK_PAUSE_S

    def close(self, linger_ms: int = 0) -> None:
        """Close for good. Sent messages have `linger_ms` to leave the process."""
        self._closed = True
        self._drop(linger_ms)

    # ---- names

    def _resolve(self) -> None:
        self._after(_RESOLVER_S, self._unresolved)
        self._resolver.ask(self._resolved)

    def _unresolved(self) -> None:
        self._resolver.close()
        self._resolved((), f"the resolver has not answered for {_RESOLVER_S:g} s")

    def _resolved(self, addresses: Sequence[Address], why: str) -> None:
        if self._closed:
            return
        self._addresses = list(addresses)
        self.nameless = "" if addresses else why
        if not addresses:
            self._fail(why, 0, self._resolve)
        elif self._failed:
            self._probe()
        else:
            self._connect()

    # ---- the connection

    def _connect(self) -> None:
        self._drop()
        family, address = self._addresses[0]
        socket = node_socket(self._context, self._lease, self._keys, int(self._connect_s * 1000))
        self._connected_at = None
        self._monitor = Monitor(self._loop, socket, _EVENTS, self._happened)
        self._watched = Watched(self._loop, socket, self._receive, self._user.settled)
        socket.ipv6 = int(family == socket_module.AF_INET6)
        socket.connect(f"tcp://{join_endpoint(_address_text(family, address), self._port)}")

    def _receive(self, frames: Frames) -> None:
        self._user.received([frame.bytes for frame in frames])

    def _happened(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._connected_at = self._loop.clock()
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_up, self._failed, self._greeted = True, False, False
            self._pause = _FIRST_PAUSE_S
            self._user.connected()
        elif event & _FAILURES:
            self._denied(event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == _OTHER_MECHANISM)
        elif event & _ENDS:
            self._ended()

    def _ended(self) -> None:
        was_up, reached = self.is_up, self._connected_at is not None
        self._drop()
        if was_up:
            self._after(random.uniform(0, _FIRST_PAUSE_S), self._connect)
            self._user.disconnected()
        elif reached and self._greeted:
            self._fail("a program there accepts connections and closes them", 0, self._probe)
        else:
            self._failed = True
            self._again(self._probe)

    def _denied(self, certain: bool) -> None:
        """Report a denial only if a known zmq peer ended the handshake immediately.

        A slow end means a busy peer, and any program may end a handshake immediately.
        """
        since = self._connected_at
        at_once = since is not None and self._loop.clock() - since < HANDSHAKE_MS / 2000
        if certain or (self._greeted and at_once):
            self._user.denied(certain)

    # ---- finding out why it failed

    def _probe(self) -> None:
        self._drop()
        self._probing_since = self._loop.clock()
        try:
            self._probing = Probe(self._loop, self._addresses[0], self._connect_s, self._probed)
        except OSError as error:  # this host lacks the address family, or descriptors
            self._probed(error.strerror or "no socket", error.errno or 0)

    def _probed(self, why: str, number: int) -> None:
        self._probing = None
        self._greeted = not why
        if self._greeted:
            self._connect()
            return
        del self._addresses[0]
        if self._loop.clock() - self._probing_since >= self._connect_s:
            self._pause = _FIRST_PAUSE_S  # the probe took as long as a pause
        self._fail(why, number, self._probe if self._addresses else self._resolve)

    def _fail(self, why: str, number: int, then: Callback) -> None:
        self._failed = True
        self._again(then)
        self._user.unreachable(why, number)

    # ---- timers: one step at a time

    def _again(self, step: Callback) -> None:
        self._after(self._pause * random.uniform(0.75, 1.0), step)
        self._pause = min(2 * self._pause, self._longest_pause)

    def _after(self, seconds: float, step: Callback) -> None:
        self._timer.cancel()
        if not self._closed:
            self._timer = self._loop.after(seconds, step)

    def _drop(self, linger_ms: int = 0) -> None:
        """Drop the present attempt or connection."""
        self.is_up = False
        self._timer.cancel()
        self._resolver.close()
        if self._probing is not None:
            self._probing.close()
            self._probing = None
        if self._monitor is not None and self._watched is not None:
            self._monitor.close()
            self._watched.close(linger_ms)
            self._monitor = self._watched = None


def _address_text(family: int, address: Sequence[object]) -> str:
    """Return an address in libzmq's notation. A link-local address has the name of its interface."""
    host = str(address[0])
    if family == socket_module.AF_INET6 and "%" not in host and len(address) > 3 and address[3]:
        return f"{host}%{socket_module.if_indextoname(int(str(address[3])))}"
    return host
