"""What one node does in its job: which generation it is in and how far. State that only this node knows; what
it does next is decided by `following.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from fleetrun.elastic.rounds.records import Cause, Done, Node, Report, Round


class Phase(Enum):
    IDLE = auto()  # in no generation
    READY = auto()  # member of one that forms
    RUNNING = auto()  # its processes were started
    STOPPING = auto()  # they were told to stop
    STOPPED = auto()  # none is left
    FINISHING = auto()  # the job is done; its servers may leave
    OVER = auto()  # the launcher knows the end


@dataclass(frozen=True, slots=True)
class Failure:
    """What this node wants the round to stop for. `since`: when it did so first."""

    cause: Cause
    restart: bool
    after: float
    since: float


@dataclass(slots=True)
class Part:
    node: Node
    joined: float
    phase: Phase = Phase.IDLE
    round: Round | None = None
    """The last state seen of the generation that it is in."""
    members: tuple[Node, ...] = ()
    rank: int = -1
    completed: bool = False
    completed_since: float = 0.0
    failure: Failure | None = None
    causes: list[tuple[float, Cause]] = field(default_factory=list)
    """Of this node, with the times at which they happened."""
    stopped_since: float = 0.0
    """When it was told to stop."""
    stop_cause: Cause | None = None
    seen_alive: bool = False
    """It has seen the job before its end."""
    last: Round | None = None
    """The end of the job."""
    was_up: bool = False
    down_since: float | None = None
    why_down: str = ""
    downs: int = 0
    told: tuple[int, Done, int] | None = None
    """The last report: generation, how far, how many causes."""
    renew: set[str] = field(default_factory=set)
    """Keys to write again, since they stand under a lease that has ended."""

    @property
    def generation(self) -> int:
        return self.round.generation if self.round is not None else -1

    @property
    def active(self) -> bool:
        """It has processes."""
        return self.phase in (Phase.RUNNING, Phase.STOPPING)

    def is_in(self, round_: Round) -> bool:
        """Whether it is a member of this very generation: another job may have come to the same number."""
        mine = self.round
        return mine is not None and (mine.generation, mine.topology) == (round_.generation, round_.topology)

    def take(self, round_: Round, members: tuple[Node, ...], rank: int) -> None:
        """Become a member of a generation."""
        self.phase, self.round, self.members, self.rank = Phase.READY, round_, members, rank
        self.completed, self.failure, self.causes, self.stop_cause = False, None, [], None

    def rest(self) -> None:
        self.phase, self.round, self.members, self.rank = Phase.IDLE, None, (), -1
        self.failure, self.causes = None, []

    def own(self, cause: Cause) -> Cause:
        return replace(cause, node=self.node.title, rank=self.rank)

    def aged(self, now: float) -> tuple[Cause, ...]:
        return tuple(replace(cause, age=max(0.0, now - at)) for at, cause in self.causes)

    def report(self, now: float) -> Report | None:
        if self.phase is Phase.READY:
            return Report(done=Done.READY)
        if self.phase is Phase.RUNNING:
            return Report(done=Done.COMPLETED if self.completed else Done.READY)
        if self.phase is Phase.STOPPING:
            return Report(done=Done.STOPPING, causes=self.aged(now))
        if self.phase is Phase.STOPPED:
            return Report(done=Done.STOPPED, causes=self.aged(now))
        return None
