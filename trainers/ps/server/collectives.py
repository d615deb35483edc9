"""Answer barriers and gathers of all trainers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetrun.aliases import Callback
from trainers.ps.server.members import Member, Members, Refusal
from trainers.ps.wire import Code, Field, Kind, Message, Part

ANY_GATHER = 0
"""The count of a trainer that has completed no gather. It joins the current gather of the others."""
_MAX_GATHER = 1 << 62


class Collectives:
    """Barriers and gathers of all trainers. Each method answers one kind of request, and None means later.
    `refuse_if_lost` raises Refusal when a trainer is lost. A gather ends when every trainer has contributed.
    Its answer is kept until the next gather ends, for trainers that did not receive it. The trainers count
    their gathers. After a server restart during a gather, trainers that have completed it have another count
    than trainers that have not.
    """

    def __init__(self, members: Members, record: Callable[[Message], None], refuse_if_lost: Callback) -> None:
        self._members = members
        self._record = record
        self._refuse_if_lost = refuse_if_lost
        self._contributions: dict[int, Message] = {}
        self._answered: dict[int, Message] = {}
        self._result: tuple[Part, ...] = ()
        self._next = 1

    def barrier(self, member: Member, request: Message) -> Message | None:
        """Answer when all active trainers have reached the barrier."""
        if request.number > member.barrier:
            self._record(request)
            member.barrier = request.number
        if all(other.barrier >= request.number for other in self._members.active()):
            return request.reply(Kind.DONE)
        self._refuse_if_lost()
        return None

    def gather(self, member: Member, request: Message) -> Message | None:
        """Return the contribution of each trainer as one TEXT part each. Raises Refusal if a trainer has
        finished, or if the sender is at another gather than the others.
        """
        if _same(self._answered.get(member.rank), request):
            return self._answer(request)
        if [part.field for part in request.parts] != [Field.TEXT] or request.number > _MAX_GATHER:
            raise Refusal(Code.BAD_MESSAGE, "a GATHER needs exactly one TEXT part")
        if finished := [other.rank for other in self._members if other.finished]:
            raise Refusal(
                Code.TRAINER_LOST,
                f"trainer {finished[0]} has called fleet.stop_worker() and cannot contribute. Make this "
                "call before fleet.stop_worker() on all trainers",
            )
        self._contributions[member.rank] = request
        contributions = [
            self._contributions[other.rank] for other in self._members if self._contributed(other)
        ]
        counts = {each.number for each in contributions} - {ANY_GATHER}
        if len(counts) > 1:
            raise Refusal(
                Code.MISMATCH,
                f"some trainers are at gather {min(counts)} and others at gather {max(counts)}, because this "
                "server restarted in between and lost contributions",
            )
        if len(contributions) < len(self._members):
            self._refuse_if_lost()
            return None
        self._result = tuple(each.parts[0] for each in contributions)
        self._answered, self._contributions = self._contributions, {}
        self._next = max(1, *(each.number for each in contributions)) + 1
        return self._answer(request)

    def reset(self) -> None:
        """Drop the contributions to an unfinished gather, because its trainers have stopped waiting."""
        self._contributions = {}

    def awaited(self, request: Message) -> Sequence[Member]:
        """Return the trainers that this request waits for."""
        if request.kind is Kind.BARRIER:
            return [other for other in self._members.active() if other.barrier < request.number]
        return [other for other in self._members if not self._contributed(other)]

    def _contributed(self, member: Member) -> bool:
        """Return True if this incarnation of the trainer has contributed."""
        contribution = self._contributions.get(member.rank)
        return contribution is not None and contribution.incarnation == member.incarnation

    def _answer(self, request: Message) -> Message:
        return request.reply(Kind.DATA, number=self._next, parts=self._result)


def _same(one: Message | None, other: Message) -> bool:
    """Return True if both are the same request, sent twice."""
    return one is not None and (one.incarnation, one.sequence) == (other.incarnation, other.sequence)
