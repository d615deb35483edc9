"""Members: which trainers have joined, finished, left or been lost, and which of their requests have
counted. Pure: connections and time are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from trainers.ps.wire import Code, Message

Reachable = Callable[[bytes], bool]


class Refusal(Exception):
    """A request that the server will not do; becomes a REFUSED reply with this code and text."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class Applied:
    """The sequence numbers that have counted, of one incarnation. A retry may come late and out of order,
    so the highest number alone would not do; a client has far fewer than `_WINDOW` requests underway.
    """

    _WINDOW = 4096

    def __init__(self, numbers: set[int] | None = None, floor: int = 0) -> None:
        self.numbers = numbers or set()
        self.floor = floor

    def __contains__(self, sequence: int) -> bool:
        return sequence <= self.floor or sequence in self.numbers

    def add(self, sequence: int) -> None:
        self.numbers.add(sequence)
        if len(self.numbers) > 2 * self._WINDOW:
            kept = sorted(self.numbers)[-self._WINDOW :]
            self.floor, self.numbers = kept[0] - 1, set(kept)


@dataclass(slots=True)
class Member:
    """One trainer as the server sees it. `step` is the next that it has not pushed; those before `resumed`
    were pushed by a former incarnation. `applied`: its requests that have changed tables; `counted`: its
    pulls that entry filters have counted.
    """

    rank: int
    route: bytes = b""
    incarnation: int | None = None
    restart_count: int = 0
    applied: Applied = field(default_factory=Applied)
    counted: Applied = field(default_factory=Applied)
    step: int = 0
    resumed: int = 0
    barrier: int = 0
    gone_since: float | None = None
    away: float = 0.0
    finished: bool = False
    left: bool = False

    @property
    def joined(self) -> bool:
        return self.incarnation is not None


class Members:
    """All trainers of the job, by rank. `grace` and `join_timeout` in seconds. `start`: which start of the
    job these are the trainers of, where that is known.
    """

    def __init__(self, count: int, grace: float, join_timeout: float, now: float) -> None:
        self._all = [Member(rank) for rank in range(count)]
        self._active: Sequence[Member] | None = None
        self._somebody_away = True
        self._started = now
        self._grace = grace
        self._join_timeout = join_timeout
        self.start: str | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def may_join(self, message: Message, reachable: Reachable) -> bool:
        """Whether a HELLO can be accepted now; False: later. Raises Refusal for a rank that is taken.

        A restarted trainer takes the place of its former self once that one's connection is gone. One that
        has left and is back without a restart belongs to the next job on this endpoint.
        """
        if message.rank >= len(self._all):
            raise Refusal(
                Code.MISMATCH, f"there is no trainer {message.rank}: this job has {len(self._all)} trainers"
            )
        member = self._all[message.rank]
        if not member.joined or member.incarnation == message.incarnation:
            return True
        restarted = message.number > member.restart_count
        if member.left:
            return restarted
        if not reachable(member.route):
            return True
        if not restarted:
            raise Refusal(Code.MISMATCH, f"there is already a trainer {message.rank} in this job")
        return False

    def join(self, route: bytes, message: Message) -> Member:
        """Register the sender of a HELLO that `may_join`."""
        member = self._all[message.rank]
        if member.incarnation != message.incarnation:
            self._all[message.rank] = member = Member(
                message.rank,
                route=route,
                incarnation=message.incarnation,
                restart_count=message.number,
                step=member.step,
                resumed=member.step,
            )
            self._active = None
        return member

    def finish(self, member: Member) -> None:
        """It will push no more."""
        member.finished, self._active = True, None

    def incarnation(self, rank: int) -> int | None:
        """Which incarnation of a trainer takes part now; None before it has joined, and when it has left."""
        member = self._all[rank]
        return None if member.left else member.incarnation

    def restore(self, members: list[Member], start: str | None) -> None:
        """Take the place of all members: those of a snapshot."""
        self._all, self._active, self.start = members, None, start

    def succeed(self, steps: Sequence[int], start: str) -> None:
        """Take the place of all members: others, who have not joined, each at its step."""
        self.restore([Member(rank, step=step) for rank, step in enumerate(steps)], start)

    def known(self, message: Message) -> Member:
        """The sender of any other request."""
        member = self._all[message.rank] if message.rank < len(self._all) else None
        if member is None or member.incarnation != message.incarnation:
            raise Refusal(
                Code.UNKNOWN_CLIENT,
                f"trainer {message.rank} is not known here: this server was restarted and its tables are "
                "gone, or a newer instance of that trainer has taken its place, or there are others now",
            )
        return member

    def heard(self, route: bytes, message: Message) -> None:
        """A message arrived: whoever sent it is there."""
        if message.rank < len(self._all):
            member = self._all[message.rank]
            if member.incarnation == message.incarnation:
                member.route, member.gone_since, member.away = route, None, 0.0

    def watch(self, reachable: Reachable, now: float) -> None:
        """Find out for how long each trainer has had no connection."""
        for member in self._all:
            if not member.joined:
                member.away = now - self._started
            elif reachable(member.route):
                member.gone_since, member.away = None, 0.0
            elif member.gone_since is None:
                member.gone_since = now
            else:
                member.away = now - member.gone_since
        self._somebody_away = any(member.away for member in self._all)

    def active(self) -> Sequence[Member]:
        """Those who may still push."""
        if self._active is None:
            self._active = tuple(member for member in self._all if not member.finished)
        return self._active

    def lost(self, *, may_return: bool = False) -> list[Member]:
        """Those whose connection has been gone for too long, and who had not finished.

        Too long is `grace`; with `may_return`, and for those who have not come yet, `join_timeout`.
        """
        if not self._somebody_away:  # asked for every request that waits
            return []
        return [member for member in self.active() if member.away > self._limit(member, may_return)]

    def why_lost(self, *, may_return: bool = False) -> str:
        """One sentence for each of them."""
        return "; ".join(
            f"trainer {member.rank} is lost: "
            + ("its connection has been gone for" if member.joined else "it has not joined for")
            + f" over {self._limit(member, may_return):g} s"
            for member in self.lost(may_return=may_return)
        )

    def _limit(self, member: Member, may_return: bool) -> float:
        return self._grace if member.joined and not may_return else self._join_timeout

    def everyone_left(self) -> bool:
        return all(member.left for member in self._all)
