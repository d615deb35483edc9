"""Define the rendezvous store: its interface (`Store`), its content in memory (`Ledger`), and a client's copy
of the watched keys (`Mirror`).

All of it is pure: without transport, loop or clock. The clients are in `memory_store.py` (the same process),
`embedded/client.py` (zmq) and `etcd/store.py`. The tests of the protocol run against all three.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

from fleetrun.aliases import Callback
from fleetrun.errors import LaunchError
from fleetrun.frozen import frozen

# ---- The interface: compare-and-set, leases, watches
#
# A store belongs to one job, and keys are relative to it. A client mirrors the prefixes that it watches. Its
# user decides again whenever the mirror has changed, and writes. A write that comes too late fails, and the
# faster change arrives in the mirror. After a lost connection, the mirror becomes complete again and the user
# decides again, so the user can forget earlier states.

ABSENT = 0
"""As an expected revision: the key must not exist."""


def reconnect_grace(lease: float) -> float:
    """Return the seconds that a store waits for a client to reconnect before it ends the client's lease.

    The client's process may only be suspended.
    """
    return min(max(1.0, lease / 10), 4.0, lease / 4)


@frozen
class Entry:
    """A value and its revisions. The store counts revisions from 1 over all keys."""

    value: bytes
    created: int  # the revision that created the key
    revision: int  # the revision of the last write


Written = Callable[[bool], None]
"""A function that gets True if a key was written or deleted."""

Found = Callable[[Entry | None], None]
"""A function that gets the entry that was read, or None if there is none."""

Entries = Mapping[str, Entry]
"""Entries by key."""

CLOSED = Entry(b"", ABSENT, ABSENT)
"""A marker among changes, in place of an entry: the key was deleted because its client closed the connection.

A key that was deleted for another reason, such as an expired lease, has None.
"""


class Listener(Protocol):
    """The user of a store. Calls come from the loop and must return immediately."""

    def changed(self) -> None:
        """Handle changes of the mirror. Called once for all changes that arrived together."""

    def up(self, *, fresh: bool) -> None:
        """Handle a new or restored connection. The mirror is complete.

        With `fresh`, the lease is new. Keys under the earlier lease disappear and must be written again.
        """

    def down(self, why: str) -> None:
        """Handle a store that has not answered for a while, or has refused the connection.

        `why` is a text for users, such as `h1:6768: Connection refused`. Called again when `why` changes. The
        client keeps trying.
        """

    def lost(self, error: LaunchError) -> None:
        """Handle the permanent loss of the store. The client has stopped.

        The launcher that hosts the store has ended, or the store refused this node (token, version, job).
        """


class Store(Protocol):
    """One node's client. It renews its lease from `open` to `close`."""

    @property
    def mirror(self) -> Entries:
        """The entries under all watched prefixes, by key."""

    @property
    def closed(self) -> Collection[str]:
        """Keys that left the mirror because the client that wrote them closed its connection. Always empty if
        the store does not report them.
        """

    def open(self, listener: Listener) -> None:
        """Start to connect. You may call the other methods before `up`, and their requests wait."""

    def watch(self, prefix: str) -> None:
        """Mirror the keys under `prefix` from now on. `changed` follows, even without keys.

        A prefix that ends with `/`, or is empty, covers all keys that start with it. Any other prefix is one
        whole key.
        """

    def unwatch(self, prefix: str) -> None:
        """Stop mirroring this prefix. Its keys leave the mirror."""

    def put(
        self,
        key: str,
        value: bytes,
        *,
        expect: int | None = None,
        leased: bool = False,
        then: Written | None = None,
    ) -> None:
        """Write a key.

        With `expect`, write only if the key has this revision (ABSENT: only if the key does not exist). With
        `leased`, the key is deleted when this client's lease ends. `then` gets True if the key was written.
        It gets False also when the connection was lost and the outcome is unknown.
        """

    def delete(self, key: str, *, expect: int | None = None, then: Written | None = None) -> None:
        """Delete a key, with arguments as in `put`. Deleting a missing key succeeds."""

    def delete_prefix(self, prefix: str) -> None:
        """Delete all keys of this job that start with `prefix`. An empty prefix deletes all keys."""

    def read(self, key: str, then: Found) -> None:
        """Read one key without watching it. The client repeats the request until it is answered."""

    def close(self) -> None:
        """End the lease immediately, which deletes the keys under it.

        Waits briefly until earlier requests are sent (0.5 s; 1 s for an etcd, which writes to disk).
        """


