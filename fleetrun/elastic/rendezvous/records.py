"""The records of the rendezvous: their keys in the store, and their JSON in both directions. No rule of the
rendezvous is in this file.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar

from fleetrun.aliases import Fields, Numbers, Strings, Texts
from fleetrun.elastic.rendezvous.checks import NO_CHECK, Check, Measured
from fleetrun.frozen import frozen_by_name
from fleetrun.plan.topology import Offer
from fleetrun.pod.policy import NOTHING_SPENT, Spent
from fleetrun.record.faults import MachineFaults, read_faults

T = TypeVar("T")

MOST_BYTES = 64 << 20
"""Limit of an unpacked record; a topology of 100,000 nodes has about 20 MB."""

WRONG = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading JSON of unknown origin may raise."""


class BadRecordError(ValueError):
    """The value is not such a record: it was not written by this version of fleetrun."""


class State(StrEnum):
    """Of a round. The diagram of all transitions is in `member.py`."""

    OPEN = "open"
    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class CauseKind(StrEnum):
    """Kinds of causes for which a round stops, and one of what may have led to it."""

    FAILED = "failed"  # a process failed
    LOST = "lost"  # a node no longer answers
    LEFT = "left"  # a node was told to leave (a signal)
    ASKED = "asked"  # a user wants all processes to start again
    JOINED = "joined"  # a node came to an elastic job
    TIMEOUT = "timeout"  # --timeout
    REFUSED = "refused"  # the nodes' options, versions or ranks do not match; nothing was started
    RESTARTED = "restarted"  # a server ended, and was started again on its own: the round went on


@frozen_by_name
class Node:
    """A node that wants to take part. `rank` is the one it asks for, -1 for any; `host` is its address,
    `name` its machine's own name, `machine` the name by which an engine knows it, if there is one. `options`
    are those that must be equal on all nodes, as they would be typed; `faults` are those that earlier
    launches have left on this machine; `software` is what its Python has (`host.software.packed`).
    `has_store`: its launcher hosts the rendezvous store, or a part.
    """

    id: str
    host: str
    name: str
    offer: Offer
    rank: int = -1
    version: str = ""
    machine: str = ""
    options: Texts = field(default_factory=dict)
    faults: MachineFaults = ()
    software: str = ""
    has_store: bool = False

    @property
    def known_as(self) -> str:
        """The machine's name in `faults`."""
        return self.machine or self.title

    @property
    def title(self) -> str:
        """Its name in messages: `h1 (10.0.0.1)`."""
        return self.host if self.name in ("", self.host) else f"{self.name} ({self.host})"


Nodes = tuple[Node, ...]
"""In the order of their ranks, or of their arrival."""


@frozen_by_name
class Cause:
    """Why a round stops, as every node reports it.

    `node` is the title of the node, `rank` its rank (-1: none yet). `headline` is one line such as `trainer 3
    exited with code 7`, `lines` the failure report of that node, without frame, and `summary` its last line,
    the cause: `trainer 3: ValueError: bad input at train.py:36`. `age` is how old it was, in
    seconds, when its node wrote it: both times are of that node's clock, so clocks need not agree. `symptom`:
    the process failed because of another one, and its node does not know which. `counts`: whether it counts
    against --max_restart; `time`, `step` and `error` are those of `pod.policy.Fault`. `machine` is
    the machine that may be to blame (`Node.known_as`); empty where a script is, or that is not known.
    `suspicion` is that of `record.faults.MachineFault`. `requested`: a user asked for it.
    """

    why: CauseKind
    node: str
    rank: int = -1
    headline: str = ""
    code: int = 1
    lines: Strings = ()
    summary: str = ""
    age: float = 0.0
    symptom: bool = False
    time: float = 0.0
    step: int | None = None
    error: str = ""
    machine: str = ""
    suspicion: str = ""
    requested: bool = False

    @property
    def counts(self) -> bool:
        return self.why is CauseKind.FAILED


