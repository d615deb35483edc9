"""The thread that mirrors prefixes: a watch on all of them in one stream, then a reading of all at one
moment, then what the watch told after that moment. When anything goes wrong, all of it again.

The stream begins before the reading, so nothing is missed between the two. A stream that is silent for a
while is replaced too: the silence of a dead one is the same.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from fleetrun.elastic.etcd import wire
from fleetrun.elastic.etcd.client import Client
from fleetrun.elastic.etcd.cut import Cut
from fleetrun.elastic.etcd.errors import Rejected, StreamEnded, Unreachable
from fleetrun.elastic.etcd.pauses import Pauses
from fleetrun.elastic.stores.store import Entry
from fleetrun.errors import LaunchError

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
        """No member could be watched; the watcher goes on trying."""
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
        """Watch these, and read all of them anew. The number of the turn in which that is done."""
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
