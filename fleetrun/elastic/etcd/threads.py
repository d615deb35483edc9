"""The two threads of a client of an etcd: one keeps the lease and does writes and reads in their order, the
other mirrors prefixes. Both tell `store.py`, which brings their news to the event loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fleetrun.elastic.etcd import wire
from fleetrun.elastic.etcd.client import (
    NOT_FOUND,
    Client,
    Cut,
    Rejected,
    StreamEnded,
    UnknownFate,
    Unreachable,
)
from fleetrun.elastic.etcd.wire import Body
from fleetrun.elastic.store import Entry
from fleetrun.errors import LaunchError

# ---- Pauses between tries

SHORTEST, LONGEST = 0.05, 1.0


class Pauses:
    def __init__(self) -> None:
        self._next = SHORTEST

    def next(self) -> float:
        """Seconds."""
        pause, self._next = self._next, min(2 * self._next, LONGEST)
        return pause

    def over(self) -> None:
        """It worked: the next pause is a short one again."""
        self._next = SHORTEST


# ---- The thread for the lease, writes and readings, one after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request. `body` gets the lease's id; `answered` is called in the thread, with None when the outcome
    is unknown.
    """

    path: str
    body: Callable[[str], Body]
    answered: Callable[[Body | None], None]
    repeat: bool
    """Asking twice does no harm."""
    write: bool


class Asker(Protocol):
    """Is called in the worker's thread."""

    def leased(self, *, fresh: bool) -> None:
        """There is a lease, a new one or (after trouble) still the old one."""
        ...

    def unanswered(self, why: str) -> None:
        """No member answers; the worker keeps trying."""
        ...

    def hopeless(self, error: LaunchError) -> None:
        """The worker has stopped."""
        ...


class Worker:
    def __init__(self, client: Client, seconds: int, asker: Asker, proven: Callable[[], None]) -> None:
        """`seconds`: of the lease. `proven` is called when etcd took a write."""
        self._client = client
        self._seconds = seconds
        self._asker = asker
        self._proven = proven
        self._news = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._until: float | None = None  # with the end in sight: when to give up
        self._lease = ""
        self._renew_at = 0.0
        self._in_trouble = False

    def ask(self, job: Job) -> None:
        with self._news:
            self._jobs.append(job)
            self._news.notify()

    def end(self, within: float) -> None:
        """Do what was asked for, revoke the lease, and stop; give up after so many seconds."""
        with self._news:
            self._until = self._client.deadline = time.monotonic() + within
            self._news.notify()

    def run(self) -> None:
        """The thread's. Until `end`."""
        pauses = Pauses()
        while not self._finished():
            try:
                self._take_turn()
                pauses.over()
            except (Unreachable, Rejected) as error:
                if self._until is not None:
                    break
                self._in_trouble = True
                self._asker.unanswered(str(error))
                self._rest(pauses.next())
            except LaunchError as error:
                self._asker.hopeless(error)
                break
        self._client.close()

    def _finished(self) -> bool:
        """At the end, and there is nothing left to do. Revokes the lease."""
        if self._until is None or self._jobs:
            return False
        if self._lease:
            try:
                self._client.ask("/lease/revoke", {"ID": self._lease})
            except (Unreachable, Rejected, LaunchError):
                return True  # it ends by itself
        return True

    def _rest(self, seconds: float) -> None:
        with self._news:
            self._news.wait_for(lambda: self._until is not None, seconds)

    def _take_turn(self) -> None:
        if not self._lease:
            self._grant()
        elif self._in_trouble or time.monotonic() >= self._renew_at:
            self._renew()
        else:
            with self._news:
                patience = max(0.0, self._renew_at - time.monotonic())
                self._news.wait_for(lambda: self._jobs or self._until is not None, patience)
            if self._jobs:
                self._do(self._jobs[0])

    def _grant(self) -> None:
        answer = self._client.ask("/lease/grant", {"TTL": self._seconds, "ID": 0})
        self._lease = str(answer["ID"])
        self._kept(fresh=True)

    def _renew(self) -> None:
        answer = self._client.ask("/lease/keepalive", {"ID": self._lease})
        if int(answer.get("result", {}).get("TTL", 0)) > 0:
            self._kept(fresh=False)
        else:
            self._lease = ""

    def _kept(self, *, fresh: bool) -> None:
        self._renew_at = time.monotonic() + self._seconds / 4
        if fresh or self._in_trouble:
            self._asker.leased(fresh=fresh)
        self._in_trouble = False

    def _do(self, job: Job) -> None:
        try:
            answer = self._client.ask(job.path, job.body(self._lease), repeat=job.repeat)
        except UnknownFate as error:
            self._jobs.popleft()
            job.answered(None)
            raise Unreachable(str(error)) from None
        except Rejected as error:
            if error.code != NOT_FOUND:
                raise
            self._lease = ""  # the job is done under the next one
            return
        self._jobs.popleft()
        if job.write:
            self._proven()
        job.answered(answer)


