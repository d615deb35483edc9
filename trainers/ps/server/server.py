"""One server's process: its endpoint, its loop, signals and the clock. `service` answers requests, and
`state` writes snapshots and the write-ahead log.
"""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq

from fleetrun.frozen import frozen
from trainers.process.log import glog
from trainers.ps.configs import PsConfigs
from trainers.ps.saves.manifest import Loaded, name_of
from trainers.ps.saves.read import RowOwner, check_small, load_tables, open_saves
from trainers.ps.server.members import Members
from trainers.ps.server.publisher import Publisher
from trainers.ps.server.saving import SaveRunner
from trainers.ps.server.service import Outgoing, Service
from trainers.ps.server.state import StateSaver
from trainers.ps.server.steps import AsyncSteps, SyncSteps
from trainers.ps.server.store import AnyTable, Store
from trainers.ps.server.table_meter import Emit, Numbers, TableMeter
from trainers.ps.tables.disk import checked_folder
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import describe_job, describe_kept_job
from trainers.ps.transport import Authenticator, CurveKeys, Newcomers, bind_to, receive, send, server_socket
from trainers.ps.wire import ROW_DTYPES, Kind, Message, WireError, decode, encode
from trainers.storage.folder import absolute_path


class LivenessChecks:
    """The schedule on which the server checks its trainers' connections, every `interval` seconds. Time that
    the server missed, because it was suspended or blocked by its disk, does not count as a trainer's absence.
    """

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._next = now + interval
        self._missed = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until the next check."""
        return max(0.0, self._next - now)

    def due(self, now: float) -> float | None:
        """Return the time without the missed time, or None before the next check."""
        if now < self._next:
            return None
        self._missed += now - self._next
        self._next = now + self._interval
        return now - self._missed

    def skip(self, now: float) -> None:
        """Miss no time, because no request is pending. The next check is due as soon as a request
        is pending.
        """
        self._next = max(self._next, now)


class TableClock:
    """The clock of rows with a time to live. It reads seconds since 1970, because saved tables and the
    write-ahead log outlive a process, and measures by the monotonic clock. If the node's clock is set, this
    clock follows and reports the difference, so that rows keep their age.
    """

    def __init__(self, monotonic: float, wall: float) -> None:
        self._ahead = wall - monotonic

    def read(self, monotonic: float, wall: float) -> tuple[float, float]:
        """Return the time, and by how many seconds the clock has been set since the last call."""
        set_by = wall - monotonic - self._ahead
        if abs(set_by) < _LEAST_SET_S:
            set_by = 0.0
        self._ahead += set_by
        return monotonic + self._ahead, set_by


_LEAST_SET_S = 1.0
"""A smaller difference comes from a time service, or from the time between two readings."""
_CHECK_INTERVAL_S = 0.5
_NOTHING = Message(kind=Kind.PROBE)
_PROBE = encode(_NOTHING)


@frozen(kw_only=True)
class ServerPlan:
    """Server `index` of `endpoints` for the trainers of this `start` of the job. `load_from`: saved tables to
    start with. `load_only`: the tables and parameters to load from them, or None for all. `settings`: text
    that must be the same on all trainers. `durable_dir`: the directory of snapshots and write-ahead log, if
    the configs request them.
    """

    endpoints: Sequence[str]
    index: int
    trainers: int
    sync: bool
    configs: PsConfigs
    max_staleness: int | None = None
    settings: str = ""
    start: str = ""
    keys: CurveKeys | None = None
    load_from: str | None = None
    load_only: Sequence[str] | None = None
    durable_dir: Path | None = None

    @property
    def job(self) -> str:
        """The description of the job and of this server's index. Every trainer must send the same
        description.
        """
        place = (len(self.endpoints), self.index, self.settings)
        return describe_job(self.sync, self.trainers, *place, start=self.start)


class Server:
    """A server that binds and recovers at construction, and serves in `run`. `emit`: see TableMeter. None
    reports nothing.
    """

    def __init__(self, plan: ServerPlan, emit: Emit | None = None) -> None:
        self._plan = plan
        self._endpoint = plan.endpoints[plan.index]
        self._context = zmq.Context()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._terminated = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._close)
            self._socket = server_socket(self._context, plan.keys)
            self._newcomers = None
            if plan.keys is not None:
                self._authenticator = Authenticator(self._socket, plan.keys)
            else:
                self._newcomers = Newcomers(self._socket)
            bind_to(self._socket, self._endpoint)
            self._state_saver = self._make_state_saver()
            self._make_service()
            self._meter = None if emit is None else TableMeter(self._store, self._steps, emit, self._numbers)
            self._checks = LivenessChecks(_CHECK_INTERVAL_S, time.monotonic())
            self._attended = self._verified = time.monotonic()
            self._clock = TableClock(time.monotonic(), time.time())
            undo.pop_all()

    def _make_state_saver(self) -> StateSaver | None:
        plan = self._plan
        if plan.durable_dir is None or plan.configs.durability == "none":
            return None
        job = describe_kept_job(plan.sync, len(plan.endpoints), plan.index, plan.settings)
        return StateSaver(plan.durable_dir, plan.configs, job=job, server=plan.index, wake=self._wake)

    def _make_service(self) -> None:
        plan, configs, saver = self._plan, self._plan.configs, self._state_saver
        # Half of the timeout is for heartbeats to notice a dead connection, and half is for a new connection.
        grace = configs.trainer_timeout_s / 2
        self._members = Members(plan.trainers, grace, configs.join_timeout_s, time.monotonic())
        self._store = Store(
            row_dtype=ROW_DTYPES[configs.wire_dtype],
            skip_bad=configs.nonfinite == "skip",
            disk=checked_folder(configs.disk_dir) if configs.disk_dir else None,
            threads=configs.server_threads,
            fill=self._fill if plan.load_from is not None else None,
        )
        self._steps = SyncSteps(self._store) if plan.sync else AsyncSteps(self._store, plan.max_staleness)
        reading = (lambda: saver.busy) if saver is not None else (lambda: False)
        where = absolute_path(configs.publish) if configs.publish else ""
        self._saving = SaveRunner(
            plan.index, len(plan.endpoints), wake=self._wake, reading=reading, published=where
        )
        self._publisher = (
            Publisher(plan.endpoints, where, configs, sync=plan.sync, keys=plan.keys, wake=self._wake)
            if where and plan.index == 0
            else None
        )
        self._service = Service(
            self._members,
            self._store,
            self._steps,
            job=plan.job,
            sync=plan.sync,
            may_return=not plan.sync or saver is not None,
            saving=self._saving,
            record=saver.record if saver is not None else None,
            publisher=self._publisher,
        )
        if saver is not None:
            saver.recover(
                self._service,
                self._members,
                self._store,
                self._steps,
                trainers=plan.trainers,
                start=plan.start,
            )
            if self._publisher is not None and saver.recovered:
                self._publisher.continues()

    @property
    def dismissed(self) -> bool:
        """True if every trainer has left."""
        return self._service.over

    def run(self) -> None:
        """Serve until every trainer has left or SIGTERM arrives. A later SIGTERM waits until the durable
        state has been closed or removed, because the writer of a snapshot may be slow to end.
        """
        try:
            with self._handle_sigterm():  # before the log line after which a SIGTERM may come
                try:
                    glog(f"running server with rank id: {self._plan.index}, endpoint: {self._endpoint}")
                    if self._publisher is not None:
                        self._publisher.start()
                    self._serve()
                finally:
                    if self._publisher is not None:
                        self._publisher.close()
                    self._saving.close()
                    if self._state_saver is not None:
                        self._state_saver.close(over=self.dismissed)
        finally:
            self._close()

    def _fill(self, tables: Sequence[AnyTable]) -> Loaded:
        assert self._plan.load_from is not None
        started, names = time.monotonic(), self._plan.load_only
        place = RowOwner(self._plan.index, len(self._plan.endpoints))
        opened = open_saves(self._plan.load_from)
        everything = opened.rows()
        if names is not None:
            opened = opened.only(names)
            tables = [table for table in tables if name_of(table.spec) in names]
        check_small(opened.specs().values(), [table.spec for table in tables], opened.folder.where)
        load_tables(opened, tables, place)
        sparse = [table for table in tables if isinstance(table, SparseTable)]
        for table in sparse:
            if lost := table.sweep():
                glog(
                    f"WARNING: removed {lost} rows of {table.spec.name!r} in {opened.folder.where}, because "
                    "this server's share of the table's bound is full. Raise max_rows or max_bytes."
                )
        rows = sum(map(len, sparse))
        glog(f"loaded {rows} rows of {self._plan.load_from} in {time.monotonic() - started:.1f} s")
        found = opened.rows()
        ids = " ".join(save.id for save in opened.saves)
        return Loaded(
            where=opened.folder.where,
            source=f"{ids} of {opened.folder.where}" + (f", {' '.join(sorted(names))}" if names else ""),
            tables=frozenset(table.spec.name for table in tables),
            rows=found,
            others=sorted(everything.keys() - found.keys()),
            named=names is not None,
        )

    def _wake(self) -> None:
        """Wake the loop after a write. Any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # unread wake-ups fill the socket, so the loop will wake
            self._wake_sender.send(b"w")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        if self._newcomers is not None:
            poller.register(self._newcomers.events, zmq.POLLIN)
        while not self._service.over:
            quiet = self._quiet
            ready = dict(poller.poll(self._wait_ms(time.monotonic())))
            if quiet:
                self._checks.skip(time.monotonic())
            if self._wake_receiver.fileno() in ready and self._drain_wakeups():
                return
            if self._socket in ready:
                self._receive()
            self._attend(time.monotonic(), time.time())

    @property
    def _quiet(self) -> bool:
        """True if nothing needs a check before a message arrives."""
        return self._service.idle and self._state_saver is None

    def _wait_ms(self, now: float) -> int | None:
        """Return the milliseconds until the server has work without a message, or None for no limit."""
        if self._service.shrinking:
            return 0
        waits = [] if self._quiet else [self._checks.wait(now)]
        if self._newcomers is not None and (pause := self._newcomers.check()):
            waits.append(pause)
        if self._meter is not None and (wait := self._meter.wait(now)) is not None:
            waits.append(wait)
        return math.ceil(min(waits) * 1000) if waits else None

    def _attend(self, now: float, wall: float) -> None:
        """Do the work that is due at `now`, by the monotonic clock. `wall` is the node's time."""
        if self._meter is not None:
            self._meter.report(now)
        if self._service.shrinking:
            self._send(self._service.shrink_some(self._reachable))
        if not self._quiet and (checked := self._checks.due(now)) is not None:
            changes, self._attended = self._store.changes, now
            self._service.pass_time(*self._clock.read(now, wall))
            if self._meter is not None and self._store.changes > changes:
                self._meter.active = True
            self._send(self._service.tick(self._reachable, checked))
            self._save_state()
        if now - self._verified >= _CHECK_INTERVAL_S:
            self._verified = now
            self._service.verify(now - self._attended)

    def _drain_wakeups(self) -> bool:
        """Return True if SIGTERM arrived. Otherwise a write has ended, so retry the requests that may wait
        for it.
        """
        self._wake_receiver.recv(4096)
        if self._terminated:
            return True
        self._save_state()
        self._send(self._service.retry_pending(self._reachable))
        return False

    def _save_state(self) -> None:
        may_cut = not (self._saving.busy or self._service.shrinking)  # `busy` closes abandoned saves
        if self._state_saver is not None:
            self._state_saver.update(self._members, self._store, self._steps, may_cut=may_cut)

    def _numbers(self) -> Numbers:
        """Return the step of this server and the numbers of its saved state, for its meter."""
        kept = {} if self._state_saver is None else self._state_saver.numbers()
        return {"step": self._steps.step, **kept}

    def _receive(self) -> None:
        if self._meter is not None:
            self._meter.active = True
        route, *frames = receive(self._socket)
        if self._newcomers is not None and self._newcomers.greets(frames):
            return
        try:
            message = decode([frame.buffer for frame in frames])
        except WireError as error:
            self._send([(route.bytes, _refused(_NOTHING, error))])
            return
        self._send(self._service.handle(route.bytes, message, self._reachable))

    def _send(self, outgoing: Sequence[Outgoing]) -> None:
        for route, message in outgoing:
            try:
                frames = encode(message)
            except WireError as error:  # more values than fit, because the trainer requested too much at once
                frames = encode(_refused(message, error))
            self._try_send([route, *frames])

    def _reachable(self, route: bytes) -> bool:
        return self._try_send([route, *_PROBE])

    def _try_send(self, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Return True if the peer is still connected. A peer without a reply repeats its request."""
        try:
            send(self._socket, frames)
        except zmq.Again:
            return True  # connected, but slow to read
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _close(self) -> None:
        for name in ("_authenticator", "_newcomers", "_socket"):  # absent after a failed construction
            made = getattr(self, name, None)
            if made is not None:
                made.close()
        self._context.term()
        self._wake_receiver.close()
        self._wake_sender.close()

    @contextlib.contextmanager
    def _handle_sigterm(self) -> Iterator[None]:
        """Wake the loop on SIGTERM. Signal handlers run in the main thread only, so another thread sets no
        handler.

        The interpreter itself writes to the wake socket. A signal therefore also ends the poll if another
        thread receives the signal, or if it arrives just before the loop starts to wait.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, self._set_terminated)
        woken = signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            signal.signal(signal.SIGTERM, previous)

    def _set_terminated(self, number: int, frame: object) -> None:
        self._terminated = True


def _refused(message: Message, error: WireError) -> Message:
    return message.reply(Kind.REFUSED, code=error.code, text=str(error))
