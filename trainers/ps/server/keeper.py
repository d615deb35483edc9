"""Keeper: a server's memory beyond its process - snapshots and the log, by the job's wishes. Knows when;
leaves files to `durable` and what the state is to `state`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from trainers.errors import ServerError
from trainers.process.log import glog
from trainers.ps.configs import PsConfigs
from trainers.ps.durable.durable import Durable
from trainers.ps.durable.errors import JournalFullError
from trainers.ps.durable.syncing import Fsync
from trainers.ps.net.wire import Code, Kind, Message, WireError, decode, encode
from trainers.ps.saved.errors import SaveError
from trainers.ps.server.members import Members, Refusal
from trainers.ps.server.service import Service
from trainers.ps.server.state import StateError, dump, restore, table_names
from trainers.ps.server.steps import Steps
from trainers.ps.server.store import Store
from trainers.ps.server.succession import succeed, successors


class Keeper:
    """The state of one server, kept in a folder. `wake` is called in another thread when a snapshot has been
    written.
    """

    def __init__(
        self, folder: Path, configs: PsConfigs, *, job: str, server: int, wake: Callable[[], None]
    ) -> None:
        fsync = cast(Fsync, configs.log_fsync) if configs.durability == "log" else None
        self._durable = Durable(folder, job=job, server=server, fsync=fsync)
        self._interval = configs.snapshot_interval_s
        self._wake = wake
        self._due: float | None = None
        self._only_snapshots = fsync is None  # then who joined must be in one, or would be unknown later
        self._taking_part: list[int | None] = []
        self._recovered = False

    def recover(
        self, service: Service, members: Members, store: Store, steps: Steps, *, trainers: int, start: str
    ) -> None:
        """Bring the service to where the folder says that it was, and let it go on with so many trainers of
        this start of the job. Raises ServerError when it cannot be.
        """
        self._replay(service, members, store, steps)
        former = len(members)
        if (former, members.start) == (trainers, start):
            return
        # One record: whoever is killed here comes back before it or after it. Without a journal the next
        # snapshot has it, and whoever comes back before that does the same again.
        record = successors(trainers, start)
        self._durable.append(encode(record))
        succeed(record, members, steps)
        if former != trainers:
            step = next(iter(members)).step
            glog(f"the job had {former} trainers and has {trainers} now: they begin at step {step}")

    def _replay(self, service: Service, members: Members, store: Store, steps: Steps) -> None:
        started, records = time.monotonic(), 0
        snapshot = self._durable.snapshot
        try:
            if snapshot is not None:
                by_name = {spec.name: spec for spec in snapshot.specs}
                names = table_names(snapshot.blob)
                store.make({number: by_name[name] for number, name in names.items()})
                snapshot.load(list(store.tables.values()))
                restore(snapshot.blob, members, store, steps)
            for frames in self._durable.records():
                record = decode(frames)
                if record.kind is Kind.TRAINERS:
                    succeed(record, members, steps)
                else:
                    service.replay(record)
                records += 1
        except (StateError, WireError, Refusal) as error:
            raise ServerError(
                f"what this server kept cannot be used: {error}; remove its durability_dir to start anew"
            ) from error
        self._recovered = snapshot is not None or records > 0
        if self._recovered:
            took = time.monotonic() - started
            glog(
                f"recovered {len(store.tables)} tables at step {steps.step}: {records} records, {took:.1f} s"
            )

    def record(self, request: Message) -> None:
        """Keep a request that changes the state; when this returns it may be acknowledged. Raises Refusal
        when there is no room for it.
        """
        try:
            self._durable.append(encode(request))
        except JournalFullError as error:
            raise Refusal(Code.FAILED, str(error)) from error

    def look(self, members: Members, store: Store, steps: Steps, *, may_cut: bool) -> None:
        """End a snapshot that is written, and begin one that is due. The first follows the initial values at
        once.
        """
        self._end()
        if not store.ready or self._durable.snapshotting or not may_cut:
            return
        taking_part = [member.incarnation for member in members]
        joined = self._only_snapshots and taking_part != self._taking_part
        self._taking_part = taking_part
        if self._due is None or joined or time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval
            blob = dump(members, store, steps)
            try:
                self._durable.begin_snapshot(
                    steps.step, store.tables.values(), blob, done=lambda task: self._wake()
                )
            except (JournalFullError, OSError) as error:  # the log goes on in its old file
                self._complain(error)

    @property
    def busy(self) -> bool:
        """Whether the tables are being read for a snapshot."""
        return self._durable.snapshotting

    def close(self, *, over: bool) -> None:
        """Let the folder go; when the job is over, remove it."""
        if over:
            self._durable.discard()
        else:
            self._durable.close()

    def _end(self) -> None:
        task = self._durable.end_snapshot()
        if task is None:
            return
        try:
            task.result()
        except SaveError as error:  # the former snapshot and the log still hold everything
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        glog(f"a snapshot failed, the next one is tried in {self._interval:g} s: {error}")
