"""Evaluators of a pod that failed: each is started again on its own, as often as --max_restart says. What
becomes of them decides nothing about the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from fleetrun.errors import LaunchError
from fleetrun.pod.container import Container, Ended
from fleetrun.pod.deploy import Deployer
from fleetrun.pod.loop import Loop
from fleetrun.pod.observer import Observer
from fleetrun.pod.process import kill_marked
from fleetrun.pod.restarts import GiveUp, RestartPolicy
from fleetrun.pod.result import Failure


class Evaluators:
    """They are started again only while the job `goes_on`."""

    def __init__(
        self,
        loop: Loop,
        policy: RestartPolicy,
        observer: Observer,
        deployer: Deployer,
        goes_on: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._policy = policy
        self._observer = observer
        self._deployer = deployer
        self._goes_on = goes_on
        self._failures: Counter[str] = Counter()

    def exited(self, container: Container, ended: Ended) -> None:
        """One that ends well has done its work."""
        if ended.exit.ok:
            return
        decision = self._policy.decide(ended.exit, self._failures[container.spec.name])
        self._failures[container.spec.name] += 1
        self._observer.failed(Failure(ended=ended, decision=decision))
        if not isinstance(decision, GiveUp):
            self._loop.after(decision.after, partial(self._again, container, ended))

    def _again(self, container: Container, ended: Ended) -> None:
        """Unless the job ends, or all its processes started again meanwhile."""
        if not self._goes_on() or container.restarts != ended.attempt:
            return
        kill_marked(container.spec.mark)
        container.renew()
        self._observer.restarting([container])
        try:
            self._deployer.start([container])  # a hook is the job's: if it failed, that would end the job
        except LaunchError as error:
            decision = GiveUp(f"the restart failed: {error.message}")
            self._observer.failed(Failure(ended=ended, decision=decision))
