"""The events of a pod and their form in the record; the result of a job; the interface to other machines.

`LaunchSession.publish` passes each event to what runs on this machine (console, record, parts); `Peers` are
the other machines of the job. The first failure in time decides the exit code.
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

# ---- The result of a job: the failure that counts, and the exit code it makes

TIMEOUT = 124
LOST_GUARD = 125

HUNG = "(--hang_timeout)"
"""What the headline of a hang ends with, on every machine of the job."""


@frozen_by_name
class Failure:
    """A failure as it happens, and what is done about it.

    `earlier` are processes that wrote down a failure before this one and have not ended yet; `alive` counts
    those that are still running.
    """

    ended: Ended
    decision: Restart | GiveUp
    earlier: tuple[tuple[ContainerSpec, ErrorRecord], ...] = ()
    alive: int = 0

    @property
    def tolerated(self) -> bool:
        """Whether the job continues whatever is decided: evaluators are not part of the training."""
        return self.ended.spec.role is Role.EVALUATOR

    @classmethod
    def of(cls, ended: Ended, decision: Restart | GiveUp, alive: Sequence[Container]) -> Failure:
        """Besides those that are still `alive`."""
        records = ((each.spec, each.record()) for each in alive)
        earlier = tuple(
            (spec, record) for spec, record in records if record and record.time < ended.failed_at
        )
        return cls(ended=ended, decision=decision, earlier=earlier, alive=len(alive))


@frozen_by_name
class Verdict:
    """What the others wait for, when a job makes no progress, in one `sentence`. `kind` is one of `not
    entered`, `stopped`, `dead`, `left early`, `late`, `mismatch`, `deadlock`, `transport`, `server` or
    `silent`: others are not known to wait. `ranks` are those that it is about, none where that is not known
    or it is a parameter server; `stack` is that of the first of them, innermost call first, or of
    two after their names. `call` is what others wait in: a collective with its number and group, or a step;
    empty if that is not known. One of kind `straggler` is about a job that makes progress.
    """

    kind: str
    sentence: str
    ranks: Integers
    stack: Strings = ()
    call: str = ""


@frozen_by_name
class Late:
    """How a trainer comes to collectives: to `behind` of the last `of` after most members of the group, by
    `seconds` in the median of those. `share`: of the time, for which it was late.
    """

    rank: int
    title: str
    node: str
    share: float
    seconds: float
    behind: int
    of: int


class Detail(StrEnum):
    """How much is found out about ranks: for how long none of a node has given a sign of life; what their
    probes say; and what is read from outside of processes that do not answer; and, of other nodes, the ends
    of logs and what `doctor` measures there.
    """

    SIGNS = "signs"
    PROBES = "probes"
    OUTSIDE = "outside"
    ALL = "all"


@frozen
class Findings:
    """Where the processes of this node are, a line for each place (`stacks`), where the ranks of all nodes
    are (`ranks`), what follows from it, which ranks wait for something, and which come late, the latest
    first. `straggler`: the same in a sentence, if it is worth one. `states`: what the probes of all ranks
    have answered, for JSON. `alone`: the only trainer that hangs.
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
    """No trainer, or one `alone`, gave a sign of life for `silent_for` seconds, and what is done about it.

    `containers` were running then. `stacks` says where they are, one line for all that are at the same
    place, the outlier first; empty when that is not known. `verdict`: for which rank they wait.
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
        """In one line: which processes they wait for, if that is known, else where they are."""
        if self.verdict is not None:
            return self.verdict.sentence.partition(". ")[0]
        return ": ".join([self.headline, *self.stacks[:1]])

    @property
    def reason(self) -> str:
        """The headline, and why nothing is started again."""
        why = f"; {self.decision.reason}" if isinstance(self.decision, GiveUp) else ""
        return f"{self.headline}{why}"


@frozen_by_name
class JobResult:
    """`cause` is the failure that ended the job, `others` the other failures that it did not cause, in order;
    `hang` is set when it hung instead. `began` is the end of a server, which was restarted, that led to
    `cause`.

    `strays` counts processes that had left their container and were ended with the job.
    """

    code: int
    cause: Ended | None = None
    began: Ended | None = None
    others: tuple[Ended, ...] = ()
    forgiven: tuple[Ended, ...] = ()
    """Failures that restarts followed."""
    reason: str = ""
    restarts: int = 0
    strays: int = 0
    hang: Hang | None = None
    verdict: Verdict | None = None
    """On what the failure follows, where `cause` is only a symptom."""
    requested: bool = False
    """Its user ended it: see `why_interrupted`."""
    left_behind: str = ""
    """Which processes could not be ended, in a sentence; empty if there is none."""


def why_interrupted(number: int, command: str) -> tuple[str, bool]:
    """Why a job ends that got this signal, or was asked to end as if by it by a `command` of fleetrun; and
    whether its user asked for that, by Ctrl-C or the command: then the end is not an error.
    """
    if command:
        return f"asked to end by {command}", True
    if number == signal.SIGINT:
        return "interrupted", True
    return f"got {signal_name(number)}", False


def first_failure(failures: Sequence[Ended]) -> tuple[Ended | None, tuple[Ended, ...]]:
    """The failure that came first in time, and the rest.

    Exits are given in the order in which the kernel reported them. That order decides, unless a process wrote
    down when it failed: a rank may raise first and be slow to leave, while its peers see the broken
    connection and leave at once. A broken connection is never first where there is another failure: a peer
    may notice it before the launcher does.
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
    hang: Hang | None = None,
    *,
    verdict: Verdict | None = None,
    requested: bool = False,
    forgiven: Sequence[Ended] = (),
    left_behind: str = "",
) -> JobResult:
    """What these failures make of a job that was not ended with a `code` of its own. `forgiven` are those
    that a restart followed.
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


_NAMED_SERVERS = re.compile(r"\bservers? (\d+(?:, \d+)*)")


def _origin(cause: Ended, forgiven: Sequence[Ended]) -> Ended | None:
    """The last end of a server that the error of this process names, among those that a restart followed."""
    if cause.record is None or cause.spec.role is Role.SERVER:
        return None
    ranks = servers_named_in(cause.record.message)
    servers = [each for each in forgiven if each.spec.role is Role.SERVER and each.spec.rank in ranks]
    return servers[-1] if servers else None


def servers_named_in(message: str) -> frozenset[int]:
    """The ranks of the servers that it names first: `server 1 was restarted`."""
    named = _NAMED_SERVERS.search(message)
    return frozenset(map(int, named[1].split(", "))) if named else frozenset()


def code_of(ended: Ended) -> int:
    """The exit code for a job that this ended: never 0, nor that of a signal that fleetrun itself sent."""
    return 1 if ended.stopped else ended.exit.shell_code or 1


# ---- The stream of events of a pod


@frozen
class Started:
    """These processes run now."""

    containers: Sequence[Container]


@frozen
class RestartAsked:
    """A command of a user wants these processes to start again; they are asked to end first."""

    containers: Sequence[Container]
    command: str


@frozen
class Restarting:
    """These containers are about to be started again."""

    containers: Sequence[Container]


@frozen
class Leaving:
    """All trainers have ended; the `rest` is still running."""

    rest: Sequence[Container]


@frozen
class Ending:
    """The pod is being stopped, perhaps because its user asked for it."""

    reason: str
    requested: bool = False


PodEvent = Started | Ended | Verdict | Failure | Hang | RestartAsked | Restarting | Leaving | Ending
"""`Ended`: one process has exited, successfully or not; the events that follow from it come later."""


# ---- The form of these events in the event log; docs/reference/events.md describes it


def record_lines(event: object) -> Iterator[tuple[str, Document]]:
    """(name of the event, its fields) for each line of the record that this event of a pod makes."""
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
            yield "restart_asked", {"containers": _names(event.containers), "by": event.command}
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
    """For another program: the latest ranks. Of those that are not listed it is next to nothing."""
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
    """For another program."""
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


# ---- What a supervisor reports to the other machines of its job


class Peers(Protocol):
    """The other machines. Calls come from the loop and must return at once. What they answer comes back as
    `Supervisor.finish` and `Supervisor.stop_for`.
    """

    def pod_failed(
        self, ended: Ended, decision: Restart | GiveUp, fault: Fault, verdict: Verdict | None = None
    ) -> None:
        """This pod stops because of this failure, which is a `fault` for the restart policy; `decision` is
        what that says here, `verdict` on what the failure follows, if that is known.
        """

    def pod_failed_too(self, ended: Ended, fault: Fault) -> None:
        """Another failure, seen while the pod stops; it may be the older one."""

    def pod_hung(self, hang: Hang, fault: Fault) -> None:
        """This pod stops because its trainers give no sign of life."""

    def restart_asked(self, command: str) -> None:
        """A command of a user wants all processes of a collective job to start again."""

    def pod_completed(self) -> None:
        """All trainers of this machine ended well."""
