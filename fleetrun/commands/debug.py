"""The `fleetrun debug` command opens pdb in a process of a running job."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

import click

from fleetrun.aliases import Fields
from fleetrun.commands.everywhere import (
    NO_SUCH_PROCESS,
    Nodes,
    node_options,
    nodes_at,
    nodes_of,
    read_where,
)
from fleetrun.commands.find import NoSuchProcessError, complete_running_jobs, find_running
from fleetrun.commands.output import remark
from fleetrun.commands.stacks import NoneRunsError, targets
from fleetrun.control.client import Running
from fleetrun.control.debugger import at_terminal, debug, relay
from fleetrun.envs.channels import DEBUG_SIGNAL
from fleetrun.errors import UsageError
from fleetrun.files import debug_socket
from fleetrun.stacks.frames import Target
from fleetrun.stacks.processes import catches

_NOW = "fleetrun: the process stops when it reaches a line of Python. Ctrl-C ends this wait"


@click.command()
@click.argument("job", required=False, metavar="[RANK | JOB]", shell_complete=complete_running_jobs)
@click.option("--role", metavar="ROLE", help="Role of the process: trainer, ps, ...  [default: trainer]")
@click.option("--rank", metavar="N", help="Rank of the process, if you also name the JOB.")
@click.option("--now", is_flag=True, help="Stop the process at its next line, without a breakpoint.")
@node_options
def command(job: str | None, role: str | None, rank: str | None, now: bool, **options: object) -> int:
    """Open pdb in the process with this RANK, by default in the only one that waits at a breakpoint.

    JOB is a job's name, run ID (pod), script or directory. The default is the job of this directory. If
    the process runs on another node, the job needs a token. --job works from a host outside of the job.

    `breakpoint()` in a script waits for this command. In pdb, Ctrl-C interrupts an expression, and after `c`
    the program. Ctrl-D or `q` leaves pdb, and the process continues. While a process waits, fleetrun reports
    no hang. The calls of other ranks may time out. pdb first names these process groups.

    \b
    Examples:
      fleetrun debug
      fleetrun debug 3
      fleetrun debug 3 --now
      fleetrun debug mnist --rank 3
      fleetrun debug 0 --role ps

    \b
    Exit codes:
      0  you left pdb, or the process has ended
      1  no such job exists, or a node or its store does not answer
      2  the command line is wrong, several processes or jobs match, or the process does not wait
    """
    if job is not None and job.isdecimal():
        job, rank = None, job
    where, asked = read_where(options, {"JOB": job}), {"role": role, "rank": rank, "now": now}
    if where.url is not None:
        return _elsewhere(nodes_at(where), asked)
    running = find_running(job)
    nodes = nodes_of(running, where)
    if nodes is not None and not where.includes_own(running):
        return _elsewhere(nodes, asked)
    try:
        return _debug(running, targets(running, role, rank, "debug"), now=now, here=where.here)
    except (NoSuchProcessError, NoneRunsError):
        if where.here:
            return NO_SUCH_PROCESS
        if nodes is None:
            raise
        return _elsewhere(nodes, asked)


def _debug(running: Running, there: Sequence[Target], *, now: bool, here: bool) -> int:
    """Debug the one of these processes that waits. `here`: for a user on another node."""
    runtime = running.socket.parent
    waiting = [each for each in there if debug_socket(runtime, each.mark).exists()]
    target, *more = waiting or there
    if more:
        raise UsageError(
            f"{len(waiting)} of {len(there)} processes wait at a breakpoint; choose one by its rank",
            hint=f"There are: {', '.join(each.title for each in waiting or there)}.",
        )
    if now and not waiting:
        if not catches(target.pid, DEBUG_SIGNAL):
            raise UsageError(
                f"{target.title} is no Python process with fleetrun's probe",
                hint="A process that has just started has no probe yet. --probe off removes it.",
            )
        os.kill(target.pid, DEBUG_SIGNAL)
        remark(_NOW)

    def wait() -> None:
        if not (now and catches(target.pid, DEBUG_SIGNAL)):
            raise UsageError(
                f"{target.title} does not wait at a breakpoint, or another `fleetrun debug` is connected",
                hint="--now stops it at its next line.",
            )
        time.sleep(0.05)

    ended = debug(debug_socket(runtime, target.mark), wait, relay if here else at_terminal)
    remark(f"fleetrun: {target.title}: {ended}")
    return 0


def _elsewhere(nodes: Nodes, asked: Fields) -> int:
    """Debug a process on another node."""
    if asked["now"]:
        remark(_NOW)
    with nodes:
        nodes.ask("debug", asked, math.inf)
        with nodes.typing() as (read, write):
            ended = at_terminal(read, write, lambda: write(b"interrupt"))
        if nodes.nowhere.issuperset(nodes.ranks):
            raise UsageError("no node has such a process")
        code = nodes.report()
    if not code:
        remark(f"fleetrun: {ended}")
    return code
