"""Watches a pod from start to end: exits, signals and deadlines in, decisions out. Wakes only for a cause.

                 all trainers 0                 servers gone
start --> WATCHING ------------> LEAVING -------------------> result 0
            |  ^                    | a moment later
    failure |  | restart            v
    or hang v  | (collective, hang: ladder --------------------> result 0
          policy  all; ps: what failed)
            | gives up
signal, ----+------------------> ENDING: ladder ------------> result: the first failure's code,
timeout                                                       128 + n, 124

With peers (a job on several machines) the pod is one of many: it leaves when the trainers of all machines
have ended, and in collective mode a failure stops it, whatever the policy says; machines restart together.
Evaluators stand beside all that: `evaluators.py` starts them again, and nothing waits for them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection
from functools import partial

from fleetrun.envs.contract import Role
from fleetrun.errors import LaunchError
from fleetrun.pod.container import Container, Ended
from fleetrun.pod.deploy import Deployer
from fleetrun.pod.evaluators import Evaluators
from fleetrun.pod.hangwatch import HangWatch
from fleetrun.pod.loop import Loop, Timer
from fleetrun.pod.observer import Observer
from fleetrun.pod.oom import OomWatch
from fleetrun.pod.peers import Peers
from fleetrun.pod.phase import Phase
from fleetrun.pod.pod import Pod
from fleetrun.pod.process import Exit, ask_strays, end_descendants, kill_marked, signal_name
from fleetrun.pod.restarts import GiveUp, RestartPolicy
from fleetrun.pod.result import LOST_GUARD, TIMEOUT, Failure, Hang, JobResult, conclude
from fleetrun.pod.stopper import Stopper
from fleetrun.pod.strays import Strays

SERVERS_LEAVE = 1.0  # for servers to leave by themselves (stop_worker) after the last trainer
TRAINERS_FOLLOW = 1.0  # for trainers after a server that ended with 0: it may know that they are done


class Supervisor:
    """Runs one pod, once."""

    _phase = Phase.WATCHING
    _code: int | None = None
    _reason = ""
    _hang: Hang | None = None

    def __init__(
        self,
        pod: Pod,
        loop: Loop,
        policy: RestartPolicy,
        observer: Observer,
        *,
        stop_timeout: float,
        timeout: float | None = None,
        peers: Peers | None = None,
        restarts: int = 0,
        hangs: HangWatch | None = None,
        sweep: Callable[[float], int] = end_descendants,
        ask: Callable[[Collection[int]], None] = ask_strays,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`restarts`: how many there were. `sweep` and `ask` are those of `Strays`."""
        self._pod = pod
        self._loop = loop
        self._policy = policy
        self._observer = observer
        self._timeout = timeout
        self._strays = Strays(loop.clock, sweep, ask)
        self._stopper = Stopper(pod, loop, self._strays, stop_timeout, wall)
        self._oom = OomWatch()
        self._timers: list[Timer] = []
        self._limit: Timer | None = None
        self._failures: list[Ended] = []
        self._peers = peers
        self._deployer = Deployer(
            pod, self._watch, exited=self._exited, failed=self._failed, started=self._started,
            goes_on=self._goes_on,
        )  # fmt: skip
        self._evaluators = Evaluators(loop, policy, observer, self._deployer, self._goes_on)
        self._restarts = restarts
        self._hangs = hangs or HangWatch(loop)

    def _goes_on(self) -> bool:
        return self._phase is Phase.WATCHING

    def run(self) -> JobResult:
        """Start, watch, stop. Raises LaunchError when a process cannot be started; what had started is ended
        then.
        """
        try:
            self._deployer.deploy(self._pod.containers)
            if self._timeout is not None:
                self._limit = self._loop.after(self._timeout, self._timed_out)
            self._hangs.watch(self._pod, self._hung)
            self._loop.run()
        except LaunchError:
            self._stopper.end_now()
            raise
        finally:  # the loop may go on with the next pod
            self._cancel_timers()
            if self._limit is not None:
                self._limit.cancel()
            self._hangs.close()
            self._oom.close()
        strays = self._strays.end()
        return conclude(self._failures, self._code, self._reason, self._restarts, strays, self._hang)

    def _started(self, containers: list[Container]) -> None:
        self._observer.started(containers)
        if self._peers is not None and self._pod.trainers_completed:  # there is none on this machine
            self._peers.pod_completed()

    def _watch(self, container: Container, then: Callable[[Ended], None]) -> None:
        process = container.start()

        def on_exit() -> None:
            self._loop.remove(process.fileno())
            ended = container.collect(self._oom.killed)
            self._observer.exited(ended)
            if self._phase is Phase.WATCHING:
                then(ended)
            else:
                self._exited_late(ended)

        self._loop.add(process.fileno(), on_exit)

    # ---- exits

    def _exited(self, container: Container, ended: Ended) -> None:
        if container.spec.role is Role.EVALUATOR:
            self._evaluators.exited(container, ended)
        elif not ended.exit.ok:
            self._failed(ended, [container] if self._pod.spec.mode.has_servers else self._pod.containers)
        elif container.spec.role is Role.SERVER:
            if not ended.dismissed:
                early = partial(self._left_early, container, ended)
                self._timers.append(self._loop.after(TRAINERS_FOLLOW, early))
        elif self._pod.trainers_completed:
            if self._peers is None:
                self._leave()
            else:
                self._peers.pod_completed()

    def _left_early(self, container: Container, ended: Ended) -> None:
        """A server ended, well but unasked, and the trainers still run: whom would they talk to?"""
        if self._phase is Phase.WATCHING:
            self._failed(ended, [container])

    def _exited_late(self, ended: Ended) -> None:
        """While stopping. It counts as a failure only if fleetrun did not ask for it."""
        before = ended.record is not None and ended.record.time < self._stopper.asked_at
        counts = (ended.asked is None or before) and ended.spec.role is not Role.EVALUATOR
        if not ended.exit.ok and self._phase is not Phase.LEAVING and counts:
            self._failures.append(ended)
            if self._peers is not None:
                self._peers.pod_failed_too(ended)
        if not self._stopper.step() and not self._pod.alive:
            self._loop.stop()

    def _failed(self, ended: Ended, together: list[Container]) -> None:
        self._failures.append(ended)
        decision = self._policy.decide(ended.exit, self._restarts)
        self._observer.failed(Failure.of(ended, decision, self._pod.alive))
        together_only = self._peers is not None and not self._pod.spec.mode.has_servers
        if isinstance(decision, GiveUp) or together_only:
            if self._peers is not None:
                self._peers.pod_failed(ended, decision)
            self._reason = decision.reason if isinstance(decision, GiveUp) else ""
            self._end()
            return
        self._restarts += 1
        if self._pod.spec.mode.has_servers:
            self._restart(together, decision.after)
        else:
            self._restart_all(decision.after)

    def _hung(self, silent_for: float, stacks: tuple[str, ...]) -> None:
        """No trainer gives a sign of life; who waits for whom nobody knows, so all start again."""
        if self._phase is not Phase.WATCHING:
            return
        decision = self._policy.decide(Exit(TIMEOUT), self._restarts)
        running = tuple(each.spec for each in self._pod.alive)
        hang = Hang(silent_for=silent_for, containers=running, decision=decision, stacks=stacks)
        self._observer.hung(hang)
        if isinstance(decision, GiveUp) or self._peers is not None:
            self._hang, self._code, self._reason = hang, TIMEOUT, hang.reason
            if self._peers is not None:
                self._peers.pod_hung(hang)
            self._end()
        else:
            self._restarts += 1
            self._restart_all(decision.after)

    def _restart_all(self, after: float) -> None:
        self._phase = Phase.RESTARTING
        self._cancel_timers()  # one that failed before may wait for its own restart
        self._deployer.call_off()
        self._stop(lambda: self._restart(self._pod.containers, after))

    def _restart(self, containers: list[Container], after: float) -> None:
        if self._phase is Phase.RESTARTING:
            self._hangs.watch(self._pod, self._hung)
        self._phase = Phase.WATCHING
        self._stopper.forget()
        forgiven, self._failures = self._failures, []
        if not self._pod.alive:  # a daemon of the last attempt may still hold a port or a device
            self._strays.end_now()
        for container in containers:
            kill_marked(container.spec.mark)
            container.renew()
        self._timers.append(self._loop.after(after, partial(self._start_again, containers, forgiven)))

    def _start_again(self, containers: list[Container], forgiven: list[Ended]) -> None:
        """Raises nothing: when the restart itself fails, the others are stopped as after any failure."""
        self._observer.restarting(containers)
        try:
            self._deployer.deploy(containers)
        except LaunchError as error:
            self._failures = forgiven
            self._restarts -= 1
            self._code = LaunchError.exit_code
            self._reason = f"the restart failed: {error.message}" + (f" ({error.hint})" if error.hint else "")
            self._observer.ending(f"{self._reason}; stopping the job")
            self._end()

    # ---- the end

    def finish(self) -> None:
        """Peers: the trainers of all machines ended well."""
        if self._phase is Phase.WATCHING:
            self._leave()

    def stop_for(self, reason: str, notice: str) -> None:
        """Peers: the job stops, for another machine's reason; `notice` is what processes read of it.
        Stopping already is fine.
        """
        if self._phase is not Phase.ENDING:
            self._reason, self._stopper.notice = reason, notice
            self._hangs.last_look(reason, self._end)

    def _leave(self) -> None:
        """All trainers ended well. What served them may leave, and is asked to after a moment."""
        self._phase = Phase.LEAVING
        self._cancel_timers()
        rest = self._pod.alive
        if not rest:
            self._loop.stop()
            return
        self._observer.leaving(rest)
        self._timers.append(self._loop.after(SERVERS_LEAVE, lambda: self._stop(self._loop.stop)))

    def _end(self) -> None:
        """Stop everything, then the loop."""
        self._phase = Phase.ENDING
        self._cancel_timers()
        self._stop(self._loop.stop)

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _stop(self, then: Callable[[], None]) -> None:
        self._hangs.close()
        self._stopper.stop(then)

    def interrupt(self, number: int) -> None:
        """A signal that means: end. The second Ctrl-C (or SIGQUIT) means: at once."""
        if self._phase is not Phase.ENDING:
            self._code = 128 + number
            self._reason = f"got {signal_name(number)}"
            what = "the job" if self._peers is None else "the processes of this node"
            self._observer.ending(f"{self._reason}; stopping {what}")
            self._end()
        elif number in (signal.SIGINT, signal.SIGQUIT) and self._stopper.kill():
            self._observer.ending(f"got {signal_name(number)}; killing what is left")

    def _timed_out(self) -> None:
        if self._phase not in (Phase.LEAVING, Phase.ENDING):
            self._code = TIMEOUT
            self._reason = f"the job took longer than --timeout {self._timeout:g} s"
            self._observer.ending(f"{self._reason}; stopping it")
            self._end()

    def guard_lost(self) -> None:
        """Nobody would clean up after this process any more: end everything now."""
        self._code = LOST_GUARD
        self._reason = "the guard process was killed"
        self._stopper.end_now()
        self._loop.stop()
