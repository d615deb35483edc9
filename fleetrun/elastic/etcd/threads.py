"""Run the two threads of an etcd client. One keeps the lease and sends writes and reads in order. The other
mirrors prefixes. Both report to `store.py`, which passes the results to the event loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from fleetrun.aliases import Callback, Strings
from fleetrun.elastic.etcd import wire
from fleetrun.elastic.etcd.client import (
    NOT_FOUND,
    Client,
    Rejected,
    StreamEnded,
    StreamInterrupt,
    UnknownOutcome,
    Unreachable,
)
from fleetrun.elastic.etcd.wire import Body
from fleetrun.elastic.store import Entry
from fleetrun.errors import LaunchError
from fleetrun.frozen import frozen_by_name

SHORTEST, LONGEST = 0.05, 1.0


class Backoff:
    """Pauses between attempts, each twice as long as the previous one."""

    def __init__(self) -> None:
        self._next = SHORTEST

    def next(self) -> float:
        """Return the next pause, in seconds."""
        pause, self._next = self._next, min(2 * self._next, LONGEST)
        return pause

    def reset(self) -> None:
        """Reset the pause after a successful attempt."""
        self._next = SHORTEST


class Events(Protocol):
    """The user of both threads. Calls come from a thread."""

    def leased(self, *, fresh: bool) -> None:
        """Handle a lease that was granted or, after an outage, confirmed."""

    def unanswered(self, why: str) -> None:
        """Handle an outage of all members. The worker keeps trying."""

    def reading(self) -> None:
        """Handle the start of a read of all prefixes."""

    def read_all(self, turn: int, entries: dict[str, Entry], revision: int) -> None:
        """Handle the entries of all prefixes at this revision. `turn` is the return value of `Watcher.watch`
        for these prefixes.
        """

    def changed(self, changes: list[wire.Change]) -> None:
        """Handle the later changes, in order."""

    def unreadable(self, why: str) -> None:
        """Handle a failure to watch any member. The watcher keeps trying."""

    def gave_up(self, error: LaunchError) -> None:
        """Handle a permanent error. The thread has stopped."""


# ---- The thread for the lease, writes and reads


@frozen_by_name
class Request:
    """A request to etcd."""

    path: str
    body: Callable[[str], Body]
    """Makes the body, given the id of the lease."""
    answered: Callable[[Body | None], None]
    """Called in the worker's thread with the answer, or with None if the outcome is unknown."""
    repeat: bool
    """True if sending it twice does no harm."""
    write: bool


class Worker:
    """The thread for the lease, writes and reads."""

    def __init__(
        self,
        client: Client,
        seconds: int,
        events: Events,
        proven: Callback,
        check: Callable[[Client], None] = lambda client: None,
    ) -> None:
        """Prepare a worker with a lease of `seconds`.

        `proven` is called when etcd has carried out a write. `check` is called before each new lease, and may
        raise the errors of a request.
        """
        self._client = client
        self._seconds = seconds
        self._events = events
        self._proven = proven
        self._check = check
        self.renewed = time.monotonic()
        """The time when the last successful renewal of the lease was sent."""
        self._changed = threading.Condition()
        self._requests: deque[Request] = deque()
        self._until: float | None = None  # after `end`: when to give up
        self._lease = ""
        self._renew_at = 0.0
        self._failing = False

    def submit(self, request: Request) -> None:
        """Queue a request. Requests are sent in order."""
        with self._changed:
            self._requests.append(request)
            self._changed.notify()

    def end(self, within: float) -> None:
        """Finish earlier requests, revoke the lease and stop. Give up after `within` seconds."""
        with self._changed:
            self._until = self._client.deadline = time.monotonic() + within
            self._changed.notify()

    def run(self) -> None:
        """Run the thread until `end`."""
        backoff = Backoff()
        while not self._finished():
            try:
                self._step()
                backoff.reset()
            except (Unreachable, Rejected) as error:
                if self._until is not None:
                    break
                self._failing = True
                self._events.unanswered(str(error))
                self._rest(backoff.next())
            except LaunchError as error:
                self._events.gave_up(error)
                break
        self._client.close()

    def _finished(self) -> bool:
        """Return True if `end` was called and all requests are done. Revoke the lease in this case."""
        if self._until is None or self._requests:
            return False
        if self._lease:
            try:
                self._client.ask("/lease/revoke", {"ID": self._lease})
            except (Unreachable, Rejected, LaunchError):
                return True  # the lease expires without help
        return True

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._until is not None, seconds)

    def _step(self) -> None:
        if not self._lease:
            self._check(self._client)
            sent = time.monotonic()
            answer = self._client.ask("/lease/grant", {"TTL": self._seconds, "ID": 0})
            self._lease = str(answer["ID"])
            self._lease_kept(sent, fresh=True)
        elif self._failing or time.monotonic() >= self._renew_at:
            self._renew()
        else:
            with self._changed:
                patience = max(0.0, self._renew_at - time.monotonic())
                self._changed.wait_for(lambda: self._requests or self._until is not None, patience)
            if self._requests:
                self._send(self._requests[0])

    def _renew(self) -> None:
        sent = time.monotonic()
        answer = self._client.ask("/lease/keepalive", {"ID": self._lease})
        if int(answer.get("result", {}).get("TTL", 0)) > 0:
            self._lease_kept(sent, fresh=False)
        else:
            self._lease = ""

    def _lease_kept(self, sent: float, *, fresh: bool) -> None:
        self.renewed = sent
        self._renew_at = time.monotonic() + self._seconds / 4
        if fresh or self._failing:
            self._events.leased(fresh=fresh)
        self._failing = False

    def _send(self, request: Request) -> None:
        try:
            answer = self._client.ask(request.path, request.body(self._lease), repeat=request.repeat)
        except UnknownOutcome as error:
            self._requests.popleft()
            request.answered(None)
            raise Unreachable(str(error)) from None
        except Rejected as error:
            if error.code != NOT_FOUND:
                raise
            self._lease = ""  # the request is repeated under the next lease
            return
        self._requests.popleft()
        if request.write:
            self._proven()
        request.answered(answer)


