"""Run one node of a job of several nodes. The agent connects the membership with the supervisor. The
membership decides when a generation starts and stops, and the supervisor runs this node's processes.

    joining --start--> running --stop--> stopping --(stopped)--> waiting --start--> running ...
       |                  |                                         |
       +---- ended or failed: the membership's decision is final ---+--> Outcome
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from fleetrun.aliases import Callback, Clock, Strings
from fleetrun.elastic.membership import FaultsKnown, Membership, StoreDown, StoreUp
from fleetrun.elastic.rendezvous.actions import Waiting
from fleetrun.elastic.rendezvous.checks import Measured
from fleetrun.elastic.rendezvous.member import LOST_CODE
from fleetrun.elastic.rendezvous.records import Cause, CauseKind, Node, Nodes, Round
from fleetrun.errors import LaunchError
from fleetrun.frozen import frozen, frozen_by_name
from fleetrun.pod.container import Ended
from fleetrun.pod.events import (
    LOST_GUARD,
    TIMEOUT,
    Hang,
    JobResult,
    Peers,
    Verdict,
    code_of,
    why_interrupted,
)
from fleetrun.pod.loop import Loop
from fleetrun.pod.policy import Fault, GiveUp, Restart, Spent, is_symptom
from fleetrun.pod.supervisor import Supervisor
from fleetrun.record.faults import MachineFault

LEAVE_TIMEOUT = 3.0
"""Seconds that a node waits at the end of the job until the other nodes have seen the end."""

_NOTICES = {
    CauseKind.FAILED: "failure",
    CauseKind.ASKED: "restart",
    CauseKind.JOINED: "membership",
    CauseKind.LEFT: "membership",
    CauseKind.LOST: "lost",
}
"""The kind of notice that processes get before a stop."""

_STUCK = frozenset({"stopped", "not entered", "silent", "transport"})
"""Kinds of diagnoses about a rank that does not continue. Its node may be to blame."""

_HANG = "hang"
"""`Cause.suspicion` of these diagnoses, and of a hang."""


@frozen_by_name
class Assignment:
    """This node's place in one generation.

    `attempts` counts the earlier generations of all nodes, and `restarts` the failures of the job so far.
    `first`: this node ran in no earlier generation. `edit`: see `Round`.
    """

    generation: int
    members: Nodes
    rank: int
    first: bool
    attempts: int
    restarts: int
    spent: Spent
    edit: str


@frozen_by_name
class Outcome:
    """The end of the job for this node: an exit code, and its cause.

    `error` is set if the node could not take part or continue. `result` is the result of its last pod. `rank`
    is its last rank, or -1 without one. `requested`: the user ended the job on this node.
    """

    code: int
    cause: Cause | None = None
    error: LaunchError | None = None
    result: JobResult | None = None
    rank: int = -1
    requested: bool = False


class Pods(Protocol):
    """A factory of this node's pods."""

    def supervisor(self, place: Assignment, peers: Peers) -> Supervisor:
        """Return the supervisor of this generation's pod. Raises LaunchError if the pod cannot be made."""

    def check(
        self, round: Round, members: Sequence[Node], rank: int, then: Callable[[Measured], None]
    ) -> Callback:
        """Take part in the check of this round. Call `then` once, unless the caller cancels the check with
        the returned function.
        """

    def describe(self, ended: Ended, verdict: Verdict | None, why: str) -> tuple[str, Strings, str]:
        """Describe a failure: in one line, as a report without frame, and as the cause at the end of a
        report.

        `verdict` is the cause of the failure, if known. `why` is the reason if no restart follows.
        """


@frozen
class Stopping:
    """The processes of this node are being stopped for this cause. `restart`: they will start again."""

    cause: Cause
    restart: bool


@frozen
class Departing:
    """This node is about to leave the job. `requested`: the user requested it."""

    why: str
    requested: bool = False


@frozen
class Paused:
    """The job has ended like this, and waits for a change of its script (--watch)."""

    outcome: Outcome


NodeEvent = Waiting | Assignment | Stopping | Departing | Paused | FaultsKnown | StoreDown | StoreUp
"""An event between the nodes of a job. An `Assignment` shows that the nodes have joined, and that a
generation starts.
"""


