"""What a client of a store knows of the prefixes that it watches. Knows no store."""

from __future__ import annotations

from collections.abc import Mapping

from fleetrun.elastic.stores.ledger import covers
from fleetrun.elastic.stores.store import Entry


class Mirror:
    """`stale`: it has changed since somebody last set this to False."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.prefixes: dict[str, None] = {}
        self.stale = False

    def watch(self, prefix: str) -> None:
        self.prefixes[prefix] = None

    def unwatch(self, prefix: str) -> None:
        self.prefixes.pop(prefix, None)
        for key in [key for key in self.entries if not self._watched(key)]:
            del self.entries[key]

    def note(self, news: Mapping[str, Entry | None]) -> None:
        """What has changed (None: is gone). Of what is not watched, or no longer, nothing is kept."""
        for key, entry in news.items():
            if not self._watched(key):
                continue
            self.stale = True
            if entry is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = entry

    def replace(self, prefix: str, entries: Mapping[str, Entry]) -> None:
        """All that the prefix covers, and nothing else of it."""
        if prefix not in self.prefixes:
            return
        for key in [key for key in self.entries if covers(prefix, key)]:
            del self.entries[key]
        self.entries |= entries
        self.stale = True

    def _watched(self, key: str) -> bool:
        return any(covers(prefix, key) for prefix in self.prefixes)
