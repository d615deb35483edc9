"""Implement a node's client of the embedded store: its lease and heartbeat, its mirror, its unanswered
requests, and the errors when the store is lost. `connection.py` makes the connection.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from fleetrun import __version__
from fleetrun.elastic.embedded import wire
from fleetrun.elastic.embedded.connection import StoreConnection
from fleetrun.elastic.embedded.sockets import Pulse
from fleetrun.elastic.store import Entry, Found, Listener, Mirror, MirroringStore, Written
from fleetrun.envs.curve import Context, CurveKeys
from fleetrun.errors import LaunchError, StoreError, StoreLostError, StoreSilentError
from fleetrun.frozen import frozen
from fleetrun.pod.loop import Loop, Timer


@frozen
class _PendingRequest:
    frames: tuple[bytes, ...]
    then: Callable[[Any], None] | None
    repeat: bool


class PendingRequests:
    """Requests without an answer. They wait in order until there is a connection."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._number = 0
        self._waiting: dict[int, _PendingRequest] = {}
        self._asked: dict[int, _PendingRequest] = {}
        self._open = False
        self._closed = False

    def ask(
        self,
        message: Callable[[int], object],
        then: Callable[[Any], None] | None,
        *body: bytes,
        repeat: bool = False,
    ) -> int:
        """Send `message(number)`, and return the number.

        After a broken connection, a request with `repeat` is sent again. Other requests get the answer False.
        """
        self._number += 1
        request = _PendingRequest((wire.encode(message(self._number)), *body), then, repeat)
        if self._open:
            self._asked[self._number] = request
            self._send(*request.frames)
        else:
            self._waiting[self._number] = request
        return self._number

    def open(self) -> None:
        """Send all waiting requests, because there is a connection."""
        self._open = True
        waiting, self._waiting = self._waiting, {}
        for number, request in waiting.items():
            self._asked[number] = request
            self._send(*request.frames)

    def answer(self, number: int, answer: object) -> None:
        """Pass an answer to the callback of its request."""
        request = self._asked.pop(number, None)
        if request is not None and request.then is not None:
            request.then(answer)

    def unanswered(self) -> None:
        """Handle a lost connection, which also loses the answers to sent requests."""
        self._open = False
        asked, self._asked = self._asked, {}
        self._waiting |= {number: request for number, request in asked.items() if request.repeat}
        for request in asked.values():
            if not request.repeat and request.then is not None and not self._closed:
                request.then(False)

    def close(self) -> None:
        """Drop all requests without calling their callbacks."""
        self._closed = True
        self._waiting.clear()
        self._asked.clear()


class Heartbeat:
    """Call `beat(silent, send)` eight times per lease, from `start` to `stop`.

    `silent` is the number of seconds without a message. Every second time, `send` is True because a heartbeat
    is due.

    If two beats are half a lease or more apart, this process was stopped or its node slept. The time in
    between is not counted.
    """

    def __init__(self, loop: Loop, lease: float, beat: Callable[[float, bool], None]) -> None:
        self.lease = lease
        self._loop = loop
        self._beat = beat
        self._last_seen = self._looked = loop.clock()
        self._send_next = False
        self._timer = Timer()

    def start(self) -> None:
        self.stop()
        self._last_seen = self._looked = self._loop.clock()
        self._timer = self._loop.after(self.lease / 8, self._tick)

    def keep_to(self, lease: float) -> None:
        """Use the lease that the store has granted."""
        if lease != self.lease:
            self.lease = lease
            self.start()

    def note_message(self) -> None:
        """Note that a message was received."""
        self._last_seen = self._loop.clock()

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.after(self.lease / 8, self._tick)
        self._send_next = not self._send_next
        now = self._loop.clock()
        if now - self._looked >= self.lease / 2:
            self._last_seen = now
        self._looked = now
        self._beat(now - self._last_seen, self._send_next)


# ---- Errors of a store that will never answer

_HINT = "To survive the loss of any node, use --master H1,H2,H3 or etcd://..."


def store_lost(endpoint: str) -> StoreLostError:
    """Return the error for a store whose launcher has ended."""
    return StoreLostError(
        f"the rendezvous store {endpoint} has ended, with the launcher that hosted it: connection refused",
        hint=_HINT,
    )


SECRET_OF_GUEST = "Set the token in --token_file or FLEETRUN_TOKEN. For a job without a token, set none."


def store_denied(endpoint: str, *, secret: bool, guest: bool) -> StoreError:
    """Return the error for a rejected handshake. `secret` is True if this side has a token."""
    if guest:
        why = "the token differs from the token of the job" if secret else "the job has a token"
        return StoreError(
            f"the rendezvous store {endpoint} rejects this command: {why}", hint=SECRET_OF_GUEST
        )
    theirs = (
        "has a token, and the rendezvous store has another token or none"
        if secret
        else "has no token, and the rendezvous store has one"
    )
    return StoreError(
        f"the rendezvous store {endpoint} rejects this node because their tokens differ (this node {theirs})",
        hint="Set the same FLEETRUN_TOKEN or --token_file on all nodes, or on none.",
    )


