"""What a client of etcd knows of the keys that it watches, from three sources: whole readings, the changes
after them, and the answers to its own writes, which may come before the watch tells. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetrun.elastic.etcd.wire import Change
from fleetrun.elastic.stores.ledger import covers
from fleetrun.elastic.stores.store import Entry


class EtcdMirror:
    """Never goes back in time, except when etcd itself does (its data were lost)."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.prefixes: dict[str, None] = {}
        self._revision = 0  # up to which the watch has told everything
        self._ahead: dict[str, int] = {}  # keys of which an answer told more, and up to which revision
        self._before = 0  # what the next reading must know: all that was known when it began
        self._since: set[str] = set()  # keys that were answered after that

    def forget(self, prefix: str) -> None:
        """EtcdMirror it no longer."""
        self.prefixes.pop(prefix, None)
        for key in [key for key in self.entries if not self._covers(key)]:
            del self.entries[key]

    def reading(self) -> None:
        """A reading of all prefixes begins."""
        self._before = max(self._revision, *self._ahead.values(), 0)
        self._since.clear()

    def replace(self, found: Mapping[str, Entry], revision: int) -> bool:
        """The reading. Whether anything is different now."""
        if revision < self._before:
            self._ahead = {key: self._ahead[key] for key in self._since & self._ahead.keys()}
        self._revision = revision
        self._ahead = {key: until for key, until in self._ahead.items() if until > revision}
        now = {key: entry for key, entry in found.items() if self._covers(key) and key not in self._ahead}
        now |= {key: self.entries[key] for key in self._ahead if key in self.entries}
        if now == self.entries:
            return False
        self.entries.clear()
        self.entries.update(now)
        return True

    def follow(self, changes: Iterable[Change]) -> bool:
        """What the watch tells. Whether anything is different now."""
        different = False
        for change in changes:
            self._revision = max(self._revision, change.revision)
            if change.revision > self._ahead.get(change.key, 0):
                self._ahead.pop(change.key, None)
                different |= self._set(change)
        return different

    def answered(self, change: Change) -> bool:
        """How a key stood when a write was answered. Whether anything is different now."""
        if not self._covers(change.key) or change.revision <= self._revision:
            return False
        self._since.add(change.key)
        self._ahead[change.key] = max(change.revision, self._ahead.get(change.key, 0))
        return self._set(change)

    def _set(self, change: Change) -> bool:
        if not self._covers(change.key) or self.entries.get(change.key) == change.entry:
            return False
        if change.entry is None:
            del self.entries[change.key]
        else:
            self.entries[change.key] = change.entry
        return True

    def _covers(self, key: str) -> bool:
        return any(covers(prefix, key) for prefix in self.prefixes)