@frozen_by_name
class Round:
    """One generation of the job. `size` is the number of members; the topology lists them.

    `attempts` counts the generations that ran before: others were not accepted, or only checked nodes.
    `restarts` counts failures that led to a restart, `spent` is what they have used of --max_restart,
    `losses` what lost nodes have used of their own budget. `faults` are those of all machines, `worked` the
    seconds that those with faults have taken part in the job since, in generations that made new steps. While
    STOPPING, `restart` says whether another generation follows, `after` how many seconds later at the
    earliest. `code` is the exit code of an ENDED round. `topology` names the record with the members
    (`3/h1-17.0`: of generation 3, the first that this node wrote); in an OPEN round it is the previous one,
    "" before the first. `cause` of an OPEN or FORMING round is what ended the previous generation.
    """

    generation: int
    state: State
    size: int = 0
    attempts: int = 0
    restarts: int = 0
    spent: Spent = NOTHING_SPENT
    losses: Spent = NOTHING_SPENT
    faults: MachineFaults = ()
    worked: Numbers = field(default_factory=dict)
    cause: Cause | None = None
    restart: bool = False
    after: float = 0.0
    code: int = 0
    topology: str = ""
    check: Check = NO_CHECK

    def stopping(self, cause: Cause, *, restart: bool, after: float = 0.0) -> Round:
        return replace(self, state=State.STOPPING, cause=cause, restart=restart, after=after)

    def again(self) -> Round:
        """The one that follows where this was not accepted, or has only checked its nodes."""
        return replace(self, generation=self.generation + 1, state=State.OPEN, size=0, after=0.0)


class MemberStatus(StrEnum):
    """How far a member is in its generation, in this order."""

    READY = "ready"  # it has read the topology and takes part
    COMPLETED = "completed"  # its trainers have exited with 0
    STOPPING = "stopping"  # it has seen that the round stops; `causes` are its own failures so far
    STOPPED = "stopped"  # none of its processes is left


@frozen_by_name
class Report:
    """Of one member in one generation; rewritten on progress. `step` is the last that a STOPPED member's
    trainers made, `measured` what a READY one found in a check.
    """

    done: MemberStatus
    causes: tuple[Cause, ...] = ()
    step: int | None = None
    measured: Measured | None = None


@frozen_by_name
class Verdict:
    """To a node that cannot take part: its exit code, and a message and a hint for its user."""

    code: int
    message: str
    hint: str = ""


@frozen_by_name
class Census:
    """Which nodes have come so far, for those that wait: only the leader watches all."""

    present: int
    missing: Strings = ()


# ---- JSON


def pack(record: Node | Round | Report | Verdict | Census) -> bytes:
    return json.dumps(asdict(record), separators=(",", ":")).encode()


_MOST_KINDS = 16


