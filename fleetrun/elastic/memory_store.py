"""Connect to a ledger in the same process, and end its leases by a timer. The launcher that hosts the store
uses both.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from fleetrun.elastic.store import Entry, Found, Ledger, Listener, Mirror, MirroringStore, Session, Written
from fleetrun.pod.loop import Loop, Timer


class MemoryStore(MirroringStore):
    """A Store. Requests are carried out in order at the loop's next turn, as they would be over a network."""

    def __init__(self, ledger: Ledger, loop: Loop, node_id: str, *, lease: float = 10.0) -> None:
        self.node_id = node_id
        self._ledger = ledger
        self._loop = loop
        self._lease = lease
        self._listener: Listener | None = None
        self._session: Session | None = None
        self._name = f"{node_id}-{secrets.token_hex(8)}"
        self._mirror: Mirror = Mirror()
        self._asked: list[Callable[[Session], None]] = []
        self._turn = Timer()
        self._beat = Timer()

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._beat = self._loop.after(self._lease / 4, self._keep_alive)
        self._wake()

    def watch(self, prefix: str) -> None:
        self._mirror.watch(prefix)
        self._ask(lambda session: self._show_prefix(session, prefix))

    def unwatch(self, prefix: str) -> None:
        self._mirror.unwatch(prefix)
        self._ask(lambda session: self._forget(session, prefix))

    def put(
        self,
        key: str,
        value: bytes,
        *,
        expect: int | None = None,
        leased: bool = False,
        then: Written | None = None,
    ) -> None:
        def write(session: Session) -> None:
            owner = session if leased else None
            done = self._ledger.put(key, value, expect=expect, session=owner) is not None
            self._answer(then, done)

        self._ask(write)

    def delete(self, key: str, *, expect: int | None = None, then: Written | None = None) -> None:
        self._ask(lambda session: self._answer(then, self._ledger.delete(key, expect=expect)))

    def delete_prefix(self, prefix: str) -> None:
        self._ask(lambda session: self._ledger.delete_prefix(prefix))

    def read(self, key: str, then: Found) -> None:
        self._ask(lambda session: self._show(then, self._ledger.get(key)))

    def close(self) -> None:
        """End the lease after all earlier requests. Their callbacks are not called."""
        asked, session = self._taken(), self._session
        self._stop()
        if session is not None:
            for each in asked:
                each(session)
            self._ledger.revoke(session)

    def _stop(self) -> None:
        self._listener = None
        self._asked.clear()
        self._turn.cancel()
        self._beat.cancel()

    # ---- in the loop

    def _ask(self, what: Callable[[Session], None]) -> None:
        self._asked.append(what)
        self._wake()

    def _wake(self) -> None:
        if self._listener is not None and not self._turn.pending:
            self._turn = self._loop.after(0.0, self._take_turn)

    def _take_turn(self) -> None:
        if self._listener is None:
            return
        session = self._connect()
        self._look(session)
        for asked in self._taken():
            if self._listener is not None:
                asked(session)
        self._look(session)
        if self._mirror.stale and self._listener is not None:
            self._mirror.stale = False
            self._listener.changed()

    def _connect(self) -> Session:
        """Return the session. Start one if it is missing or its lease has ended."""
        session = self._session
        if session is None or not session.open:
            session = self._ledger.grant(self._name, self._lease, self._loop.clock(), self._wake)
            self._session = session
            self._up(session, fresh=True)
        return session

    def _up(self, session: Session, *, fresh: bool) -> None:
        for prefix in self._mirror.prefixes:
            self._show_prefix(session, prefix)
        if self._listener is not None:
            self._listener.up(fresh=fresh)

    def _taken(self) -> list[Callable[[Session], None]]:
        taken, self._asked = self._asked, []
        return taken

    def _answer(self, then: Written | None, done: bool) -> None:
        if self._session is not None:
            self._look(self._session)
        if then is not None and self._listener is not None:
            then(done)

    def _show(self, then: Found, entry: Entry | None) -> None:
        if self._listener is not None:
            then(entry)

    def _look(self, session: Session) -> None:
        self._mirror.note(session.take())

    def _show_prefix(self, session: Session, prefix: str) -> None:
        if prefix in self._mirror.prefixes:
            self._look(session)
            self._mirror.replace(prefix, self._ledger.watch(session, prefix))

    def _forget(self, session: Session, prefix: str) -> None:
        if prefix not in self._mirror.prefixes:  # otherwise it is watched again
            self._ledger.unwatch(session, prefix)

    def _keep_alive(self) -> None:
        self._beat = self._loop.after(self._lease / 4, self._keep_alive)
        if self._session is not None and self._session.open:
            self._ledger.renew(self._session, self._loop.clock())


_LOOKS_PER_LEASE = 16


class Expiry:
    """A timer that ends the leases of a ledger that were not renewed, until `close`.

    After this process was stopped, or its node slept, all leases seem to have run out. If a tick is late by
    more than a quarter of a lease, the timer therefore renews all leases.
    """

    def __init__(self, ledger: Ledger, loop: Loop, lease: float) -> None:
        self._ledger = ledger
        self._loop = loop
        self._every = min(0.5, lease / _LOOKS_PER_LEASE)
        self._late = lease / 4
        self._looked = loop.clock()
        self._timer = loop.after(self._every, self._tick)

    def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.after(self._every, self._tick)
        self.look()

    def look(self) -> None:
        """End expired leases, or renew all leases if this call comes late."""
        now = self._loop.clock()
        if now - self._looked > self._every + self._late:
            self._ledger.renew_all(now)
        else:
            self._ledger.expire(now)
        self._looked = now
