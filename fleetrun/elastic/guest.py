"""Let a command query the nodes of a running job through its store, without taking part in the job.

The command lists the nodes and reads their answers to its requests (`requests.py`). It runs on a host of the
job or on any other host.

The store's client runs in a separate thread, so its lease is renewed while the command waits for a reader of
its output. Answers arrive in one queue, which holds at most one piece of each node.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from fleetrun.aliases import Callback
from fleetrun.elastic.mailbox import Mailbox
from fleetrun.elastic.meeting import PREFERRED_PORT, open_as_guest
from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.records import BadRecordError, Nodes, Round, State
from fleetrun.elastic.requests import Piece, Request, pack_request, unpack_piece
from fleetrun.elastic.store import Entries, Entry, Store
from fleetrun.envs.contract import join_endpoint
from fleetrun.errors import LaunchError, UsageError
from fleetrun.frozen import frozen_by_name
from fleetrun.pod.loop import Loop, Timer

CONNECT_WITHIN = 10.0
"""Seconds to connect to the store and read the list of nodes."""

UNDERSTAND_WITHIN = 5.0
"""Seconds until a node must confirm a request."""

ANSWER_WITHIN = 60.0
"""Longest pause between two pieces of a node, in seconds. A node that searches a long log sends empty
pieces.
"""


class UnreachableError(LaunchError):
    """The store of the job does not answer, it refuses this command, or no job runs there."""

    exit_code = 1


@frozen_by_name
class Address:
    """The address of a job's store."""

    master: str  # as in --master, with ports
    job: str
    token: str = ""


def read_address(text: str, token: str) -> Address:
    """Read `HOST[:PORT][,HOST...][/JOB]` or `etcd://HOST:PORT[,...][/JOB][?...]`. Raises UsageError."""
    scheme, mark, rest = text.rpartition("://")
    if mark and scheme != "etcd":
        raise UsageError(f"--job {text}: use HOST:PORT/JOB or etcd://HOST:PORT/JOB")
    rest, question, parameters = rest.partition("?")
    where, _, job = rest.partition("/")
    if not where or "/" in job:
        raise UsageError(f"--job {text}: use HOST:PORT/JOB, as in --master and --job_id of the launch")
    if not mark:
        where = ",".join(map(_with_port, where.split(",")))
    return Address(master=f"{scheme}{mark}{where}{question}{parameters}", job=job or "default", token=token)


def _with_port(text: str) -> str:
    host, mark, port = text.rpartition(":")
    if mark and port.isdecimal() and (":" not in host or host.startswith("[")):
        return join_endpoint(host.strip("[]"), int(port))
    return join_endpoint(text.strip("[]"), PREFERRED_PORT)


@frozen_by_name
class Heard:
    """An answer from the node of this rank: a piece, or the end of its pieces."""

    rank: int
    piece: Piece | None = None
    gone: str = ""  # why no piece follows
    over: bool = False  # with `gone`: the job has ended


class Guest:
    """A connection of a command to a job. Use it as a context manager, from the command's thread only."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._met = threading.Event()
        self._thread = _Client(address, self._heard, self._met)

    def __enter__(self) -> Guest:
        """Connect to the store and read the list of nodes. Raises LaunchError."""
        self._thread.start()
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect and drop open requests."""
        self._thread.end()

    def _wait(self) -> None:
        met, failed = self._met.wait(CONNECT_WITHIN), self._thread.failed
        if failed is not None:
            raise UnreachableError(failed.message, hint=failed.hint)
        if not met:
            raise UnreachableError(self._thread.silence)

    @property
    def nodes(self) -> Nodes:
        """The nodes that run the job, in rank order."""
        return self._thread.members

    def ask(self, request: Request, ranks: Sequence[int], patience: float) -> None:
        """Send a request to the nodes of these ranks. From now on `hear` returns their answers. A node may be
        silent for `patience` seconds.
        """
        chosen = {self.nodes[rank].id: rank for rank in ranks}
        self._thread.call(partial(self._thread.ask, request, chosen, patience))

    def hear(self, within: float | None = None) -> Heard | None:
        """Return the next piece of any asked node, or None if none arrives within so many seconds."""
        try:
            return self._heard.get(timeout=within)
        except queue.Empty:
            return None

    def take(self, heard: Heard) -> None:
        """Confirm that a piece was used, so that its node may send the next one."""
        if heard.piece is not None:
            self._thread.call(partial(self._thread.taken, heard.rank))

    def wait_for_end(self, ranks: Sequence[int]) -> None:
        """Wait until these nodes have left the job, or the job has ended."""
        while self._thread.present & set(ranks) and self._thread.failed is None:
            time.sleep(0.05)


