"""`fleetrun ps`: the jobs of this user that run on this machine."""

from __future__ import annotations

import os
import time
from typing import Any

import click

from fleetrun.commands.output import Cell, Column, print_json, print_lines, room, table
from fleetrun.commands.views import alive, figure, loss_of, step_of, text
from fleetrun.console.text import format_count, format_duration
from fleetrun.control.client import STOPPED, Running, running_launches
from fleetrun.control.usage import objects_in

_COLUMNS = (
    Column("JOB"),
    Column("POD", 8),
    Column("MODE", 3),
    Column("STATE"),
    Column("PROCS", 7, right=True),
    Column("TIME", 8, right=True),
    Column("RESTARTS", 2, right=True),
    Column("STEP", 5, right=True),
    Column("LOSS", 4, right=True),
    Column("LOG DIR", 1, rest=True),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="One JSON list of the jobs, for programs.")
def command(as_json: bool) -> int:
    """List the jobs that run on this machine and were started by this user.

    A job is one line, the oldest first: its name and pod, how it stands, how many of its processes are up,
    for how long it has been running, and where its logs are. Of a job on several machines each shows its
    part.

    A launcher that is `stopped` (Ctrl-Z), or `silent` because it is very busy, cannot say the rest.

    \b
    Examples:
      fleetrun ps
      fleetrun ps --json | jq -r '.[].job'

    \b
    Exit codes:
      0  the list is printed, empty or not
    """
    jobs = running_launches(os.environ)
    if as_json:
        print_json([_facts(each) for each in jobs])
    elif not jobs:
        click.echo("No job of yours runs here.", err=True)
    else:
        now = time.time()
        print_lines(table(_COLUMNS, [_row(each, now) for each in jobs], room()))
    return 0


def _facts(job: Running) -> dict[str, Any]:
    known = {"job": job.job, "pod": job.pod, "pid": job.pid, "started": job.started}
    return {**known, "log_dir": str(job.log_dir), "silent": job.silence or None, **job.status}


def _silence(job: Running) -> str:
    if not job.silence:
        return ""
    return "stopped" if job.silence == STOPPED else "silent"


def _row(job: Running, now: float) -> list[Cell]:
    status = job.status
    there = objects_in(status, "containers")
    first = there[0] if there else {}
    trainer = next((each for each in there if each.get("role") == "trainer"), first)
    restarts = figure(status, "restarts")
    return [
        Cell(job.job or "?", "bold"),
        Cell(job.pod),
        Cell(text(status, "mode")),
        Cell(_silence(job) or text(status, "state"), "yellow" if job.silence else ""),
        Cell(f"{alive(there)}/{len(there)}" if there else ""),
        Cell(format_duration(now - job.started if job.started is not None else None)),
        Cell(format_count(restarts) if restarts else ""),
        Cell(step_of(trainer)),
        Cell(loss_of(trainer)),
        Cell(str(job.log_dir) if job.job else "", "dim"),
    ]
