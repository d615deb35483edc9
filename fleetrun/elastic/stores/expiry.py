"""Ends the leases of a ledger in time. Knows when its own loop was late: then nobody else was."""

from __future__ import annotations

from fleetrun.elastic.stores.ledger import Ledger
from fleetrun.pod.loop import Loop

_PART = 16


class Expiry:
    """Looks at a ledger's leases from `start` to `close`, several times within one of `lease` seconds.

    A process that was stopped, or a machine that slept, wakes up to leases that all seem to have run out. So
    when a look comes late by more than a quarter of a lease, everybody gets a whole one again.
    """

    def __init__(self, ledger: Ledger, loop: Loop, lease: float) -> None:
        self._ledger = ledger
        self._loop = loop
        self._every = min(0.5, lease / _PART)
        self._late = lease / 4
        self._looked = loop.clock()
        self._timer = loop.after(self._every, self._tick)

    def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.after(self._every, self._tick)
        self.look()

    def look(self) -> None:
        now = self._loop.clock()
        if now - self._looked > self._every + self._late:
            self._ledger.renew_all(now)
        else:
            self._ledger.expire(now)
        self._looked = now
