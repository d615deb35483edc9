"""The `fleetrun plot` command plots a job."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from fleetrun.commands.everywhere import Nodes, Where, node_options, nodes_at, nodes_of, read_where
from fleetrun.commands.find import any_job, find_any, history_of, logs_of_job
from fleetrun.commands.output import output_path, print_file, remark
from fleetrun.console.text import printable
from fleetrun.elastic.ask import UnreachableError
from fleetrun.host.interpreter import check_package
from fleetrun.record.history import History, read


@click.command()
@any_job
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="File to write: FILE.png, FILE.svg or FILE.pdf.  [default: ./JOB.POD.png]",
)
@logs_of_job
@node_options
def command(job: str | None, output: str | None, log_dir: Path | None, **options: object) -> int:
    """Plot a job that is running or has ended: loss and speed of each process over time, the values that
    scripts report by name, tables of parameter servers, restarts, and when each process started and ended.

    JOB is a job's name, run ID (pod), script or directory. The default is the only job that runs here, or
    else the last job that ran. The data comes from the event log of the job, LOG_DIR/JOB.POD.events.jsonl.
    The plot shows loss and speed if the processes reported them. If a running job on several nodes has a
    token, one plot shows all nodes. --node chooses one node. --job works from a host outside of the job.

    \b
    Examples:
      fleetrun plot
      fleetrun plot ads -o ads.svg
      fleetrun plot --log_dir /mnt/logs
      fleetrun plot --job h1:6768/ads --token_file secret

    \b
    Exit codes:
      0  the picture is written, and its name is printed
      1  no such job exists, or a node or the store of the job does not answer
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
        raise UnreachableError("no node sent its event log")
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
        remark("No process reported progress. See `fleetrun help progress`.")
    if left := [title for title, _ in named_panels(drawn)[MOST_NAMED:]]:
        names = printable(", ".join(left[:MOST_NAMED])) + (", ..." if len(left) > MOST_NAMED else "")
        remark(f"Not drawn: {names}. A plot has at most {MOST_NAMED} panels of named values.")
