"""Service: what a server answers. Pure: messages, connections and time come as arguments, replies go back
as values.

A request that cannot be answered yet waits; whenever something has changed all waiting requests are tried
again. A trainer that asks again for a waiting request gets WAIT at once, so it can tell a server that waits
from one that is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainers.ps.net.wire import Code, Field, Kind, Message, Part, bytes_part
from trainers.ps.server.members import Member, Members, Reachable, Refusal
from trainers.ps.server.rounds import Gradient, Round
from trainers.ps.server.store import Store

Outgoing = tuple[bytes, Message]


@dataclass(slots=True)
class _Waiting:
    route: bytes
    request: Message


class Service:
    """One server. `sync`: a step is applied when every active trainer has pushed it; otherwise a push on
    its arrival. `job` describes the job in words that every trainer must use too.
    """

    def __init__(self, members: Members, *, sync: bool, job: str) -> None:
        self._members = members
        self._job = job
        self._sync = sync
        self._store = Store()
        self._round = Round()
        self._step = 0
        self._waiting: dict[tuple[int, int, int], _Waiting] = {}
        self._verbs: dict[Kind, Callable[[Member, Message], Message | None]] = {
            Kind.ASSIGN: self._assign,
            Kind.READY: self._ready,
            Kind.OPEN: self._open,
            Kind.PULL: self._pull,
            Kind.PUSH: self._push,
            Kind.BARRIER: self._barrier,
            Kind.FINISH: self._finish,
            Kind.LEAVE: self._leave,
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
        """Replies to this request, and to waiting ones that it has freed."""
        self._members.heard(route, request)
        key = (request.rank, request.incarnation, request.sequence)
        reply = self._answer(route, request, reachable)
        if reply is not None:
            self._waiting.pop(key, None)
            return [(route, reply), *self._retry(reachable)]
        self._waiting[key] = _Waiting(route, request)
        wait = request.reply(Kind.WAIT, parts=(_text(self._awaited(request)),))
        return [(route, wait), *self._retry(reachable)]

    def tick(self, reachable: Reachable, now: float) -> list[Outgoing]:
        """Look after connections; replies to waiting requests that this has decided."""
        self._members.watch(reachable, now)
        return self._retry(reachable)

    def _retry(self, reachable: Reachable) -> list[Outgoing]:
        replies = []
        for key, waiting in list(self._waiting.items()):
            reply = self._answer(waiting.route, waiting.request, reachable)
            if reply is not None:
                del self._waiting[key]
                replies.append((waiting.route, reply))
        return replies

    def _answer(self, route: bytes, request: Message, reachable: Reachable) -> Message | None:
        try:
            if request.kind is Kind.HELLO:
                return self._hello(route, request, reachable)
            if request.kind not in self._verbs:
                raise Refusal(Code.BAD_MESSAGE, f"{request.kind.name} is not a request")
            return self._verbs[request.kind](self._members.known(request), request)
        except Refusal as refusal:
            return request.reply(Kind.REFUSED, code=refusal.code, parts=(_text(str(refusal)),))

    def _hello(self, route: bytes, request: Message, reachable: Reachable) -> Message | None:
        if not request.parts or request.parts[0].field is not Field.TEXT:
            raise Refusal(Code.BAD_MESSAGE, "a HELLO that does not say for which job")
        job = request.parts[0].data.numpy().tobytes().decode("utf-8", "replace")
        if job != self._job:
            raise Refusal(Code.MISMATCH, f"trainer {request.rank} runs {job!r}, this server {self._job!r}")
        if not self._members.may_join(request, reachable):
            return None
        self._store.declare(request.rank, request.parts[1:])
        member = self._members.join(route, request)
        code = Code.NONE if self._store.ready else Code.NOT_READY
        # Its former self may have pushed the step that the others wait for; that push counts.
        return request.reply(Kind.DONE, number=self._step + (member.rank in self._round.ranks()), code=code)

    def _assign(self, member: Member, request: Message) -> Message:
        if not self._store.ready:  # a late copy of a message that was answered must not reset trained values
            self._store.assign(request.parts)
        return request.reply(Kind.DONE)

    def _ready(self, member: Member, request: Message) -> Message:
        self._store.ready = True
        return request.reply(Kind.DONE)

    def _open(self, member: Member, request: Message) -> Message | None:
        if self._store.ready:
            return request.reply(Kind.DONE, number=self._step)
        self._expect_everyone()
        return None

    def _pull(self, member: Member, request: Message) -> Message | None:
        self._expect_ready()
        if self._sync and request.number > self._step:
            self._expect_everyone()
            return None
        return request.reply(Kind.DATA, number=self._step, parts=self._store.pull(request.parts))

    def _push(self, member: Member, request: Message) -> Message:
        if request.sequence <= member.applied:  # a retry of what was applied
            return request.reply(Kind.DONE, number=self._step)
        self._expect_ready()
        push = self._store.read_push(request.parts)
        if self._sync:
            self._add_to_round(member, request.number, push)
        else:
            self._store.apply(push)
            self._step += 1
        member.applied = request.sequence
        return request.reply(Kind.DONE, number=self._step)

    def _add_to_round(self, member: Member, step: int, push: list[Gradient]) -> None:
        if step != self._step or member.rank in self._round.ranks() or member.finished:
            raise Refusal(
                Code.BAD_STEP,
                f"trainer {member.rank} pushed step {step}; this server is at step {self._step}",
            )
        self._round.add(member.rank, push)
        self._close_round()

    def _close_round(self) -> None:
        """Apply the step when all who may push have. Who has finished no longer counts, as in Paddle."""
        ranks = self._round.ranks()
        if ranks and all(member.rank in ranks for member in self._members.active()):
            self._store.apply(self._round.average())
            self._round = Round()
            self._step += 1

    def _barrier(self, member: Member, request: Message) -> Message | None:
        member.barrier = max(member.barrier, request.number)
        if all(other.barrier >= request.number for other in self._members.active()):
            return request.reply(Kind.DONE)
        self._expect_everyone()
        return None

    def _finish(self, member: Member, request: Message) -> Message | None:
        member.finished = True
        self._close_round()
        if self._sync:
            self._expect_everyone()
        if len(self._members.active()) > len(self._members.lost()):
            return None
        return request.reply(Kind.DONE, number=self._step)

    def _leave(self, member: Member, request: Message) -> Message:
        member.finished = member.left = True
        self._close_round()
        return request.reply(Kind.DONE)

    def _expect_ready(self) -> None:
        if not self._store.ready:
            raise Refusal(Code.NOT_READY, "trainer 0 has not sent the initial values yet")

    def _expect_everyone(self) -> None:
        """Refuse to wait for a trainer that is gone. An async job gives a restarted one time to come back."""
        if self._members.lost(may_return=not self._sync):
            raise Refusal(Code.TRAINER_LOST, self._members.why_lost(may_return=not self._sync))

    def _awaited(self, request: Message) -> str:
        """What a waiting request waits for, for a person."""
        if request.kind is Kind.OPEN:
            return "the initial values of trainer 0"
        if request.kind is Kind.HELLO:
            return f"the former trainer {request.rank} to be gone"
        active = self._members.active()
        if request.kind is Kind.BARRIER:
            active = [other for other in active if other.barrier < request.number]
        if request.kind is Kind.PULL:
            active = [other for other in active if other.rank not in self._round.ranks()]
        return "trainer " + ", ".join(str(other.rank) for other in active)


def _text(said: str) -> Part:
    return bytes_part(Field.TEXT, said.encode())
