"""Watch a pod from start to end. Exits and signals come in, decisions go out. It wakes only for a cause.

                     all trainers 0                 servers gone
    start --> WATCHING ------------> LEAVING -------------------> result 0
                |  ^                    | a moment later
        failure |  | restart            v
        or hang v  | (collective, hang: ladder --------------------> result 0
              policy  all; ps: what failed)
                | gives up
    signal, ----+------------------> ENDING: ladder ------------> result: the first failure's code,
    timeout                                                       128 + n, 124

With peers (a multi-node job), the pod is one of many. It leaves after the trainers of all nodes have ended.
In collective mode a failure always stops it, because nodes restart together.

`Deployer` starts containers, after the pod's hook. `Stopper` (`stopping.py`) ends them by a ladder of
SIGTERM, a deadline and SIGKILL, first workers, then their servers. `Strays` are processes without a
container. `Evaluators` (`evaluators.py`) restart separately, and the job does not wait for them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING

from fleetrun.aliases import Callback, Clock
from fleetrun.envs.contract import Role
from fleetrun.errors import LaunchError
from fleetrun.pod.container import Container, Ended, Pod
from fleetrun.pod.evaluators import Evaluators
from fleetrun.pod.events import (
    LOST_GUARD,
    TIMEOUT,
    Ending,
    Failure,
    Findings,
    Hang,
    JobResult,
    Leaving,
    Peers,
    PodEvent,
    RestartAsked,
    Restarting,
    Started,
    Verdict,
    conclude,
    why_interrupted,
)
from fleetrun.pod.loop import Loop, Timer
from fleetrun.pod.policy import NOTHING_SPENT, Budget, Fault, GiveUp, Spent
from fleetrun.pod.process import Exit
from fleetrun.pod.stopping import LET_GO, Stopper, Strays

if TYPE_CHECKING:
    from fleetrun.pod.hangs import HangWatch


class Phase(Enum):
    WATCHING = auto()
    ASKING = auto()
    LEAVING = auto()
    RESTARTING = auto()
    ENDING = auto()


# ---- Starting: first the hook of the pod, to its end, then containers

Watch = Callable[[Container, Callable[[Ended], None]], None]
"""Starts one container, and calls back with its end. Raises LaunchError if the container cannot start."""

Ready = Callable[[list[Container], Callback], None]
"""Prepares the start of these containers, and calls back, perhaps later."""


def start_cold(containers: list[Container], then: Callback) -> None:
    """Start without a preparation."""
    then()


class Deployer:
    """Starts containers of one pod, any number of times."""

    def __init__(
        self,
        pod: Pod,
        watch: Watch,
        *,
        exited: Callable[[Container, Ended], None],
        failed: Callable[[Ended, list[Container]], None],
        started: Callable[[list[Container]], None],
        goes_on: Callable[[], bool],
        ready: Ready,
    ) -> None:
        """Make a deployer.

        `exited` receives each container at its end. `failed` receives a failed hook and the containers that
        it kept from starting. Containers that wait for a hook start only while the job `goes_on`. `ready`
        prepares their start.
        """
        self._pod = pod
        self._watch = watch
        self._exited = exited
        self._failed = failed
        self._started = started
        self._goes_on = goes_on
        self._ready = ready
        self._called_off = 0
        self._behind_hook: list[list[Container]] = []

    def deploy(self, containers: list[Container]) -> None:
        """Run the hook, then start the containers. Raises LaunchError if a container cannot start."""
        hook = self._pod.hook
        if hook is None:
            self.start(containers)
        elif hook.alive:  # the hook of another restart, so this restart runs the hook after it
            self._behind_hook.append(containers)
        else:
            hook.renew()
            self._watch(hook, lambda ended: self._hook_ended(ended, containers))

    def call_off(self) -> None:
        """Drop the containers that wait for their start."""
        self._behind_hook.clear()
        self._called_off += 1

    def _hook_ended(self, ended: Ended, containers: list[Container]) -> None:
        if ended.exit.ok:
            self.start(containers)
        else:
            self._failed(ended, containers)
        if self._behind_hook and self._goes_on():
            self.deploy(self._behind_hook.pop(0))

    def start(self, containers: list[Container]) -> None:
        """Start the containers without the hook. Raises LaunchError if a container cannot start."""
        number = self._called_off
        self._ready(containers, lambda: self._begin(containers) if number == self._called_off else None)

    def _begin(self, containers: list[Container]) -> None:
        for container in containers:
            self._watch(container, lambda ended, container=container: self._exited(container, ended))  # type: ignore[misc]
        self._pod.running()
        self._started(containers)


# ---- The supervisor


LastStep = Callable[[Sequence[Container]], int | None]
"""Returns the last step of these containers in this attempt, or None if unknown."""


VerdictCallback = Callable[[Verdict | None], None]
Inspect = Callable[[Sequence[Container], Ended | None, VerdictCallback], Callback | None]
"""Starts to find the cause of a failure. Without a failure (None), it finds what a job waits for before a
stop.

