"""The `fleetrun stop` command stops a job and waits until it has ended."""

from __future__ import annotations

import sys

import click

from fleetrun.commands.everywhere import Nodes, node_options, nodes_at, nodes_of, read_where
from fleetrun.commands.find import describe_end, find_running, job_title, running_job, started_here
from fleetrun.commands.output import remark, write
from fleetrun.console.text import printable
from fleetrun.control.client import NoAnswer, NoLauncher, Running, Watched, ask, ask_by_signal
from fleetrun.errors import LaunchError, UsageError

_TIMEOUT = 5.0


@click.command()
@running_job
@click.option("--now", is_flag=True, help="Kill the processes immediately with SIGKILL, without SIGTERM.")
@node_options
def command(job: str | None, now: bool, **options: object) -> int:
    """Stop a running job, and wait until all its processes have ended.

    JOB is the name of a job, its run ID (pod), script (train.py or train) or directory, or the start of its
    name. The default is the job that you started in this directory, or else the only running job. In this
    case fleetrun asks first, if you are on a terminal.

    The processes get SIGTERM, trainers before servers, and SIGKILL after the --stop_timeout of the job. A
    second `fleetrun stop --now` kills them immediately. A job on several nodes ends on all nodes. With
    --node N only this node leaves, and --on_node_loss decides whether the other nodes continue. The command
    waits for the processes of this node. Processes on other nodes end at most --stop_timeout later.

    If the launcher does not answer, the command sends it a signal. A launcher that is stopped (Ctrl-Z)
    continues first.

    \b
    Examples:
      fleetrun stop
      fleetrun stop resnet --now
      fleetrun stop --node 3
      fleetrun stop --job h1:6768/resnet --token_file secret

    \b
    Exit codes:
      0    the job has ended
      1    no such job exists, or a node or the store of the job does not answer
      2    several jobs match JOB, or you must name a job of another directory
      130  you answered no; after Ctrl-C the job still stops
    """
    where = read_where(options, {"JOB": job})
    if where.url is not None:
        return _stop_others(nodes_at(where), now, where.url, wait=True)
    found = find_running(job)
    if job is None and not started_here(found):
        _confirm(found)
    nodes = nodes_of(found, where)
    here = where.includes_own(found)
    missing = 0
    if nodes is not None:
        try:
            missing = _stop_others(nodes, now, job_title(found), wait=not here)
        except LaunchError as error:
            if not here:
                raise
            remark(f"fleetrun: {printable(error.message)}")
            missing = 1
    if here:
        watched = Watched(found.pid)
        try:
            if _ask(found, now, watched):
                write(f"stopping {job_title(found)}\n")
                watched.wait()
        finally:
            watched.close()
        write(f"{job_title(found)} has ended{describe_end(found)}\n")
    return missing


def _confirm(found: Running) -> None:
    """Ask before stopping a job that was started elsewhere, because it may be the wrong job.

    Raises UsageError.
    """
    if not (sys.stdin and sys.stdin.isatty()):
        raise UsageError(
            "the job was started in another directory", hint=f"To stop it: fleetrun stop {found.pod}"
        )
    click.confirm("Stop it?", abort=True)


def _stop_others(nodes: Nodes, now: bool, name: str, *, wait: bool) -> int:
    """Stop the job on the other nodes. With `wait`, return after they have left the job."""
    with nodes:
        nodes.ask("stop", {"now": now})
        nodes.settle()
        missing = nodes.report()
        if wait:
            one = nodes.title(nodes.ranks[0]) if len(nodes.ranks) == 1 else ""
            write(f"stopping {printable(name)}{f' on {one}' if one else ''}\n")
            nodes.wait_for_end(but=nodes.trouble)
            left = f"{one} has" if one else "all nodes have"
            write(f"{left} left the job; processes there end within --stop_timeout\n")
    return missing


def _ask(job: Running, now: bool, watched: Watched) -> bool:
    """Ask the launcher through its socket, or by a signal if it does not answer.

    Return False if it had already ended.
    """
    try:
        ask(job.socket, {"ask": "stop", "now": now}, _TIMEOUT)
    except NoLauncher:
        return False
    except NoAnswer as silence:
        if not ask_by_signal(silence.pid or job.pid, now):
            if watched.ending():  # the reason for its silence
                watched.wait()
                return False
            why = f"the launcher of {job_title(job)} does not answer ({silence})"
            raise LaunchError(why, hint="`fleetrun ps` shows whether it is still running.") from None
    return True
