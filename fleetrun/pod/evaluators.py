"""Restart each evaluator separately, up to --max_restart. Evaluators do not decide about the job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fleetrun.errors import LaunchError
from fleetrun.pod.container import Container, Ended
from fleetrun.pod.events import Failure, PodEvent, Restarting
from fleetrun.pod.loop import Loop
from fleetrun.pod.policy import NOTHING_SPENT, Budget, GiveUp, Spent


class Evaluators:
    """Restarts evaluators while the job `goes_on`. `end_marked` is `process.kill_marked`."""

    def __init__(
        self,
        loop: Loop,
        budget: Budget,
        publish: Callable[[PodEvent], None],
        start: Callable[[list[Container]], None],
        goes_on: Callable[[], bool],
        end_marked: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._budget = budget
        self._publish = publish
        self._start = start
        self._goes_on = goes_on
        self._end_marked = end_marked
        self._spent: dict[str, Spent] = {}

    def exited(self, container: Container, ended: Ended) -> None:
        """Handle an exit. An evaluator that exits with success has done its work."""
        if ended.ok:
            return
        spent = self._spent.get(container.spec.name, NOTHING_SPENT)
        fault = ended.fault(None)
        decision = self._budget.decide(fault, spent)
        self._spent[container.spec.name] = self._budget.after(fault, spent)
        self._publish(Failure(ended=ended, decision=decision))
        if not isinstance(decision, GiveUp):
            self._loop.after(decision.after, partial(self._again, container, ended))

    def _again(self, container: Container, ended: Ended) -> None:
        """Restart the evaluator, unless the job ends or all processes have restarted meanwhile."""
        if not self._goes_on() or container.restarts != ended.attempt:
            return
        self._end_marked(container.spec.mark)
        container.renew()
        self._publish(Restarting([container]))
        try:
            self._start([container])  # a pre-hook belongs to the job, and its failure would end the job
        except LaunchError as error:
            decision = GiveUp(f"the restart failed: {error.message}")
            self._publish(Failure(ended=ended, decision=decision))