# ---- The content of the embedded store: keys with revisions, leases, watches. Time is an argument. Changes
# wait in a session's outbox until the session takes them.
#
# A prefix is a directory or one whole key. One look-up for each directory of a key therefore finds all
# watchers of the key, however many sessions watch something else.

Outbox = dict[str, "Entry | None"]
"""Each changed key with its current entry (None or CLOSED: deleted), in the order of the last changes."""


class Session:
    """One client: its lease, the keys under the lease, its watches, and the changes that wait for it."""

    __slots__ = ("_wake", "keys", "name", "open", "outbox", "seconds", "until", "watches")

    def __init__(self, name: str, seconds: float, until: float, wake: Callback) -> None:
        self.name = name
        self.seconds = seconds
        self.until = until
        self.open = True
        self.keys: set[str] = set()
        self.watches: set[str] = set()
        self.outbox: Outbox = {}
        self._wake = wake

    def notify(self, key: str, entry: Entry | None) -> None:
        """Add a change to the outbox, and wake the client if the outbox was empty."""
        if not self.outbox:
            self._wake()
        self.outbox.pop(key, None)
        self.outbox[key] = entry

    def take(self) -> Outbox:
        """Return the changes since the last call."""
        taken, self.outbox = self.outbox, {}
        return taken

    def end(self) -> None:
        self.open = False
        self.outbox = {}
        self._wake()


def covers(prefix: str, key: str) -> bool:
    """Return True if a prefix covers a key: a directory by its start, any other prefix as the whole key."""
    return key.startswith(prefix) if prefix.endswith("/") or not prefix else key == prefix


def _above(key: str) -> Iterator[str]:
    """Yield the prefixes that cover a key, without the key itself: `a/b/c` -> ``, `a/`, `a/b/`."""
    yield ""
    end = key.find("/")
    while end >= 0:
        yield key[: end + 1]
        end = key.find("/", end + 1)


class Ledger:
    """The keys of one job, with their watchers and leases."""

    def __init__(self) -> None:
        self.revision = 0
        self.size = 0
        """Bytes of all keys and values."""
        self._entries: dict[str, Entry] = {}
        self._folders: dict[str, dict[str, None]] = {}
        self._owners: dict[str, Session] = {}
        self._sessions: dict[str, Session] = {}
        self._watchers: dict[str, dict[Session, None]] = {}

    # ---- leases

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def session(self, name: str) -> Session | None:
        """Return the session with this name, or None if its lease has ended."""
        return self._sessions.get(name)

    def grant(self, name: str, seconds: float, now: float, wake: Callback = lambda: None) -> Session:
        """Start a session with a new lease.

        `wake` is called when the outbox gets its first change, and when the lease ends. It must return
        immediately and not call the ledger.
        """
        if name in self._sessions:
            raise ValueError(f"session {name!r} has a lease already")
        session = self._sessions[name] = Session(name, seconds, now + seconds, wake)
        return session

    def renew(self, session: Session, now: float) -> None:
        session.until = now + session.seconds

    def renew_all(self, now: float) -> None:
        """Renew all leases, after the process that ends leases was suspended."""
        for session in self._sessions.values():
            self.renew(session, now)

    def expire(self, now: float) -> list[Session]:
        """End and return the sessions that were not renewed in time."""
        late = [session for session in self._sessions.values() if session.until <= now]
        for session in late:
            self._end(session, None)
        return late

    def revoke(self, session: Session) -> None:
        """End the lease of a client that closed its connection, and delete the keys under it.

        May be called twice.
        """
        self._end(session, CLOSED)

    def _end(self, session: Session, change: Entry | None) -> None:
        if self._sessions.pop(session.name, None) is None:
            return
        self.unwatch_all(session)
        for key in sorted(session.keys):
            self._delete(key, self._entries[key], change)
        session.end()

    # ---- keys

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def range(self, prefix: str) -> dict[str, Entry]:
        """Return the entries that a prefix covers, sorted by key."""
        if prefix and not prefix.endswith("/"):
            entry = self._entries.get(prefix)
            return {} if entry is None else {prefix: entry}
        return {key: self._entries[key] for key in sorted(self._folders.get(prefix, ()))}

    def put(
        self, key: str, value: bytes, *, expect: int | None = None, session: Session | None = None
    ) -> Entry | None:
        """Write a key and return the new entry, or None if the key does not have the expected revision.

        With a session, the key belongs to the session's lease from now on. Without a session, it stays until
        it is deleted.
        """
        old = self._entries.get(key)
        if not _as_expected(old, expect):
            return None
        self.revision += 1
        entry = Entry(value, old.created if old else self.revision, self.revision)
        self.size += len(value) - len(old.value) if old else len(key) + len(value)
        self._entries[key] = entry
        if old is None:
            for folder in _above(key):
                self._folders.setdefault(folder, {})[key] = None
        self._own(key, session)
        self._notify(key, entry)
        return entry

    def delete(self, key: str, *, expect: int | None = None) -> bool:
        """Delete a key. Return False if the key does not have the expected revision, else True."""
        old = self._entries.get(key)
        if not _as_expected(old, expect):
            return False
        if old is not None:
            self._delete(key, old, None)
        return True

    def _delete(self, key: str, old: Entry, change: Entry | None) -> None:
        self.revision += 1
        self.size -= len(key) + len(old.value)
        del self._entries[key]
        for folder in _above(key):
            keys = self._folders[folder]
            del keys[key]
            if not keys:
                del self._folders[folder]
        self._own(key, None)
        self._notify(key, change)

    def delete_prefix(self, prefix: str) -> None:
        for key in self.range(prefix):
            self.delete(key)

    # ---- watches

    def watch(self, session: Session, prefix: str) -> dict[str, Entry]:
        """Watch a prefix and return the entries that it covers now. Later changes go to the session's
        outbox.
        """
        session.watches.add(prefix)
        self._watchers.setdefault(prefix, {})[session] = None
        return self.range(prefix)

    def unwatch(self, session: Session, prefix: str) -> None:
        """Stop watching a prefix. Changes that are already in the outbox stay there."""
        if prefix in session.watches:
            session.watches.remove(prefix)
            watchers = self._watchers[prefix]
            del watchers[session]
            if not watchers:
                del self._watchers[prefix]

    def unwatch_all(self, session: Session) -> None:
        """Stop watching all prefixes, and drop the changes in the outbox."""
        for prefix in tuple(session.watches):
            self.unwatch(session, prefix)
        session.outbox.clear()

    def _notify(self, key: str, entry: Entry | None) -> None:
        for prefix in (*_above(key), key):
            for session in self._watchers.get(prefix, ()):
                session.notify(key, entry)

    def _own(self, key: str, session: Session | None) -> None:
        before = self._owners.pop(key, None)
        if before is not None:
            before.keys.discard(key)
        if session is not None:
            self._owners[key] = session
            session.keys.add(key)


