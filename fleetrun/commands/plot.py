"""The `fleetrun plot` command plots a job."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fleetrun.commands.everywhere import Nodes, Where, node_options, nodes_at, nodes_of, read_where
from fleetrun.commands.find import any_job, find_any, history_of, logs_of_job
from fleetrun.commands.output import output_path, print_file, remark
from fleetrun.console.text import printable
from fleetrun.elastic.guest import UnreachableError
from fleetrun.host.interpreter import check_package
from fleetrun.record.history import History, read


@click.command()
@any_job
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="The file to write: FILE.png, FILE.svg or FILE.pdf.  [default: ./JOB.POD.png]",
)
@logs_of_job
@node_options
def command(job: str | None, output: str | None, log_dir: Path | None, **options: Any) -> int:
    """Plot a job that is running or has ended: loss and speed of each process over time, the values that
    scripts report by name, tables of parameter servers, restarts, and when each process started and ended.

    JOB is a job's name, pod, script or folder. The default is the only job that is running
    here, or else the last one that ran. The data comes from the record of the job,
    LOG_DIR/JOB.POD.events.jsonl; loss and speed are shown if the processes reported them. Of a job on several
    machines that runs and has a secret, the records of all nodes are drawn in one plot; --node chooses one,
    and --job asks from a host that runs no part of the job.

    \b
    Examples:
      fleetrun plot
      fleetrun plot ads -o ads.svg
      fleetrun plot --log_dir /mnt/logs
      fleetrun plot --job h1:6768/ads --token_file secret

    \b
    Exit codes:
      0  the picture is written, and its name is printed
      1  there is no such job, or a node or its store does not answer
      2  the command line is wrong, or matplotlib is not installed: pip install 'fleetrun[plot]'
    """
    check_package("matplotlib", "fleetrun plot", "plot")
    where = read_where(options, {"JOB": job, "--log_dir": log_dir})
    with tempfile.TemporaryDirectory() as folder:
        histories, missing = _histories(job, log_dir, where, Path(folder))
        _draw(histories, output)
    return missing


def _histories(
    job: str | None, log_dir: Path | None, where: Where, folder: Path
) -> tuple[list[History], int]:
    """Return the event logs of the chosen nodes, and the exit code if one is missing. Raises LaunchError."""
    if where.url is not None:
        nodes: Nodes | None = nodes_at(where)
        found = []
    else:
        there = find_any(job, log_dir)
        nodes = nodes_of(there, where, secret=True)
        found = [history_of(there)] if where.includes_own(there) else []
    if nodes is None:
        return found, 0
    with nodes:
        records = nodes.records(folder)
        missing = nodes.report()
    found += [replace(read(path), running=True) for path in records.values()]
    if not found:
        raise UnreachableError("no node has told its record")
    return found, missing


def _draw(histories: Sequence[History], output: str | None) -> None:
    from fleetrun.plots.figure import (
        ENDINGS,
        MOST_NAMED,
        named_panels,
        write_plot,
    )  # imported late, because few commands plot

    history, *more = histories
    name = output or f"{history.job or 'job'}.{history.pod}.png".replace(os.sep, "_")
    to = output_path(name, ENDINGS)
    now = time.time() if history.running else None
    drawn = write_plot(history, to, now, others=[each.path for each in more])
    print_file(to, f"The plot of job {printable(history.job or '?')}, for an image viewer or a browser:")
    if not (drawn.curves or drawn.values or drawn.tables):
        remark("No process reported progress: see fleetrun help progress.")
    if left := [title for title, _ in named_panels(drawn)[MOST_NAMED:]]:
        names = printable(", ".join(left[:MOST_NAMED])) + (", ..." if len(left) > MOST_NAMED else "")
        remark(f"Not drawn: {names}: a plot has {MOST_NAMED} panels of named values at most.")
