"""Run `fleetrun doctor` from the words of a launch to an exit code.

It measures this node, judges the facts, compares them with the other nodes, and shows the findings as a table
or as JSON.
"""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fleetrun import __version__, files
from fleetrun.aliases import Document, Environ, Fields, Numbers, ShowText
from fleetrun.console.text import printable
from fleetrun.doctor import judge_machine, measure
from fleetrun.doctor.facts import Finding, Machine, Verdict, Wanted, exit_code, warned
from fleetrun.doctor.requirements import Plan, make_plan
from fleetrun.envs.contract import TOKEN, VISIBLE_VARIABLE, without_contract
from fleetrun.envs.settings.command_line import CommandLine
from fleetrun.envs.settings.options import JobFile, LaunchSettings
from fleetrun.envs.settings.parsing import plural
from fleetrun.envs.settings.resolve import resolve
from fleetrun.errors import UsageError
from fleetrun.frozen import frozen
from fleetrun.host.network import Ports
from fleetrun.plan.topology import process_command
from fleetrun.schedulers.placing import place

# ---- All measurements of this node at once, each with a time limit, then the judgement

PATIENCE = 20.0
"""Seconds for a measurement. A lost network file system never answers."""


def examine(settings: LaunchSettings, plan: Plan, environ: Environ) -> Machine:
    """Measure this node. Torch is checked if trainers run Python."""
    wanted = plan.wanted
    tasks: measure.Tasks = {
        **measure.OF_THE_HOST,
        "logs": lambda: measure.folder(Path(settings.log_dir)),
        "network": lambda: measure.network(wanted.address),
        "runtime_error": lambda: _runtime_error(environ),
    }
    if settings.tensorboard is not None:
        boards = Path(settings.tensorboard)
        tasks["boards"] = lambda: measure.unwritable(boards)
    if wanted.devices and wanted.device_kind == "gpu":
        tasks["driver"] = lambda: measure.ask_driver(wanted.devices)
    if process_command(settings)[0] == sys.executable:
        own = {**environ, **dict(settings.environment)}
        tasks["torch"] = lambda: measure.ask_torch(_environment(plan, own))
    return observed(tasks, {"torch": measure.TORCH_PATIENCE + PATIENCE})


def observed(tasks: measure.Tasks, patience: Numbers) -> Machine:
    """Run the tasks, each within its time limit. `late` names the tasks that exceed it."""
    found = at_once(tasks, patience)
    late = tuple(name for name in tasks if name not in found)
    return Machine(python=platform.python_version(), fleetrun=__version__, **found, late=late)


def _environment(plan: Plan, environ: Environ) -> dict[str, str]:
    """Return the environment of a process of the job, with the chosen devices and without the token."""
    values = without_contract(environ)
    values.pop(TOKEN, None)
    if plan.wanted.devices:
        values[VISIBLE_VARIABLE[plan.wanted.device_kind]] = ",".join(plan.wanted.devices)
    return values


def _runtime_error(environ: Environ) -> str:
    """Return the reason why sockets of launches cannot be created.

    Creates their directory, as a launch would.
    """
    try:
        files.make_run_folder(files.run_folder(environ))
    except OSError as error:
        return f"{files.run_folder(environ)}: {error.strerror}" if error.strerror else str(error)
    return ""


def at_once(tasks: measure.Tasks, patience: Numbers) -> Document:
    """Run all tasks in threads, and return their results by name.

    A task has `PATIENCE` seconds, or the time in `patience`. Slower tasks are left running, because a blocked
    system call cannot be interrupted.
    """
    found: Document = {}

    def run(name: str, act: Callable[[], object]) -> None:
        found[name] = act()

    threads = {
        name: threading.Thread(target=run, args=(name, act), daemon=True) for name, act in tasks.items()
    }
    for thread in threads.values():
        thread.start()
    began = time.monotonic()
    for name, thread in sorted(threads.items(), key=lambda item: patience.get(item[0], PATIENCE)):
        thread.join(max(0.0, began + patience.get(name, PATIENCE) - time.monotonic()))
        assert thread.is_alive() or name in found, f"the check {name} failed: see above"
    return dict(found)


def findings_of(machine: Machine, plan: Plan) -> Iterator[Finding]:
    """Judge the facts for this job, in the order of the output."""
    wanted = plan.wanted
    yield judge_machine.python(machine)
    if machine.torch is not None:
        yield from judge_machine.torch(machine.torch, wanted)
    if plan.host is not None:
        yield from judge_machine.devices(machine.driver, machine.torch, wanted)
    yield from _host(machine, wanted)
    if machine.network is not None:
        yield from judge_machine.network(machine.network, wanted)
    if plan.offer is not None:
        yield judge_machine.ports(machine.network, wanted)
    for name in machine.late:
        yield warned(_NAMES.get(name, name), f"no answer within {PATIENCE:g} s", _LATE)


