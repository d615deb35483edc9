"""Define the parts of a decision: the job's `Policy`, the possible acts, and the `Decision` itself.
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
"""Seconds that a job that has run waits for more nodes when it has enough, because nodes are often lost
together.
"""


ELECTION = 4.0
"""Seconds in which the members of an etcd elect another leader."""

FORGIVEN_AFTER = 3600.0
"""Seconds of work after which a node's faults expire, without --restart_window."""

_LOSSES = 3
"""At least this many nodes may be lost before the next step."""


@frozen_by_name
class Policy:
    """The job's requirements on its nodes: how many, and what happens if one is lost."""

    fewest: int
    most: int
    spares: int = 0  # nodes that may wait until another is lost
    on_loss: NodeLoss = NodeLoss.FAIL  # --on_node_loss
    elastic_timeout: float = 30.0
    rdzv_timeout: float = 60.0
    lease: float = 10.0  # seconds that a node may be silent
    sort_ip: bool = False
    budget: Budget = NO_RESTARTS
    exclude_after: int = 0  # faults after which a node is excluded; 0: never
    check: str = "off"  # --check
    watch: bool = False  # a job that ends waits for a change of its script (--watch)
    fixed_ranks: Strings = ()  # the hosts of --ips, to name missing nodes
    endpoint: str = ""  # the address of the rendezvous store

    @property
    def elastic(self) -> bool:
        """True if the job survives the loss of a node even without a spare."""
        return self.fewest < self.most or self.on_loss is not NodeLoss.FAIL

    @property
    def replaces(self) -> bool:
        """True if the job may survive the loss of a node."""
        return self.elastic or self.spares > 0

    @property
    def losses(self) -> Budget:
        """The budget for lost nodes, with or without known steps.

        A job that loses all of its nodes one by one before its next step may itself break them.
        """
        return replace(self.budget, limit=max(_LOSSES, self.most))

    @property
    def reform_timeout(self) -> float:
        """The seconds that a job may lack nodes after it has run."""
        return max(1.0, self.elastic_timeout)

    @property
    def ghost(self) -> float:
        """Seconds until the lease of a dead node has certainly ended, for which its replacement may have to
        wait.

        If several nodes serve the store, the dead node may have been their leader. All leases then start
        again.
        """
        return self.lease + 1.0 + ("," in self.endpoint) * ELECTION


@frozen_by_name
class Waiting:
    """The progress of a rendezvous."""

    present: int  # number of present nodes
    fewest: int
    most: int
    missing: Strings = ()  # hosts or `rank 3`; empty if unknown
    left: float = 0.0  # seconds
    spare: bool = False  # the job runs on `present` other nodes


# ---- Acts of any node at the store


@frozen
class Register:
    """Write this node's entry, because it wants to take part."""


@frozen
class Unregister:
    """Delete this node's entry after it has seen the end of the job."""


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
    """Check this node, which waits as a spare while this round runs."""

    round: Round


@frozen
class WriteReport:
    """Write this node's report on its progress in the generation."""

    generation: int
    report: Report


@frozen
class WriteRound:
    """Write the round if its revision is still `expect`."""

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
    """Refuse a node that cannot take part."""

    id: str
    verdict: Verdict


@frozen
class DropNode:
    """Delete the entry of a silent node, if the entry still has this revision."""

    id: str
    revision: int


@frozen
class CheckNode:
    """Read this node's entry, which the mirror may not have yet."""

    id: str


@frozen
class WriteCensus:
    """Write the number of present nodes, for the waiting nodes."""

    census: Census


@frozen
class DeleteJob:
    """Delete all keys of the job, after every node has seen its end."""


# ---- Acts of this node in its own processes and state


@frozen
class Accept:
    """Take part as member `rank` in the generation that forms."""

    round: Round
    rank: int


@frozen
class Start:
    """Start this node's processes."""

    round: Round


@frozen
class Stop:
    """Stop this node's processes."""

    cause: Cause
    restart: bool
    at_once: bool = False
    """Use SIGKILL. The job has continued without this node, and further work of the processes would
    interfere.
    """


@frozen
class Leave:
    """Leave the generation, after all of this node's processes have ended."""


@frozen
class Finish:
    """Let this node's servers exit, because all trainers of the job have completed."""


@frozen
class Pause:
    """Wait for a change, after all of this node's processes have ended (--watch)."""

    round: Round


@frozen
class End:
    """End the job on this node with this exit code."""

    code: int
    cause: Cause | None


@frozen
class Fail:
    """Report that this node cannot take part, or cannot continue."""

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
    | Pause
    | End
    | Fail
    | Close
)


@dataclass(slots=True)
class Decision:
    """The acts that are due now, and the time of the next decision at the latest."""

    acts: list[Act] = field(default_factory=list)
    until: float = math.inf
    waiting: Waiting | None = None

    def do(self, *acts: Act) -> None:
        self.acts += acts

    def look_at(self, when: float) -> None:
        """Decide again at this time at the latest."""
        self.until = min(self.until, when)
