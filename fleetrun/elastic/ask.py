"""Ask the nodes of a running job, through its rendezvous store. `ask_wire.py` describes the protocol.

A `Question` is one request with the answers to it. With `OtherNodes`, a node asks the other nodes of its job.
With `Guest`, a command asks nodes without taking part in the job.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from fleetrun.aliases import Callback, Clock, Fields
from fleetrun.decoding import BadRecordError
from fleetrun.elastic.ask_wire import LARGEST, Piece, Request, decompressed, pack_request, unpack_piece
from fleetrun.elastic.mailbox import Mailbox
from fleetrun.elastic.meeting import PREFERRED_PORT, open_as_guest
from fleetrun.elastic.membership import Membership
from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.records import Nodes, Round, State
from fleetrun.elastic.store import Entries, Entry, Store
from fleetrun.envs.contract import join_endpoint
from fleetrun.errors import LaunchError, UsageError
from fleetrun.frozen import frozen_by_name
from fleetrun.pod.loop import Loop, Timer

# ---- One request and its answers

CONFIRM_WITHIN = 5.0
"""Seconds until a node must confirm a request of a command."""

ANSWER_WITHIN = 60.0
"""Longest pause between two pieces of a node, in seconds. A node that searches a long log sends empty
pieces.
"""

_DAMAGED = "its answer is damaged or incomplete"


@frozen_by_name
class Received:
    """A piece of the answer from the node of this rank, or the end of its pieces."""

    rank: int
    piece: Piece | None = None
    ended: str = ""  # why no piece follows; empty if the job has ended

    @property
    def data(self) -> bytes:
        return b"" if self.piece is None else self.piece.data

    @property
    def last(self) -> bool:
        return self.piece is None or self.piece.code is not None


@dataclass(slots=True)
class _Stream:
    """The pieces of one node."""

    rank: int
    key: str
    quiet: float | None  # silent since this time; None while its piece is unread
    next: int = 0
    revision: int = -1


class Question:
    """A request in the store, and the pieces of the asked nodes, which `receive` gets.

    `asked`: ranks of the nodes by id. With `patience`, the answer of a node ends if the node does not confirm
    the request in time, or is silent for so many seconds. `silence` then returns the reason if the store is
    unreachable. The user must call `look` after each change of the mirror.
    """

    def __init__(
        self,
        loop: Loop,
        store: Store,
        name: str,
        request: Request,
        asked: Mapping[str, int],
        token: str,
        receive: Callable[[Received], None],
        patience: float | None = None,
        silence: Callable[[], str] = str,
    ) -> None:
        self.request = request
        self.asked = asked
        self._loop = loop
        self._store = store
        self._name = name
        self._receive = receive
        self._patience = patience
        self._silence = silence
        self._answers = records.answers_prefix(name)
        now = loop.clock()
        self._streams = {id_: _Stream(rank, self._answers + id_, now) for id_, rank in asked.items()}
        self._timer = Timer()
        self._closed = False
        store.watch(self._answers)
        store.put(records.request_key(name), pack_request(name, request, token), leased=True)
        if patience is not None:
            self._timer = loop.after(1.0, self._look_for_silence)

    @property
    def open(self) -> bool:
        """True while a node may send another piece."""
        return bool(self._streams)

    def look(self, mirror: Entries) -> None:
        """Receive new pieces. Close the question after the last one."""
        if self._closed:
            return
        for id_, stream in list(self._streams.items()):
            entry = mirror.get(stream.key)
            if entry is not None and entry.revision != stream.revision:
                stream.revision = entry.revision
                self._note(id_, stream, unpack_piece(entry.value))
        if not self._streams:
            self.close()

    def end(self, why: str, present: Entries | None = None) -> None:
        """End the answers of all nodes. With `present`, only of nodes that are not in it and have no unread
        piece.
        """
        for id_, stream in list(self._streams.items()):
            if present is None or (stream.quiet is not None and records.node_key(id_) not in present):
                self._end(id_, why)

    def taken(self, rank: int) -> None:
        """Let the node of this rank send its next piece."""
        for stream in self._streams.values():
            if stream.rank == rank and stream.quiet is None:
                stream.quiet = self._loop.clock()
                self._store.delete(stream.key, expect=stream.revision)

    def close(self) -> None:
        """Delete the keys of this question. You may call it twice."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        self._store.delete(records.request_key(self._name))
        # before the deletions, so that the store does not send them here
        self._store.unwatch(self._answers)
        self._store.delete_prefix(self._answers)

    def _note(self, id_: str, stream: _Stream, piece: Piece | None) -> None:
        if piece is None or piece.number > stream.next:
            self._end(id_, _DAMAGED)
        # the node wrote the piece again, because it did not see that the piece was read
        elif piece.number < stream.next:
            self._store.delete(stream.key)
        else:
            stream.next += 1
            stream.quiet = None
            if piece.code is not None:
                del self._streams[id_]
                if piece.number:
                    self._store.delete(stream.key)
            if piece.number or piece.code is not None:
                self._receive(Received(rank=stream.rank, piece=piece))
            else:
                self.taken(stream.rank)

    def _look_for_silence(self) -> None:
        now = self._loop.clock()
        for id_, stream in list(self._streams.items()):
            limit = self._patience if stream.next and self._patience is not None else CONFIRM_WITHIN
            if stream.quiet is not None and now - stream.quiet > limit:
                self._end(id_, self._silence() or f"no answer within {limit:g} s")
        if self._streams:
            self._timer = self._loop.after(1.0, self._look_for_silence)

    def _end(self, id_: str, why: str) -> None:
        self._receive(Received(rank=self._streams.pop(id_).rank, ended=why))