class SuspensionWatch:
    """A watch for suspension. It calls `then` if this process has not run for `limit` seconds, because the
    process was stopped or its machine slept.

    `clock` continues while the machine sleeps.
    """

    def __init__(self, loop: Loop, limit: float, then: Callback, clock: Clock) -> None:
        self._loop = loop
        self._limit = limit
        self._then = then
        self._clock = clock
        self._looked = clock()
        self._timer = loop.after(limit / 2, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.after(self._limit / 2, self._look)
        before, self._looked = self._looked, self._clock()
        if self._looked - before >= self._limit:
            self._then()


def _clock_with_sleep() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Agent:
    """The agent of one node. It is the `Events` of the membership with which it runs."""

    def __init__(
        self,
        loop: Loop,
        node: Node,
        pods: Pods,
        publish: Callable[[NodeEvent], None],
        *,
        timeout: float | None = None,
        lease: float = math.inf,
        clock: Clock = _clock_with_sleep,
    ) -> None:
        """Make an agent. `lease`: seconds without activity after which the other nodes give up a node."""
        self._loop = loop
        self._lease = lease
        self._clock = clock
        self._node = node
        self._pods = pods
        self.publish = publish
        self._timeout = timeout
        self._next: Assignment | None = None
        self.place: Assignment | None = None
        """The place in the present generation, or in the last one."""
        self._ran = False
        self._stopping = self._paused = False
        self._supervisor: Supervisor | None = None
        self._result: JobResult | None = None
        self._outcome: Outcome | None = None
        self._own_code: int | None = None
        self._requested = False
        self._expired: Cause | None = None
        self._serves = False
        self._cancel_check: Callback = lambda: None
        self._membership: Membership  # set in `run`; the loop, which calls this agent, runs only in `run`

    def run(
        self,
        membership: Membership,
        *,
        start_checks: Sequence[tuple[float, Callable[[], LaunchError | None]]] = (),
        serves: bool = False,
    ) -> Outcome:
        """Take part until the job has ended for this node.

        `start_checks`: each check runs if the rendezvous store was not reached within its seconds. A check
        returns an error if the store is out of reach for good. `serves`: this node hosts the store, and the
        job ends when this node leaves.
        """
        self._membership, self._serves = membership, serves
        if self._timeout is not None:
            self._loop.after(self._timeout, self._timed_out)
        for seconds, check in start_checks:
            self._loop.after(seconds, partial(self._check_start, check))
        watch = None
        if self._lease < math.inf:
            watch = SuspensionWatch(self._loop, self._lease / 2, self._resumed, self._clock)
        self._membership.join()
        while self._outcome is None:
            self._loop.run()
            place, self._next = self._next, None
            if place is not None and self._outcome is None:
                self._run_pod(place)
        if watch is not None:
            watch.stop()
        # Wait for a limited time until the membership has left the store by itself, the leader last.
        if not self._membership.closed:
            limit = self._loop.after(LEAVE_TIMEOUT, self._loop.stop)
            self._membership.when_closed = self._loop.stop
            self._loop.run()
            limit.cancel()
        self._membership.close()
        return self._outcome

    def _resumed(self) -> None:
        """Hold the processes after a suspension, because the other nodes may have given up this node.

        The processes take no step until the store confirms that their generation runs. If the store does not
        answer, they continue after the length of a lease, because an outage alone must not stop a job.
        """
        held = self._supervisor
        if held is None or self._stopping:
            return

        def release() -> None:
            limit.cancel()
            if self._supervisor is held and not self._stopping:
                held.hold(False)

        held.hold(True)
        limit = self._loop.after(self._lease, release)
        self._membership.confirm(release)

    def _check_start(self, check: Callable[[], LaunchError | None]) -> None:
        error = None if self._membership.reached else check()
        if error is not None:
            self._membership.close()
            self.failed(error)

    def _run_pod(self, place: Assignment) -> None:
        self.place = place
        self._stopping = self._paused = False
        self._ran = True
        step = None
        try:
            self._supervisor = self._pods.supervisor(place, self)
            self.publish(place)
            self._result = self._supervisor.run()
            step = self._supervisor.last_step
        except LaunchError as error:
            headline = error.message + (f" ({error.hint})" if error.hint else "")
            self._membership.failed(self._cause(CauseKind.FAILED, headline, error.exit_code), False, 0.0)
        finally:
            self._supervisor = None
        if self._result is not None and self._result.left_behind:
            self._leave(self._result.left_behind)
        self._membership.stopped(step)

    def _leave(self, why: str) -> None:
        """Leave the job because a process of this node does not end. The node is to blame, and no generation
        can use it.
        """
        self.publish(FaultsKnown((MachineFault(time.time(), self._node.known_as, why),)))
        self._membership.leave(self._cause(CauseKind.LOST, why, LOST_CODE), last=self._serves)

    def _cause(
        self, why: CauseKind, headline: str, code: int, lines: Strings = (), age: float = 0.0
    ) -> Cause:
        title, rank = self._node.title, self.place.rank if self.place is not None else -1
        return Cause(why=why, node=title, rank=rank, headline=headline, code=code, lines=lines, age=age)

    def _ended(self, code: int, cause: Cause | None, error: LaunchError | None = None) -> Outcome:
        rank = self.place.rank if self.place is not None else -1
        return Outcome(
            code=code, cause=cause, error=error, result=self._result, rank=rank, requested=self._requested
        )

    # ---- called by the membership (membership.Events)

    def check(self, round: Round, members: Nodes, rank: int, then: Callable[[Measured], None]) -> None:
        self._cancel_check()
        self._cancel_check = self._pods.check(round, members, rank, then)

    def start(self, round: Round, members: Nodes, rank: int) -> None:
        if self._expired is not None:  # the timeout expired during another stop
            self._membership.failed(self._expired, False, 0.0)
            return
        self._next = Assignment(
            generation=round.generation,
            members=members,
            rank=rank,
            first=not self._ran,
            attempts=round.attempts,
            restarts=round.restarts,
            spent=round.spent,
            edit=round.edit,
        )
        self._loop.stop()

    def stop(self, cause: Cause, restart: bool, *, at_once: bool = False) -> None:
        first, self._stopping = not self._stopping, True
        if first:
            self.publish(Stopping(cause, restart))
            # Report restarted servers, because a restart may have caused the failure of a trainer on another
            # node.
            for ended in self._supervisor.restarted_servers if self._supervisor is not None else ():
                self._membership.note(self._of(ended, why=CauseKind.RESTARTED))
        if self._supervisor is not None and at_once:
            self._supervisor.kill_for(cause.headline, _NOTICES.get(cause.why, "stop"))
        elif self._supervisor is not None:
            ctrl_c = cause.why is CauseKind.LEFT and cause.code == 128 + signal.SIGINT and not restart
            notice = _NOTICES.get(cause.why, "stop")
            self._supervisor.stop_for(cause.headline, notice, interrupted=ctrl_c)
        else:
            self._next = None
            self._loop.after(0.0, self._membership.stopped)

    def finish(self) -> None:
        if self._supervisor is not None:
            self._supervisor.finish()
        else:
            self._loop.after(0.0, self._membership.stopped)

    def pause(self, code: int, cause: Cause | None) -> None:
        self._paused, self._stopping = True, False
        self.publish(Paused(self._ended(code, cause)))

    def ended(self, code: int, cause: Cause | None = None, error: LaunchError | None = None) -> None:
        """Finish with this outcome, unless one exists. The loop ends as soon as no pod runs in it."""
        self._cancel_check()
        if self._outcome is None:
            self._outcome = self._ended(code if self._own_code is None else self._own_code, cause, error)
        if self._supervisor is None:
            self._loop.stop()

    def failed(self, error: LaunchError) -> None:
        """Handle that this node cannot take part, or cannot continue."""
        if self._supervisor is not None:
            if not self._stopping:
                self.publish(Departing(f"{error.message}; stopping the processes of this node"))
            self._supervisor.stop_for(error.message, "stop")
        self.ended(error.exit_code, error=error)

    # ---- called by the supervisor (pod.events.Peers)

    def pod_failed(
        self, ended: Ended, decision: Restart | GiveUp, fault: Fault, verdict: Verdict | None
    ) -> None:
        over = decision.reason if isinstance(decision, GiveUp) else ""
        self._post(_with(self._of(ended, verdict, over=over), fault), decision)

    def pod_hung(self, hang: Hang, fault: Fault) -> None:
        cause = self._cause(CauseKind.FAILED, hang.headline, TIMEOUT, hang.stacks)
        machine = self._node.known_as if hang.alone else self._blamed(hang.verdict)
        blamed = replace(cause, summary=hang.cause, machine=machine, suspicion=_HANG)
        self._post(_with(blamed, fault), hang.decision)

    def _post(self, cause: Cause, decision: Restart | GiveUp) -> None:
        after = decision.after if isinstance(decision, Restart) else 0.0
        self._membership.failed(cause, isinstance(decision, Restart), after)

    def pod_failed_too(self, ended: Ended, fault: Fault) -> None:
        self._membership.note(_with(self._of(ended), fault))

    def restart_asked(self, command: str, edit: str) -> None:
        cause = self._cause(CauseKind.ASKED, f"restart by {command}", 1)
        self._membership.failed(replace(cause, requested=True, edit=edit), True, 0.0)

    def pod_completed(self) -> None:
        self._membership.completed()

    def _of(
        self,
        ended: Ended,
        verdict: Verdict | None = None,
        why: CauseKind = CauseKind.FAILED,
        over: str = "",
    ) -> Cause:
        """Make the cause of a failure. `over` is the reason if no restart follows."""
        headline, lines, summary = self._pods.describe(ended, verdict, over)
        age = max(0.0, time.time() - ended.failed_at)
        symptom = verdict is None and is_symptom(ended.exit, ended.message)
        machine, suspicion = self._blamed(verdict), _HANG
        if verdict is None and ended.may_be_machine:
            machine, suspicion = self._node.known_as, ended.suspicion
        cause = self._cause(why, headline, code_of(ended), lines, age)
        return replace(cause, summary=summary, symptom=symptom, machine=machine, suspicion=suspicion)

    def _blamed(self, verdict: Verdict | None) -> str:
        """Return the node of the rank that the others wait for. Return "" if the script causes the wait."""
        if verdict is None or verdict.kind not in _STUCK or not verdict.ranks or self.place is None:
            return ""
        first = 0
        for member in self.place.members:
            first += len(member.offer.trainers)
            if verdict.ranks[0] < first:
                return member.known_as
        return ""

    # ---- signals, a killed guard, the timeout

    def interrupt(self, number: int, command: str = "") -> None:
        """Leave the job, after a signal to end or a `command` of fleetrun. The other nodes decide if the job
        continues.
        """
        why, requested = why_interrupted(number, command)
        if self._paused:  # the job keeps the end that all nodes have reported
            self._paused = False
            self._membership.failed(self._cause(CauseKind.LEFT, why, 0), False, 0.0)
            return
        first = self._own_code is None
        code = self._own_code = self._own_code or 128 + number
        if first:
            self._requested = requested
            cause = replace(self._cause(CauseKind.LEFT, why, code), requested=requested)
            self._membership.leave(cause, last=self._serves)
        if self._supervisor is not None:
            # One Ctrl-C may reach all nodes. A stop because of another node's Ctrl-C is not the first of two.
            if first and self._stopping:
                self.publish(Departing(f"{why}; this node's processes are stopping already", requested))
            else:
                self._supervisor.interrupt(number, command)
        else:
            self.publish(Departing(why, requested))
            self.ended(code)

    def restart(self, name: str, command: str, edit: str = "") -> str:
        """Restart this process, or all, for a `command` of fleetrun. Return the reason for a refusal, or an
        empty text. `edit`: see `Supervisor.restart`.
        """
        if self._paused:
            self.restart_asked(command, edit)
            return ""
        if self._supervisor is None or self._stopping:
            return "no process runs on this node, or all of them are stopping"
        return self._supervisor.restart(name, command, edit)

    def guard_lost(self) -> None:
        """Leave the job immediately, because without the guard nothing cleans up after this process."""
        self._own_code = LOST_GUARD
        cause = self._cause(CauseKind.LOST, "fleetrun-guard, the launcher's parent, was killed", LOST_GUARD)
        self._membership.leave(cause, last=self._serves)
        if self._supervisor is not None:
            self._supervisor.guard_lost()
        self.ended(LOST_GUARD, cause)

    def _timed_out(self) -> None:
        headline = f"the job took longer than --timeout {self._timeout:g} s"
        cause = self._cause(CauseKind.TIMEOUT, headline, TIMEOUT)
        if self._supervisor is not None:
            self._stopping, self._expired = True, cause
            self.publish(Departing(f"{headline}; stopping it"))
            self._membership.failed(cause, False, 0.0)
            self._supervisor.stop_for(headline, "stop")
        else:
            self._membership.leave(cause)
            self.ended(TIMEOUT, cause)


def _with(cause: Cause, fault: Fault) -> Cause:
    """Add the facts that the leader's restart policy needs."""
    return replace(cause, time=fault.time, step=fault.step, error=fault.error)
