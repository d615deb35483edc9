"""`fleetrun plot`: a picture of a job."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from fleetrun.commands.find import find_any, history_of, of_any
from fleetrun.host.interpreter import check_package


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False, shell_complete=of_any)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where to: FILE.png, FILE.svg or FILE.pdf.  [default: JOB.POD.png in the current directory]",
)
@click.option(
    "--log_dir", "--log-dir", metavar="DIR", help="The folder with the logs of the job.  [default: log]"
)
def command(job: str | None, output: str | None, log_dir: str | None) -> int:
    """Draw a job that runs or ran: the loss and the speed of each process over time with restarts marked, and
    the lives of all processes.

    JOB is a job's name, its pod, or the beginning of one; without it the only job that runs here, or else the
    one that ran last. What is drawn comes from the record of the job, LOG_DIR/JOB.POD.events.jsonl; loss and
    speed are there if its processes reported them.

    \b
    Examples:
      fleetrun plot
      fleetrun plot ads -o ads.svg
      fleetrun plot --log_dir /mnt/logs

    \b
    Exit codes:
      0  the picture is there; its name is printed
      1  there is no such job
      2  the command is wrong, or matplotlib is not installed: pip install 'fleetrun[plot]'
    """
    check_package("matplotlib", "fleetrun plot", "plot")
    from fleetrun.plots.picture import check_name, paint  # late: matplotlib

    found = find_any(job, Path(log_dir) if log_dir is not None else None)
    to = check_name(output or f"{found.job or 'job'}.{found.pod}.png".replace(os.sep, "_"))
    history = history_of(found)
    drawn = paint(history, to, time.time() if history.running else None)
    click.echo(str(to))
    if not drawn.curves:
        click.echo("No process has reported progress: see docs/progress.md.", err=True)
    return 0