# ---- A node asks the other nodes of its job

WITHIN = {"state": 2.0, "ranks": 4.0}
"""Seconds that a node waits for the answers of other nodes. A node may need 3 seconds to find its ranks."""

SMALLEST, ALL_OF_THEM = 2 << 10, 16 << 20
"""Limits of one answer and of all answers to one request, in bytes. The more nodes, the shorter each
answer.
"""


class Answer(NamedTuple):
    """The answer of one node. Times are in seconds since the epoch, by the clock of the asking node."""

    data: bytes
    asked: float  # when the request was sent
    received: float  # when the answer arrived


AnswersByRank = Mapping[int, Answer | None]
"""Answers by rank of the asked nodes, with None for a missing answer."""


@dataclass(slots=True)
class _Pending:
    question: Question
    limit: Timer
    asked: float
    then: list[Callable[[AnswersByRank], None]]
    found: dict[int, Answer] = field(default_factory=dict)


class OtherNodes:
    """The other nodes of this node's job. The token of the job signs the requests."""

    within = WITHIN["state"]

    def __init__(self, loop: Loop, me: str, token: str, wall: Clock = time.time) -> None:
        self._loop = loop
        self._me = me
        self._token = token
        self._wall = wall
        self._membership: Membership | None = None
        self._pending: dict[str, _Pending] = {}
        self._number = 0

    def join(self, membership: Membership) -> None:
        """Set the membership of this node. Until then, no other node is known."""
        self._membership = membership
        membership.when_looked.append(self._look)

    @property
    def _ranks(self) -> dict[str, int]:
        """Ranks of the members by id. Empty while this node is outside the job."""
        membership = self._membership
        members = () if membership is None or membership.closed else membership.members
        return {each.id: rank for rank, each in enumerate(members)}

    def ask(
        self,
        verb: str,
        options: Fields,
        then: Callable[[AnswersByRank], None],
        rank: int | None = None,
    ) -> None:
        """Ask all other nodes, or the one with this rank. `then` gets the answers within `WITHIN` seconds.

        While the store is unreachable, `then` gets empty answers immediately, because requests to a store
        wait until it is back. Equal requests at the same time share their answers.
        """
        asked = {id_: each for id_, each in self._ranks.items() if id_ != self._me and rank in (None, each)}
        if not asked or self._membership is None or not self._membership.connected:
            then(dict.fromkeys(asked.values()))
            return
        most = min(LARGEST, max(SMALLEST, ALL_OF_THEM // len(asked)))
        nodes = () if rank is None else tuple(asked)
        request = Request(verb=verb, options={**options, "most": most}, nodes=nodes)
        for each in self._pending.values():
            if (each.question.request, each.question.asked) == (request, asked):
                each.then.append(then)
                return
        self._number += 1
        name = f"{self._me}.{self._number}"
        receive, finish = partial(self._receive, name, most), partial(self._finish, name)
        question = Question(self._loop, self._membership.store, name, request, asked, self._token, receive)
        limit = self._loop.after(WITHIN[verb], finish)
        self._pending[name] = _Pending(question, limit, self._wall(), [then])

    def _receive(self, name: str, most: int, received: Received) -> None:
        pending, piece = self._pending[name], received.piece
        if piece is not None and piece.code == 0 and len(piece.data) <= most:
            pending.found[received.rank] = Answer(piece.data, pending.asked, self._wall())

    def _finish(self, name: str) -> None:
        pending = self._pending.pop(name)
        pending.limit.cancel()
        if self._membership is not None and not self._membership.closed:
            pending.question.close()
        now, asked, found = self._ranks, pending.question.asked, pending.found
        for then in pending.then:
            then({now[id_]: found.get(rank) for id_, rank in asked.items() if id_ in now})

    def _look(self, others: Entries) -> None:
        for name, pending in list(self._pending.items()):
            pending.question.look(others)
            if not pending.question.open:
                self._finish(name)


# ---- A command asks the nodes of a job
#
# The store's client runs in a separate thread, so its lease is renewed while the command waits for a reader
# of its output. Answers arrive in one queue, which holds at most one piece of each node.

CONNECT_WITHIN = 10.0
"""Seconds to connect to the store and read the list of nodes."""


class UnreachableError(LaunchError):
    """The store of the job does not answer, it refuses this command, or no job runs there."""

    exit_code = 1


@frozen_by_name
class Address:
    """The address of a job's store."""

    master: str  # as in --master, with ports
    job: str
    token: str = ""

    def __str__(self) -> str:
        return self.master.partition("?")[0]


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


class Guest:
    """A connection of a command to a job. Use it as a context manager, from the command's thread only."""

    def __init__(self, address: Address) -> None:
        self._client = _Client(address)

    def __enter__(self) -> Guest:
        """Connect to the store and read the list of nodes. Raises LaunchError."""
        client = self._client
        client.start()
        try:
            met = client.met.wait(CONNECT_WITHIN)
            if client.failed is not None:
                raise UnreachableError(client.failed.message, hint=client.failed.hint)
            if not met:
                raise UnreachableError(client.silence)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect and drop open requests."""
        if self._client.is_alive():
            self._client.call(self._client.leave)
            self._client.join(5.0)

    @property
    def nodes(self) -> Nodes:
        """The nodes that run the job, in rank order."""
        return self._client.members

    def ask(self, request: Request, ranks: Sequence[int], patience: float) -> None:
        """Send a request to the nodes of these ranks, and drop the previous one. `receive` then returns their
        answers. A node may be silent for `patience` seconds.
        """
        asked = {self.nodes[rank].id: rank for rank in ranks}
        self._client.call(partial(self._client.ask, replace(request, nodes=tuple(asked)), asked, patience))

    @property
    def asking(self) -> str:
        """The name of the last request that a node has answered."""
        return self._client.name_of_question

    def receive(self, within: float | None) -> Received | None:
        """Return the next piece of any asked node, or None if none arrives within so many seconds."""
        try:
            return self._client.received.get(timeout=within)
        except queue.Empty:
            return None

    def take(self, received: Received) -> None:
        """Confirm that a piece was used, so that its node may send the next one."""
        if not received.last:
            self._client.call(partial(self._client.taken, received.rank))

    def wait_for_end(self, ranks: Sequence[int]) -> None:
        """Wait until these nodes have left the job, or the job has ended."""
        while self._client.present & set(ranks) and self._client.failed is None:
            time.sleep(0.05)


class _Client(threading.Thread):
    """The store's Listener in a thread. Other threads may read the public attributes and call `call`."""

    def __init__(self, address: Address) -> None:
        super().__init__(name="store", daemon=True)
        self.members: Nodes = ()
        self.present: frozenset[int] = frozenset()
        """Ranks of the nodes that are still in the job."""
        self.failed: LaunchError | None = None
        self.silence = f"the rendezvous store {address} does not answer"
        self.received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self.name_of_question = ""
        self.met = threading.Event()
        """Set when the list of nodes is known, or the store is lost."""
        self._address = address
        self._name = secrets.token_hex(8)
        self._number = 0
        self._loop = Loop()
        self._mailbox = Mailbox(self._loop)
        self._store = open_as_guest(address.master, address.job, self._name, address.token, self._loop)
        self._question: Question | None = None
        self._down = ""
        self._topology = ""
        self._round: Round | None = None

    def call(self, what: Callback) -> None:
        """Make a call in this thread. Call it from another thread."""
        self._mailbox.post(what)

    def run(self) -> None:
        for prefix in (records.ROUND_KEY, records.NODES_PREFIX):
            self._store.watch(prefix)
        self._store.open(self)
        self._loop.run()
        self._mailbox.close()
        self._loop.close()

    def leave(self) -> None:
        self._drop_question()
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
        if self._question is not None:
            self._question.look(mirror)
            self._question.end("" if self._job_ended else "it has left the job", mirror)

    def up(self, *, fresh: bool) -> None:
        self._down = ""
        if fresh and self._question is not None:
            self._question.end("this command was suspended or disconnected for too long")
        self.changed()

    def down(self, why: str) -> None:
        self._down = self.silence = f"the rendezvous store {self._address} cannot be reached: {why}"

    def lost(self, error: LaunchError) -> None:
        self.failed = error
        self.present = frozenset()
        if self._question is not None:
            self._question.end("" if self._job_ended else error.message)
        self.met.set()

    # ---- the nodes

    @property
    def _job_ended(self) -> bool:
        return self._round is None or self._round.state in (State.STOPPING, State.ENDED)

    def _look_at_round(self, entry: Entry | None) -> None:
        try:
            self._round = None if entry is None else records.read_round(entry.value)
        except BadRecordError as error:
            self.silence = f"another version of fleetrun runs this job: {error}"
            return
        if self._round is None or not self._round.topology:
            if not self.met.is_set():
                self.silence = f"the nodes of job {self._address.job} at {self._address} have not met yet"
            return
        asks = self._question is not None and self._question.open
        if self._round.topology != self._topology and not asks:
            name = self._topology = self._round.topology
            self._store.read(records.topology_key(name), partial(self._learn, name))

    def _learn(self, name: str, entry: Entry | None) -> None:
        if entry is None or name != self._topology:
            self._topology = ""
            return
        with suppress(BadRecordError):
            self.members = records.read_topology(entry.value)
        self.changed()
        self.met.set()

    # ---- requests and their answers

    def ask(self, request: Request, asked: Mapping[str, int], patience: float) -> None:
        """Send a request and drop the previous one."""
        self._drop_question()
        if self.failed is not None:
            for rank in asked.values():
                self.received.put(Received(rank=rank, ended=self.failed.message))
            return
        self._number += 1
        name, token = f"{self._name}.{self._number}", self._address.token
        self.name_of_question = name
        self._question = Question(
            self._loop, self._store, name, request, asked, token, self._receive, patience, lambda: self._down
        )
        self.changed()

    def taken(self, rank: int) -> None:
        if self._question is not None:
            self._question.taken(rank)
            self._loop.after(0.0, self.changed)  # the node may have left meanwhile

    def _drop_question(self) -> None:
        if self._question is not None and self.failed is None:
            self._question.close()
        self._question = None

    def _receive(self, received: Received) -> None:
        if (piece := received.piece) is not None:
            data = decompressed(piece.data)
            shown = None if data is None else replace(piece, data=data)
            received = replace(received, piece=shown, ended="" if shown else _DAMAGED)
        self.received.put(received)
