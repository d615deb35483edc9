"""Service: what a server answers. Pure: messages, connections and time come as arguments, replies go back as
values.

A request that cannot be answered yet waits; whenever something has changed for others, all waiting requests
are tried again. A trainer that asks again for a waiting request gets WAIT at once, so it can tell a server
that waits from one that is gone.

Every request that changes what must survive goes through `record` first, and `replay` does it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from trainers.ps.server.members import Member, Members, Reachable, Refusal
from trainers.ps.server.saving import Saving, Upkeep
from trainers.ps.server.steps import Steps
from trainers.ps.server.store import Gradient, Store
from trainers.ps.wire import Code, Field, Kind, Message, Part, bytes_part

MOST_WAITING = 4096
"""Requests of one trainer."""
MEETINGS = (Kind.BARRIER, Kind.GATHER)
"""What all trainers must come to."""
_ENOUGH = 2

Sender = tuple[int, int]
"""Rank and incarnation."""


def _sender(request: Message) -> Sender:
    return (request.rank, request.incarnation)


@dataclass(slots=True)
class Waiting:
    """`repeats`: how often this was asked again since its trainer last asked anything new: a trainer that
    computes asks nothing, one that waits asks again and again.
    """

    route: bytes
    request: Message
    repeats: int = 0


class WaitingRequests:
    """By sender and sequence; those of one sender in the order in which they came."""

    def __init__(self) -> None:
        self._all: dict[Sender, dict[int, Waiting]] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def repeats(self, request: Message) -> int | None:
        """How often this request has been repeated; one that is new means that its trainer goes on. None
        when too many of this trainer wait.
        """
        mine = self._all.get(_sender(request))
        if mine is None:
            return 0
        if request.sequence in mine:
            return mine[request.sequence].repeats + 1
        for waiting in mine.values():
            waiting.repeats = 0
        return None if len(mine) >= MOST_WAITING else 0

    def park(self, route: bytes, request: Message, repeats: int) -> None:
        mine = self._all.setdefault(_sender(request), {})
        mine[request.sequence] = Waiting(route, request, repeats)

    def drop(self, request: Message) -> None:
        """It has been answered."""
        mine = self._all.get(_sender(request))
        if mine is not None:
            mine.pop(request.sequence, None)
            if not mine:
                del self._all[_sender(request)]

    def all(self) -> list[Waiting]:
        return [waiting for mine in self._all.values() for waiting in mine.values()]

    def standstill(self, active: Collection[Member], needs_others: Callable[[Message], bool]) -> str | None:
        """Why nobody can go on: some wait at a barrier, or in a gathering, and all others for something else
        that needs others. None while somebody can.
        """
        barrier: set[int] = set()
        gathering: set[int] = set()
        step: set[int] = set()
        places = {Kind.BARRIER: barrier, Kind.GATHER: gathering}
        for each in self.all():
            if each.repeats >= _ENOUGH and needs_others(each.request):
                places.get(each.request.kind, step).add(each.request.rank)
        step -= barrier | gathering  # who waits there may have a push underway
        waits = [
            f"trainer {_listed(ranks)} {where}"
            for ranks, where in (
                (barrier, "waits at fleet.barrier_worker()"),
                (gathering, "waits in fleet.util"),
                (step, "waits for the others' next step"),
            )
            if ranks
        ]
        if len(waits) < 2 or not all(member.rank in barrier | gathering | step for member in active):
            return None
        return (
            f"{', '.join(waits)}: none can go on. All trainers must come to these calls after the same steps"
        )


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


ANY = 0
"""The count of a trainer that has ended no gathering: it joins the one that the others are in."""
_MOST = 1 << 62


class Meetings:
    """Every method answers one kind of request; None: later. `expect_everyone` raises Refusal when somebody
    is gone for good.
    """

    def __init__(
        self, members: Members, record: Callable[[Message], None], expect_everyone: Callable[[], None]
    ) -> None:
        self._members = members
        self._record = record
        self._expect_everyone = expect_everyone
        self._given: dict[int, Message] = {}
        self._answered: dict[int, Message] = {}
        self._result: tuple[Part, ...] = ()
        self._next = 1

    def barrier(self, member: Member, request: Message) -> Message | None:
        """Answered when all active trainers have come as far."""
        if request.number > member.barrier:
            self._record(request)
            member.barrier = request.number
        if all(other.barrier >= request.number for other in self._members.active()):
            return request.reply(Kind.DONE)
        self._expect_everyone()
        return None

    def gather(self, member: Member, request: Message) -> Message | None:
        """What each trainer has given, a TEXT part for each. Raises Refusal when a trainer has finished, and
        when the sender means another gathering than the others.
        """
        if _same(self._answered.get(member.rank), request):
            return self._answer(request)
        if [part.field for part in request.parts] != [Field.TEXT] or request.number > _MOST:
            raise Refusal(Code.BAD_MESSAGE, "a GATHER gives one TEXT part")
        if finished := [other.rank for other in self._members if other.finished]:
            raise Refusal(
                Code.TRAINER_LOST, f"trainer {finished[0]} has called fleet.stop_worker() and gives nothing"
            )
        self._given[member.rank] = request
        given = [self._given[other.rank] for other in self._members if self._gave(other)]
        _expect_one({each.number for each in given} - {ANY})
        if len(given) < len(self._members):
            self._expect_everyone()
            return None
        self._result = tuple(each.parts[0] for each in given)
        self._answered, self._given = self._given, {}
        self._next = max(1, *(each.number for each in given)) + 1
        return self._answer(request)

    def break_up(self) -> None:
        """Nobody waits any more: what was given to a gathering that has not ended is taken back."""
        self._given = {}

    def awaited(self, request: Message) -> Sequence[Member]:
        """Those who have not come yet to what this request waits for."""
        if request.kind is Kind.BARRIER:
            return [other for other in self._members.active() if other.barrier < request.number]
        return [other for other in self._members if not self._gave(other)]

    def _gave(self, member: Member) -> bool:
        """What a former self of a trainer gave does not count."""
        given = self._given.get(member.rank)
        return given is not None and given.incarnation == member.incarnation

    def _answer(self, request: Message) -> Message:
        return request.reply(Kind.DATA, number=self._next, parts=self._result)


def _expect_one(counts: set[int]) -> None:
    if len(counts) > 1:
        raise Refusal(
            Code.MISMATCH,
            f"trainers gather for the {min(counts)}. and for the {max(counts)}. time: this server was "
            "restarted while they did, and what some of them gave is gone",
        )


def _same(one: Message | None, other: Message) -> bool:
    """Whether it is the same request, sent again."""
    return one is not None and (one.incarnation, one.sequence) == (other.incarnation, other.sequence)


Outgoing = tuple[bytes, Message]

_OF_STEPS = (Kind.PULL, Kind.PUSH)
"""What makes nothing possible for others, as long as it completes no step."""


class Service:
    """One server. `job` describes the job in words that every trainer must use too. `may_return`: a trainer
    that is gone is waited for as long as one that has not come yet.
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
        saving: Saving,
        record: Callable[[Message], None] | None = None,
    ) -> None:
        self._members = members
        self._store = store
        self._steps = steps
        self._job = job
        self._sync = sync
        self._may_return = may_return
        self._record = record or _forget
        self._upkeep = Upkeep(members, store, saving, lambda request: self._record(request))
        self._waiting = WaitingRequests()
        self._meetings = Meetings(members, lambda request: self._record(request), self._expect_everyone)
        self._verbs: dict[Kind, Callable[[Member, Message], Message | None]] = {
            Kind.ASSIGN: self._assign,
            Kind.READY: self._ready,
            Kind.OPEN: self._open,
            Kind.PULL: self._pull,
            Kind.PUSH: self._push,
            Kind.BARRIER: self._meetings.barrier,
            Kind.FINISH: self._finish,
            Kind.LEAVE: self._leave,
            Kind.SAVE: self._save,
            Kind.SAVED: self._upkeep.saved,
            Kind.SHRINK: self._shrink,
            Kind.GATHER: self._meetings.gather,
        }

    @property
    def over(self) -> bool:
        """Whether every trainer has left."""
        return self._members.everyone_left()

    @property
    def idle(self) -> bool:
        """Whether no request waits."""
        return not self._waiting

    def handle(self, route: bytes, request: Message, reachable: Reachable) -> list[Outgoing]:
        """Replies to this request, and to waiting ones that it has made possible."""
        self._members.heard(route, request)
        repeats = self._waiting.repeats(request)
        if repeats is None:
            busy = _text(f"{MOST_WAITING} requests of trainer {request.rank} wait already")
            return [(route, request.reply(Kind.REFUSED, code=Code.BAD_MESSAGE, parts=(busy,)))]
        progress = self._steps.progress
        answer = self._answer(route, request, reachable)
        if answer is None:
            self._waiting.park(route, request, repeats)
            reply = request.reply(Kind.WAIT, parts=(_text(self._awaited(request)),))
        else:
            self._waiting.drop(request)
            reply = answer
        # Where all meet: who waits for an earlier one waits for somebody else.
        alone = request.kind in _OF_STEPS or (request.kind in MEETINGS and answer is None)
        if alone and progress == self._steps.progress:
            return [(route, reply)]
        return [(route, reply), *self._retry(reachable)]

    def look_again(self, reachable: Reachable) -> list[Outgoing]:
        """Replies to waiting requests that something outside of the service has decided."""
        return self._retry(reachable)

    def tick(self, reachable: Reachable, now: float) -> list[Outgoing]:
        """Look after connections; replies to waiting requests that this has decided."""
        self._members.watch(reachable, now)
        self._upkeep.release()
        return [*self._retry(reachable), *self._stop_standstill()]

    def _stop_standstill(self) -> list[Outgoing]:
        if (why := self._waiting.standstill(self._members.active(), self._needs_others)) is None:
            return []
        stopped, self._waiting = self._waiting.all(), WaitingRequests()
        self._meetings.break_up()
        return [
            (each.route, each.request.reply(Kind.REFUSED, code=Code.STANDSTILL, parts=(_text(why),)))
            for each in stopped
        ]

    def _needs_others(self, request: Message) -> bool:
        """Whether it waits for what trainers do; not for a disk, or for a connection to be gone."""
        if self._members.incarnation(request.rank) != request.incarnation or request.kind is Kind.SHRINK:
            return False  # a trainer that has been replaced, or wants to replace one, waits for nobody else
        member, active = self._members.known(request), self._members.active()
        return request.kind is not Kind.SAVE or not self._steps.may_pull(member, request.number, active)

    def replay(self, request: Message) -> None:
        """Do again what was recorded. Raises Refusal for what cannot have been recorded by this job."""
        recording, self._record = self._record, _forget
        try:
            if request.kind is Kind.HELLO:
                self._join(b"", request)
            elif request.kind is Kind.PUSH:
                self._take(self._members.known(request), request, self._store.sort(request.parts)[0])
            else:
                self._verbs[request.kind](self._members.known(request), request)
        finally:
            self._record = recording

    def _retry(self, reachable: Reachable) -> list[Outgoing]:
        replies = []
        for waiting in self._waiting.all():
            reply = self._answer(waiting.route, waiting.request, reachable)
            if reply is not None:
                self._waiting.drop(waiting.request)
                replies.append((waiting.route, reply))
        return replies

    def _answer(self, route: bytes, request: Message, reachable: Reachable) -> Message | None:
        try:
            if request.kind is Kind.HELLO:
                return self._hello(route, request, reachable)
            verb = self._verbs.get(request.kind)
            if verb is None:
                raise Refusal(Code.BAD_MESSAGE, f"{request.kind.name} is not a request")
            return verb(self._members.known(request), request)
        except Refusal as refusal:
            return request.reply(Kind.REFUSED, code=refusal.code, parts=(_text(str(refusal)),))

    def _hello(self, route: bytes, request: Message, reachable: Reachable) -> Message | None:
        if not request.parts or request.parts[0].field is not Field.TEXT:
            raise Refusal(Code.BAD_MESSAGE, "a HELLO that does not say for which job")
        job = request.parts[0].data.numpy().tobytes().decode("utf-8", "replace")
        if job != self._job:
            raise Refusal(
                Code.MISMATCH,
                f"trainer {request.rank} runs {job!r}, this server {self._job!r}; unless that trainer "
                "is left from a former start, give both the same strategy, before fleet.is_server() is asked",
            )
        if not self._members.may_join(request, reachable):
            return None
        member = self._join(route, request)
        code = Code.NONE if self._store.ready else Code.NOT_READY
        return request.reply(Kind.DONE, number=member.step, code=code)

    def _join(self, route: bytes, request: Message) -> Member:
        self._store.declare(request.rank, request.parts[1:])
        self._record(request)
        return self._members.join(route, request)

    def _assign(self, member: Member, request: Message) -> Message:
        if not self._store.ready:  # a late copy of a message that was answered must not reset trained values
            self._store.read_assign(request.parts)
            self._record(request)
            self._store.assign(request.parts)
        return request.reply(Kind.DONE)

    def _ready(self, member: Member, request: Message) -> Message:
        self._record(request)
        self._store.ready = True
        return request.reply(Kind.DONE)

    def _open(self, member: Member, request: Message) -> Message | None:
        if self._store.ready:
            return request.reply(Kind.DONE, number=self._steps.step)
        self._expect_everyone()
        return None

    def _pull(self, member: Member, request: Message) -> Message | None:
        self._expect_ready()
        return self._values(member, request, request.number, request.parts)

    def _push(self, member: Member, request: Message) -> Message | None:
        self._expect_ready()
        gradients, asking = self._store.sort(request.parts)
        self._take(member, request, gradients)
        if not asking:
            return request.reply(Kind.DONE, number=self._steps.step)
        return self._values(member, request, request.number + 1, asking)

    def _take(self, member: Member, request: Message, gradients: Sequence[Gradient]) -> None:
        """Take the gradients of a push, once."""
        if request.sequence in member.applied:
            return
        gradients = self._store.check(gradients)
        if self._steps.counts(member, request.number):
            self._record(request)
            self._steps.push(member, request.number, gradients)
            self._steps.close(self._members.active())
        member.applied.add(request.sequence)

    def _values(self, member: Member, request: Message, number: int, parts: Sequence[Part]) -> Message | None:
        """The values as of step `number`; None while they cannot be had."""
        if not self._steps.may_pull(member, number, self._members.active()):
            self._expect_everyone()
            return None
        counts = self._store.counts_pulls(parts)
        if counts and request.sequence in member.counted:
            parts = [part._replace(field=Field.PEEK) if part.field is Field.KEYS else part for part in parts]
        values = self._steps.pull(member, number, parts)
        if counts and request.sequence not in member.counted:
            # Not with the push that may have brought these questions: they are answered later than it counts.
            self._record(request._replace(kind=Kind.PULL, number=number, parts=tuple(parts)))
            member.counted.add(request.sequence)
        return request.reply(Kind.DATA, number=self._steps.step, parts=values)

    def _finish(self, member: Member, request: Message) -> Message | None:
        if not member.finished:
            self._record(request)
            self._members.finish(member)
        self._steps.close(self._members.active())
        if self._sync:
            self._expect_everyone()
        if len(self._members.active()) > len(self._members.lost(may_return=self._sync and self._may_return)):
            return None
        return request.reply(Kind.DONE, number=self._steps.step)

    def _leave(self, member: Member, request: Message) -> Message:
        self._record(request)
        member.left = True
        self._members.finish(member)
        self._steps.close(self._members.active())
        return request.reply(Kind.DONE)

    def _save(self, member: Member, request: Message) -> Message | None:
        self._expect_ready()
        if not self._steps.may_pull(member, request.number, self._members.active()):
            self._expect_everyone()
            return None
        return self._upkeep.save(member, request, self._steps.step)

    def _shrink(self, member: Member, request: Message) -> Message | None:
        self._expect_ready()
        return self._upkeep.shrink(member, request)

    def _expect_ready(self) -> None:
        if not self._store.ready:
            raise Refusal(Code.NOT_READY, "trainer 0 has not sent the initial values yet")

    def _expect_everyone(self) -> None:
        """Refuse to wait for a trainer that is gone for good."""
        if self._members.lost(may_return=self._may_return):
            raise Refusal(Code.TRAINER_LOST, self._members.why_lost(may_return=self._may_return))

    def _awaited(self, request: Message) -> str:
        """What a waiting request waits for, for a person."""
        if request.kind is Kind.OPEN:
            return "the initial values of trainer 0"
        if request.kind is Kind.HELLO:
            return f"the former trainer {request.rank} to be gone"
        if request.kind in (Kind.SAVE, Kind.SHRINK):
            return "the tables being written"
        active = self._members.active()
        if request.kind in MEETINGS:
            active = self._meetings.awaited(request)
        if request.kind in (Kind.PULL, Kind.PUSH):
            active = self._steps.awaited(active, request.number + (request.kind is Kind.PUSH))
        return "trainer " + ", ".join(str(other.rank) for other in active)


def _text(said: str) -> Part:
    return bytes_part(Field.TEXT, said.encode())


def _forget(request: Message) -> None:
    return
