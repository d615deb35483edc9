"""Answer the requests of trainers. The module is pure. Messages, connections and time are arguments, and
replies are return values.

A request that cannot be answered yet is pending. Whenever something changes for other requests, all pending
requests are tried again. A trainer that repeats a pending request gets WAIT immediately. The trainer can thus
distinguish a waiting server from a dead one.

Every request that changes durable state goes through `record` first. `replay` applies the request again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainers.data.positions import Records, decode_records
from trainers.errors import DataError
from trainers.ps.durable.journal import DurabilityError
from trainers.ps.server.checks import check_duties
from trainers.ps.server.collectives import Collectives
from trainers.ps.server.members import Member, Members, Reachable, Refusal
from trainers.ps.server.publisher import Publisher
from trainers.ps.server.pushes import Gradient
from trainers.ps.server.saving import SaveRequest, SaveRunner, SaveTurns, Sender
from trainers.ps.server.steps import Steps
from trainers.ps.server.store import Store
from trainers.ps.server.versions import OF_PUBLISHER, Versions, done_with
from trainers.ps.tables.spec import FullError
from trainers.ps.wire import LOADED, Code, Field, Kind, Message, Part, route_of, text_part

MAX_PENDING = 4096
"""The most pending requests of one trainer."""
COLLECTIVE_KINDS = (Kind.BARRIER, Kind.GATHER)
"""Kinds of requests that are answered once all trainers have sent them."""
_STEP_KINDS = (Kind.PULL, Kind.PUSH, Kind.LOOK)
"""Kinds of requests that unblock other requests only if they complete a step."""
_WAITING_REPEATS = 2
"""A trainer that has repeated a request this often is not computing."""

_MOST_LOOKED = 1000
"""The most keys in a LOOK."""
_SHRUNK_AT_ONCE = 8192
"""Rows per slice of a shrink, about 3 ms. Other requests are answered between two slices."""

Outgoing = tuple[bytes, Message]
"""Route and reply."""


class Service:
    """One server. `job` describes the job, and every trainer must send the same description. With
    `may_return`, a disconnected trainer has as much time as one that has not joined yet.
    """

    def __init__(
        self,
        members: Members,
        store: Store,
        steps: Steps,
        *,
        job: str,
        sync: bool,
        may_return: bool,
        saving: SaveRunner,
        record: Callable[[Message], None] | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        self._members = members
        self._store = store
        self._steps = steps
        self._job = job
        self._sync = sync
        self._may_return = may_return
        self._record = record or _record_nothing
        self._saving = saving
        self._turns = SaveTurns()
        self._pending = PendingRequests()
        self._shrink_of: Message | None = None
        self._set_by = 0.0
        """Seconds by which the clock was set and which are not in the write-ahead log yet."""
        self._shrunk: dict[Sender, tuple[int, int]] = {}
        """For each trainer, the sequence of its last shrink request and the number of removed rows."""
        self._collectives = Collectives(members, lambda request: self._record(request), self._refuse_if_lost)
        self._versions = Versions(
            store, steps, saving, publisher, sync=sync, record=lambda request: self._record(request)
        )
        self._handlers: dict[Kind, Callable[[Member, Message], Message | None]] = {
            Kind.ASSIGN: self._assign,
            Kind.READY: self._ready,
            Kind.OPEN: self._open,
            Kind.PULL: self._pull,
            Kind.PUSH: self._push,
            Kind.BARRIER: self._collectives.barrier,
            Kind.FINISH: self._finish,
            Kind.LEAVE: self._leave,
            Kind.SAVE: self._save,
            Kind.SAVED: self._saved,
            Kind.SHRINK: self._shrink,
            Kind.GATHER: self._collectives.gather,
            Kind.REFRESH: self._refresh,
            Kind.POSITIONS: self._positions_of,
            Kind.SKIP: self._skip,
        }

    @property
    def over(self) -> bool:
        """True if every trainer has left."""
        return self._members.everyone_left()

    @property
    def idle(self) -> bool:
        """True if time can pass without effect. No request is pending, no trainer saves, and rows do not
        expire.
        """
        return not (self._pending or self._saving.requester or self._store.expires)

    def verify(self, unattended: float) -> None:
        """Check the state of this server in constant time. `unattended` is the time in seconds since the last
        `tick`. Raises BrokenError.
        """
        check_duties(unattended, bool(self._pending or self._saving.requester), self._store.budgets)
        self._store.verify()

    def handle(self, route: bytes, request: Message, reachable: Reachable) -> list[Outgoing]:
        """Return replies to this request, and to pending requests that it has unblocked."""
        self._members.mark_connected(route, request)
        repeats = self._pending.repeats(request)
        if repeats is None:
            busy = f"trainer {request.rank} already has {MAX_PENDING} pending requests"
            return [(route, request.reply(Kind.REFUSED, code=Code.BAD_MESSAGE, text=busy))]
        progress = self._steps.progress
        answer = self._answer(route, request, reachable)
        if answer is None:
            self._pending.add(route, request, repeats)
            reply = request.reply(Kind.WAIT, text=self._awaited(request))
        else:
            self._pending.remove(request)
            reply = answer
        # A collective request unblocks others only with the last one. Until then, they wait for another
        # trainer.
        changes_nothing = request.kind in _STEP_KINDS or (request.kind in COLLECTIVE_KINDS and answer is None)
        if changes_nothing and progress == self._steps.progress:
            return [(route, reply)]
        return [(route, reply), *self.retry_pending(reachable)]

    def retry_pending(self, reachable: Reachable) -> list[Outgoing]:
        """Return replies to pending requests that can be answered now."""
        replies = []
        progress = None
        while progress != self._steps.progress:  # a push that waited for its turn may complete a step
            progress = self._steps.progress
            for pending in self._pending.all():
                reply = self._answer(pending.route, pending.request, reachable)
                if reply is not None:
                    self._pending.remove(pending.request)
                    replies.append((pending.route, reply))
        return replies

    @property
    def shrinking(self) -> bool:
        """True while tables are being shrunk. They cannot be saved then, and `shrink_some` must be called."""
        return self._store.shrinking

    def shrink_some(self, reachable: Reachable) -> list[Outgoing]:
        """Shrink a slice, and after the last slice return replies to pending requests. If a budget waits for
        the end, the end is recorded, because a server that recovers must evict rows from the same moment on.
        """
        self._shrink_some()
        if self._store.shrinking and not self._store.slices_left:
            with suppress(Refusal):  # the disk is full, so the next call tries again
                self._record(Message(kind=Kind.SHRUNK))
                self._store.release()
        return [] if self._store.shrinking else self.retry_pending(reachable)

    def pass_time(self, now: float, set_by: float = 0.0) -> None:
        """Advance the time to `now`, in seconds since 1970. The clock was set by `set_by` seconds since the
        last call. If rows have a time to live, the time is recorded, so a server that recovers removes the
        same rows. If the disk is full, the next call records the time instead.
        """
        if not self._store.ready:
            return
        self._set_by += set_by
        record = _time_record(now, self._store.moves_by(now, self._set_by))
        if record.parts or self._store.ticks_at(record.number / 1000):
            with suppress(Refusal):
                self._record(record)
                self._store.tick(*_time_of(record))
                self._set_by = 0.0

    def tick(self, reachable: Reachable, now: float) -> list[Outgoing]:
        """Check connections, and return replies to pending requests that this has decided."""
        self._members.check_connections(reachable, now)
        # Abandon the running save if its trainer has gone, because nobody else will commit it.
        self._end_orphaned_turn()
        if self._has_left(self._saving.requester):
            self._saving.abandon()
        return [*self.retry_pending(reachable), *self._break_deadlock()]

    def _break_deadlock(self) -> list[Outgoing]:
        if (why := self._pending.find_deadlock(self._members.active(), self._needs_others)) is None:
            return []
        stopped = [each for each in self._pending.all() if each.request.kind not in OF_PUBLISHER]
        for each in stopped:
            self._pending.remove(each.request)
        self._collectives.reset()
        return [
            (each.route, each.request.reply(Kind.REFUSED, code=Code.DEADLOCK, text=why)) for each in stopped
        ]

    def _needs_others(self, request: Message) -> bool:
        """Return True if a request waits for other trainers, not for a disk or for a connection to close."""
        if request.kind in OF_PUBLISHER:
            return False
        if self._members.incarnation(request.rank) != request.incarnation or request.kind is Kind.SHRINK:
            return False  # a trainer that was replaced, or that replaces another, does not wait for others
        member, active = self._members.sender_of(request), self._members.active()
        return request.kind not in (Kind.SAVE, Kind.REFRESH) or not self._steps.may_pull(
            member, request.number, active
        )

    def replay(self, request: Message) -> None:
        """Apply a recorded request. Raises Refusal if this job cannot have recorded it."""
        recording, self._record = self._record, _record_nothing
        try:
            if request.kind is Kind.HELLO:
                # The trainer may be waiting, so that it sends nothing for a while.
                self._join(route_of(f"trainer {request.rank}", request.incarnation), request)
            elif request.kind is Kind.READY:
                self._check_source(request.text if request.parts else "")
                self._store.ready = True
            elif request.kind is Kind.TIME:
                self._store.tick(*_time_of(request))
            elif request.kind is Kind.SHRUNK:
                self._store.release()
            elif request.kind is Kind.PUBLISH:
                self._saving.replay(request.text, self._store.tables.values())
            elif request.kind is Kind.PUSH:
                records, parts = _split_records(request.parts)
                gradients = self._store.sort(parts)[0]
                self._store.ready = True  # also in a write-ahead log of former versions
                self._take(self._members.sender_of(request), request, gradients, records)
            else:
                self._handlers[request.kind](self._members.sender_of(request), request)
            while self._store.slices_left:
                self._shrink_some()
        finally:
            self._record = recording

    def _answer(self, route: bytes, request: Message, reachable: Reachable) -> Message | None:
        try:
            if request.kind is Kind.HELLO:
                return self._hello(route, request, reachable)
            if request.kind in OF_PUBLISHER:
                if self._versions.is_of_another(request):
                    self._pending.drop_others(_sender(request))
                return self._versions.answer(request)
            if request.kind is Kind.LOOK:
                return self._look(request)
            handler = self._handlers.get(request.kind)
            if handler is None:
                raise Refusal(Code.BAD_MESSAGE, f"{request.kind.name} is not a request")
            return handler(self._members.sender_of(request), request)
        except Refusal as refusal:
            return request.reply(Kind.REFUSED, code=refusal.code, text=str(refusal))

    def _hello(self, route: bytes, request: Message, reachable: Reachable) -> Message | None:
        if not request.parts or request.parts[0].field is not Field.TEXT:
            raise Refusal(Code.BAD_MESSAGE, "a HELLO without a description of the job")
        job = request.parts[0].data.numpy().tobytes().decode("utf-8", "replace")
        if job != self._job:
            raise Refusal(
                Code.MISMATCH,
                f"trainer {request.rank} runs {job!r}, but this server runs {self._job!r}. Set the same "
                "strategy on both before fleet.is_server() is called. If the trainer is from an earlier "
                "start of the job, end it",
            )
        if not self._members.may_join(request, reachable):
            return None
        member = self._join(route, request)
        if self._store.ready:
            return request.reply(Kind.DONE, number=member.step)
        loaded = self._store.loaded
        text = None if loaded is None else loaded.encode()
        return request.reply(Kind.DONE, number=member.step, code=Code.NOT_READY, text=text)

    def _join(self, route: bytes, request: Message) -> Member:
        self._store.declare(request.rank, request.parts[1:])
        self._record(request)
        return self._members.join(route, request)

    def _assign(self, member: Member, request: Message) -> Message:
        # A late copy of an answered message must not reset trained values.
        loaded = request.number == LOADED
        if loaded:
            self._require_ready()
        if not (request.sequence in member.applied if loaded else self._store.ready):
            self._store.make_room(self._store.read_assign(request.parts, initial=not loaded), filtered=False)
            self._record(request)
            if loaded:
                member.applied.add(request.sequence)
            self._store.assign(request.parts, keep_state=loaded)
        return request.reply(Kind.DONE)

    def _ready(self, member: Member, request: Message) -> Message:
        """Record the start of training together with the save that was loaded. A server that recovers before
        the first snapshot loads this save again. Recorded pushes are valid only on top of this save.
        """
        source = self._source
        self._record(request._replace(parts=(text_part(source),)) if source else request)
        self._store.ready = True
        return request.reply(Kind.DONE)

    @property
    def _source(self) -> str:
        """The saved tables that were loaded at the start, or "" for initial values."""
        return "" if self._store.loaded is None else self._store.loaded.source

    def _check_source(self, recorded: str) -> None:
        """Raise Refusal if the tables started with other saved tables than now."""
        source = self._source
        if recorded != source:
            raise Refusal(
                Code.MISMATCH,
                f"this server's tables started with {recorded or 'initial values'}, but would now start "
                f"with {source or 'initial values'}. Pass the former arguments to fleet.init_server()",
            )

    def _open(self, member: Member, request: Message) -> Message | None:
        if self._store.ready:
            return request.reply(Kind.DONE, number=self._steps.step)
        self._refuse_if_lost()
        return None

    def _pull(self, member: Member, request: Message) -> Message | None:
        self._require_ready()
        return self._values(member, request, request.number, request.parts)

    def _push(self, member: Member, request: Message) -> Message | None:
        self._require_ready()
        records, parts = _split_records(request.parts)
        gradients, asking = self._store.sort(parts)
        if not self._steps.may_push(member, request.number):
            self._refuse_if_lost()
            return None
        self._steps.check_rates(member, request.number, gradients)
        self._take(member, request, gradients, records)
        if not asking:
            return request.reply(Kind.DONE, number=self._steps.step)
        return self._values(member, request, request.number + 1, asking)

    def _take(
        self,
        member: Member,
        request: Message,
        gradients: Sequence[Gradient],
        records: Sequence[Records] = (),
    ) -> None:
        """Apply the gradients of a push once. If its records were counted before, only make the step."""
        if request.sequence in member.applied:
            return
        gradients = self._store.check(gradients)
        positions = self._members.positions
        try:
            new = positions.are_new(records)
        except DataError as error:
            raise Refusal(Code.MISMATCH, str(error)) from error
        if self._steps.counts(member, request.number, new):
            if new is False:
                gradients, records = [each for each in gradients if each.written], ()
            self._steps.make_room(member, self._members.active(), gradients)
            self._record(request)
            overflowed = request.code is Code.NOT_FINITE
            self._steps.push(member, request.number, None if overflowed else gradients)
            positions.count(member.rank, records)
            self._steps.close(self._members.active())
        member.applied.add(request.sequence)

    def _values(self, member: Member, request: Message, number: int, parts: Sequence[Part]) -> Message | None:
        """Return the values as of step `number`, or None while they are not available."""
        if not self._has_reached(member, number):
            return None
        counts = self._store.counts_pulls(parts)
        if counts and request.sequence in member.counted:
            parts = [part._replace(field=Field.PEEK) if part.field is Field.KEYS else part for part in parts]
            counts = False
        try:
            values = self._steps.pull(member, number, parts)
        except Refusal as refusal:
            if counts and refusal.code is Code.NO_MEMORY:
                # Some keys were counted without a record, so a replay would admit them later.
                raise FullError(str(refusal)) from refusal
            raise
        if counts:
            # Write a separate record. The push that carried these keys was recorded before the answer.
            try:
                self._record(request._replace(kind=Kind.PULL, number=number, parts=tuple(parts)))
            except Refusal as refusal:  # for the reason above
                raise DurabilityError(str(refusal)) from refusal
            member.counted.add(request.sequence)
        return request.reply(Kind.DATA, number=self._steps.step, parts=values)

    def _positions_of(self, member: Member, request: Message) -> Message:
        self._require_ready()
        answer = self._members.positions.of(request.text)
        return request.reply(Kind.DATA, number=self._steps.next_of(member), text=answer)

    def _skip(self, member: Member, request: Message) -> Message:
        if request.number > member.step:
            self._steps.make_room(member, self._members.active())
            self._record(request)
            self._steps.skip(member, request.number)
            self._steps.close(self._members.active())
        return request.reply(Kind.DONE, number=self._steps.step)

    def _look(self, request: Message) -> Message:
        self._require_ready()
        if [part.field for part in request.parts] != [Field.TEXT, Field.KEYS]:
            raise Refusal(Code.BAD_MESSAGE, "a LOOK needs the name of a table and keys")
        keys = request.parts[1].data.numpy()
        if len(keys) > _MOST_LOOKED:
            raise Refusal(Code.BAD_MESSAGE, f"a LOOK has {len(keys)} keys; the most are {_MOST_LOOKED}")
        try:
            found = json.dumps(self._store.look(request.text, keys))
        except OSError as error:  # an error of rows on disk
            raise Refusal(Code.FAILED, str(error)) from error
        return request.reply(Kind.DATA, number=self._steps.step, text=found)

    def _finish(self, member: Member, request: Message) -> Message | None:
        if not member.finished:
            self._steps.make_room(member, self._members.active())
            self._record(request)
            self._members.finish(member)
        self._steps.close(self._members.active())
        if self._steps.done(member) < member.step:  # its last push waits for a push of another trainer
            self._refuse_if_lost()
            return None
        # A trainer that is lost now has done the steps of the finished trainers. They need not wait.
        if len(self._members.active()) > len(self._members.lost(may_return=self._sync and self._may_return)):
            return None
        return request.reply(Kind.DONE, number=self._steps.step)

    def _leave(self, member: Member, request: Message) -> Message:
        self._steps.make_room(member, self._members.active())
        self._record(request)
        member.left = True
        self._members.finish(member)
        self._steps.close(self._members.active())
        return request.reply(Kind.DONE)

    def _save(self, member: Member, request: Message) -> Message | None:
        self._require_ready()
        if not self._has_reached(member, request.number) or self._store.shrinking:
            return None
        save = SaveRequest.decode(request.text)
        requester, state = _sender(request), (self._steps.step, self._store.changes)
        if save.turn:
            self._end_orphaned_turn()
            given = self._turns.take(save, requester, state)
            if self._turns.holder == requester:
                self._turns.number = request.number
            if given is None:
                self._refuse_if_awaited(request)
            return done_with(request, given)
        self._refuse_if_not_its_turn(requester)
        if not self._saving.known(save.id):  # if the tables are cut, the cut is made now
            self._turns.state = state
        return done_with(request, self._saving.run(save, requester, list(self._store.tables.values())))

    def _saved(self, member: Member, request: Message) -> Message:
        """End a save that was committed or abandoned, or end a turn to save."""
        self._turns.end(request.text, saved=request.number == 1)
        self._saving.end(request.text, saved=request.number == 1)
        return request.reply(Kind.DONE)

    def _refresh(self, member: Member, request: Message) -> Message | None:
        self._require_ready()
        if not self._has_reached(member, request.number):
            return None
        return self._versions.refresh(request)

    def _end_orphaned_turn(self) -> None:
        if self._has_left(self._turns.holder):
            self._turns.end(self._turns.id, saved=False)

    def _refuse_if_awaited(self, request: Message) -> None:
        """Raise Refusal if the save that runs may wait on another server for pushes of this sender, which a
        restarted server lost after the turn began. Otherwise each could wait for the other.
        """
        if self._steps.waits(self._turns.number, request.number):
            self._refuse_if_not_its_turn(_sender(request))

    def _refuse_if_not_its_turn(self, requester: Sender) -> None:
        """Raise Refusal if another trainer holds the turn, because the first server restarted during a save.
        Otherwise two trainers could each wait on different servers for the other's save.
        """
        holder = self._turns.holder
        if holder not in (None, requester):
            raise Refusal(Code.FAILED, f"trainer {holder[0]} is saving; one trainer can save at a time")

    def _has_left(self, sender: Sender | None) -> bool:
        if sender is None:
            return False
        rank, incarnation = sender
        lost = {member.rank for member in self._members.lost()}
        return self._members.incarnation(rank) != incarnation or rank in lost

    def _shrink(self, member: Member, request: Message) -> Message | None:
        """Let a day pass in some tables."""
        self._require_ready()
        if self._saving.tables_in_use or self._store.shrinking:
            self._refuse_if_awaited(request)
            return None
        if request.sequence not in member.applied:
            checked = self._store.read_shrink(request.parts)
            self._record(request)
            member.applied.add(request.sequence)
            self._store.begin_shrink(checked)
            self._shrink_of = request
            self._shrink_some()
            if self._store.shrinking:
                return None
        sequence, removed = self._shrunk.get(_sender(request), (0, 0))
        return request.reply(Kind.DONE, number=removed if sequence == request.sequence else 0)

    def _shrink_some(self) -> None:
        removed = self._store.shrink_some(_SHRUNK_AT_ONCE)
        if removed is not None and self._shrink_of is not None:
            self._shrunk[_sender(self._shrink_of)] = self._shrink_of.sequence, removed
            self._shrink_of = None

    def _require_ready(self) -> None:
        if not self._store.ready:
            raise Refusal(Code.NOT_READY, "trainer 0 has not sent the initial values yet")

    def _has_reached(self, member: Member, number: int) -> bool:
        """Return True if values as of step `number` are available. Raises Refusal if they never will be."""
        reached = self._steps.may_pull(member, number, self._members.active())
        if not reached:
            self._refuse_if_lost()
        return reached

    def _refuse_if_lost(self) -> None:
        """Raise Refusal if a trainer is lost, instead of waiting for it."""
        if self._members.lost(may_return=self._may_return):
            raise Refusal(Code.TRAINER_LOST, self._members.describe_lost(may_return=self._may_return))

    def _awaited(self, request: Message) -> str:
        """Describe the event that a pending request waits for."""
        if request.kind is Kind.OPEN:
            return "the initial values of trainer 0"
        if request.kind is Kind.HELLO:
            return f"the connection of the former trainer {request.rank} to close"
        if request.kind in (Kind.SAVE, Kind.SHRINK, Kind.REFRESH, *OF_PUBLISHER):
            return "the tables to be written or shrunk"
        active = self._members.active()
        if request.kind in COLLECTIVE_KINDS:
            active = self._collectives.awaited(request)
        if request.kind in (Kind.PULL, Kind.PUSH):
            active = self._steps.awaited(active, request.number + (request.kind is Kind.PUSH))
        return "trainer " + ", ".join(str(other.rank) for other in active)


@dataclass(slots=True)
class PendingRequest:
    """A request without an answer yet. `repeats` counts how often it was sent again since its trainer last
    sent a new request. A computing trainer sends nothing, but a waiting trainer repeats its request.
    """

    route: bytes
    request: Message
    repeats: int


class PendingRequests:
    """Pending requests by sender and sequence. Requests of one sender are in the order of their arrival."""

    def __init__(self) -> None:
        self._all: dict[Sender, dict[int, PendingRequest]] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def repeats(self, request: Message) -> int | None:
        """Return how often this request has been repeated, or None if its trainer has too many pending
        requests. A new request means that its trainer makes progress.
        """
        mine = self._all.get(_sender(request))
        if mine is None:
            return 0
        if request.sequence in mine:
            return mine[request.sequence].repeats + 1
        for pending in mine.values():
            pending.repeats = 0
        return None if len(mine) >= MAX_PENDING else 0

    def add(self, route: bytes, request: Message, repeats: int) -> None:
        mine = self._all.setdefault(_sender(request), {})
        mine[request.sequence] = PendingRequest(route, request, repeats)

    def remove(self, request: Message) -> None:
        """Remove a request that has been answered."""
        mine = self._all.get(_sender(request))
        if mine is not None:
            mine.pop(request.sequence, None)
            if not mine:
                del self._all[_sender(request)]

    def drop_others(self, sender: Sender) -> None:
        """Drop the requests of other incarnations of this sender."""
        for rank, incarnation in [*self._all]:
            if rank == sender[0] and incarnation != sender[1]:
                del self._all[rank, incarnation]

    def all(self) -> list[PendingRequest]:
        return [pending for mine in self._all.values() for pending in mine.values()]

    def find_deadlock(
        self, active: Collection[Member], needs_others: Callable[[Message], bool]
    ) -> str | None:
        """Return why no trainer can continue, or None while at least one can. In a deadlock, some trainers
        wait at a barrier or in a gather, and all others wait for something else that needs other trainers.
        """
        barrier: set[int] = set()
        gather: set[int] = set()
        step: set[int] = set()
        waiting_in = {Kind.BARRIER: barrier, Kind.GATHER: gather}
        for each in self.all():
            if each.repeats >= _WAITING_REPEATS and needs_others(each.request):
                waiting_in.get(each.request.kind, step).add(each.request.rank)
        step -= barrier | gather  # a trainer in a collective may have a push in flight
        waits = [
            f"trainer {_listed(ranks)} {where}"
            for ranks, where in (
                (barrier, "waits at fleet.barrier_worker()"),
                (gather, "waits in fleet.util or load_state_dict()"),
                (step, "waits for the others' next step"),
            )
            if ranks
        ]
        if len(waits) < 2 or not all(member.rank in barrier | gather | step for member in active):
            return None
        return (
            f"{', '.join(waits)}, so no trainer can continue. All trainers must make these calls after the "
            "same steps"
        )


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _sender(request: Message) -> Sender:
    return (request.rank, request.incarnation)


def _split_records(parts: Sequence[Part]) -> tuple[list[Records], Sequence[Part]]:
    """Return the stream records of a push, and its other parts. Raises Refusal."""
    if not parts or parts[0].field is not Field.RECORDS:
        return [], parts
    try:
        return decode_records(parts[0].data.numpy().tobytes()), parts[1:]
    except DataError as error:
        raise Refusal(Code.BAD_MESSAGE, str(error)) from error


def _time_record(now: float, moved_by: float) -> Message:
    """Return the record of a time and of the shift of the times of rows, in whole milliseconds."""
    moved = round(moved_by * 1000)
    return Message(kind=Kind.TIME, number=int(now * 1000), parts=(text_part(str(moved)),) if moved else ())


def _time_of(record: Message) -> tuple[float, float]:
    return record.number / 1000, int(record.text or 0) / 1000


def _record_nothing(request: Message) -> None:
    return
