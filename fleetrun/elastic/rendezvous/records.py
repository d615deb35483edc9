"""Define the records of the rendezvous: their keys in the store, and their conversion to and from JSON.

The rules of the rendezvous are elsewhere.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

from fleetrun.aliases import Fields, Numbers, Strings, Texts
from fleetrun.decoding import WRONG, BadRecordError, finite, of_bytes, of_fields, optional, texts
from fleetrun.elastic.rendezvous.checks import NO_CHECK, Check, Measured
from fleetrun.frozen import frozen_by_name
from fleetrun.plan.topology import Offer
from fleetrun.pod.policy import NOTHING_SPENT, Spent
from fleetrun.record.faults import MachineFaults, read_faults

MOST_BYTES = 64 << 20
"""Limit of an unpacked record. A topology of 100,000 nodes has about 20 MB."""


class State(StrEnum):
    """The state of a round. The diagram of all transitions is in `member.py`."""

    OPEN = "open"
    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class CauseKind(StrEnum):
    """The reason why a round stops, or an event that may have led to the stop."""

    FAILED = "failed"  # a process failed
    LOST = "lost"  # a node has stopped answering
    LEFT = "left"  # a node received a signal to leave
    ASKED = "asked"  # a user requested that all processes restart
    JOINED = "joined"  # a node joined an elastic job
    TIMEOUT = "timeout"  # --timeout has passed
    REFUSED = "refused"  # the nodes' options, versions or ranks do not match, so no process started
    RESTARTED = "restarted"  # a server ended and restarted alone, while the round continued


@frozen_by_name
class Node:
    """A node that wants to take part."""

    id: str
    host: str  # its address
    name: str  # the node's own name
    offer: Offer
    rank: int = -1  # the requested rank, or -1 for any
    version: str = ""
    machine: str = ""  # the engine's name for the node, if it has one
    options: Texts = field(default_factory=dict)
    """Options that must be equal on all nodes, in the form of the command line."""
    faults: MachineFaults = ()  # the faults that earlier runs have left on this node
    software: str = ""  # the node's Python packages (`host.software.packed`)
    has_store: bool = False  # its launcher hosts the rendezvous store or a member of it

    @property
    def known_as(self) -> str:
        """The node's name in `faults`."""
        return self.machine or self.title

    @property
    def title(self) -> str:
        """The node's name in messages: `h1 (10.0.0.1)`."""
        return self.host if self.name in ("", self.host) else f"{self.name} ({self.host})"


Nodes = tuple[Node, ...]
"""Nodes in the order of their ranks, or of their arrival."""


@frozen_by_name
class Cause:
    """The cause for which a round stops, as every node reports it."""

    why: CauseKind
    node: str  # the title of the node
    rank: int = -1  # the node's rank; -1 before it has one
    headline: str = ""  # one line, such as `trainer 3 exited with code 7`
    code: int = 1
    lines: Strings = ()  # the node's failure report, without frame
    summary: str = ""
    """The last line of the report: `trainer 3: ValueError: bad input at train.py:36`."""
    age: float = 0.0
    """Age in seconds when the node wrote the cause. Both times are by the node's clock, so clocks may differ.
    """
    symptom: bool = False  # another, unidentified process made this one fail
    time: float = 0.0  # `time`, `step` and `error` are as in `pod.policy.Fault`
    step: int | None = None
    error: str = ""
    machine: str = ""
    """The node that may be to blame (`Node.known_as`). Empty if a script is, or if the node is unknown."""
    suspicion: str = ""  # as in `record.faults.MachineFault`
    requested: bool = False  # a user requested it
    edit: str = ""  # if an edit caused it (--watch), its time and its copy of the code (--sync)

    @property
    def counts(self) -> bool:
        """True if the cause counts against --max_restart."""
        return self.why is CauseKind.FAILED