It calls back exactly once, after a few seconds at most, and returns a function that cancels the search. It
returns None, and does not call back, if the failure explains itself or the job makes progress.
"""

SERVERS_LEAVE = 1.0  # seconds after the last trainer, for servers to leave by themselves (stop_worker)
TRAINERS_FOLLOW = 1.0  # seconds after a server ended with 0, which may mean that the trainers are done


class Supervisor:
    """Runs one pod, once."""

    _phase = Phase.WATCHING
    _code: int | None = None
    _reason = ""
    _requested = False
    _hang: Hang | None = None
    _left = ""
    _verdict: Verdict | None = None

    def __init__(
        self,
        pod: Pod,
        loop: Loop,
        budget: Budget,
        publish: Callable[[PodEvent], None],
        *,
        stop_timeout: float,
        out_of_memory: Callable[[int], bool],
        timeout: float | None,
        peers: Peers | None,
        restarts: int,
        spent: Spent,
        last_step: LastStep,
        has_saved: Callable[[Container], bool],
        hangs: HangWatch | None,
        inspect: Inspect,
        ready: Ready,
        sweep: Callable[[float], int],
        ask: Callable[[Collection[int]], None],
        end_marked: Callable[[str], None],
        wall: Clock = time.time,
    ) -> None:
        """Make a supervisor.

        `out_of_memory` returns True if the kernel killed this pid for lack of memory. `restarts` counts
        restarts so far, and `spent` is the part of the budget that they used. `has_saved` returns True if a
        process saved a checkpoint in this attempt. `sweep` and `ask` are passed to `Strays`. `end_marked`
        ends leftover processes of a container.
        """
        self._pod = pod
        self._loop = loop
        self._wall = wall
        self._budget = budget
        self._publish = publish
        self._timeout = timeout
        self._strays = Strays(loop.clock, sweep, ask)
        self._stopper = Stopper(pod, loop, self._strays, stop_timeout, wall, self._leave_behind)
        self._out_of_memory = out_of_memory
        self._timers: list[Timer] = []
        self._limit: Timer | None = None
        self._failures: list[Ended] = []
        self._forgiven: list[Ended] = []
        """Failures that a restart followed."""
        self._peers = peers
        self._deployer = Deployer(
            pod, self._watch, exited=self._exited, failed=self._failed, started=self._started,
            goes_on=self._goes_on, ready=ready,
        )  # fmt: skip
        self._end_marked = end_marked
        self._evaluators = Evaluators(loop, budget, publish, self._deployer.start, self._goes_on, end_marked)
        self._restarts = restarts
        self._spent = spent
        self._last_step = last_step
        self._has_saved = has_saved
        self._hangs = hangs
        self._inspect = inspect
        self._cancel_inspection: Callback | None = None
        self._inspected_failure: Ended | None = None
        self._meanwhile: list[Callback] = []

    @property
    def restarted_servers(self) -> list[Ended]:
        """The last end of each server that was restarted."""
        servers = [each for each in self._forgiven if each.spec.role is Role.SERVER]
        return list({each.spec.rank: each for each in servers}.values())

    def _goes_on(self) -> bool:
        return self._phase is Phase.WATCHING

    def run(self) -> JobResult:
        """Start, watch and stop the pod.

        Raises LaunchError if a process cannot start, after ending the processes that had started.
        """
        try:
            self._deployer.deploy(self._pod.containers)
            if self._timeout is not None:
                self._limit = self._loop.after(self._timeout, self._timed_out)
            self._watch_for_hangs()
            self._loop.run()
        except LaunchError:
            self._stopper.end_now()
            raise
        finally:  # the loop may continue with the next pod
            self._cancel_plans()
            if self._cancel_inspection is not None:
                self._cancel_inspection()
            if self._limit is not None:
                self._limit.cancel()
            self._close_hangs()
        strays = self._strays.end()
        return conclude(
            self._failures,
            self._code,
            self._reason,
            self._restarts,
            strays,
            self._hang,
            verdict=self._verdict,
            requested=self._requested,
            forgiven=self._forgiven,
            left_behind=self._left,
        )

    def _watch_for_hangs(self) -> None:
        if self._hangs is not None:
            self._hangs.watch(self._pod, self._hung)

    def _close_hangs(self) -> None:
        if self._hangs is not None:
            self._hangs.close()

    def _started(self, containers: list[Container]) -> None:
        self._publish(Started(containers))
        if self._peers is not None and self._pod.trainers_completed:  # this node has no trainers
            self._peers.pod_completed()

    def _watch(self, container: Container, then: Callable[[Ended], None]) -> None:
        process = container.start()

        def on_exit() -> None:
            self._loop.remove(process.fileno())
            ended = container.collect(self._out_of_memory)
            self._publish(ended)
            self._act(container, ended, then)

        self._loop.add(process.fileno(), on_exit)

    # ---- exits

    def _act(self, container: Container, ended: Ended, then: Callable[[Ended], None]) -> None:
        """Act on an exit in the current phase.

        During an inspection after a failure, further exits in a job with servers wait for their turn. If only
        the failed process restarts, `then` follows. Without servers, all processes stop together.
        """
        if container.restarts != ended.attempt and container is not self._pod.hook:
            return  # it has been restarted since then, unless it waits for a hook
        if self._phase is Phase.WATCHING:
            then(ended)
        elif self._phase is Phase.ASKING and self._pod.spec.mode.has_servers:
            self._meanwhile.append(partial(self._act, container, ended, then))
        else:
            self._exited_late(ended)

    def _act_on_the_rest(self) -> None:
        waiting, self._meanwhile = self._meanwhile, []
        for act in waiting:
            act()

    def _exited(self, container: Container, ended: Ended) -> None:
        if self._stopper.step_one(container.spec.name):
            return
        if container.spec.role is Role.EVALUATOR:
            self._evaluators.exited(container, ended)
        elif not ended.ok:
            self._failed(ended, [container] if self._pod.spec.mode.has_servers else self._pod.containers)
        elif container.spec.role is Role.SERVER:
            if not ended.dismissed:
                # While trainers still run that need it.
                early = partial(self._act, container, ended, lambda ended: self._failed(ended, [container]))
                self._timers.append(self._loop.after(TRAINERS_FOLLOW, early))
        elif self._pod.trainers_completed:
            if self._peers is None:
                self._leave()
            else:
                self._peers.pod_completed()

    def _exited_late(self, ended: Ended) -> None:
        """Handle an exit during a stop. It counts as a failure only if fleetrun did not cause it.

        After all trainers have ended, only a server with an error report counts, because it may have lost
        tables that it had to save.
        """
        before = ended.record is not None and ended.record.time < self._stopper.asked_at
        counts = (ended.asked is None or before) and ended.spec.role is not Role.EVALUATOR
        if self._phase is Phase.LEAVING:
            if not ended.ok and ended.spec.role is Role.SERVER and ended.record is not None:
                self._failures.append(ended)
        elif not ended.ok and counts:
            self._failures.append(ended)
            if self._peers is not None:
                self._peers.pod_failed_too(ended, self._fault(ended))
        if self._phase is not Phase.ASKING and not self._stopper.step() and not self._pod.alive:
            self._loop.stop()

    def _failed(self, ended: Ended, together: list[Container]) -> None:
        """Handle a failure. If it may be a mere symptom, first find where the other processes are."""
        self._failures.append(ended)
        then = partial(self._inspected, ended, together)
        self._inspected_failure = ended
        self._cancel_inspection = self._inspect(self._pod.containers, ended, then)
        if self._cancel_inspection is None:
            self._follow(ended, together)
        else:
            self._phase = Phase.ASKING

    def _inspected(self, ended: Ended, together: list[Container], verdict: Verdict | None) -> None:
        self._cancel_inspection = None
        self._phase = Phase.WATCHING
        if verdict is not None:
            self._verdict = verdict
            self._publish(verdict)
        self._follow(ended, together)
        self._act_on_the_rest()

    def _follow(self, ended: Ended, together: list[Container]) -> None:
        """Restart or end the job."""
        fault = self._fault(ended)
        decision = self._budget.decide(fault, self._spent)
        self._publish(Failure.of(ended, decision, self._pod.alive))
        together_only = self._peers is not None and not self._pod.spec.mode.has_servers
        if isinstance(decision, GiveUp) or together_only:
            if self._peers is not None:
                self._peers.pod_failed(ended, decision, fault, self._verdict)
            self._reason = decision.reason if isinstance(decision, GiveUp) else ""
            self._end()
            return
        self._count(fault)
        if self._pod.spec.mode.has_servers:
            self._restart(together, decision.after)
        else:
            self._restart_all(decision.after)

    @property
    def last_step(self) -> int | None:
        """The last step of the trainers in the last attempt, or None if unknown."""
        return self._last_step(self._pod.containers)

    def _fault(self, ended: Ended) -> Fault:
        """Return the fault. With servers trainers restart one by one, so only the trainer's own steps
        count.
        """
        alone = self._pod.spec.mode.has_servers and ended.spec.role is Role.TRAINER
        made = [each for each in self._pod.containers if not alone or each.spec is ended.spec]
        return ended.fault(self._last_step(made), counts_on=alone and not any(map(self._has_saved, made)))

    def _count(self, fault: Fault) -> None:
        self._before = self._restarts, self._spent
        self._restarts += 1
        self._spent = self._budget.after(fault, self._spent)

    def _hung(self, silent_for: float, findings: Findings) -> None:
        """Restart all processes, because all trainers are silent, or one of them hangs."""
        if self._phase is not Phase.WATCHING:
            return
        fault = Fault(exit=Exit(TIMEOUT), time=self._wall(), step=self.last_step)
        decision = self._budget.decide(fault, self._spent)
        running = tuple(each.spec for each in self._pod.alive)
        hang = Hang(
            silent_for=silent_for,
            containers=running,
            decision=decision,
            stacks=findings.stacks,
            verdict=findings.verdict,
            alone=findings.alone,
        )
        if findings.verdict is not None:
            self._publish(findings.verdict)
        self._publish(hang)
        if isinstance(decision, GiveUp) or self._peers is not None:
            self._hang, self._code, self._reason = hang, TIMEOUT, hang.reason
            if self._peers is not None:
                self._peers.pod_hung(hang, fault)
            self._end()
        else:
            self._count(fault)
            self._restart_all(decision.after)

    # ---- a restart on request of a user

    def restart(self, name: str, command: str, edit: str = "") -> str:
        """Restart this container for a `command` of fleetrun, without counting a failure.

        In collective mode, all containers on all nodes restart. After an `edit` (`Cause.edit`), they do
        so without a name, and failures count anew. Return the reason for a refusal, or an empty string.
        """
        there = {each.spec.name: each for each in self._pod.containers}
        container = there.get(name)
        if not (container or edit):
            return f"this node has no process {name}"
        if self._phase is not Phase.WATCHING or self._stopper.stops_one(name):
            return "the process is restarting or stopping already"
        if container and not container.alive:
            return f"{container.spec.title} does not run"
        if not self._timers:  # otherwise a failed process waits for its own restart, which may also fail
            self._before = self._restarts, self._spent
        if container and (self._pod.spec.mode.has_servers or container.spec.role is Role.EVALUATOR):
            self._publish(RestartAsked([container], command, self._restarts))
            self._stopper.stop_one(container, partial(self._restart, [container], 0.0))
        elif self._peers is not None:
            self._peers.restart_asked(command, edit)
        else:
            if edit:
                self._before = self._restarts, self._spent = 0, NOTHING_SPENT
            self._publish(RestartAsked(self._pod.containers, command, self._restarts))
            self._stopper.notice = "restart"
            self._restart_all(0.0)
        return ""

    def _restart_all(self, after: float) -> None:
        self._phase = Phase.RESTARTING
        self._cancel_plans()  # a process that failed before may wait for its own restart
        self._stop(lambda: self._restart(self._pod.containers, after))

    def _restart(self, containers: list[Container], after: float) -> None:
        if self._phase is Phase.RESTARTING:
            self._watch_for_hangs()
        self._phase = Phase.WATCHING
        self._stopper.forget()
        forgiven, self._failures = self._failures, []
        self._verdict = None
        self._forgiven += forgiven
        if not self._pod.alive:  # a daemon of the last attempt may still hold a port or a device
            self._strays.end_now()
        for container in containers:
            self._end_marked(container.spec.mark)
            container.renew()
        self._timers.append(self._loop.after(after, partial(self._start_again, containers, forgiven)))

    def _start_again(self, containers: list[Container], forgiven: list[Ended]) -> None:
        """Start containers again. If the restart fails, stop the other containers as after any failure."""
        self._publish(Restarting(containers))
        try:
            self._deployer.deploy(containers)
        except LaunchError as error:
            self._failures = forgiven
            self._cannot_restart(error.message + (f" ({error.hint})" if error.hint else ""))

    def _cannot_restart(self, why: str) -> None:
        self._restarts, self._spent = self._before
        self._code = LaunchError.exit_code
        self._reason = f"the restart failed: {why}"
        self._publish(Ending(f"{self._reason}; stopping the job"))
        self._end()

    def _leave_behind(self, containers: list[Container]) -> None:
        """Handle containers that SIGKILL has not ended. They and their resources may stay forever."""
        titles = ", ".join(each.spec.title for each in containers)
        self._left = (
            f"{titles} did not end within {LET_GO:g} s after SIGKILL: a device, a network file system "
            "or a frozen cgroup blocks the end"
        )
        if self._phase in (Phase.ENDING, Phase.LEAVING):
            self._publish(Ending(self._left))
        else:
            self._cannot_restart(self._left)

    # ---- the end

    def finish(self) -> None:
        """Leave, because the trainers of all nodes ended with success. Peers call it."""
        if self._phase is Phase.WATCHING:
            self._leave()

    def stop_for(self, reason: str, notice: str, *, interrupted: bool = False) -> None:
        """Stop the job for another node's reason. Peers call it.

        `notice` is the reason that processes read. `interrupted` is True after Ctrl-C. The call has an effect
        only if the job is not ending already.
        """
        if self._phase is not Phase.ENDING:
            self._reason, self._stopper.notice, self._stopper.interrupted = reason, notice, interrupted
            if self._hangs is None:
                self._end()
            else:
                self._hangs.last_look(reason, self._end)

    def kill_for(self, reason: str, notice: str) -> None:
        """Kill all processes, even during a stop, because the job continued without this node. Peers call it.

        Further actions of these processes would disturb the job.
        """
        if self._phase is Phase.ENDING:
            self._stopper.kill()
        else:
            self._reason, self._stopper.notice = reason, notice
            self._end(at_once=True)

    def hold(self, held: bool) -> None:
        """Suspend all processes, or let them continue."""
        for container in self._pod.alive:
            container.hold(held)

    def _leave(self) -> None:
        """Let servers leave after all trainers ended with success, and stop them after a moment."""
        self._phase = Phase.LEAVING
        self._cancel_plans()
        rest = self._pod.alive
        if not rest:
            self._loop.stop()
            return
        self._publish(Leaving(rest))
        self._timers.append(self._loop.after(SERVERS_LEAVE, lambda: self._stop(self._loop.stop)))

    def _end(self, *, at_once: bool = False) -> None:
        """Stop all processes, then the loop."""
        self._phase = Phase.ENDING
        self._cancel_plans()
        self._stop(self._loop.stop, at_once=at_once)

    def _cancel_plans(self) -> None:
        """Cancel the timers, and the starts that wait."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._deployer.call_off()

    def _stop(self, then: Callback, *, at_once: bool = False) -> None:
        self._close_hangs()
        if self._cancel_inspection is not None:
            self._cancel_inspection()
            self._cancel_inspection = None
            if self._peers is not None and self._inspected_failure is not None:
                # this failure may be older than the failures that peers have
                failure = self._inspected_failure
                self._peers.pod_failed_too(failure, self._fault(failure))
            self._act_on_the_rest()
        self._stopper.stop(then, at_once=at_once)

    def interrupt(self, number: int, command: str = "") -> None:
        """Handle a signal that means "end", or the request of a `command`. The second Ctrl-C (or
        SIGQUIT) kills.
        """
        why, requested = why_interrupted(number, command)
        if self._phase is not Phase.ENDING:
            self._stopper.interrupted = number == signal.SIGINT
            self._code, self._reason, self._requested = 128 + number, why, requested
            what = "the job" if self._peers is None else "the processes of this node"
            text = f"{why}; stopping {what}"
            if number == signal.SIGINT:
                text = f"stopping{'' if self._peers is None else f' {what}'}; Ctrl-C again kills"
            self._look_and_end(text, requested)
        elif number in (signal.SIGINT, signal.SIGQUIT):
            if self._cancel_inspection is not None:
                self._end()
            if self._stopper.kill():
                self._publish(Ending(f"{why}; killing the remaining processes", requested))

    def _timed_out(self) -> None:
        if self._phase not in (Phase.LEAVING, Phase.ENDING):
            self._code = TIMEOUT
            self._reason = f"the job took longer than --timeout {self._timeout:g} s"
            self._look_and_end(f"{self._reason}; stopping it")

    def _look_and_end(self, text: str, requested: bool = False) -> None:
        """End the job. If it is stuck, first find what it waits for, because its processes hold this
        state.
        """
        watching, self._phase, self._inspected_failure = self._phase is Phase.WATCHING, Phase.ENDING, None
        cancel = self._inspect(self._pod.containers, None, self._seen) if watching else None
        self._publish(Ending(text, requested))
        if cancel is None:
            self._end()
        self._cancel_inspection = cancel

    def _seen(self, verdict: Verdict | None) -> None:
        self._cancel_inspection = None
        if verdict is not None:
            self._verdict = verdict
            self._publish(verdict)
        self._end()

    def guard_lost(self) -> None:
        """End all processes now, because the guard has ended and could not clean up after this process."""
        self._code = LOST_GUARD
        self._reason = "fleetrun-guard, the launcher's parent, was killed"
        self._stopper.end_now()
        self._loop.stop()
