"""Tells what happens to a pod, as it happens: one line each. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable

from fleetrun.console import banner, report
from fleetrun.console.console import Console
from fleetrun.console.tail import read_tail
from fleetrun.pod.container import Container, Ended
from fleetrun.pod.restarts import GiveUp
from fleetrun.pod.result import Failure
from fleetrun.pod.spec import PodSpec


class Narrator:
    """The supervisor's observer. `catch_up` shows what the followed logs hold so far, so that it comes before
    the news. `alone`: what becomes of a failure is decided on this machine.
    """

    def __init__(
        self, console: Console, spec: PodSpec, catch_up: Callable[[], None], *, alone: bool = True
    ) -> None:
        self._console = console
        self._spec = spec
        self._catch_up = catch_up
        self._told = False
        self._alone = alone

    def started(self, containers: list[Container]) -> None:
        if not self._told:
            self._told = True
            self._console.info(banner.pod_line("Watching", self._spec, "running"))
        for each in containers:
            if each.process is not None:
                self._console.debug(f"{each.spec.title}: pid {each.process.pid}, log {each.spec.log}")

    def exited(self, ended: Ended) -> None:
        """What follows from it is told."""

    def failed(self, failure: Failure) -> None:
        ended, decision = failure.ended, failure.decision
        if isinstance(decision, GiveUp) and not failure.alive:
            return  # the report comes at once and says it all
        self._catch_up()
        said = [report.one_line(ended, read_tail(ended.spec.log))]
        said += [f"{spec.title} had failed before: {record.message}" for spec, record in failure.earlier]
        said.append(self._answer(failure))
        self._console.error("; ".join(said))

    def _answer(self, failure: Failure) -> str:
        spec, decision = failure.ended.spec, failure.decision
        if not self._alone and not self._spec.mode.has_servers:
            return f"log {spec.log}"
        if isinstance(decision, GiveUp):
            return "stopping the rest"
        when = "now" if decision.after == 0 else f"in {decision.after:g} s"
        what = spec.title if self._spec.mode.has_servers else "all processes"
        return f"restart {decision.number} of {decision.limit} of {what} {when}; log {spec.log}"

    def restarting(self, containers: list[Container]) -> None:
        self._console.debug(f"restarting {', '.join(each.spec.title for each in containers)}")

    def leaving(self, rest: list[Container]) -> None:
        self._console.debug(f"all trainers ended; waiting for {', '.join(each.spec.title for each in rest)}")

    def ending(self, why: str) -> None:
        self._console.warning(why)