@frozen_by_name
class Round:
    """One generation of the job."""

    generation: int
    state: State
    size: int = 0  # number of members, which the topology lists
    attempts: int = 0
    """Number of earlier generations that ran. Generations that were not accepted, or only checked nodes, do
    not count.
    """
    restarts: int = 0  # number of failures that led to a restart
    spent: Spent = NOTHING_SPENT  # how much of --max_restart these failures have used
    losses: Spent = NOTHING_SPENT  # how much of their separate budget lost nodes have used
    faults: MachineFaults = ()  # faults of all nodes
    worked: Numbers = field(default_factory=dict)
    """Seconds of work of nodes with faults since their last fault, in generations that made new steps."""
    cause: Cause | None = None
    """In an OPEN or FORMING round, the cause that ended the previous generation."""
    restart: bool = False
    """True in a STOPPING round if another generation follows. True in an ENDED round if another generation
    follows a change of the script (--watch).
    """
    after: float = 0.0  # in a STOPPING round, seconds until the next generation at the earliest
    code: int = 0  # the exit code of an ENDED round
    topology: str = ""
    """The name of the record with the members. `3/h1-17.0` is the first one of generation 3 that this node
    wrote. In an OPEN round it is the previous name, or "" before the first.
    """
    check: Check = NO_CHECK
    edit: str = ""  # as in `Cause`, the edit that all nodes run

    def stopping(self, cause: Cause, *, restart: bool, after: float = 0.0) -> Round:
        """Return this round in the state STOPPING."""
        return replace(self, state=State.STOPPING, cause=cause, restart=restart, after=after)

    def again(self) -> Round:
        """Return the round that follows if this one was not accepted, or has only checked its nodes."""
        return replace(self, generation=self.generation + 1, state=State.OPEN, size=0, after=0.0)


class MemberStatus(StrEnum):
    """The progress of a member in its generation, in this order."""

    READY = "ready"  # it has read the topology and takes part
    COMPLETED = "completed"  # its trainers have exited with 0
    STOPPING = "stopping"  # it has seen that the round stops; `causes` are its own failures so far
    STOPPED = "stopped"  # all its processes have ended


@frozen_by_name
class Report:
    """The report of one member in one generation. The member rewrites it on progress."""

    done: MemberStatus
    causes: tuple[Cause, ...] = ()
    step: int | None = None  # the last step of a STOPPED member's trainers
    measured: Measured | None = None  # the result of a READY member's check


@frozen_by_name
class Verdict:
    """A refusal to a node that cannot take part: its exit code, and a message and a hint for its user."""

    code: int
    message: str
    hint: str = ""


@frozen_by_name
class Census:
    """The nodes that have arrived so far, for waiting nodes, because only the leader watches all nodes."""

    present: int
    missing: Strings = ()


# ---- JSON


def pack(record: Node | Round | Report | Verdict | Census) -> bytes:
    """Return a record as JSON."""
    return json.dumps(asdict(record), separators=(",", ":")).encode()


_MOST_KINDS = 16


def pack_topology(members: Sequence[Node]) -> bytes:
    """Pack the members in rank order, without the values that are equal on all nodes (options, version).

    Each kind of software is stored once. Only the first few kinds are stored.
    """
    kinds = list(dict.fromkeys(each.software for each in members))[:_MOST_KINDS]
    places = {text: number for number, text in enumerate(kinds)}
    table = [
        [
            each.id,
            each.host,
            each.name,
            each.machine,
            each.rank,
            each.offer.packed(),
            places.get(each.software),
        ]
        for each in members
    ]
    return zlib.compress(json.dumps([kinds, table], separators=(",", ":")).encode(), 1)


@lru_cache(maxsize=1)
def read_topology(data: bytes) -> Nodes:
    """Read the members. Raises BadRecordError.

    The last result is cached, for simulations with many nodes in one process.
    """
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, MOST_BYTES)
        if unpacker.unconsumed_tail:
            raise BadRecordError(f"a topology of more than {MOST_BYTES} bytes")
        kinds, table = json.loads(text)
        return tuple(
            Node(
                id=str(id_),
                host=str(host),
                name=str(name),
                machine=str(machine),
                rank=int(rank),
                offer=Offer.unpacked(offer),
                software="" if kind is None else str(kinds[kind]),
            )
            for id_, host, name, machine, rank, offer, kind in table
        )
    except (zlib.error, *WRONG) as error:
        raise BadRecordError(str(error) or type(error).__name__) from None


def _measure(value: object) -> float:
    number = finite(value)
    if number < 0:
        raise ValueError(f"{number} is less than nothing")
    return number


