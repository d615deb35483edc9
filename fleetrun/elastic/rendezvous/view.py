"""Hold the state for a node's decisions: the state of the job, from its mirror of the store (`View`), and its
own (`MemberState`). Decisions and writes are elsewhere. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import chain

from fleetrun.decoding import BadRecordError
from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.actions import Policy
from fleetrun.elastic.rendezvous.checks import Measured
from fleetrun.elastic.rendezvous.records import (
    Cause,
    Census,
    MemberStatus,
    Node,
    Nodes,
    Report,
    Round,
    State,
    Verdict,
)
from fleetrun.elastic.store import ABSENT, Entries, Entry
from fleetrun.frozen import frozen
from fleetrun.record.faults import MachineFaults, merged


@frozen
class Candidate:
    """A node that wants to take part."""

    node: Node
    created: int  # orders nodes by arrival
    revision: int
    since: float  # when this node first saw it
    fits: int  # equal for nodes with the same version and options


@frozen
class ReceivedReport:
    """A report, and the time of each of its causes."""

    report: Report
    causes: tuple[tuple[float, Cause], ...]


class View:
    """The records in one node's mirror, each parsed once, with the times of their arrival by the node's own
    clock.
    """

    def __init__(self, me: str, now: float) -> None:
        self.me = me
        self.up = False
        self.foreign = ""
        """The reason why the value at the round's key is not a round. Empty if it is one."""
        self.round: Round | None = None
        self.round_revision = ABSENT
        self.round_since = now
        self.unformed_since = now
        """Time since which no generation ran or was stopping, and no turn of a check started or ended."""
        self.ran_since = now
        """When the last generation that ran started, or when this node saw it for the first time."""
        self._ran = -1
        self._round_seen = ABSENT
        """Revision of the round when the job was last seen alive."""
        self.rewound = False
        """True if the store's revisions started again. The store lost its data, and another node has opened a
        round.
        """
        self._missed = False
        """True if this node's own entry has been missing since then."""
        self.leader: str | None = None
        self.leader_created = ABSENT
        self.leader_revision = ABSENT
        self.leaderless_since: float | None = None
        self.led_since = now
        self.departed_leader = ""
        """The last leader, if this node saw it disappear."""
        self.whole_since = now
        self.census: Census | None = None
        self.census_since = now
        self.verdict: Verdict | None = None
        self.nodes: dict[str, Candidate] = {}
        self.faults: MachineFaults = ()
        """The faults that nodes have brought along."""
        self.nodes_since = now
        """When a node last arrived or left."""
        self.departed: dict[str, float] = {}
        """The nodes that left while this node was connected, with the times."""
        self.closed: set[str] = set()
        """Nodes that closed their connection to the store, because their launchers have ended."""
        self.reports: dict[str, ReceivedReport] = {}
        """The reports of the round's generation."""
        self.others: dict[str, Entry] = {}
        """Entries of other protocols, such as `ask_wire.py`."""
        self.topologies_seen = 0
        """Number of topologies that this node has learned. It makes the names of its own topologies
        unique.
        """
        self.epoch = 0.0
        """Offset from this node's clock to seconds since the epoch."""
        self._topology: tuple[str, Nodes] | None = None
        self._known: dict[str, Entry] = {}

    # ---- reading

    @property
    def census_of_round(self) -> Census | None:
        """The census of this round. None if the last census belongs to an earlier round."""
        return self.census if self.census_since >= self.round_since else None

    @property
    def leads(self) -> bool:
        return self.leader == self.me

    @property
    def registered(self) -> bool:
        return self.me in self.nodes

    @property
    def members(self) -> Nodes | None:
        """The members of the round's topology, in rank order. None before it was read, empty if there is
        none.
        """
        name = self.round.topology if self.round is not None else ""
        if not name:
            return ()
        return self._topology[1] if self._topology is not None and self._topology[0] == name else None

    @property
    def cleared(self) -> bool:
        """True if the leader deleted the round after the end of the job.

        In this case the store has kept its data. The revisions of a store that lost its data start again.
        """
        mine = self.nodes.get(self.me)
        if self.round is not None or self._round_seen == ABSENT or mine is None:
            return False
        return not self._missed or mine.created > self._round_seen

    def learned(self, name: str, members: Nodes) -> None:
        """Store a topology that was read."""
        self._topology = (name, members)
        self.topologies_seen += 1

    def left(self, id_: str, now: float) -> None:
        """Note that the entry of a node is missing in the store itself."""
        if id_ not in self.nodes:
            self.departed.setdefault(id_, now)

    def lost_at(self, id_: str, lease: float) -> float | None:
        """Return when a node left, or will count as lost if it stays absent. Return None while it is present.

        A node that was absent when this view started may still return. A view starts after a change of leader
        or a reconnect.
        """
        if id_ in self.nodes:
            return None
        return self.departed.get(id_, max(self.whole_since, self.led_since) + lease)

    def done(self, id_: str) -> MemberStatus | None:
        """Return the progress of a member, or None before its first report."""
        entry = self.reports.get(id_)
        return None if entry is None else entry.report.done

    # ---- updating

    def refresh(
        self,
        mirror: Entries,
        now: float,
        *,
        whole: bool = False,
        closed: Collection[str] = (),
    ) -> None:
        """Read the changes in the mirror.

        With `whole`, the connection was lost in between, so missing keys may have disappeared at any time.
        `closed` is as in `Store.closed`.
        """
        if whole:
            self.whole_since = now
        known = self._known
        first = mirror.get(records.ROUND_KEY)  # first: the round decides what reports mean
        for key, entry in chain(((records.ROUND_KEY, first),) if first else (), mirror.items()):
            old = known.get(key)
            if (
                old is not entry and old != entry
            ):  # also by value, because a store that lost its data restarts its revisions
                known[key] = entry
                self._note(key, entry, now)
        if len(known) > len(mirror):
            for key in [key for key in known if key not in mirror]:
                del known[key]
                self._miss(key, now, seen=not whole, closed=key in closed)
        if self.leader is None and self.leaderless_since is None:
            self.leaderless_since = now
        if self.round is not None and self.round.state is not State.ENDED and self.registered:
            self._round_seen, self._missed = self.round_revision, False

    def _note(self, key: str, entry: Entry, now: float) -> None:
        folder, _, name = key.partition("/")
        try:
            if key == records.ROUND_KEY:
                self._note_round(records.read_round(entry.value), entry, now)
            elif key == records.LEADER_KEY:
                leader = entry.value.decode(errors="replace")
                if leader == self.me and self.leader != leader:
                    self.led_since = now
                self.leader, self.leaderless_since = leader, None
                self.leader_created, self.leader_revision = entry.created, entry.revision
            elif key == records.CENSUS_KEY:
                self.census, self.census_since = records.read_census(entry.value), now
            elif folder == "nodes":
                self._note_node(name, records.read_node(entry.value), entry, now)
            elif folder == "reports":
                self._note_report(name, records.read_report(entry.value), now)
            elif folder == "verdicts":
                self.verdict = records.read_verdict(entry.value)
            else:
                self.others[key] = entry
        except BadRecordError as error:
            if key == records.ROUND_KEY:
                self.foreign = str(error)

    def _note_round(self, round_: Round, entry: Entry, now: float) -> None:
        before = self.round
        apart = (State.OPEN, State.FORMING)
        if round_.state in apart and (
            before is None or before.state not in apart or before.check != round_.check
        ):
            self.unformed_since = now
        if before is None or round_.generation != before.generation:
            self.reports = {}
        if round_.state in (State.RUNNING, State.STOPPING) and self._ran != round_.generation:
            self._ran, self.ran_since = round_.generation, now
        self.foreign = ""
        still = self.rewound and not round_.topology
        self.rewound = still or entry.revision < self._round_seen
        self.round, self.round_revision, self.round_since = round_, entry.revision, now

    def _note_node(self, id_: str, node: Node, entry: Entry, now: float) -> None:
        if node.id != id_:
            raise BadRecordError(f"the entry of {id_} says that it is {node.id}")
        before = self.nodes.get(id_)
        fits = hash((node.version, frozenset(node.options.items())))
        again = before is not None and before.created == entry.created
        since = before.since if before is not None and again else now
        self.nodes[id_] = Candidate(node, entry.created, entry.revision, since, fits)
        if node.faults:
            self.faults = merged(self.faults, node.faults)
        self.departed.pop(id_, None)
        self.closed.discard(id_)
        if not again:
            self.nodes_since = now

    def _note_report(self, name: str, report: Report, now: float) -> None:
        generation, _, id_ = name.partition("/")
        if self.round is not None and generation == str(self.round.generation):
            if _further(self.done(id_), report.done):
                return  # an earlier report, written again by a client that missed the answer to its write
            causes = tuple((now - cause.age, cause) for cause in report.causes)
            self.reports[id_] = ReceivedReport(report, causes)

    def _miss(self, key: str, now: float, *, seen: bool, closed: bool) -> None:
        folder, _, name = key.partition("/")
        if key == records.ROUND_KEY:
            self.round, self.round_revision, self.round_since = None, ABSENT, now
        elif key == records.LEADER_KEY:
            self._miss_leader(now, seen=seen, closed=closed)
        elif key == records.CENSUS_KEY:
            self.census = None
        elif folder == "nodes":
            self.nodes.pop(name, None)
            self._missed |= name == self.me
            self.nodes_since = now
            if seen:
                self.departed[name] = now
            if closed:
                self.closed.add(name)
        elif folder == "reports":
            generation, _, id_ = name.partition("/")
            if self.round is not None and generation == str(self.round.generation):
                self.reports.pop(id_, None)
        elif folder == "verdicts":
            self.verdict = None
        else:
            self.others.pop(key, None)

    def _miss_leader(self, now: float, *, seen: bool, closed: bool) -> None:
        self.departed_leader = self.leader if seen and self.leader is not None else ""
        if closed and self.departed_leader:
            self.closed.add(self.departed_leader)
        self.leader, self.leader_created, self.leader_revision = None, ABSENT, ABSENT
        self.leaderless_since = now