# ---- The thread that mirrors prefixes: a watch on all of them in one stream, then a reading of all at one
# moment, then what the watch delivered after that moment. When anything goes wrong, all of it again.
#
# The stream begins before the reading, so nothing is missed between the two. A stream that is silent for a
# while is replaced too: the silence of a dead one is the same.

_SHORT = 1.0  # seconds: a stream that ends earlier is not replaced at once


class Hearer(Protocol):
    """Is called in the watcher's thread."""

    def reading(self) -> None:
        """All prefixes are about to be read."""
        ...

    def read_all(self, turn: int, entries: dict[str, Entry], revision: int) -> None:
        """All prefixes of this turn, as they were at this revision."""
        ...

    def changed(self, changes: list[wire.Change]) -> None:
        """After that, in the order in which it happened."""
        ...

    def unreadable(self, why: str) -> None:
        """No member could be watched; the watcher keeps trying."""
        ...

    def hopeless(self, error: LaunchError) -> None:
        """The watcher has stopped."""
        ...


class Watcher:
    def __init__(self, client: Client, keys: wire.Keys, patience: float, hearer: Hearer) -> None:
        self._client = client
        self._keys = keys
        self._patience = patience
        self._hearer = hearer
        self._news = threading.Condition()
        self._turn = 0
        self._prefixes: tuple[str, ...] = ()
        self._cut = Cut()
        self._ended = False

    def watch(self, prefixes: tuple[str, ...]) -> int:
        """Watch these, and read all of them again. The number of the turn in which that is done."""
        with self._news:
            self._prefixes = prefixes
            self._turn += 1
            self._wake()
            return self._turn

    def end(self) -> None:
        with self._news:
            self._ended = True
            self._wake()

    def _wake(self) -> None:
        self._cut.use()
        self._news.notify()

    def run(self) -> None:
        """The thread's. Until `end`."""
        pauses = Pauses()
        while (turn := self._next()) is not None:
            number, prefixes, cut = turn
            begun = time.monotonic()
            try:
                self._follow(number, prefixes, cut)
                pauses.over()
            except StreamEnded:
                self._rest(number, 0.0 if time.monotonic() - begun > _SHORT else pauses.next())
            except (Unreachable, Rejected) as error:
                self._hearer.unreadable(str(error))
                self._rest(number, pauses.next())
            except LaunchError as error:
                self._hearer.hopeless(error)
                break
        self._client.close()

    def _next(self) -> tuple[int, tuple[str, ...], Cut] | None:
        """Waits until there is something to watch; None: the end."""
        with self._news:
            self._news.wait_for(lambda: self._prefixes or self._ended)
            self._cut = Cut()
            return None if self._ended else (self._turn, self._prefixes, self._cut)

    def _rest(self, number: int, seconds: float) -> None:
        with self._news:
            self._news.wait_for(lambda: self._ended or self._turn != number, seconds)

    def _follow(self, number: int, prefixes: tuple[str, ...], cut: Cut) -> None:
        waiting, unsure, since = len(prefixes), list[wire.Change](), 0
        questions = wire.watches(self._keys, prefixes)
        for message in self._client.follow("/watch", questions, self._patience, cut):
            unsure += wire.changes(self._keys, message)
            if message.get("canceled"):
                self._read(prefixes)  # it tells the reason, if it is one that stays
                raise StreamEnded(message.get("cancel_reason", "the watch was cancelled"))
            if message.get("created"):
                waiting -= 1
                if not waiting:
                    since = self._tell_all(number, prefixes)
            if not waiting and unsure:
                if later := [change for change in unsure if change.revision > since]:
                    self._hearer.changed(later)
                unsure = []
        if waiting and not cut.used:
            raise Unreachable(f"{self._client.name}: no answer to a watch within {self._patience:.2g} s")

    def _tell_all(self, number: int, prefixes: tuple[str, ...]) -> int:
        self._hearer.reading()
        entries, revision = self._read(prefixes)
        self._hearer.read_all(number, entries, revision)
        return revision

    def _read(self, prefixes: tuple[str, ...]) -> tuple[dict[str, Entry], int]:
        answer = self._client.ask("/kv/txn", wire.read(self._keys, prefixes))
        return wire.entries(self._keys, answer), wire.revision(answer)
