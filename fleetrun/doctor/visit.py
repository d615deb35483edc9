"""A visit of the doctor: from the words of a launch to sections of findings and an exit code."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

from fleetrun.doctor import show
from fleetrun.doctor.examine import examine, judge
from fleetrun.doctor.facts import Machine
from fleetrun.doctor.finding import Finding, exit_code
from fleetrun.doctor.plan import Plan, make
from fleetrun.doctor.show import Section
from fleetrun.envs.settings.command_line import CommandLine
from fleetrun.envs.settings.options import JobFile, Resolved
from fleetrun.envs.settings.resolve import resolve
from fleetrun.errors import UsageError
from fleetrun.host.network import Ports
from fleetrun.schedulers.placing import place

Say = Callable[[str], None]
"""A line for the person who waits."""

Busy = Callable[[str], AbstractContextManager[object]]
"""What they see while something takes long."""

_ANY_SCRIPT = "train.py"


class Visit:
    """Raises UsageError for options that no launch would take."""

    def __init__(
        self, line: CommandLine, file: JobFile, environ: MutableMapping[str, str], say: Say, busy: Busy
    ) -> None:
        self._names_script = any((line.script, file.script, *(wish.script for wish in file.roles)))
        self._environ = environ
        self._say = say
        self._busy = busy
        named = line if self._names_script else replace(line, script=_ANY_SCRIPT)
        self._resolved: Resolved = resolve(named, environ, place, file)
        self._machine: Machine | None = None
        self._extra: dict[str, Any] = {}
        engine = self._resolved.settings.scheduler
        if engine != "local":
            raise UsageError(
                f"--scheduler {engine} starts the job on other machines; doctor checks those that it runs on",
                hint="Run fleetrun doctor there, with the options of the launch but --scheduler.",
            )

    def run(self) -> tuple[list[Section], int]:
        """Check; the sections, and the exit code."""
        settings = self._resolved.settings
        ports = Ports(settings.port_range)
        try:
            plan = make(self._resolved, ports, self._environ, names_script=self._names_script)
            with self._busy("checking this machine"):
                machine = self._machine = examine(settings, plan, self._environ)
            findings = (*plan.findings, *judge(machine, plan))
            sections = [Section(_title(plan), findings)]
            if plan.site is not None and not plan.site.alone:
                sections.append(self._together(plan, machine, findings, ports))
        finally:
            ports.close()
        return sections, exit_code(each for section in sections for each in section.findings)

    def _together(self, plan: Plan, machine: Machine, findings: tuple[Finding, ...], ports: Ports) -> Section:
        from fleetrun.doctor.together import compare  # late: one machine needs no network

        party, found = compare(self._resolved, plan, machine, findings, ports, self._environ, self._say)
        titles = {card.id: card.title for card in party.members}
        self._extra["links"] = [
            {"from": titles[one], "to": titles[other], **asdict(link)}
            for (one, other), link in party.links.items()
            if one in titles and other in titles
        ]
        return Section("All machines", tuple(found))

    def table(self, sections: list[Section], width: int | None, *, colour: bool) -> list[str]:
        return show.table(sections, width, colour=colour)

    def document(self, sections: list[Section]) -> str:
        facts = asdict(self._machine) if self._machine is not None else None
        return show.document(sections, {"facts": _plain(facts), **self._extra})


def _title(plan: Plan) -> str:
    name = os.uname().nodename
    address = plan.site.address if plan.site is not None else name
    return name if address == name else f"{name} ({address})"


def _plain(value: Any) -> Any:
    """As JSON can hold it."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | frozenset):
        return [_plain(each) for each in value]
    return value
