"""`fleetrun stacks`: show the Python stacks of a job's processes on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from fleetrun.commands.find import (
    RemoteProcess,
    choose_processes,
    complete_running_jobs,
    find_running,
    remote_processes,
)
from fleetrun.commands.output import print_json, write
from fleetrun.commands.why import ask_why
from fleetrun.console.text import printable
from fleetrun.control.client import NoAnswer, Running
from fleetrun.errors import LaunchError
from fleetrun.record.history import Known, UnreadableError, read
from fleetrun.stacks.collect import Collection, collect, find_pyspy
from fleetrun.stacks.frames import Target, groups
from fleetrun.stacks.text import as_json, clean, grouped_lines, stack_lines

INCOMPLETE = 1


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False, shell_complete=complete_running_jobs)
@click.option("--role", metavar="ROLE", help="Only these roles: trainer, ps, ...; separated by commas.")
@click.option(
    "--rank", metavar="LIST", help="Only these ranks: 3, or 0,4-7; of trainers unless --role is given."
)
@click.option(
    "--each", is_flag=True, help="Show each process by itself, even if several have the same stack."
)
@click.option("--timeout", default=20.0, show_default=True, metavar="SECONDS",
              type=click.FloatRange(0.1, 3600), help="Limit for all processes together.")  # fmt: skip
@click.option("--json", "in_json", is_flag=True, help="Print one JSON document.")
def command(
    job: str | None, role: str | None, rank: str | None, each: bool, timeout: float, in_json: bool
) -> int:
    """Show the Python stacks of JOB's processes and of their children, such as data loader workers.

    JOB is the name of a job, a pod, or the beginning of either; it is optional if only one job is running.
    Processes with the same stack are shown once, and a process that is alone at its place comes first: in a
    hang it is often the one that all others wait for. Of a job on several machines this shows the processes
    of this machine, and below them where the ranks of all machines are, as one tree (`fleetrun why`).

    py-spy is used if it is installed (pip install 'fleetrun[monitor]') and allowed to inspect the processes.
    Otherwise a process with fleetrun's probe is asked to write its stacks to its log, where they are read.
    Neither ends a process; py-spy pauses it for some milliseconds.

    \b
    Examples:
      fleetrun stacks
      fleetrun stacks mnist --role trainer --rank 0,3
      fleetrun stacks --json | jq '.processes[].threads[0].frames[0]'

    \b
    Exit codes:
      0  the stacks of all Python processes are shown
      1  some stacks could not be taken, or there is no such job
      2  the command line is wrong, or JOB fits several jobs
    """
    running = find_running(job)
    found = collect(targets(running, role, rank, "stacks"), timeout, find_pyspy())
    ranks = _everywhere(running) if role is None and rank is None else []
    if in_json:
        processes = [as_json(one) for one in found.processes]
        document = {"version": 1, "job": running.job, "pod": running.pod, "processes": processes}
        print_json({**document, "ranks": ranks})
    else:
        write("".join(f"{line}\n" for line in [*_lines(found, each), *_below(ranks)]))
    if not found.whole:
        click.echo(f"fleetrun: {found.hint}", err=True)
    return 0 if found.whole else INCOMPLETE


def _everywhere(running: Running) -> list[str]:
    """The ranks of all nodes, a line for each place; none for a job on one node."""
    if len(running.status.get("nodes", ())) < 2:
        return []
    try:
        return [printable(str(line)) for line in ask_why(running)["ranks"]]
    except NoAnswer as silence:
        return [f"the launcher does not say where the other ranks are: {printable(str(silence))}"]


def _below(ranks: Sequence[str]) -> list[str]:
    return ["", "On all nodes:", *(f"  {line}" for line in ranks)] if ranks else []


def _lines(found: Collection, each: bool) -> Iterable[str]:
    if not each:
        yield from grouped_lines(groups(found.processes))
        return
    for one in found.processes:
        yield clean(f"{one.title}, pid {one.pid}:")
        yield from stack_lines(one)


def targets(running: Running, role: str | None, rank: str | None, verb: str) -> list[Target]:
    """The running containers. If the launcher does not answer (Ctrl-Z), its record lists what it started.
    Raises UsageError if there are none of these roles and ranks; on which machine to type the command `verb`
    instead is in its hint.
    """
    containers = running.status.get("containers") if running.status else _recorded(running)
    there = {
        str(one.get("name")): one
        for one in (containers if isinstance(containers, Sequence) else ())
        if isinstance(one, dict) and isinstance(one.get("pid"), int)
    }
    if not there:
        raise LaunchError("this job has no running process on this machine", hint="See `fleetrun status`.")
    known = [_known(name, one) for name, one in there.items()]
    command = f"fleetrun {verb} {printable(running.job)}".strip()
    chosen = choose_processes(known, role, rank, partial(_away, running), command)
    return [_target(running.pod, one, there[one.name]["pid"]) for one in chosen]


def _away(running: Running) -> list[RemoteProcess]:
    try:
        return remote_processes(read(running.record, but=("progress",)))
    except UnreadableError:
        return []


def _known(name: str, one: Mapping[str, Any]) -> Known:
    rank = one.get("rank")
    number = rank if isinstance(rank, int) else 0
    return Known(name=name, role=str(one.get("role")), rank=number, index=0, log=Path(str(one.get("log"))))


def _target(pod: str, one: Known, pid: int) -> Target:
    rank = one.rank or 0
    return Target(
        role=one.role,
        rank=rank,
        title=f"{'server' if one.role == 'ps' else one.role} {rank}",
        pid=pid,
        log=str(one.log),
        mark=f"{pod}.{one.role}.{rank}",
    )


def _recorded(running: Running) -> list[dict[str, Any]]:
    try:
        history = read(running.record, but=("progress",))
    except UnreadableError:
        return []
    pids: dict[str, object] = {}
    for event in history.all("started", "exited"):
        name = str(event.get("container"))
        pids[name] = event.get("pid") if event["event"] == "started" else None
    return [
        {"name": one.name, "role": one.role, "rank": one.rank, "pid": pids.get(one.name), "log": str(one.log)}
        for one in history.containers
    ]
