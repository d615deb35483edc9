"""The `fleetrun stacks` command shows the Python stacks of a job's processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from fleetrun.aliases import Document, Fields
from fleetrun.commands.everywhere import (
    NO_SUCH_PROCESS,
    Nodes,
    node_options,
    nodes_at,
    nodes_of,
    own_rank,
    read_where,
)
from fleetrun.commands.find import (
    NoSuchProcessError,
    RemoteProcess,
    choose_processes,
    find_running,
    json_option,
    remote_processes,
    running_job,
)
from fleetrun.commands.output import print_json, remark, write_lines
from fleetrun.commands.why import ask_why
from fleetrun.console.text import printable
from fleetrun.control.client import NoAnswer, Running
from fleetrun.errors import LaunchError, UsageError
from fleetrun.record.history import Known, UnreadableError, read
from fleetrun.record.journal import objects_in
from fleetrun.stacks.collect import collect, find_pyspy
from fleetrun.stacks.frames import Taken, Target, groups
from fleetrun.stacks.text import as_json, clean, grouped_lines, of_json, stack_lines

INCOMPLETE = 1


class NoneRunsError(LaunchError):
    """No process of the job runs on this node."""


@click.command()
@running_job
@click.option(
    "--role", metavar="ROLE", help="Select only these roles: trainer, ps, ..., separated by commas."
)
@click.option(
    "--rank",
    metavar="LIST",
    help="Select only these ranks, such as 0,4-7, of trainers unless you set --role.",
)
@click.option(
    "--each", is_flag=True, help="Show each process separately, even if several have the same stack."
)
@click.option("--timeout", default=20.0, show_default=True, metavar="SECONDS",
              type=click.FloatRange(0.1, 3600), help="Time limit for all processes together.")  # fmt: skip
@json_option()
@node_options
def command(
    job: str | None,
    role: str | None,
    rank: str | None,
    each: bool,
    timeout: float,
    in_json: bool,
    **options: object,
) -> int:
    """Show the Python stacks of JOB's processes and of their children, such as data loader workers.

    JOB is a job's name, run ID (pod), script or directory. The default is the job of this directory.

    Processes with the same stack are shown once. A process with a stack of its own comes first: in a hang,
    the others often wait for it. For a job on several nodes, the command shows the processes of all nodes,
    and below them the ranks as one tree (`fleetrun why`). --node chooses one node. --job works from a host
    outside of the job.

    fleetrun uses py-spy if it is installed (pip install 'fleetrun[monitor]') and may inspect the processes.
    Otherwise fleetrun's probe writes the stacks to the log of its process. Both leave the process running.
    py-spy pauses it for some milliseconds.

    \b
    Examples:
      fleetrun stacks
      fleetrun stacks mnist --role trainer --rank 0,3
      fleetrun stacks --json | jq '.processes[].threads[0].frames[0]'
      fleetrun stacks --job h1:6768/mnist --token_file secret

    \b
    Exit codes:
      0  the stacks of all Python processes are shown
      1  some stacks could not be taken, or there is no such job, or a node or its store does not answer
      2  the command line is wrong, or JOB fits several jobs
    """
    where = read_where(options, {"JOB": job})
    running = find_running(job) if where.url is None else None
    nodes = nodes_at(where) if running is None else nodes_of(running, where)
    taken: list[Taken] = []
    hint, missing, ranks = "", 0, []
    here = running is not None and where.includes_own(running)
    if nodes is not None and not nodes.reached(alone=here):
        nodes, missing = None, INCOMPLETE
    with contextlib.closing(nodes) if nodes is not None else contextlib.nullcontext():
        if nodes is not None:
            nodes.ask("stacks", {"role": role, "rank": rank, "timeout": timeout}, timeout + _MORE)
        if running is not None and here:
            try:
                own = own_rank(running)
                there = [replace(each, node=own) for each in targets(running, role, rank, "stacks")]
                found = collect(there, timeout, find_pyspy())
                taken += found.processes
                hint = found.hint
            except (NoSuchProcessError, NoneRunsError):
                if where.here:
                    return NO_SUCH_PROCESS
                if nodes is None:
                    raise
            ranks = _everywhere(running) if not where.here and role is None and rank is None else []
        if nodes is not None:
            taken += [each for number in nodes.ranks for each in _taken_on(nodes, number)]
            missing = nodes.report()
    _show(taken, ranks, running, each=each, in_json=in_json or where.here)
    if not taken and not missing:
        raise UsageError("no node has such a process")
    if hint:
        remark(f"fleetrun: {hint}")
    return missing or (INCOMPLETE if hint else 0)


def _show(
    taken: Sequence[Taken], ranks: Sequence[str], running: Running | None, *, each: bool, in_json: bool
) -> None:
    if not in_json:
        below = ["", "On all nodes:", *(f"  {line}" for line in ranks)] if ranks else []
        write_lines([*_lines(taken, each), *below])
        return
    job = {"job": running.job, "pod": running.pod} if running is not None else {}
    print_json({"version": 1, **job, "processes": [as_json(one) for one in taken], "ranks": list(ranks)})


_MORE = 15.0
"""Seconds beyond --timeout after which another node is given up."""


def _taken_on(nodes: Nodes, rank: int) -> list[Taken]:
    """Return the stacks that node `rank` sends, as far as they can be read."""
    found = []
    for document in nodes.documents(rank):
        for each in objects_in(document if isinstance(document, dict) else {}, "processes"):
            with contextlib.suppress(LookupError, TypeError, ValueError, OverflowError):
                found.append(of_json(each, rank))
    return found


def _everywhere(running: Running) -> list[str]:
    """Return the ranks of all nodes, with one line per place in the code. Empty for a job on one node."""
    if len(running.status.get("nodes", ())) < 2:
        return []
    try:
        return [printable(str(line)) for line in ask_why(running)["ranks"]]
    except NoAnswer as silence:
        return [f"cannot read the stacks of the other ranks from the launcher: {printable(str(silence))}"]


def _lines(found: Sequence[Taken], each: bool) -> Iterable[str]:
    if not each:
        yield from grouped_lines(groups(found))
        return
    for one in found:
        node = "" if one.target.node is None else f" on node {one.target.node}"
        yield clean(f"{one.title}, pid {one.pid}{node}:")
        yield from stack_lines(one)


def targets(running: Running, role: str | None, rank: str | None, verb: str) -> list[Target]:
    """Return the running processes with these roles and ranks. If the launcher does not answer (Ctrl-Z), they
    come from its event log.

    Raises UsageError if no process matches. Its hint names the node on which to run the command `verb`
    instead.
    """
    containers = running.status.get("containers") if running.status else _recorded(running)
    there = {
        str(one.get("name")): one
        for one in (containers if isinstance(containers, Sequence) else ())
        if isinstance(one, dict) and isinstance(one.get("pid"), int)
    }
    if not there:
        raise NoneRunsError("this job has no running process on this machine", hint="See `fleetrun status`.")
    known = [_known(name, one) for name, one in there.items()]
    command = f"fleetrun {verb} {printable(running.job)}".strip()
    chosen = choose_processes(known, role, rank, partial(_away, running), command)
    return [_target(running.pod, one, there[one.name]["pid"]) for one in chosen]


def _away(running: Running) -> list[RemoteProcess]:
    try:
        return remote_processes(read(running.record))
    except UnreadableError:
        return []


def _known(name: str, one: Fields) -> Known:
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


def _recorded(running: Running) -> list[Document]:
    try:
        history = read(running.record)
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
