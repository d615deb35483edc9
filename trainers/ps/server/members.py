"""Track which trainers have joined, finished, left or been lost, and which of their requests have been
applied.

The module is pure. Connections and time are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from trainers.ps.server.positions import Positions
from trainers.ps.wire import Code, CodedError, Message

Reachable = Callable[[bytes], bool]


class Refusal(CodedError):
    """An error for a request that the server refuses."""


class SequenceSet:
    """The sequence numbers of applied requests of one incarnation.

    A retry may arrive late and out of order, so the highest number alone is not enough. A client has far
    fewer than `_WINDOW` requests in flight.
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
    """One trainer as the server sees it."""

    rank: int
    route: bytes = b""
    incarnation: int | None = None
    restart_count: int = 0
    applied: SequenceSet = field(default_factory=SequenceSet)
    """The requests of this trainer that have changed tables."""
    counted: SequenceSet = field(default_factory=SequenceSet)
    """The pulls of this trainer that entry filters have counted."""
    step: int = 0
    """The next step that this trainer has not pushed."""
    resumed: int = 0
    """An earlier incarnation of this trainer pushed the steps before this one."""
    barrier: int = 0
    disconnected_since: float | None = None
    disconnected_s: float = 0.0
    """How long this trainer has been disconnected, in seconds."""
    finished: bool = False
    left: bool = False

    @property
    def joined(self) -> bool:
        return self.incarnation is not None


class Members:
    """All trainers of the job, by rank. `grace` and `join_timeout` are in seconds.

    `start` identifies the start of the job to which these trainers belong, if it is known. `positions` holds
    the stream records that these trainers and their predecessors have pushed.
    """

    def __init__(self, count: int, grace: float, join_timeout: float, now: float) -> None:
        self._all = [Member(rank) for rank in range(count)]
        self._active: Sequence[Member] | None = None
        self._any_disconnected = True
        self._started = now
        self._grace = grace
        self._join_timeout = join_timeout
        self.start: str | None = None
        self.positions = Positions()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def may_join(self, message: Message, reachable: Reachable) -> bool:
        """Return True if the server can accept a HELLO now, or False if later. Raises Refusal if the rank is
        in use.

        A restarted trainer replaces its earlier incarnation once the connection of that incarnation has
        closed. A trainer that has left and joins again without a restart belongs to the next job on this
        endpoint.
        """
        if message.rank >= len(self._all):
            raise Refusal(
                Code.MISMATCH,
                f"trainer {message.rank} does not exist: this job has {len(self._all)} trainers",
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
            raise Refusal(Code.MISMATCH, f"this job already has a trainer {message.rank}")
        return False

    def join(self, route: bytes, message: Message) -> Member:
        """Register the sender of a HELLO for which `may_join` is true."""
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
        """Record that this trainer has made its last push."""
        member.finished, self._active = True, None

    def incarnation(self, rank: int) -> int | None:
        """Return the current incarnation of a trainer, or None before it has joined and after it has left."""
        member = self._all[rank]
        return None if member.left else member.incarnation

    def restore(self, members: list[Member], start: str | None) -> None:
        """Replace all members by the members of a snapshot."""
        self._all, self._active, self.start = members, None, start

    def replace(self, steps: Sequence[int], start: str) -> None:
        """Replace all members by new members that have not joined, each at its step."""
        self.restore([Member(rank, step=step) for rank, step in enumerate(steps)], start)

    def sender_of(self, message: Message) -> Member:
        """Return the sender of any request except HELLO. Raises Refusal if it is not a current member."""
        member = self._all[message.rank] if message.rank < len(self._all) else None
        if member is None or member.incarnation != message.incarnation:
            raise Refusal(
                Code.UNKNOWN_CLIENT,
                f"trainer {message.rank} is unknown. Either this server restarted without its tables, a "
                "newer instance of the trainer replaced it, or the job continues with other trainers",
            )
        return member

    def mark_connected(self, route: bytes, message: Message) -> None:
        """Record that the sender of a message is connected."""
        if message.rank < len(self._all):
            member = self._all[message.rank]
            if member.incarnation == message.incarnation:
                member.route, member.disconnected_since, member.disconnected_s = route, None, 0.0

    def check_connections(self, reachable: Reachable, now: float) -> None:
        """Update for each trainer how long it has been disconnected."""
        for member in self._all:
            if not member.joined:
                member.disconnected_s = now - self._started
            elif reachable(member.route):
                member.disconnected_since, member.disconnected_s = None, 0.0
            elif member.disconnected_since is None:
                member.disconnected_since = now
            else:
                member.disconnected_s = now - member.disconnected_since
        self._any_disconnected = any(member.disconnected_s for member in self._all)

    def active(self) -> Sequence[Member]:
        """Return the members that may still push."""
        if self._active is None:
            self._active = tuple(member for member in self._all if not member.finished)
        return self._active

    def lost(self, *, may_return: bool = False) -> list[Member]:
        """Return the members that have not finished and were disconnected for too long.

        The limit is `grace`. With `may_return`, and for members that have not joined yet, the limit is
        `join_timeout`.
        """
        if not self._any_disconnected:  # a shortcut, because this runs for every pending request
            return []
        return [member for member in self.active() if member.disconnected_s > self._limit(member, may_return)]

    def describe_lost(self, *, may_return: bool) -> str:
        """Return a clause for each lost trainer."""
        return "; ".join(
            f"trainer {member.rank} is lost: "
            + ("it has been disconnected" if member.joined else "it has not joined")
            + f" for over {self._limit(member, may_return):g} s"
            for member in self.lost(may_return=may_return)
        )

    def _limit(self, member: Member, may_return: bool) -> float:
        return self._grace if member.joined and not may_return else self._join_timeout

    def everyone_left(self) -> bool:
        return all(member.left for member in self._all)
