"""Server: one endpoint, one loop. Knows sockets, signals and the clock; every answer belongs to `service`,
and what outlives the process to `state`.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from trainers.process.log import glog
from trainers.ps.configs import PsConfigs
from trainers.ps.saves.read import Place, check_small, load_tables, open_saves
from trainers.ps.server.members import Members
from trainers.ps.server.saving import Saving
from trainers.ps.server.service import Outgoing, Service
from trainers.ps.server.state import Keeper
from trainers.ps.server.steps import AsyncSteps, SyncSteps
from trainers.ps.server.store import AnyTable, Store
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import job_words, kept_words
from trainers.ps.transport import Gate, JobKeys, receive, send, server_socket
from trainers.ps.wire import ROW_DTYPES, Field, Kind, Message, WireError, bytes_part, decode, encode


class Looks:
    """One look every so many seconds. Times are of a clock that also runs while nobody looks."""

    def __init__(self, every: float, now: float) -> None:
        self._every = every
        self._next = now + every
        self._missed = 0.0

    def wait(self, now: float) -> float:
        """Seconds until the next one."""
        return max(0.0, self._next - now)

    def due(self, now: float) -> float | None:
        """The time that trainers are told, without what was missed; None before the next look."""
        if now < self._next:
            return None
        self._missed += now - self._next
        self._next = now + self._every
        return now - self._missed

    def unneeded(self, now: float) -> None:
        """Nobody waits for a look: no time is missed, and the next one comes as soon as somebody does."""
        self._next = max(self._next, now)


_LOOK_EVERY_S = 0.5
_PROBE = encode(Message(kind=Kind.PROBE))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """What a server is to be: `index` of `endpoints` for this many trainers, those of this `start` of the
    job. `load_from`: a save to begin with. `settings`: in words, what trainers must have alike. `keep_in`: a
    folder for snapshots and log, if the configs ask for any.
    """

    endpoints: Sequence[str]
    index: int
    trainers: int
    sync: bool
    configs: PsConfigs = field(default_factory=PsConfigs)
    max_staleness: int | None = None
    settings: str = ""
    start: str = ""
    keys: JobKeys | None = None
    load_from: str | None = None
    keep_in: Path | None = None

    @property
    def words(self) -> str:
        """The job and this server's place in it, as every trainer must describe them too."""
        place = (len(self.endpoints), self.index, self.settings)
        return job_words(self.sync, self.trainers, *place, start=self.start)

    @property
    def kept_words(self) -> str:
        """What its folder must be of."""
        return kept_words(self.sync, len(self.endpoints), self.index, self.settings)


