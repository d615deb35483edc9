"""Implement a Store in an etcd (3.4 or later), as a client in the launcher's event loop.

The library for etcd blocks, so two threads send requests and watch (`threads.py`). Here their results reach
the loop and update the mirror.

Importing this module raises NotSupportedError if the library is not installed.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterable

from fleetrun.aliases import Callback, Environ
from fleetrun.elastic.etcd import wire
from fleetrun.elastic.etcd.wire import Change, parse_address, password_for
from fleetrun.elastic.mailbox import Mailbox
from fleetrun.elastic.store import Entries, Entry, Found, Listener, MirroringStore, Watched, Written
from fleetrun.errors import LaunchError, NotSupportedError, StoreSilentError
from fleetrun.pod.loop import Loop, Timer


class EtcdMirror(Watched):
    """The mirror, which has three sources: reads of all prefixes, later changes from the watch, and answers
    to own writes. An answer may arrive before the watch reports the write.

    The mirror never goes back in time, unless etcd itself does (its data were lost).
    """

    def __init__(self) -> None:
        super().__init__()
        self._revision = 0  # up to which the watch has reported everything
        self._ahead: dict[str, int] = {}  # keys with a newer answer, and the answer's revision
        self._before = 0  # the newest revision when the read started; the read must be at least as new
        self._since: set[str] = set()  # keys with answers after the read started

    def reading(self) -> None:
        """Note the start of a read of all prefixes."""
        self._before = max(self._revision, *self._ahead.values(), 0)
        self._since.clear()

    def replace(self, found: Entries, revision: int) -> bool:
        """Take the result of the read. Return True if anything has changed."""
        if revision < self._before:
            self._ahead = {key: self._ahead[key] for key in self._since & self._ahead.keys()}
        self._revision = revision
        self._ahead = {key: until for key, until in self._ahead.items() if until > revision}
        now = {key: entry for key, entry in found.items() if self._watched(key) and key not in self._ahead}
        now |= {key: self.entries[key] for key in self._ahead if key in self.entries}
        if now == self.entries:
            return False
        self.entries.clear()
        self.entries.update(now)
        return True

    def follow(self, changes: Iterable[Change]) -> bool:
        """Apply changes from the watch. Return True if anything has changed."""
        different = False
        for change in changes:
            self._revision = max(self._revision, change.revision)
            if change.revision > self._ahead.get(change.key, 0):
                self._ahead.pop(change.key, None)
                different |= self._set(change)
        return different

    def answered(self, change: Change) -> bool:
        """Apply the state of a key after an own write. Return True if anything has changed."""
        if not self._watched(change.key) or change.revision <= self._revision:
            return False
        self._since.add(change.key)
        self._ahead[change.key] = max(change.revision, self._ahead.get(change.key, 0))
        return self._set(change)

    def _set(self, change: Change) -> bool:
        if not self._watched(change.key) or self.entries.get(change.key) == change.entry:
            return False
        if change.entry is None:
            del self.entries[change.key]
        else:
            self.entries[change.key] = change.entry
        return True


try:
    from fleetrun.elastic.etcd.client import Access, Client, Unreachable
    from fleetrun.elastic.etcd.threads import Request, Watcher, Worker
except ModuleNotFoundError as error:
    raise NotSupportedError(
        f"the package {error.name} is not installed; a rendezvous in an etcd needs it",
        hint="pip install 'fleetrun[etcd]'",
    ) from None

LAST_MOMENT = 1.0
"""Seconds that `close` waits for an etcd with a slow disk."""
_SHORTEST_LEASE = 2  # seconds; the shortest lease that etcd grants
_START = 5.0  # seconds until a missing member of the job's own etcd is an error
_TOGETHER = 0.01  # seconds; changes within this time are reported together


class EtcdStore(MirroringStore):
    """A Store under `/fleetrun/<job id>/` of the etcd at `url` (see `wire.py`).

    Raises UsageError if the address, or a file named in it, cannot be used. Threads start with `open`.
    """

    def __init__(
        self,
        loop: Loop,
        url: str,
        *,
        job_id: str,
        node_id: str,
        lease: float,
        environ: Environ = os.environ,
        fenced: bool = False,
        own: int | None = None,
    ) -> None:
        """Prepare the store.

        With `fenced`, the job's own nodes run the cluster (`member.py`). The store is lost as soon as the
        lease of this client may have ended, because the other nodes may then continue without this node.
        `own` is the position of this node's member in `url`.
        """
        address = parse_address(url)
        seconds = max(_SHORTEST_LEASE, math.ceil(lease))
        longest = min(max(lease / (8 if fenced else 4), 0.5), 5.0)
        access = Access(address, password_for(address, environ), timeout=longest)
        self._seconds = seconds
        self._job_id = job_id
        self._members = address.endpoints
        self._fence = Timer()
        self._fenced = fenced
        self._opened = 0.0
        first = zlib.crc32(node_id.encode()) if own is None else own  # spreads the nodes over the members
        self._keys = wire.Keys(job_id)
        self._loop = loop
        self._listener: Listener | None = None
        self._mirror: EtcdMirror = EtcdMirror()
        self._mailbox: Mailbox | None = None
        check = self._check_complete if fenced else lambda client: None
        self._worker = Worker(Client(access, first), seconds, self, access.prove, check)
        self._watcher = Watcher(Client(access, first), self._keys, seconds * 0.75, self)
        self._request_thread = self._thread("etcd requests", self._worker.run)
        self._watch_thread = self._thread("etcd watch", self._watcher.run)
        self._has_lease = False
        self._fresh = False
        self._is_up = False
        self._turn = 0  # the watcher's turn that completes the mirror
        self._whole = True
        self._failures: dict[str, str] = {}
        self._reported = ""  # the reason in the last `down`
        self._different = False
        self._late: list[wire.Change] = []  # changes that the mirror does not show yet
        self._together = Timer()

    # ---- Called by the owner (store.Store)

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._opened = self._loop.clock()
        self._mailbox = Mailbox(self._loop, self._settle)
        # Threads inherit this mask, so that signals go to the main thread, which handles them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._request_thread.start()
            self._watch_thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _thread(self, name: str, act: Callback) -> threading.Thread:
        def run() -> None:
            try:
                act()
            finally:  # also after a bug, whose traceback is printed: the job must not wait for this thread
                self.gave_up(LaunchError("the client of the etcd has failed"))

        return threading.Thread(target=run, name=name, daemon=True)

    def watch(self, prefix: str) -> None:
        self._mirror.watch(prefix)
        self._different = True
        self._read_again()

    def unwatch(self, prefix: str) -> None:
        self._mirror.unwatch(prefix)
        self._read_again()

    def put(
        self,
        key: str,
        value: bytes,
        *,
        expect: int | None = None,
        leased: bool = False,
        then: Written | None = None,
    ) -> None:
        def body(lease: str) -> wire.Body:
            return wire.put(self._keys, key, value, expect, lease if leased else None)

        self._write(body, key, value, repeat=expect is None, then=then)

    def delete(self, key: str, *, expect: int | None = None, then: Written | None = None) -> None:
        self._write(
            lambda lease: wire.delete(self._keys, key, expect), key, None, repeat=expect is None, then=then
        )

    def delete_prefix(self, prefix: str) -> None:
        self._ask("/kv/deleterange", lambda lease: self._keys.span(prefix), lambda answer: None)

    def read(self, key: str, then: Found) -> None:
        def answered(answer: wire.Body | None) -> None:
            assert answer is not None, "reads repeat until an answer arrives"
            then(wire.entries(self._keys, answer).get(key))

        self._ask("/kv/txn", lambda lease: wire.read_one(self._keys, key), answered, write=False)

    def close(self) -> None:
        self._stop()
        self._worker.end(self._seconds)  # unless the process exits earlier
        if self._request_thread.is_alive():
            self._request_thread.join(LAST_MOMENT)

    def _stop(self) -> None:
        self._listener = None
        if self._mailbox is not None:
            self._mailbox.close()
        self._together.cancel()
        self._fence.cancel()
        self._watcher.end()

    # ---- Called by the threads

    def leased(self, *, fresh: bool) -> None:
        self._post(lambda: self._now_leased(fresh))

    def unanswered(self, why: str) -> None:
        self._post(lambda: self._failed("requests", why))

    def unreadable(self, why: str) -> None:
        self._post(lambda: self._failed("watch", why))

    def reading(self) -> None:
        self._post(self._now_reading)

    def read_all(self, turn: int, entries: dict[str, Entry], revision: int) -> None:
        self._post(lambda: self._now_read(turn, entries, revision))

    def changed(self, changes: list[wire.Change]) -> None:
        self._post(lambda: self._late.extend(changes))

    def gave_up(self, error: LaunchError) -> None:
        self._post(lambda: self._lost(error))

    def _post(self, call: Callback) -> None:
        assert self._mailbox is not None
        self._mailbox.post(call)

    # ---- In the loop

    def _write(
        self,
        body: Callable[[str], wire.Body],
        key: str,
        value: bytes | None,
        *,
        repeat: bool,
        then: Written | None,
    ) -> None:
        def answered(answer: wire.Body | None) -> None:
            if answer is not None:
                self._note(self._mirror.answered(wire.written(self._keys, answer, key, value)))
            if then is not None:
                then(answer is not None and bool(answer.get("succeeded")))

        self._ask("/kv/txn", body, answered, repeat=repeat)

    def _ask(
        self,
        path: str,
        body: Callable[[str], wire.Body],
        then: Callable[[wire.Body | None], None],
        *,
        repeat: bool = True,
        write: bool = True,
    ) -> None:
        def answered(answer: wire.Body | None) -> None:
            self._post(lambda: self._deliver(then, answer))

        self._worker.submit(Request(path=path, body=body, answered=answered, repeat=repeat, write=write))

    def _deliver(self, then: Callable[[wire.Body | None], None], answer: wire.Body | None) -> None:
        if self._listener is not None:
            then(answer)

    def _read_again(self) -> None:
        self._turn = self._watcher.watch(tuple(self._mirror.prefixes))
        self._whole = not self._mirror.prefixes

    def _check_complete(self, client: Client) -> None:
        """Check that the nodes' cluster is complete and belongs to this job. Runs in the worker's thread
        before each lease.
        """
        job = wire.completed_for(client.ask("/kv/range", wire.COMPLETE))
        if job is None:
            there = {each.get("name", "") for each in client.ask("/cluster/member/list", {})["members"]}
            missing = [each for each in self._members if not any(name.endswith(f"/{each}") for name in there)]
            raise Unreachable(
                f"the store needs all nodes of --master to start; missing: {', '.join(missing)}"
            )
        if job != self._job_id:
            raise LaunchError(
                f"{client.name} serves the store of another job, {job}", hint="Use other ports in --master."
            )

    def _check_fence(self) -> None:
        left = self._worker.renewed + self._seconds - time.monotonic()
        if left > 0:
            self._fence = self._loop.after(left, self._check_fence)
            return
        why = next(iter(self._failures.values()), "no answer")
        text = f"no majority of the nodes in --master has answered for {self._seconds} s: {why}"
        self._lost(StoreSilentError(text))

    def _now_leased(self, fresh: bool) -> None:
        self._has_lease = True
        if self._fenced and not self._fence.pending:
            self._check_fence()
        self._fresh |= fresh
        if self._failures.pop("requests", None) is not None:
            self._read_again()  # the stream's connection may be dead too, without an error yet

    def _now_reading(self) -> None:
        self._show_late()
        self._mirror.reading()

    def _now_read(self, turn: int, entries: dict[str, Entry], revision: int) -> None:
        self._failures.pop("watch", None)
        if turn == self._turn:
            self._whole = True
            self._show_late()
            self._note(self._mirror.replace(entries, revision))

    def _failed(self, where: str, why: str) -> None:
        self._failures[where] = why

    def _note(self, different: bool) -> None:
        self._different |= different

    def _lost(self, error: LaunchError) -> None:
        listener = self._listener
        self._stop()
        self._worker.end(0.0)
        if self._fenced and "TLS" in error.message:
            error.hint = "Set the same FLEETRUN_TOKEN or --token_file on all nodes, or on none."
        if listener is not None:
            listener.lost(error)

    def _settle(self) -> None:
        """Call the listener after the calls from the threads."""
        if self._listener is None:
            return
        if self._failures and self._members_start():
            pass
        elif self._failures:
            why = self._failures.get("requests") or self._failures["watch"]
            self._is_up = False
            if why != self._reported:
                self._reported = why
                self._listener.down(why)
        elif self._has_lease and self._whole and (not self._is_up or self._fresh):
            self._is_up, self._reported = True, ""
            fresh, self._fresh = self._fresh, False
            self._listener.up(fresh=fresh)
        self._notify_changes()

    def _members_start(self) -> bool:
        """Return True while no member is expected to answer yet, because the members start together with the
        nodes.
        """
        return self._fenced and not self._fence.pending and self._loop.clock() < self._opened + _START

    def _notify_changes(self) -> None:
        if self._together.pending and not self._different:
            return  # further changes may follow within _TOGETHER
        self._show_late()
        if self._listener is not None and self._different and self._is_up and self._whole:
            self._different = False
            self._together.cancel()
            self._together = self._loop.after(_TOGETHER, self._notify_changes)
            self._listener.changed()

    def _show_late(self) -> None:
        self._note(self._mirror.follow(self._late))
        self._late.clear()