# ---- The client

_LINGER_MS = 500
_LOST_S = 1.0
_WELCOME_S = 10.0
_DENIALS = 4
"""Handshakes in a row that a zmq peer may end without a reason until the tokens are taken to differ.

The side that detects different mechanisms first hangs up, and the other side may never learn the reason.
"""
_REPORT_BYTES = 8 << 20
"""Received bytes after which to acknowledge them. The store drops clients that do not seem to read."""


class ZmqStore(MirroringStore):
    """A Store over zmq. Many clients in one process can share `context`, which saves threads."""

    def __init__(
        self,
        loop: Loop,
        endpoint: str,
        *,
        job_id: str,
        node_id: str,
        lease: float,
        keys: CurveKeys | None = None,
        context: Context | None = None,
    ) -> None:
        self.node_id = node_id
        self._loop = loop
        self._endpoint = endpoint
        self._secret = keys is not None
        self._guest = node_id.startswith(wire.GUEST)
        self._own_context = context is None
        self._context = context or zmq.Context()
        self._connection = StoreConnection(
            loop, endpoint, self, lease=lease, keys=keys, context=self._context
        )
        self._hello = wire.Hello(wire.PROTOCOL, __version__, job_id, node_id, secrets.token_hex(16))
        self._listener: Listener | None = None
        self._mirror: Mirror = Mirror()
        self._pending = PendingRequests(self._connection.send)
        self._listings: set[int] = set()
        """Numbers of the listings that must arrive before the mirror is complete."""
        self._store_id = ""
        self._fresh = False
        self._welcome = False
        self._was_up = False
        self._got = self._reported = 0
        self._heartbeat = Heartbeat(loop, lease, self._keep_alive)
        self._pulse: Pulse | None = None
        self._connected_at = 0.0
        self._refused_at: float | None = None
        self._denials = 0
        self._why = ""

    # ---- store.Store

    @property
    def nameless(self) -> str:
        """The reason why the store's name is unresolved, or empty if it is resolved or an address."""
        return self._connection.nameless

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._heartbeat.start()
        if self._own_context:  # a shared context means many clients in one process
            self._pulse = Pulse(self._loop, self._heartbeat.lease, self._beat, self._connection.look_again)
        self._connection.start()

    def watch(self, prefix: str) -> None:
        self._mirror.watch(prefix)
        if self._welcome:
            self._list(prefix)

    def unwatch(self, prefix: str) -> None:
        self._mirror.unwatch(prefix)
        if self._welcome:
            self._connection.send(wire.encode(wire.Unwatch(prefix)))

    def put(
        self,
        key: str,
        value: bytes,
        *,
        expect: int | None = None,
        leased: bool = False,
        then: Written | None = None,
    ) -> None:
        wire.check_entry(key, value)
        self._pending.ask(lambda n: wire.Put(n, key, expect, leased), then, value)

    def delete(self, key: str, *, expect: int | None = None, then: Written | None = None) -> None:
        self._pending.ask(lambda n: wire.Delete(n, key, expect), then)

    def delete_prefix(self, prefix: str) -> None:
        self._pending.ask(lambda n: wire.Clear(n, prefix), None)

    def read(self, key: str, then: Found) -> None:
        self._pending.ask(lambda n: wire.Read(n, key), then, repeat=True)

    def close(self) -> None:
        if self._welcome:
            self._connection.send(wire.encode(wire.Bye()))
            self._stop(_LINGER_MS)
        else:
            self._stop()

    def _stop(self, linger_ms: int = 0) -> None:
        self._listener = None
        self._welcome = False
        self._pending.close()
        self._heartbeat.stop()
        if self._pulse is not None:
            self._pulse.close()
        self._connection.close(linger_ms)
        if self._own_context:
            self._context.term()

    # ---- called by the connection (ConnectionListener)

    def connected(self) -> None:
        self._connected_at = self._loop.clock()
        self._got = self._reported = 0
        self._denials = 0
        self._connection.send(wire.encode(self._hello))

    def received(self, frames: Sequence[bytes]) -> None:
        self._heartbeat.note_message()
        self._got += sum(map(len, frames))
        if self._got - self._reported >= _REPORT_BYTES:
            self._send_alive()
        try:
            message, body = wire.decode(frames, wire.ANSWERS)
            self._understand(message, body)
        except wire.WireError as error:
            self._cut_off(f"{self._endpoint} sent an invalid answer: {error}")

    def settled(self) -> None:
        if self._mirror.stale and self._listener is not None and self._welcome and not self._listings:
            self._mirror.stale = False
            self._listener.changed()

    def disconnected(self) -> None:
        self._welcome = False
        self._listings.clear()
        self._pending.unanswered()

    def unreachable(self, why: str, number: int) -> None:
        now = self._loop.clock()
        self._down(f"{self._endpoint}: {why}")
        if number:
            self._denials = 0
        if number != errno.ECONNREFUSED:
            self._refused_at = None
        elif self._refused_at is None:
            self._refused_at = now
        elif self._was_up and now - self._refused_at >= _LOST_S:
            self._lost(store_lost(self._endpoint))

    def denied(self, certain: bool) -> None:
        self._denials += 1
        if certain or (not self._was_up and self._denials >= _DENIALS):
            self._lost(store_denied(self._endpoint, secret=self._secret, guest=self._guest))

    # ---- messages of the store

    def _understand(self, message: object, body: bytes) -> None:
        match message:
            case wire.Welcome():
                self._welcomed(message)
            case wire.Refused(text):
                refused = "this command" if self._guest else "this node"
                self._lost(StoreError(f"the rendezvous store {self._endpoint} refuses {refused}: {text}"))
            case wire.Done(n, ok):
                self._pending.answer(n, ok)
            case wire.Found(n, row):
                (entry,) = wire.unpack([row], body).values()
                self._pending.answer(n, entry)
            case wire.Listing(n, prefix, rows):
                self._listed(n, prefix, wire.unpack(rows, body))
            case wire.News(rows):
                self._mirror.note(wire.unpack(rows, body))
            case wire.Living(True):
                self._send_alive()
            case wire.Stranger():
                self._cut_off("")
            case wire.Wrong(text):
                self._cut_off(f"{self._endpoint} rejected a message: {text}")

    def _welcomed(self, welcome: wire.Welcome) -> None:
        if self._store_id not in ("", welcome.store):
            restarted = "is a new store, because the launcher that hosted it was restarted"
            self._lost(StoreLostError(f"the rendezvous store {self._endpoint} {restarted}", hint=_HINT))
            return
        self._store_id = welcome.store
        self._heartbeat.keep_to(welcome.lease)
        if self._pulse is not None:
            self._pulse.lease = welcome.lease
        self._fresh = self._fresh or welcome.fresh
        self._welcome = True
        for prefix in self._mirror.prefixes:
            self._listings.add(self._list(prefix))
        self._pending.open()
        if not self._listings:
            self._up()

    def _list(self, prefix: str) -> int:
        return self._pending.ask(lambda n: wire.Watch(n, prefix), None)

    def _listed(self, n: int, prefix: str, entries: Mapping[str, Entry | None]) -> None:
        self._pending.answer(n, None)
        self._mirror.replace(prefix, {key: entry for key, entry in entries.items() if entry is not None})
        if n in self._listings:
            self._listings.remove(n)
            if not self._listings:
                self._up()

    # ---- calling the listener

    def _up(self) -> None:
        fresh, self._fresh = self._fresh, False
        self._was_up, self._why, self._refused_at = True, "", None
        self._connection.retry_quickly()
        if self._listener is not None:
            self._listener.up(fresh=fresh)

    def _down(self, why: str) -> None:
        if self._listener is not None and why != self._why:
            self._why = why
            self._listener.down(why)

    def _lost(self, error: LaunchError) -> None:
        listener = self._listener
        if listener is not None:
            self._stop()
            listener.lost(error)

    def _cut_off(self, why: str) -> None:
        """Replace this connection."""
        self.disconnected()
        self._connection.renew()
        if why:
            self._down(why)

    # ---- heartbeat

    def _keep_alive(self, silent: float, send: bool) -> None:
        lease = self._heartbeat.lease
        if self._was_up and silent >= lease:
            down = f"has not answered for {lease:g} s: its machine or network is down"
            self._lost(StoreSilentError(f"the rendezvous store {self._endpoint} {down}", hint=_HINT))
        elif self._welcome and silent >= lease / 2:
            self._cut_off(f"{self._endpoint}: no answer for {silent:.1f} s")
        elif self._welcome and send:
            self._send_alive()
        elif (
            not self._welcome
            and self._connection.is_up
            and self._loop.clock() - self._connected_at >= _WELCOME_S
        ):
            self._cut_off(f"{self._endpoint}: the program that listens there is not fleetrun")

    def _beat(self) -> None:
        """Send a heartbeat from the thread of the pulse."""
        if self._welcome:
            self._connection.beat(wire.encode(wire.Alive(self._got)))

    def _send_alive(self) -> None:
        self._reported = self._got
        self._connection.send(wire.encode(wire.Alive(self._got)))