def _code(value: Any) -> int:
    """Read an exit code of a process. 256 would become 0."""
    code = int(value)
    if not 0 <= code <= 255:
        raise ValueError(f"{code} is not an exit code")
    return code


def _options(fields: Fields) -> dict[str, str]:
    return {str(name): str(value) for name, value in fields.items()}


_OFFER = ("servers", "trainers", "heter", "coordinators", "service", "gloo")


def _causes(value: Any) -> tuple[Cause, ...]:
    return tuple(map(_cause, value))


_step = optional(int)
_check = of_fields(Check, turn=int, usual=_measure, within=_measure, done=int, suspects=texts)
_cause = of_fields(
    Cause, why=CauseKind, node=str, rank=int, headline=str, summary=str, code=_code, lines=texts,
    age=finite, symptom=bool, time=finite, step=_step, error=str, machine=str, suspicion=str,
    requested=bool, edit=str,
)  # fmt: skip
_numbers = dict.fromkeys(("compute", "gpu", "memory", "link", "took", "waited", "late"), _measure)
read_measured = of_fields(Measured, **_numbers, error=str, link_error=str)
"""Read the output of `doctor.check`. Raises one of `WRONG`."""


def _spent(fields: Fields) -> Spent:
    return Spent(
        tuple(map(finite, fields["times"])),
        _step(fields["step"]),
        str(fields["error"]),
        _step(fields.get("last")),
        _step(fields.get("gain")),
    )


_any_round = of_fields(
    Round, generation=int, state=State, size=int, attempts=int, restarts=int, spent=_spent, losses=_spent,
    faults=read_faults, cause=optional(_cause), restart=bool, after=finite, code=_code,
    worked=lambda fields: {str(machine): _measure(seconds) for machine, seconds in fields.items()},
    topology=str, check=_check, edit=str,
)  # fmt: skip


def _round(fields: Fields) -> Round:
    found = _any_round(fields)
    if found.cause is None and (found.state is State.STOPPING or found.code):
        raise ValueError(f"a round that is {found.state} needs a cause")
    return found


read_node = of_bytes(
    of_fields(
        Node, id=str, host=str, name=str, rank=int, version=str, machine=str, faults=read_faults,
        software=str, has_store=bool, options=_options,
        offer=lambda fields: Offer.unpacked([fields[name] for name in _OFFER]),
    )
)  # fmt: skip
read_round = of_bytes(_round)
read_report = of_bytes(
    of_fields(Report, done=MemberStatus, causes=_causes, step=_step, measured=optional(read_measured))
)
read_verdict = of_bytes(of_fields(Verdict, code=_code, message=str, hint=str))
read_census = of_bytes(of_fields(Census, present=int, missing=texts))


# ---- Keys

NODES_PREFIX = "nodes/"
"""One leased entry for each node that wants to take part. Only the leader watches these entries."""

STATE_PREFIX = "state/"
LEADER_KEY = "state/leader"
ROUND_KEY = "state/round"
CENSUS_KEY = "state/census"

REQUESTS_PREFIX = "state/requests/"
"""Requests of commands and nodes to the nodes. See `ask_wire.py`."""

ANSWERS_PREFIX = "answers/"
REPORTS_PREFIX = "reports/"
TOPOLOGY_PREFIX = "topology/"
EVERYTHING = ""


def node_key(id_: str) -> str:
    return f"{NODES_PREFIX}{id_}"


def verdict_key(id_: str) -> str:
    return f"verdicts/{id_}"


def reports_prefix(generation: int) -> str:
    """Return the directory of one generation's reports."""
    return f"{REPORTS_PREFIX}{generation}/"


def report_key(generation: int, id_: str) -> str:
    return f"{reports_prefix(generation)}{id_}"


def topology_key(name: str) -> str:
    """Return the key of a topology. `name` is the `topology` of a round."""
    return f"{TOPOLOGY_PREFIX}{name}"


def request_key(name: str) -> str:
    return f"{REQUESTS_PREFIX}{name}"


def answers_prefix(name: str) -> str:
    """Return the directory of the answers to one request. Only the asker watches it."""
    return f"{ANSWERS_PREFIX}{name}/"
