"""Define the events of a pod and their form in the event log, the result of a job, and the interface to other
nodes.

`LaunchSession.publish` passes each event to its receivers on this node (console, event log, parts). `Peers`
are the other nodes of the job. The first failure in time decides the exit code.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Protocol

from fleetrun.aliases import Document, Fields, Integers, Strings
from fleetrun.envs.channels import ErrorRecord
from fleetrun.envs.contract import Role
from fleetrun.pod.container import Container, Ended
from fleetrun.pod.policy import Fault, GiveUp, Restart, is_symptom
from fleetrun.pod.process import signal_name
from fleetrun.pod.spec import ContainerSpec
from fleetrun.values import frozen, frozen_by_name

# ---- The result of a job: the failure that counts, and its exit code

TIMEOUT = 124
LOST_GUARD = 125

HUNG = "(--hang_timeout)"
"""The end of the headline of a hang, on every node of the job."""


@frozen_by_name
class Failure:
    """A failure at the moment when it happens, and the decision about it.

    `earlier` are processes that recorded a failure before this one and have not ended yet. `alive` counts the
    processes that still run.
    """

    ended: Ended
    decision: Restart | GiveUp
    earlier: tuple[tuple[ContainerSpec, ErrorRecord], ...] = ()
    alive: int = 0

    @property
    def tolerated(self) -> bool:
        """True if the job continues after any decision. Evaluators are not part of the training."""
        return self.ended.spec.role is Role.EVALUATOR

    @classmethod
    def of(cls, ended: Ended, decision: Restart | GiveUp, alive: Sequence[Container]) -> Failure:
        """Make a failure. `alive` are the processes that still run."""
        records = ((each.spec, each.record()) for each in alive)
        earlier = tuple(
            (spec, record) for spec, record in records if record and record.time < ended.failed_at
        )
        return cls(ended=ended, decision=decision, earlier=earlier, alive=len(alive))


@frozen_by_name
class Verdict:
    """A diagnosis of a job without progress: the `sentence` names what the other ranks wait for.

    `kind` is one of `not entered`, `stopped`, `dead`, `left early`, `late`, `mismatch`, `deadlock`,
    `transport`, `server` or `silent`. With `silent`, no other rank is known to wait. The kind `straggler` is
    about a job that makes progress.

    `ranks` are the ranks of the diagnosis. It has none if they are unknown, or if a parameter server is the
    cause. `stack` is the stack of the first rank, innermost call first, or two stacks after their names.
    `call` is the call in which the other ranks wait: a collective with its number and group, or a step. Empty
    if the call is unknown.
    """

    kind: str
    sentence: str
    ranks: Integers
    stack: Strings = ()
    call: str = ""


@frozen_by_name
class Late:
    """The lateness of a trainer at collectives. It came after most members of the group to `behind` of the
    last `of` collectives, with a median delay of `seconds`. `share` is the part of the time in which it was
    late.
    """

    rank: int
    title: str
    node: str
    share: float
    seconds: float
    behind: int
    of: int


class Detail(StrEnum):
    """The detail of the search for ranks.

    SIGNS: the time since the last activity of a node. PROBES: the answers of the probes. OUTSIDE: also the
    view from outside of processes that do not answer. ALL: on other nodes also the ends of logs and the
    measurements of `doctor`.
    """

    SIGNS = "signs"
    PROBES = "probes"
    OUTSIDE = "outside"
    ALL = "all"


@frozen
class Findings:
    """The result of a search for ranks.

    `stacks` holds the positions of this node's processes, one line per position. `ranks` holds the positions
    of the ranks of all nodes. `verdict` is the diagnosis, `waiting` are the ranks that wait, and `late` are
    the late ranks, latest first. `straggler` describes the lateness in a sentence, if it matters. `states`
    holds the answers of all probes, for JSON. `alone` is the only trainer that hangs.
    """

    stacks: Strings = ()
    ranks: Strings = ()
    verdict: Verdict | None = None
    waiting: frozenset[int] = frozenset()
    late: tuple[Late, ...] = ()
    straggler: Verdict | None = None
    states: tuple[Fields, ...] = ()
    alone: str = ""


@frozen_by_name
class Hang:
    """A hang, and the decision about it. For `silent_for` seconds no trainer was active, or only the trainer
    `alone` was not.

    `containers` were running at the time. `stacks` holds their positions, one line per position, the outlier
    first. `stacks` is empty if the positions are unknown. `verdict` names the rank that they wait for.
    """

    silent_for: float
    containers: tuple[ContainerSpec, ...]
    decision: Restart | GiveUp
    stacks: Strings = ()
    verdict: Verdict | None = None
    alone: str = ""

    @property
    def headline(self) -> str:
        if self.alone:
            silent = f"{self.alone} has printed and reported nothing for {self.silent_for:g} s"
            return f"{silent}, does not move and waits for no other {HUNG}"
        return f"no trainer printed or reported anything for {self.silent_for:g} s {HUNG}"

    @property
    def cause(self) -> str:
        """The cause in one line: the processes that the others wait for, if known, else the positions."""
        if self.verdict is not None:
            return self.verdict.sentence.partition(". ")[0]
        return ": ".join([self.headline, *self.stacks[:1]])

    @property
    def reason(self) -> str:
        """The headline, with the reason if no restart follows."""
        why = f"; {self.decision.reason}" if isinstance(self.decision, GiveUp) else ""
        return f"{self.headline}{why}"


@frozen_by_name
class JobResult:
    """The result of a job.

    `cause` is the failure that ended the job. `others` are the other failures that it did not cause, in
    order. `hang` is set if the job hung instead. `began` is the end of a restarted server that led to
    `cause`. `strays` counts processes that had left their process group and were ended with the job.
    """

    code: int
    cause: Ended | None = None
    began: Ended | None = None
    others: tuple[Ended, ...] = ()
    forgiven: tuple[Ended, ...] = ()
    """Failures before a restart."""
    reason: str = ""
    restarts: int = 0
    strays: int = 0
    hang: Hang | None = None
    verdict: Verdict | None = None
    """The cause of the failure, if `cause` is only a symptom."""
    requested: bool = False
    """True if the user ended the job. See `why_interrupted`."""
    left_behind: str = ""
    """A sentence that names the processes that could not be ended, or an empty text."""


def why_interrupted(number: int, command: str) -> tuple[str, bool]:
    """Return why a job ends after this signal, or after a `command` of fleetrun with the same effect. Return
    True with the reason if the user requested the end, by Ctrl-C or the command. The end is then no error.
    """
    if command:
        return f"asked to end by {command}", True
    if number == signal.SIGINT:
        return "interrupted", True
    return f"got {signal_name(number)}", False


def first_failure(failures: Sequence[Ended]) -> tuple[Ended | None, tuple[Ended, ...]]:
    """Return the failure that came first in time, and the other failures.

    Exits come in the order in which the kernel reported them. This order decides, unless a process recorded
    the time of its failure. A rank may raise first and exit slowly, while its peers see the broken connection
    and exit immediately. A broken connection is never first if another failure exists, because a peer may
    notice it before the launcher does.
    """
    if not failures:
        return None, ()
    causes = [ended for ended in failures if not is_symptom(ended.exit, ended.message)]
    first = min(causes or failures, key=lambda ended: ended.failed_at)
    return first, tuple(ended for ended in failures if ended is not first)


def conclude(
    failures: Sequence[Ended],
    code: int | None,
    reason: str,
    restarts: int,
    strays: int,
    hang: Hang | None,
    *,
    verdict: Verdict | None,
    requested: bool,
    forgiven: Sequence[Ended],
    left_behind: str,
) -> JobResult:
    """Make the result of a job from its failures, unless a `code` is set. A restart followed each of
    `forgiven`.
    """
    cause, others = first_failure(failures)
    if code is None:
        code = code_of(cause) if cause is not None else 0
    return JobResult(
        code=code,
        cause=cause,
        began=None if cause is None else _origin(cause, forgiven),
        others=others,
        forgiven=tuple(forgiven),
        reason=reason,
        restarts=restarts,
        strays=strays,
        hang=hang,
        verdict=verdict,
        requested=requested,
        left_behind=left_behind,
    )


_NAMED_SERVERS = re.compile(r"\bservers? (\d+(?:, \d+)*)", re.IGNORECASE)


def _origin(cause: Ended, forgiven: Sequence[Ended]) -> Ended | None:
    """Return the last end of a server that this process's error names, among the failures before
    a restart.
    """
    if cause.record is None or cause.spec.role is Role.SERVER:
        return None
    ranks = servers_named_in(cause.record.message)
    servers = [each for each in forgiven if each.spec.role is Role.SERVER and each.spec.rank in ranks]
    return servers[-1] if servers else None


def servers_named_in(message: str) -> frozenset[int]:
    """Return the ranks of the servers that the message names first: `server 1 was restarted`."""
    named = _NAMED_SERVERS.search(message)
    return frozenset(map(int, named[1].split(", "))) if named else frozenset()


def code_of(ended: Ended) -> int:
    """Return the exit code of a job that this failure ended. It is never 0, and never from a signal that
    fleetrun itself sent.
    """
    return 1 if ended.stopped else ended.exit.shell_code or 1


# ---- The stream of events of a pod


@frozen
class Started:
    """These processes run from now on."""

    containers: Sequence[Container]


@frozen
class RestartAsked:
    """A user's command requested a restart of these processes. They have to end first. `restarts` counts the
    failures that led to a restart.
    """

    containers: Sequence[Container]
    command: str
    restarts: int


@frozen
class Restarting:
    """These processes are about to start again."""

    containers: Sequence[Container]


@frozen
class Leaving:
    """All trainers have ended. The `rest` still runs."""

    rest: Sequence[Container]


@frozen
class Ending:
    """The pod is being stopped. `requested`: the user requested the end."""

    reason: str
    requested: bool = False


PodEvent = Started | Ended | Verdict | Failure | Hang | RestartAsked | Restarting | Leaving | Ending
"""An event of a pod. `Ended`: one process has exited, successfully or not, and the events that follow from
the exit come later.
"""


# ---- The form of these events in the event log; docs/reference/events.md describes it


def record_lines(event: object) -> Iterator[tuple[str, Document]]:
    """Yield the name and the fields of each line of the event log for this event of a pod."""
    match event:
        case Started():
            yield from _started(event)
        case Ended():
            yield "exited", _exited(event)
        case Verdict():
            yield "verdict", verdict_fields(event)
        case Failure():
            decision, ended = event.decision, event.ended
            yield (
                "failed",
                {
                    "container": ended.spec.name,
                    "rank": ended.spec.rank,
                    "attempt": ended.attempt,
                    "beside": event.tolerated,
                    **_restart(decision),
                    "reason": "" if isinstance(decision, Restart) else decision.reason,
                },
            )
        case Hang():
            yield "hung", _hung(event)
        case RestartAsked():
            names = _names(event.containers)
            yield "restart_asked", {"containers": names, "by": event.command, "restarts": event.restarts}
        case Restarting():
            yield "restarting", {"containers": _names(event.containers)}
        case Leaving():
            yield "leaving", {"containers": _names(event.rest)}
        case Ending():
            yield "ending", {"reason": event.reason}


def _started(event: Started) -> Iterator[tuple[str, Document]]:
    for each in event.containers:
        yield "started", _process(each.spec, _pid(each), each.restarts)


def _names(containers: Sequence[Container]) -> list[str]:
    return [each.spec.name for each in containers]


def _hung(event: Hang) -> Document:
    return {
        "containers": [each.name for each in event.containers if event.alone in ("", each.title)],
        "silent_for": event.silent_for,
        "stacks": list(event.stacks),
        **_restart(event.decision),
        "reason": event.reason,
    }


_MOST_LATE = 64
_WORTH = 0.01


def lateness_fields(late: Sequence[Late]) -> list[Document]:
    """Return the latest ranks as fields for another program. All other ranks have almost no lateness."""
    return [
        {
            "rank": each.rank,
            "node": each.node,
            "share": round(each.share, 4),
            "seconds": round(each.seconds, 6),
            "behind": each.behind,
            "of": each.of,
        }
        for each in late[:_MOST_LATE]
        if each.share >= _WORTH
    ]


def verdict_fields(verdict: Verdict) -> Document:
    """Return a diagnosis as fields for another program."""
    return {
        "kind": verdict.kind,
        "sentence": verdict.sentence,
        "ranks": list(verdict.ranks),
        "stack": list(verdict.stack),
        "call": verdict.call,
    }


def _pid(container: Container) -> int:
    assert container.process is not None, "it has started"
    return container.process.pid


def _process(spec: ContainerSpec, pid: int, attempt: int) -> Document:
    return {"container": spec.name, "rank": spec.rank, "pid": pid, "attempt": attempt}


def _exited(ended: Ended) -> Document:
    record = ended.record
    return {
        **_process(ended.spec, ended.pid, ended.attempt),
        "code": ended.exit.code,
        "signal": ended.exit.signal,
        "how": str(ended.exit),
        "seconds": round(ended.ended - ended.started, 3),
        "asked": ended.asked,
        "out_of_memory": ended.out_of_memory,
        "finished": ended.finished,
        "peak_memory": ended.peak_memory,
        "error": record.message[:2000] if record is not None else "",
    }


def _restart(decision: Restart | GiveUp) -> Document:
    if isinstance(decision, GiveUp):
        return {"restart": False, "after": None, "number": None, "limit": None, "step": None}
    return {
        "restart": True,
        "after": decision.after,
        "number": decision.number,
        "limit": decision.limit,
        "step": decision.step,
    }


# ---- Reports of a supervisor to the other nodes of its job


class Peers(Protocol):
    """The other nodes. Calls come from the loop and must return immediately. Answers arrive as
    `Supervisor.finish` and `Supervisor.stop_for`.
    """

    def pod_failed(
        self, ended: Ended, decision: Restart | GiveUp, fault: Fault, verdict: Verdict | None
    ) -> None:
        """Report that this pod stops because of this failure, which is a `fault` for the restart policy.
        `decision` is the policy's decision on this node. `verdict` is the cause of the failure, if known.
        """

    def pod_failed_too(self, ended: Ended, fault: Fault) -> None:
        """Report another failure during the stop of the pod. It may be the older failure."""

    def pod_hung(self, hang: Hang, fault: Fault) -> None:
        """Report that this pod stops because its trainers show no activity."""

    def restart_asked(self, command: str, edit: str) -> None:
        """Report that a user's command requested a restart of all processes of a collective job. `edit`: see
        `Supervisor.restart`.
        """

    def pod_completed(self) -> None:
        """Report that all trainers of this node ended successfully."""
