"""Tells what happens to a pod, as it happens: one line each. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable

from fleetrun.console import banner, hangs, report
from fleetrun.console.console import Console, terminal_columns
from fleetrun.console.tail import printable, read_tail
from fleetrun.pod.container import Container, Ended
from fleetrun.pod.restarts import GiveUp, Restart
from fleetrun.pod.result import Failure, Hang
from fleetrun.pod.spec import PodSpec

_WIDE = 100  # columns of what goes to no terminal


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
        if isinstance(decision, GiveUp) and not failure.alive and not failure.beside:
            return  # the report comes at once and says it all
        self._catch_up()
        said = [report.one_line(ended, read_tail(ended.spec.log))]
        for spec, record in failure.earlier:
            line, _, _ = record.message.partition("\n")
            said.append(f"{spec.title} had failed before: {printable(line)}")
        said.append(self._answer(failure))
        self._console.error("; ".join(said))

    def hung(self, hang: Hang) -> None:
        self._catch_up()
        decision = hang.decision
        if isinstance(decision, GiveUp):
            self._console.error(f"{hang.headline}; stopping the job")  # the report follows
            return
        again = f"; restart {decision.number} of {decision.limit} of all processes {_when(decision)}"
        self._console.error(hang.headline + (again if self._alone else ""))
        self._console.block(hangs.places(hang, terminal_columns() or _WIDE), level="ERROR")

    def _answer(self, failure: Failure) -> str:
        spec, decision = failure.ended.spec, failure.decision
        if not self._alone and not self._spec.mode.has_servers and not failure.beside:
            return f"log {spec.log}"
        if isinstance(decision, GiveUp):
            return f"{decision.reason}: the job goes on without it" if failure.beside else "stopping the rest"
        what = spec.title if self._spec.mode.has_servers or failure.beside else "all processes"
        return f"restart {decision.number} of {decision.limit} of {what} {_when(decision)}; log {spec.log}"

    def restarting(self, containers: list[Container]) -> None:
        self._console.debug(f"restarting {', '.join(each.spec.title for each in containers)}")

    def leaving(self, rest: list[Container]) -> None:
        self._console.debug(f"all trainers ended; waiting for {', '.join(each.spec.title for each in rest)}")

    def ending(self, why: str) -> None:
        self._console.warning(why)


def _when(decision: Restart) -> str:
    return "now" if decision.after == 0 else f"in {decision.after:g} s"
