"""The `fleetrun ps` command lists the running jobs of this user on this node."""

from __future__ import annotations

import os
import time

import click

from fleetrun.aliases import Document
from fleetrun.commands.find import json_option
from fleetrun.commands.output import (
    Cell,
    columns,
    print_json,
    print_table,
    remark,
)
from fleetrun.commands.views import count_alive, loss_of, number_of, step_of, text_of
from fleetrun.console.text import format_count, format_duration
from fleetrun.control.client import STOPPED, Running, running_launches
from fleetrun.record.journal import objects_in

_COLUMNS = columns(
    "JOB",
    "POD:8",
    "SCRIPT:6",
    "MODE:3",
    "STATE",
    "PROCS:>7",
    "TIME:>8",
    "RESTARTS:>2",
    "STEP:>5",
    "LOSS:>4",
    "LOG DIR:1*",
)


@click.command()
@json_option(help="Print the jobs as one JSON list.")
def command(in_json: bool) -> int:
    """List your running jobs on this node.

    Each job is one line, oldest first: name, run ID (pod), script, state, number of running processes,
    running time, and log directory. The other commands accept any of the first three as JOB, or the
    directory in which you started the job. `fleetrun history` lists jobs that have ended. For a job on
    several nodes, each node shows its own part.

    For the mode `ps` of a job, parameter servers, see `fleetrun help ps`.

    Some columns are empty if the launcher is `stopped` (Ctrl-Z) or `silent` (very busy).

    \b
    Examples:
      fleetrun ps
      fleetrun ps --json | jq -r '.[].job'

    \b
    Exit codes:
      0  the list is printed, even if it is empty
    """
    jobs = running_launches(os.environ)
    if in_json:
        print_json([_as_json(each) for each in jobs])
    elif not jobs:
        remark("You have no running jobs on this node.")
    else:
        now = time.time()
        print_table(_COLUMNS, [_row(each, now) for each in jobs])
    return 0


def _as_json(job: Running) -> Document:
    known = {"job": job.job, "pod": job.pod, "pid": job.pid, "started": job.started}
    return {**known, "log_dir": str(job.log_dir), "silent": job.silence or None, **job.status}


def _row(job: Running, now: float) -> list[Cell]:
    status = job.status
    silent = "" if not job.silence else "stopped" if job.silence == STOPPED else "silent"
    there = objects_in(status, "containers")
    first = there[0] if there else {}
    trainer = next((each for each in there if each.get("role") == "trainer"), first)
    restarts = number_of(status, "restarts")
    return [
        (job.job or "?", "bold"),
        job.pod,
        job.script.rpartition("/")[2],
        text_of(status, "mode"),
        (silent or text_of(status, "state"), "yellow" if job.silence else ""),
        f"{count_alive(there)}/{len(there)}" if there else "",
        format_duration(now - job.started if job.started is not None else None),
        format_count(restarts) if restarts else "",
        step_of(trainer),
        loss_of(trainer),
        (str(job.log_dir) if job.job else "", "dim"),
    ]