class Server:
    """Binds and recovers at construction, serves in `run`."""

    def __init__(self, plan: ServerPlan) -> None:
        self._plan = plan
        self._endpoint = plan.endpoints[plan.index]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waked, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._told_to_end = False
        with contextlib.ExitStack() as half:
            half.callback(self._close)
            self._gate = Gate(self._context, plan.keys) if plan.keys is not None else None
            self._socket = server_socket(self._context, self._endpoint, plan.keys)
            self._keeper = self._open_keeper()
            self._make_service()
            half.pop_all()

    def _open_keeper(self) -> Keeper | None:
        plan = self._plan
        if plan.keep_in is None or plan.configs.durability == "none":
            return None
        return Keeper(plan.keep_in, plan.configs, job=plan.kept_words, server=plan.index, wake=self._wake)

    def _make_service(self) -> None:
        plan, configs, keeper = self._plan, self._plan.configs, self._keeper
        # Half of the timeout goes to noticing a silent connection (heartbeats), half to waiting for another.
        grace = configs.trainer_timeout_s / 2
        self._members = Members(plan.trainers, grace, configs.join_timeout_s, time.monotonic())
        self._store = Store(
            row_dtype=ROW_DTYPES[configs.wire_dtype],
            skip_bad=configs.nonfinite == "skip",
            fill=self._fill if plan.load_from is not None else None,
        )
        self._steps = SyncSteps(self._store) if plan.sync else AsyncSteps(self._store, plan.max_staleness)
        reading = (lambda: keeper.busy) if keeper is not None else (lambda: False)
        self._saving = Saving(plan.index, len(plan.endpoints), wake=self._wake, reading=reading)
        self._service = Service(
            self._members,
            self._store,
            self._steps,
            job=plan.words,
            sync=plan.sync,
            may_return=not plan.sync or keeper is not None,
            saving=self._saving,
            record=keeper.record if keeper is not None else None,
        )
        if keeper is not None:
            keeper.recover(
                self._service,
                self._members,
                self._store,
                self._steps,
                trainers=plan.trainers,
                start=plan.start,
            )

    @property
    def dismissed(self) -> bool:
        """Whether every trainer has left."""
        return self._service.over

    def run(self) -> None:
        """Serve until every trainer has left or SIGTERM arrives."""
        try:
            with self._termination():  # before anybody is told that it runs, and may want to end it
                glog(f"running server with rank id: {self._plan.index}, endpoint: {self._endpoint}")
                self._serve()
        finally:
            self._saving.give_up()
            if self._keeper is not None:
                self._keeper.close(over=self.dismissed)
            self._close()

    def _fill(self, tables: Sequence[AnyTable]) -> None:
        if self._plan.load_from is not None:
            started = time.monotonic()
            place = Place(self._plan.index, len(self._plan.endpoints))
            opened = open_saves(self._plan.load_from)
            saved = [table.spec for table in opened.tables().values()]
            check_small(saved, [table.spec for table in tables], opened.folder.where)
            load_tables(opened, tables, place)
            rows = sum(len(table) for table in tables if isinstance(table, SparseTable))
            glog(f"loaded {rows} rows of {self._plan.load_from} in {time.monotonic() - started:.1f} s")

    def _wake(self) -> None:
        """Callable in any thread: something has been written."""
        with contextlib.suppress(BlockingIOError):  # full of wake-ups that have not been read: it will wake
            self._waker.send(b"w")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waked, zmq.POLLIN)
        looks = Looks(_LOOK_EVERY_S, time.monotonic())
        while not self._service.over:
            quiet = self._service.idle and self._keeper is None
            ready = dict(poller.poll(None if quiet else round(looks.wait(time.monotonic()) * 1000)))
            if self._waked.fileno() in ready and self._ended():
                return
            if self._socket in ready:
                self._receive()
            if quiet:
                looks.unneeded(time.monotonic())
            elif (now := looks.due(time.monotonic())) is not None:
                self._look(now)

    def _ended(self) -> bool:
        """Whether this was SIGTERM; otherwise something was written, which requests may wait for."""
        self._waked.recv(4096)
        if self._told_to_end:
            return True
        self._keep()
        self._send(self._service.look_again(self._reachable))
        return False

    def _look(self, now: float) -> None:
        self._send(self._service.tick(self._reachable, now))
        self._keep()

    def _keep(self) -> None:
        if self._keeper is not None:
            self._keeper.look(self._members, self._store, self._steps, may_cut=not self._saving.busy)

    def _receive(self) -> None:
        route, *frames = receive(self._socket)
        try:
            message = decode([frame.buffer for frame in frames])
        except WireError as error:
            text = bytes_part(Field.TEXT, str(error).encode())
            refused = Message(kind=Kind.REFUSED, code=error.code, parts=(text,))
            self._send([(route.bytes, refused)])
            return
        self._send(self._service.handle(route.bytes, message, self._reachable))

    def _send(self, outgoing: Sequence[Outgoing]) -> None:
        for route, message in outgoing:
            self._sent([route, *encode(message)])

    def _reachable(self, route: bytes) -> bool:
        return self._sent([route, *_PROBE])

    def _sent(self, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Whether the peer still has a connection. A reply that it did not get, it will ask for again."""
        try:
            send(self._socket, frames)
        except zmq.Again:
            return True  # connected, and slow to read
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _close(self) -> None:
        for name in ("_socket", "_gate"):  # what a failed construction has not made is not there
            made = getattr(self, name, None)
            if made is not None:
                made.close()
        self._context.term()
        self._waked.close()
        self._waker.close()

    @contextlib.contextmanager
    def _termination(self) -> Iterator[None]:
        """SIGTERM wakes the loop up. Handlers run in the main thread only; elsewhere it never does.

        The interpreter itself writes to the waker: no waiting is interrupted by a signal that another thread
        gets, or that comes just before the loop begins to wait.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, self._tell_to_end)
        woken = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            signal.signal(signal.SIGTERM, previous)

    def _tell_to_end(self, number: int, frame: object) -> None:
        self._told_to_end = True