def pack_topology(members: Sequence[Node]) -> bytes:
    """The members in rank order, without what is equal in all (options, version). Of the software each
    kind is there once; of more than a few kinds the rest is left out.
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
    """Raises BadRecordError. The last result is cached, for simulations with many nodes in one process."""
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


def _seconds(value: Any) -> float:
    """A finite number: times are compared."""
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{seconds} is not a time")
    return seconds


def _measure(value: Any) -> float:
    number = _seconds(value)
    if number < 0:
        raise ValueError(f"{number} is less than nothing")
    return number


def _code(value: Any) -> int:
    """What a process can exit with: 256 would be 0."""
    code = int(value)
    if not 0 <= code <= 255:
        raise ValueError(f"{code} is not an exit code")
    return code


def _texts(value: Any) -> Strings:
    return tuple(map(str, value))


def _options(fields: Fields) -> dict[str, str]:
    return {str(name): str(value) for name, value in fields.items()}


def _worked(fields: Fields) -> dict[str, float]:
    return {str(machine): _measure(seconds) for machine, seconds in fields.items()}


_OFFER = ("servers", "trainers", "heter", "coordinators", "service", "gloo")


def _offer(fields: Fields) -> Offer:
    return Offer.unpacked([fields[name] for name in _OFFER])


def _causes(value: Any) -> tuple[Cause, ...]:
    return tuple(map(_cause, value))


def _optional(kind: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else kind(value)


def _of_fields(record: Callable[..., T], **kinds: Callable[[Any], Any]) -> Callable[[Fields], T]:
    """Makes such records of JSON objects, each field by its kind; others are of a later version and left out,
    and those that are missing have their defaults.
    """

    def read(fields: Fields) -> T:
        return record(**{name: kinds[name](value) for name, value in fields.items() if name in kinds})

    return read


_step = _optional(int)
_check = _of_fields(Check, turn=int, usual=_measure, within=_measure, done=int, suspects=_texts)
_cause = _of_fields(
    Cause, why=CauseKind, node=str, rank=int, headline=str, summary=str, code=_code, lines=_texts,
    age=_seconds, symptom=bool, time=_seconds, step=_step, error=str, machine=str, suspicion=str,
    requested=bool,
)  # fmt: skip
_numbers = dict.fromkeys(("compute", "gpu", "memory", "link", "took", "waited", "late"), _measure)
read_measured = _of_fields(Measured, **_numbers, error=str, link_error=str)
"""What `doctor.check` prints. Raises one of `WRONG`."""


def _spent(fields: Fields) -> Spent:
    return Spent(
        tuple(map(_seconds, fields["times"])),
        _step(fields["step"]),
        str(fields["error"]),
        _step(fields.get("last")),
        _step(fields.get("gain")),
    )


_any_round = _of_fields(
    Round, generation=int, state=State, size=int, attempts=int, restarts=int, spent=_spent, losses=_spent,
    faults=read_faults, worked=_worked, cause=_optional(_cause), restart=bool, after=_seconds, code=_code,
    topology=str, check=_check,
)  # fmt: skip


def _round(fields: Fields) -> Round:
    found = _any_round(fields)
    if found.cause is None and (found.state is State.STOPPING or found.code):
        raise ValueError(f"a round that is {found.state} needs a cause")
    return found


def _of_bytes(read: Callable[[Fields], T]) -> Callable[[bytes], T]:
    """Raises BadRecordError."""

    def decoded(data: bytes) -> T:
        try:
            return read(json.loads(data))
        except WRONG as error:
            raise BadRecordError(str(error) or type(error).__name__) from None

    return decoded


read_node = _of_bytes(
    _of_fields(
        Node, id=str, host=str, name=str, rank=int, version=str, machine=str, faults=read_faults,
        software=str, has_store=bool, options=_options, offer=_offer,
    )
)  # fmt: skip
read_round = _of_bytes(_round)
read_report = _of_bytes(
    _of_fields(Report, done=MemberStatus, causes=_causes, step=_step, measured=_optional(read_measured))
)
read_verdict = _of_bytes(_of_fields(Verdict, code=_code, message=str, hint=str))
read_census = _of_bytes(_of_fields(Census, present=int, missing=_texts))


# ---- Keys

NODES_PREFIX = "nodes/"
"""One leased entry for each node that wants to take part. Only the leader watches it."""

STATE_PREFIX = "state/"
LEADER_KEY = "state/leader"
ROUND_KEY = "state/round"
CENSUS_KEY = "state/census"

ASKS_PREFIX = "state/asks/"
"""Questions of one node to the others, which watch `state/` anyway; see `inquiry.py`."""

REQUESTS_PREFIX = "state/requests/"
"""Requests of commands to the nodes; see `requests.py`."""

ANSWERS_PREFIX = "answers/"
IMPORTS_KEY = "imports"
"""With --warm, what spares may import; only they watch it."""
REPORTS_PREFIX = "reports/"
TOPOLOGY_PREFIX = "topology/"
EVERYTHING = ""


def node_key(id_: str) -> str:
    return f"{NODES_PREFIX}{id_}"


def verdict_key(id_: str) -> str:
    return f"verdicts/{id_}"


def reports_prefix(generation: int) -> str:
    """The folder of one generation's reports."""
    return f"{REPORTS_PREFIX}{generation}/"


def report_key(generation: int, id_: str) -> str:
    return f"{reports_prefix(generation)}{id_}"


def topology_key(name: str) -> str:
    """`name` is the `topology` of a round."""
    return f"{TOPOLOGY_PREFIX}{name}"


def ask_key(question: str) -> str:
    return f"{ASKS_PREFIX}{question}"


def request_key(name: str) -> str:
    return f"{REQUESTS_PREFIX}{name}"


def answers_prefix(question: str) -> str:
    """The folder of the answers to one question. Only the asking node watches it."""
    return f"{ANSWERS_PREFIX}{question}/"
