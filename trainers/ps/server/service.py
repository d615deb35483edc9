"""Service: what a server answers. Pure: messages, connections and time come as arguments, replies go back
as values.

A request that cannot be answered yet waits; whenever something has changed for others, all waiting requests
are tried again. A trainer that asks again for a waiting request gets WAIT at once, so it can tell a server
that waits from one that is gone.

Every request that changes what must survive goes through `record` first, and `replay` does it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainers.ps.net.wire import Code, Field, Kind, Message, Part, bytes_part
from trainers.ps.server.meetings import Meetings
from trainers.ps.server.members import Member, Members, Reachable, Refusal
from trainers.ps.server.rounds import Gradient
from trainers.ps.server.saving import Saving
from trainers.ps.server.steps import Steps
from trainers.ps.server.store import Store
from trainers.ps.server.upkeep import Upkeep
from trainers.ps.server.waiting import MEETINGS, MOST_WAITING, WaitingRequests

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