def _host(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    if machine.cores is not None:
        yield from judge_machine.cores(machine.cores, wanted)
    if machine.memory is not None:
        yield from judge_machine.memory(machine.memory, wanted)
    if "shm" not in machine.late:
        yield judge_machine.shm(machine.shm)
    if machine.limits is not None:
        yield from judge_machine.limits(machine.limits, wanted)
    if machine.logs is not None:
        yield from judge_machine.logs(machine.logs)
    if machine.boards is not None:
        yield judge_machine.boards(machine.boards)
    if "runtime_error" not in machine.late:
        yield judge_machine.runtime(machine.runtime_error)


_NAMES = {
    "logs": "log dir",
    "boards": "tensorboard",
    "network": "host name",
    "runtime_error": "runtime directory",
    "shm": "/dev/shm",
}
_LATE = "A file system or a name server does not answer: check these first."


# ---- Findings as text and as JSON

_STYLES = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
_UNLIMITED = 1 << 16  # columns


@frozen
class Section:
    """Findings that belong together, under a title."""

    title: str
    findings: tuple[Finding, ...]


def findings_table(sections: Sequence[Section], width: int | None, *, colour: bool) -> list[str]:
    """Format lines for a terminal of `width` columns. None: unlimited width."""
    from rich.console import Console  # imported late, as fleetrun.doctor measures in helper processes too
    from rich.table import Table
    from rich.text import Text

    colours: Any = "standard" if colour else None
    console = Console(
        file=io.StringIO(), width=(width or _UNLIMITED) - 1, force_terminal=colour, color_system=colours
    )
    with console.capture() as captured:
        for section in sections:
            table = Table.grid(padding=(0, 2))
            for least in (0, 4, 13, 0):
                table.add_column(min_width=least)
            for each in section.findings:
                verdict = each.verdict.upper() if each.verdict is Verdict.FAIL else each.verdict
                rows = [each.found, *([f"-> {each.mend}"] if each.mend else [])]
                found = Text("\n".join(map(printable, rows)), overflow="fold")
                table.add_row("", Text(verdict, _STYLES[each.verdict]), Text(printable(each.check)), found)
            console.print(Text(printable(section.title)), table, "", sep="\n")
        console.print(_summary(sections), highlight=False)
    return [line.rstrip() for line in captured.get().splitlines()]


def _summary(sections: Sequence[Section]) -> str:
    findings = [each for section in sections for each in section.findings]
    number = {verdict: sum(each.verdict is verdict for each in findings) for verdict in Verdict}
    counted = f"{number[Verdict.PASS]} passed, {plural(number[Verdict.WARN], 'warning')}, "
    counted += f"{number[Verdict.FAIL]} failed"
    if exit_code(findings):
        return f"{counted}: a job with these options would not run"
    return f"{counted}: no check found a problem for such a job"


def findings_json(sections: Sequence[Section], extra: Fields) -> str:
    """Build one JSON object with `ok`, the `sections` with their findings, and the fields of `extra`."""
    findings = [each for section in sections for each in section.findings]
    rows = [{"title": section.title, "checks": list(map(asdict, section.findings))} for section in sections]
    return json.dumps({"version": 1, "ok": not exit_code(findings), "sections": rows, **extra}, indent=2)


# ---- The command, from options to sections of findings and an exit code


Busy = Callable[[str], AbstractContextManager[object]]
"""Shows a message during long work."""

_ANY_SCRIPT = "train.py"


class Visit:
    """One visit of the doctor. Raises UsageError for options that a launch would refuse."""

    def __init__(
        self, line: CommandLine, file: JobFile, environ: MutableMapping[str, str], show: ShowText, busy: Busy
    ) -> None:
        self._names_script = any((line.script, file.script, *(wish.script for wish in file.roles)))
        self._environ = environ
        self._show = show
        self._busy = busy
        named = line if self._names_script else replace(line, script=_ANY_SCRIPT)
        self._resolved = resolve(named, environ, place, file)
        self._machine: Machine | None = None
        self._extra: Document = {}
        engine = self._resolved.settings.scheduler
        if engine != "local":
            raise UsageError(
                f"--scheduler {engine} starts the job on other nodes, but doctor checks only this node",
                hint="Run fleetrun doctor on the other nodes, without --scheduler.",
            )

    def run(self) -> tuple[list[Section], int]:
        """Run all checks. Return the sections and the exit code."""
        settings = self._resolved.settings
        ports = Ports(settings.port_range)
        try:
            plan = make_plan(self._resolved, ports, self._environ, names_script=self._names_script)
            with self._busy("checking this node"):
                machine = self._machine = examine(settings, plan, self._environ)
            findings = (*plan.findings, *findings_of(machine, plan))
            sections = [Section(_title(plan), findings)]
            if plan.site is not None and not plan.site.alone:
                sections.append(self._together(plan, machine, findings, ports))
        finally:
            ports.close()
        return sections, exit_code(each for section in sections for each in section.findings)

    def _together(self, plan: Plan, machine: Machine, findings: tuple[Finding, ...], ports: Ports) -> Section:
        from fleetrun.doctor.node_group import compare  # imported late, because only several nodes need it

        group, found = compare(self._resolved, plan, machine, findings, ports, self._environ, self._show)
        titles = {card.id: card.title for card in group.members}
        self._extra["links"] = [
            {"from": titles[one], "to": titles[other], **asdict(link)}
            for (one, other), link in group.links.items()
            if one in titles and other in titles
        ]
        return Section("All nodes", tuple(found))

    def document(self, sections: list[Section]) -> str:
        facts = asdict(self._machine) if self._machine is not None else None
        return findings_json(sections, {"facts": jsonable(facts), **self._extra})


def _title(plan: Plan) -> str:
    name = os.uname().nodename
    address = plan.site.address if plan.site is not None else name
    return name if address == name else f"{name} ({address})"


def jsonable(value: object) -> object:
    """Convert a value to types that JSON can hold."""
    if isinstance(value, dict):
        return {key: jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple | frozenset):
        return [jsonable(each) for each in value]
    return value