# ---- The thread that mirrors prefixes
#
# It watches all prefixes in one stream, then reads all at one revision, then reports the changes after that
# revision. After any failure it starts over.
#
# The stream starts before the read, so that the thread sees every change between the two. A stream that is
# silent for a while is replaced too, because a dead stream looks the same.

_SHORT = 1.0  # seconds; a stream that ends earlier is replaced after a pause


class Watcher:
    """The thread that mirrors prefixes."""

    def __init__(self, client: Client, keys: wire.Keys, patience: float, events: Events) -> None:
        self._client = client
        self._keys = keys
        self._patience = patience
        self._events = events
        self._changed = threading.Condition()
        self._turn = 0
        self._prefixes: Strings = ()
        self._interrupt = StreamInterrupt()
        self._ended = False

    def watch(self, prefixes: Strings) -> int:
        """Watch these prefixes from now on, and read all of them again. Return the number of this turn."""
        with self._changed:
            self._prefixes = prefixes
            self._turn += 1
            self._wake()
            return self._turn

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._wake()

    def _wake(self) -> None:
        self._interrupt.use()
        self._changed.notify()

    def run(self) -> None:
        """Run the thread until `end`."""
        backoff = Backoff()
        while (turn := self._next()) is not None:
            number, prefixes, interrupt = turn
            started = time.monotonic()
            try:
                self._follow(number, prefixes, interrupt)
                backoff.reset()
            except StreamEnded:
                self._rest(number, 0.0 if time.monotonic() - started > _SHORT else backoff.next())
            except (Unreachable, Rejected) as error:
                self._events.unreadable(str(error))
                self._rest(number, backoff.next())
            except LaunchError as error:
                self._events.gave_up(error)
                break
        self._client.close()

    def _next(self) -> tuple[int, Strings, StreamInterrupt] | None:
        """Wait until there is something to watch, and return it. Return None after `end`."""
        with self._changed:
            self._changed.wait_for(lambda: self._prefixes or self._ended)
            self._interrupt = StreamInterrupt()
            return None if self._ended else (self._turn, self._prefixes, self._interrupt)

    def _rest(self, number: int, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._turn != number, seconds)

    def _follow(self, number: int, prefixes: Strings, interrupt: StreamInterrupt) -> None:
        waiting, early, since = len(prefixes), list[wire.Change](), 0
        requests = wire.watches(self._keys, prefixes)
        for message in self._client.follow("/watch", requests, self._patience, interrupt):
            early += wire.changes(self._keys, message)
            if message.get("canceled"):
                self._read(prefixes)  # raises the reason, if it is permanent
                raise StreamEnded(message.get("cancel_reason", "the watch was cancelled"))
            if message.get("created"):
                waiting -= 1
                if not waiting:
                    since = self._read_all(number, prefixes)
            if not waiting and early:
                if later := [change for change in early if change.revision > since]:
                    self._events.changed(later)
                early = []
        if waiting and not interrupt.used:
            raise Unreachable(f"{self._client.name}: no answer to a watch within {self._patience:.2g} s")

    def _read_all(self, number: int, prefixes: Strings) -> int:
        self._events.reading()
        entries, revision = self._read(prefixes)
        self._events.read_all(number, entries, revision)
        return revision

    def _read(self, prefixes: Strings) -> tuple[dict[str, Entry], int]:
        answer = self._client.ask("/kv/txn", wire.read(self._keys, prefixes))
        return wire.entries(self._keys, answer), wire.revision(answer)