def _as_expected(entry: Entry | None, expect: int | None) -> bool:
    return expect is None or expect == (ABSENT if entry is None else entry.revision)


class Watched:
    """A client's copy of the entries under the watched prefixes."""

    closed: Collection[str] = ()
    """The keys of `Store.closed`."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.prefixes: dict[str, None] = {}

    def watch(self, prefix: str) -> None:
        self.prefixes[prefix] = None

    def unwatch(self, prefix: str) -> None:
        self.prefixes.pop(prefix, None)
        for key in [key for key in self.entries if not self._watched(key)]:
            del self.entries[key]

    def _watched(self, key: str) -> bool:
        return any(covers(prefix, key) for prefix in self.prefixes)


class Mirror(Watched):
    """The copy of a client that receives changes in order."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: set[str] = set()
        """Keys that were deleted because their client closed the connection."""
        self.stale = False  # True if the copy has changed since this was last set to False

    def unwatch(self, prefix: str) -> None:
        super().unwatch(prefix)
        self.closed = {key for key in self.closed if self._watched(key)}

    def note(self, news: Outbox) -> None:
        """Apply changes to watched keys."""
        for key, entry in news.items():
            if not self._watched(key):
                continue
            self.stale = True
            self.closed.discard(key)
            if entry is None or entry == CLOSED:
                self.entries.pop(key, None)
                self.closed.update([key] if entry else ())
            else:
                self.entries[key] = entry

    def replace(self, prefix: str, entries: Entries) -> None:
        """Replace the entries that the prefix covers with `entries`."""
        if prefix not in self.prefixes:
            return
        for key in [key for key in self.entries if covers(prefix, key)]:
            del self.entries[key]
        self.entries |= entries
        self.closed -= entries.keys()
        self.stale = True


class MirroringStore(Store):
    """A client of a store with its copy in `_mirror`."""

    _mirror: Watched

    @property
    def mirror(self) -> Entries:
        return self._mirror.entries

    @property
    def closed(self) -> Collection[str]:
        return self._mirror.closed