@dataclass(slots=True)
class _Stream:
    """The answers of one node."""

    rank: int
    key: str
    next: int = 0
    quiet: float | None = 0.0  # silent since this time; None while its piece is unread
    revision: int = -1


class _Client(threading.Thread):
    """The store's Listener in a thread. All but `call`, `end` and the attributes runs in this thread."""

    def __init__(self, address: Address, heard: queue.SimpleQueue[Heard], met: threading.Event) -> None:
        super().__init__(name="store", daemon=True)
        self.members: Nodes = ()
        self.present: frozenset[int] = frozenset()
        """Ranks of the nodes that are still in the job."""
        self.failed: LaunchError | None = None
        self.silence = f"the rendezvous store {_shown(address)} does not answer"
        self._address = address
        self._heard = heard
        self._met = met
        self._name = secrets.token_hex(8)
        self._number = 0
        self._unreachable = False
        self._loop = Loop()
        self._mailbox = Mailbox(self._loop)
        self._store: Store = open_as_guest(address.master, address.job, self._name, address.token, self._loop)
        self._streams: dict[str, _Stream] = {}
        self._patience = ANSWER_WITHIN
        self._topology = ""
        self._round: Round | None = None
        self._timer = Timer()

    def call(self, what: Callback) -> None:
        """Make a call in this thread. Call it from another thread."""
        self._mailbox.post(what)

    def end(self) -> None:
        """End this thread. Call it from another thread."""
        if self.is_alive():
            self.call(self._leave)
            self.join(5.0)

    def run(self) -> None:
        for prefix in (records.ROUND_KEY, records.NODES_PREFIX):
            self._store.watch(prefix)
        self._store.open(self)
        self._loop.run()
        self._mailbox.close()
        self._loop.close()

    def _leave(self) -> None:
        if self.failed is None:
            self._store.close()
        self._loop.stop()

    # ---- store.Listener

    def changed(self) -> None:
        mirror = self._store.mirror
        self._look_at_round(mirror.get(records.ROUND_KEY))
        self.present = frozenset(
            rank for rank, each in enumerate(self.members) if records.node_key(each.id) in mirror
        )
        for id_, stream in list(self._streams.items()):
            self._look_at(id_, stream, mirror)

    def up(self, *, fresh: bool) -> None:
        self._unreachable = False
        if fresh and self._streams:
            self._give_up("this command was suspended, or cut off, for too long")
        self.changed()

    def down(self, why: str) -> None:
        self._unreachable = True
        self.silence = f"the rendezvous store {_shown(self._address)} cannot be reached: {why}"

    def lost(self, error: LaunchError) -> None:
        self.failed = error
        self.present = frozenset()
        self._give_up(error.message, over=self._is_over)
        self._met.set()

    # ---- the nodes

    @property
    def _is_over(self) -> bool:
        return self._round is None or self._round.state in (State.STOPPING, State.ENDED)

    def _look_at_round(self, entry: Entry | None) -> None:
        try:
            self._round = None if entry is None else records.read_round(entry.value)
        except BadRecordError as error:
            self.silence = f"another version of fleetrun runs this job: {error}"
            return
        if self._round is None or not self._round.topology:
            if not self._met.is_set():
                self.silence = f"the nodes of job {self._address.job} at {_shown(self._address)} have not met"
            return
        if self._round.topology != self._topology and not self._streams:
            name = self._topology = self._round.topology
            self._store.read(records.topology_key(name), partial(self._learn, name))

    def _learn(self, name: str, entry: Entry | None) -> None:
        if entry is None or name != self._topology:
            self._topology = ""
            return
        with suppress(BadRecordError):
            self.members = records.read_topology(entry.value)
        self.changed()
        self._met.set()

    # ---- requests and their answers

    def ask(self, request: Request, chosen: Mapping[str, int], patience: float) -> None:
        """Send a request and drop the previous one."""
        if self._number:
            before = f"{self._name}.{self._number}"
            self._store.unwatch(records.answers_prefix(before))
            self._store.delete(records.request_key(before))
        self._number += 1
        name = f"{self._name}.{self._number}"
        self._patience = patience
        now = self._loop.clock()
        self._streams = {
            id_: _Stream(rank, records.answers_prefix(name) + id_, quiet=now) for id_, rank in chosen.items()
        }
        if self.failed is not None:
            self._give_up(self.failed.message)
            return
        asked = Request(verb=request.verb, options=request.options, nodes=tuple(chosen), by=request.by)
        self._store.watch(records.answers_prefix(name))
        packed = pack_request(name, asked, self._address.token)
        self._store.put(records.request_key(name), packed, leased=True)
        self._timer.cancel()
        self._timer = self._loop.after(1.0, self._look_for_silence)
        self.changed()

    def taken(self, rank: int) -> None:
        for stream in self._streams.values():
            if stream.rank == rank and stream.quiet is None:
                stream.quiet = self._loop.clock()
                self._store.delete(stream.key, expect=stream.revision)
                self._loop.after(0.0, self.changed)  # the node may have left meanwhile

    def _look_at(self, id_: str, stream: _Stream, mirror: Entries) -> None:
        entry = mirror.get(stream.key)
        if entry is not None and entry.revision != stream.revision:
            stream.revision = entry.revision
            self._note(id_, stream, unpack_piece(entry.value))
        elif entry is None and stream.quiet is not None and records.node_key(id_) not in mirror:
            self._end(id_, "it has left the job", over=self._is_over)

    def _note(self, id_: str, stream: _Stream, piece: Piece | None) -> None:
        if piece is None or piece.number > stream.next:
            self._end(id_, "what it says cannot be read, or a part of it is lost")
        # the node wrote the piece again, because it did not see that the piece was read
        elif piece.number < stream.next:
            self._store.delete(stream.key)
        else:
            stream.next += 1
            stream.quiet = None
            if piece.number:
                self._heard.put(Heard(rank=stream.rank, piece=piece))
            else:
                self.taken(stream.rank)
            if piece.code is not None:
                del self._streams[id_]
                self._store.delete(stream.key)

    def _look_for_silence(self) -> None:
        now = self._loop.clock()
        for id_, stream in list(self._streams.items()):
            limit = self._patience if stream.next else UNDERSTAND_WITHIN
            if stream.quiet is not None and now - stream.quiet > limit:
                self._end(id_, self.silence if self._unreachable else f"no answer within {limit:g} s")
        if self._streams:
            self._timer = self._loop.after(1.0, self._look_for_silence)

    def _end(self, id_: str, why: str, *, over: bool = False) -> None:
        stream = self._streams.pop(id_)
        self._heard.put(Heard(rank=stream.rank, gone=why, over=over))

    def _give_up(self, why: str, *, over: bool = False) -> None:
        for id_ in list(self._streams):
            self._end(id_, why, over=over)


def _shown(address: Address) -> str:
    """Return the address without parameters."""
    return address.master.partition("?")[0]
