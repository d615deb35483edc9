"""`fleetrun report`: how a job ended, from its record. Shows what `summary` tells."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import click

from fleetrun.commands.finding import find_any
from fleetrun.commands.jobnames import of_any
from fleetrun.commands.output import print_json, write
from fleetrun.commands.records import history_of
from fleetrun.commands.summary import as_json, summary
from fleetrun.console.tail import printable
from fleetrun.console.wrapping import wrapped

_HELP = """Show how JOB ended on this machine, and why: the failure report as it was printed then, and what
led to it (failures, restarts, hangs), from the record log/JOB.POD.events.jsonl.

JOB is the name of a job, a pod, or the beginning of one of them. Of several launches of one job the newest is
meant. Without JOB it is the job that runs here, else the newest record in --log_dir.

\b
Examples:
  fleetrun report
  fleetrun report night --log_dir /data/log
  fleetrun report --json | jq .code

\b
Exit codes:
  0    shown, however the job ended
  1    there is no such job
  2    usage: a wrong option, or a JOB that several fit
"""


def _fitted(lines: list[str]) -> list[str]:
    """On a terminal long lines go on below, broken between words."""
    if not sys.stdout.isatty():
        return lines
    width = shutil.get_terminal_size().columns
    return [piece for line in lines for piece in (wrapped(line, width) if line else [line])]


@click.command(help=_HELP, context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON document.")
@click.option("--log_dir", "--log-dir", type=click.Path(path_type=Path), help="Where the job's logs are.")
@click.argument("job", required=False, shell_complete=of_any)
def command(job: str | None, json_wanted: bool, log_dir: Path | None) -> int:
    history = history_of(find_any(job, log_dir))
    if json_wanted:
        print_json(as_json(history))
    else:
        lines = _fitted([printable(line) for line in summary(history, time.time())])
        write("".join(f"{line}\n" for line in lines))
    return 0
