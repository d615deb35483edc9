"""The values of a decision: what the job wants of its nodes (`Policy`), the steps that can be decided, and
the `Decision` itself. `elastic/membership.py` takes the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fleetrun.elastic.rendezvous.records import Cause, Census, Node, Report, Round, Verdict
from fleetrun.errors import LaunchError

# ---- The policy of a job: how many nodes, which timeouts, what follows a loss

REFORM_QUIET = 2.0
"""How long a job that has run waits for more nodes, once there are enough; a loss seldom comes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`fewest` to `most` nodes. `level` is --elastic_level: -1, 0 or 1. `lease` is how many seconds a node
    may be silent. `fixed_ranks` are the hosts of --ips, to name who is missing. `endpoint` is where they
    meet.
    """

    fewest: int
    most: int
    level: int = -1
    elastic_timeout: float = 30.0
    rdzv_timeout: float = 60.0
    lease: float = 10.0
    sort_ip: bool = False
    max_restart: int = 0
    fixed_ranks: tuple[str, ...] = ()
    endpoint: str = ""

    @property
    def elastic(self) -> bool:
        """Whether the job survives a node."""
        return self.fewest < self.most or self.level >= 0

    @property
    def reform_timeout(self) -> float:
        """How long a job that has run may be without enough nodes."""
        return max(1.0, self.elastic_timeout)

    @property
    def ghost(self) -> float:
        """How long a replacement of a dead node may have to wait for that one's lease to end."""
        return self.lease + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """While nodes meet: how many are there, who is missing (hosts, or `rank 3`; empty if nobody can tell),
    and the seconds left.
    """

    present: int
    fewest: int
    most: int
    missing: tuple[str, ...] = ()
    left: float = 0.0


# ---- Decisions: steps at the store and steps of this node; `membership.py` takes them

# ---- at the store, by any node


@dataclass(frozen=True, slots=True)
class Register:
    """Say that this node wants to take part."""


@dataclass(frozen=True, slots=True)
class Unregister:
    """Say that this node has seen the end."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Become the leader."""

    expect: int


@dataclass(frozen=True, slots=True)
class Learn:
    """Read the topology of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Report how far this node is."""

    generation: int
    report: Report


@dataclass(frozen=True, slots=True)
class Move:
    """Write the round, if it still is of revision `expect`."""

    round: Round
    expect: int


@dataclass(frozen=True, slots=True)
class Form:
    """Write the topology of these members, then the round."""

    round: Round
    members: tuple[Node, ...]
    expect: int


# ---- at the store, by the leader


@dataclass(frozen=True, slots=True)
class Refuse:
    id: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete the entry of a node that does not answer, if it still is of this revision."""

    id: str
    revision: int


@dataclass(frozen=True, slots=True)
class Check:
    """Ask the store itself whether this node is there."""

    id: str


@dataclass(frozen=True, slots=True)
class Count:
    """Let those who wait know."""

    census: Census


@dataclass(frozen=True, slots=True)
class Clean:
    """Everybody has seen the end: leave nothing behind."""


# ---- of this node


@dataclass(frozen=True, slots=True)
class Ready:
    """Take part in a generation that forms, as member `rank`."""

    round: Round
    rank: int


@dataclass(frozen=True, slots=True)
class Start:
    round: Round


@dataclass(frozen=True, slots=True)
class Stop:
    cause: Cause
    restart: bool


@dataclass(frozen=True, slots=True)
class Rest:
    """Out of the generation; none of its processes is left."""


@dataclass(frozen=True, slots=True)
class Finish:
    """All trainers of the job have completed."""


@dataclass(frozen=True, slots=True)
class End:
    code: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class Fail:
    error: LaunchError


@dataclass(frozen=True, slots=True)
class Close:
    """Leave the store."""


Act = (
    Register
    | Unregister
    | Claim
    | Learn
    | Tell
    | Move
    | Form
    | Refuse
    | Drop
    | Check
    | Count
    | Clean
    | Ready
    | Start
    | Stop
    | Rest
    | Finish
    | End
    | Fail
    | Close
)


@dataclass(slots=True)
class Decision:
    """What to do now, and when to look again though nothing has changed."""

    acts: list[Act] = field(default_factory=list)
    until: float = math.inf
    waiting: Waiting | None = None

    def do(self, *acts: Act) -> None:
        self.acts += acts

    def look_at(self, when: float) -> None:
        self.until = min(self.until, when)