_COURSE = tuple(MemberStatus)


def _further(one: MemberStatus | None, other: MemberStatus) -> bool:
    """Return True if a member is further than this report."""
    return one is not None and _COURSE.index(one) > _COURSE.index(other)


@frozen
class Situation:
    """The input of the leader's decisions: its view of the store, the round with its members, the job's
    policy and the time.
    """

    view: View
    round: Round
    members: Nodes
    policy: Policy
    now: float


class Phase(Enum):
    """The phase of a node in its generation."""

    IDLE = auto()  # in no generation
    READY = auto()  # member of a generation that forms
    RUNNING = auto()  # its processes were started
    STOPPING = auto()  # its processes were signalled to stop
    STOPPED = auto()  # all its processes have ended
    FINISHING = auto()  # all trainers of the job have completed, so its servers may exit
    OVER = auto()  # the launcher has received the end of the job


@frozen
class Failure:
    """A failure of this node, for which the round should stop."""

    cause: Cause
    restart: bool
    after: float
    since: float  # when it was first reported


@dataclass(slots=True)
class MemberState:
    """The state that only this node has: its generation and its progress. `member.py` decides what
    follows.
    """

    node: Node
    joined: float
    phase: Phase = Phase.IDLE
    round: Round | None = None
    """The last seen state of this node's generation."""
    members: Nodes = ()
    rank: int = -1
    completed: bool = False
    completed_since: float = 0.0
    failure: Failure | None = None
    causes: list[tuple[float, Cause]] = field(default_factory=list)
    """Causes of failures on this node, with their times."""
    stopped_since: float = 0.0
    """When this node received the order to stop."""
    stop_cause: Cause | None = None
    killed: bool = False
    """True if it had to stop immediately."""
    seen_alive: bool = False
    """True if this node has seen the job before its end."""
    paused: bool = False
    """True while it waits for a change of the script (--watch)."""
    last: Round | None = None
    """The end of the job."""
    was_up: bool = False
    down_since: float | None = None
    why_down: str = ""
    reported_outages: set[str] = field(default_factory=set)
    """The reasons of this outage that the user has seen."""
    downs: int = 0
    step: int | None = None
    """The last step of its trainers in this generation."""
    measured: Measured | None = None
    """Its result in the check of this generation, or of the generation for which it waits as a spare."""
    checked: int = -1
    """The generation for which it has checked itself as a spare."""
    reported: tuple[int, MemberStatus, int] | None = None
    """The last report: generation, progress, number of causes."""
    renew: set[str] = field(default_factory=set)
    """Keys to write again, because their lease has ended."""

    @property
    def generation(self) -> int:
        return self.round.generation if self.round is not None else -1

    @property
    def active(self) -> bool:
        """True if this node has processes."""
        return self.phase in (Phase.RUNNING, Phase.STOPPING)

    def is_in(self, round_: Round) -> bool:
        """Return True if this node is a member of exactly this generation. Another job may have reached the
        same number.
        """
        mine = self.round
        return mine is not None and (mine.generation, mine.topology) == (round_.generation, round_.topology)

    def take(self, round_: Round, members: Nodes, rank: int) -> None:
        """Become a member of a generation."""
        self.phase, self.round, self.members, self.rank = Phase.READY, round_, members, rank
        self.completed, self.failure, self.causes, self.stop_cause = False, None, [], None
        self.killed, self.paused, self.step, self.measured = False, False, None, None

    def rest(self) -> None:
        """Leave the generation."""
        self.phase, self.round, self.members, self.rank = Phase.IDLE, None, (), -1
        self.failure, self.causes, self.paused = None, [], False

    def own(self, cause: Cause) -> Cause:
        """Return a cause with this node's name and rank."""
        return replace(cause, node=self.node.title, rank=self.rank)

    def aged(self, now: float) -> tuple[Cause, ...]:
        """Return the causes with their ages, in seconds."""
        return tuple(replace(cause, age=max(0.0, now - at)) for at, cause in self.causes)

    def report(self, now: float) -> Report | None:
        """Return the report that is due, or None in a phase without one."""
        if self.phase is Phase.READY:
            checks = self.round is not None and self.round.check.turn
            if checks and self.measured is None:
                return None
            return Report(done=MemberStatus.READY, measured=self.measured)
        if self.phase is Phase.RUNNING:
            return Report(done=MemberStatus.COMPLETED if self.completed else MemberStatus.READY)
        if self.phase is Phase.STOPPING:
            return Report(done=MemberStatus.STOPPING, causes=self.aged(now))
        if self.phase is Phase.STOPPED:
            return Report(done=MemberStatus.STOPPED, causes=self.aged(now), step=self.step)
        return None
