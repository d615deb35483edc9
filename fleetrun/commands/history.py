"""The `fleetrun history` command lists the runs that have their logs in a directory, and how each ended."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fleetrun.aliases import Document
from fleetrun.commands.find import (
    LOG_DIR,
    EndedJob,
    NoJobError,
    ended_jobs,
    json_option,
    logs_of_launches,
    matching_jobs,
    script_names,
)
from fleetrun.commands.output import Cell, columns, picked, print_json, print_table
from fleetrun.console.text import format_duration, format_loss, printable
from fleetrun.record.history import Glance, UnreadableError, glance, number, was_stopped

_UNNAMED = "default"
"""Name of every job without a --job_id."""

_COLUMNS = columns(
    "BEGAN",
    "JOB:5",
    "POD",
    "SCRIPT:7",
    "TIME:>8",
    "RESTARTS:>2",
    "STEP:>4",
    "LOSS:>6",
    "END:*",
)


@click.command()
@click.argument("job", required=False)
@click.option(
    "-n", "most", type=click.IntRange(1), default=20, show_default=True, help="Number of newest jobs to list."
)
@logs_of_launches
@json_option(help="Print one JSON list, newest first.")
def command(job: str | None, most: int, log_dir: Path | None, in_json: bool) -> int:
    """List the jobs with logs in --log_dir, including running jobs: when each job started, its script, how
    long it ran, the last step and loss of its trainers, and how it ended.

    JOB limits the list to a job's name, run ID (pod) or script. The newest job is the last line. With the pod
    of a job, `fleetrun report POD` shows more, and `fleetrun again POD` starts it again. `fleetrun prune`
    deletes old logs.

    \b
    Examples:
      fleetrun history
      fleetrun history train.py -n 5
      fleetrun history --json | jq -r '.[] | select(.code != 0) | .pod'

    \b
    Exit codes:
      0  the list is printed
      1  no such job exists
    """
    place = log_dir or LOG_DIR
    found = matching_jobs(job, ended_jobs(place, set()))
    if not found:
        named = f" {printable(job)!r}" if job else ""
        raise NoJobError(
            f"no job{named} has an event log in {place}", hint="Use --log_dir to choose another directory."
        )
    seen = [each for job_ in found[:most] if (each := _seen(job_)) is not None]
    if in_json:
        print_json([_as_json(each) for each in seen])
    else:
        names = any(each.job != _UNNAMED for each in seen)
        rows = [_row(each, time.time(), names) for each in reversed(seen)]
        print_table(_COLUMNS, rows)
    return 0


def _seen(job: EndedJob) -> Glance | None:
    try:
        return glance(job.record)
    except UnreadableError:  # deleted a moment ago
        return None


def how_it_ended(launch: Glance) -> str:
    """Describe the end of a run in a few words."""
    if launch.over is None and launch.running:
        return "running"
    if not launch.launch or (launch.over is not None and not isinstance(launch.over.get("code"), int)):
        return "its event log is damaged"
    if launch.over is None:
        return "killed with its launcher"
    code, reason = launch.over.get("code"), str(launch.over.get("reason") or "")
    if code == 0:
        return "completed"
    if was_stopped(launch.over):
        return f"stopped: {reason}, exit code {code}"
    report = launch.over.get("report")
    cause = str(report[-1]).strip() if isinstance(report, list) and report else ""
    text = cause if cause.strip("=") else reason
    return f"exit code {code}{f': {text}' if text else ''}"


def _row(launch: Glance, now: float, named: bool) -> list[Cell]:
    began, progress = _began(launch), launch.progress or {}
    restarts = number((launch.over or {}).get("restarts"))
    step, loss = number(progress.get("step")), number(progress.get("loss"))
    ended = now if launch.running and launch.over is None else launch.last_seen
    failed = launch.over is None or not (launch.over.get("code") == 0 or was_stopped(launch.over))
    style = "" if launch.running else "red" if failed else "green"
    return [
        time.strftime("%Y-%m-%d %H:%M", time.localtime(began)) if began else "?",
        launch.job if named else "",
        (launch.pod, "bold"),
        script_names(str(launch.launch.get("script") or ""))[0],
        format_duration(ended - began if began else None),
        f"{restarts:,.0f}" if restarts else "",
        "" if step is None else f"{step:,.0f}",
        "" if loss is None else format_loss(loss),
        (how_it_ended(launch), style),
    ]


def _began(launch: Glance) -> float | None:
    return number(launch.launch.get("time"))


def _as_json(launch: Glance) -> Document:
    over, progress = launch.over or {}, launch.progress or {}
    return {
        "job": launch.job,
        "pod": launch.pod,
        **picked(launch.launch, "script", "cwd", "mode"),
        "began": _began(launch),
        "ended": None if launch.running and not over else launch.last_seen or None,
        "running": launch.running,
        **picked(over, "code", "reason", "restarts"),
        "step": number(progress.get("step")),
        "loss": number(progress.get("loss")),
        "outcome": how_it_ended(launch),
        "record": str(launch.path),
    }
