"""`fleetrun plot`: plot a job."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from fleetrun.commands.find import complete_jobs, find_any, history_of
from fleetrun.console.text import printable
from fleetrun.host.interpreter import check_package


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False, shell_complete=complete_jobs)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="The file to write: FILE.png, FILE.svg or FILE.pdf.  [default: ./JOB.POD.png]",
)
@click.option(
    "--log_dir", "--log-dir", metavar="DIR", help="The folder with the logs of the job.  [default: log]"
)
def command(job: str | None, output: str | None, log_dir: str | None) -> int:
    """Plot a job that is running or has ended: loss and speed of each process over time, the values that
    scripts report by name, tables of parameter servers, restarts, and when each process started and ended.

    JOB is a job's name, pod, script or folder. The default is the only job that is running
    here, or else the last one that ran. The data comes from the record of the job,
    LOG_DIR/JOB.POD.events.jsonl; loss and speed are shown if the processes reported them.

    \b
    Examples:
      fleetrun plot
      fleetrun plot ads -o ads.svg
      fleetrun plot --log_dir /mnt/logs

    \b
    Exit codes:
      0  the picture is written, and its name is printed
      1  there is no such job
      2  the command line is wrong, or matplotlib is not installed: pip install 'fleetrun[plot]'
    """
    check_package("matplotlib", "fleetrun plot", "plot")
    from fleetrun.plots.figure import (
        MOST_NAMED,
        check_name,
        named_panels,
        write_plot,
    )  # late: few commands plot

    found = find_any(job, Path(log_dir) if log_dir is not None else None)
    to = check_name(output or f"{found.job or 'job'}.{found.pod}.png".replace(os.sep, "_"))
    history = history_of(found)
    drawn = write_plot(history, to, time.time() if history.running else None)
    click.echo(str(to))
    if not (drawn.curves or drawn.values or drawn.tables):
        click.echo("No process reported progress; see docs/progress.md.", err=True)
    if left := [title for title, _ in named_panels(drawn)[MOST_NAMED:]]:
        names = printable(", ".join(left[:MOST_NAMED])) + (", ..." if len(left) > MOST_NAMED else "")
        click.echo(f"Not drawn: {names}: a plot has {MOST_NAMED} panels of named values at most.", err=True)
    return 0
