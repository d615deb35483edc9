"""Meetings: what all trainers must come to - barriers, and the exchange of what each of them has. Pure:
leaves who has joined to `members`, and when to try again to `service`.

Gatherings follow each other: one ends when every trainer has given something to it, and its answer is kept
until the next one ends, for those who did not get it. The trainers count them. A server that was restarted
in the middle of one knows nothing of it: the counts of those who have ended it and of those who have not
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainers.ps.net.wire import Code, Field, Kind, Message, Part
from trainers.ps.server.members import Member, Members, Refusal

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
