"""What a decision consists of: the job's `Policy`, the acts that can be decided, and the `Decision` itself.
`elastic/membership.py` carries the acts out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from fleetrun.aliases import Strings
from fleetrun.elastic.rendezvous.records import Cause, Census, Nodes, Report, Round, Verdict
from fleetrun.envs.contract import NodeLoss
from fleetrun.errors import LaunchError
from fleetrun.frozen import frozen, frozen_by_name
from fleetrun.pod.policy import NO_RESTARTS, Budget

REFORM_QUIET = 2.0
"""Seconds that a job that has run waits for more nodes, once there are enough: nodes are often lost
together.
"""


ELECTION = 4.0
"""Seconds in which the members of an etcd have another leader."""

FORGIVEN_AFTER = 3600.0
"""Seconds of work, without --restart_window, after which a machine's faults do not count any more."""

_LOSSES = 3
"""At least so many nodes may be lost before the next step."""


@frozen_by_name
class Policy:
    """What the job requires of its nodes: how many, and what happens when one is lost.

    There are `fewest` to `most` nodes; up to `spares` more wait until one of them is lost. `on_loss`
    is --on_node_loss. `lease` is for how many seconds a node may be silent. `fixed_ranks` are the hosts of
    --ips, so that missing ones can be named. `endpoint` is the address of the rendezvous store. A machine is
    left out after `exclude_after` faults; 0: never. `check` is --check.
    """

    fewest: int
    most: int
    spares: int = 0
    on_loss: NodeLoss = NodeLoss.FAIL
    elastic_timeout: float = 30.0
    rdzv_timeout: float = 60.0
    lease: float = 10.0
    sort_ip: bool = False
    budget: Budget = NO_RESTARTS
    exclude_after: int = 0
    check: str = "off"
    fixed_ranks: Strings = ()
    endpoint: str = ""

    @property
    def elastic(self) -> bool:
        """Whether the job survives the loss of a node, also without a spare."""
        return self.fewest < self.most or self.on_loss is not NodeLoss.FAIL

    @property
    def replaces(self) -> bool:
        """Whether the job may survive the loss of a node."""
        return self.elastic or self.spares > 0

    @property
    def losses(self) -> Budget:
        """Of lost nodes, with a step or without: a job that loses all of its nodes one by one before its next
        step may be what breaks them.
        """
        return replace(self.budget, limit=max(_LOSSES, self.most))

    @property
    def forgiven_after(self) -> float:
        """Seconds of work after which a machine's faults do not count any more."""
        return FORGIVEN_AFTER if self.budget.window is None else self.budget.window

    @property
    def reform_timeout(self) -> float:
        """Seconds that a job that has run may be without enough nodes."""
        return max(1.0, self.elastic_timeout)

    @property
    def ghost(self) -> float:
        """Seconds until the lease of a dead node has ended for certain: its replacement may have to wait.
        Where several machines serve the store, it may have been their leader: all leases begin again then.
        """
        return self.lease + 1.0 + ("," in self.endpoint) * ELECTION


@frozen_by_name
class Waiting:
    """Progress of a rendezvous: how many nodes are present, which are missing (hosts, or `rank 3`; empty when
    that is unknown), and the seconds left. `spare`: the job runs on so many other nodes.
    """

    present: int
    fewest: int
    most: int
    missing: Strings = ()
    left: float = 0.0
    spare: bool = False


# ---- Acts of any node at the store


@frozen
class Register:
    """Write this node's entry: it wants to take part."""


@frozen
class Unregister:
    """Delete this node's entry: it has seen the end of the job."""


@frozen
class ClaimLead:
    """Become the leader."""

    expect: int


@frozen
class ReadTopology:
    """Read the topology with this name."""

    name: str


@frozen
class CheckAlone:
    """Check this machine, which waits as a spare while this round runs."""

    round: Round


@frozen
class WriteReport:
    """Write this node's report: how far it is in the generation."""

    generation: int
    report: Report


@frozen
class WriteRound:
    """Write the round, if its revision still is `expect`."""

    round: Round
    expect: int


@frozen
class Propose:
    """Write the topology of these members, then the round."""

    round: Round
    members: Nodes
    expect: int


# ---- Acts of the leader at the store


@frozen
class Refuse:
    """Tell a node that it cannot take part."""

    id: str
    verdict: Verdict


@frozen
class DropNode:
    """Delete the entry of a node that does not answer, if its revision still is this one."""

    id: str
    revision: int


@frozen
class CheckNode:
    """Read this node's entry: the mirror may not have it yet."""

    id: str


@frozen
class WriteCensus:
    """Write how many nodes are present, for those that wait."""

    census: Census


@frozen
class DeleteJob:
    """Delete all keys of the job: every node has seen its end."""


# ---- Acts of this node in its own processes and state


@frozen
class Accept:
    """Take part in the generation that forms, as member `rank`."""

    round: Round
    rank: int


@frozen
class Start:
    """Start this node's processes."""

    round: Round


@frozen
class Stop:
    """Stop this node's processes. `at_once`: by SIGKILL, because the job has gone on without this node, and
    what they still did would come between.
    """

    cause: Cause
    restart: bool
    at_once: bool = False


@frozen
class Leave:
    """Leave the generation; none of its processes is left."""


@frozen
class Finish:
    """Let this node's servers exit: all trainers of the job have completed."""


@frozen
class End:
    """The job is over for this node, with this exit code."""

    code: int
    cause: Cause | None


@frozen
class Fail:
    """This node cannot take part, or cannot continue."""

    error: LaunchError


@frozen
class Close:
    """Disconnect from the store."""


Act = (
    Register
    | Unregister
    | ClaimLead
    | ReadTopology
    | WriteReport
    | WriteRound
    | Propose
    | Refuse
    | DropNode
    | CheckAlone
    | CheckNode
    | WriteCensus
    | DeleteJob
    | Accept
    | Start
    | Stop
    | Leave
    | Finish
    | End
    | Fail
    | Close
)


@dataclass(slots=True)
class Decision:
    """What to do now, and when to decide again if nothing changes until then."""

    acts: list[Act] = field(default_factory=list)
    until: float = math.inf
    waiting: Waiting | None = None

    def do(self, *acts: Act) -> None:
        self.acts += acts

    def look_at(self, when: float) -> None:
        self.until = min(self.until, when)
