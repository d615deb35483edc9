"""The `fleetrun doctor` command checks nodes before a launch. This module reads the options and shows the
results. The checks are in `fleetrun.doctor`.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import click

from fleetrun.aliases import Strings
from fleetrun.commands.find import json_option
from fleetrun.commands.output import output_width, remark, write, write_lines
from fleetrun.console.console import wants_colour
from fleetrun.doctor.visit import Visit, findings_table
from fleetrun.envs.settings import command_line
from fleetrun.envs.settings.command_line import CommandLine
from fleetrun.envs.settings.job_file import load_job_file
from fleetrun.envs.settings.options import NOTHING, JobFile
from fleetrun.errors import UsageError

_HELP = """Check this node before a long job, and with --nnodes or --ips the other nodes too.

OPTIONS are the options of the job, as after `fleetrun`; SCRIPT is optional. The command starts only one
process, which imports torch, and it removes everything that it creates.

Each check passes, warns (the job will run, perhaps slowly) or fails (it will not run), and suggests a remedy.
On several nodes, run the same command on each node, as for the job. The nodes join at --master under a
separate name, so a running job continues undisturbed. They compare versions and options, and measure round
trips, bandwidth and clocks.

\b
Examples:
  fleetrun doctor
  fleetrun doctor --gpus 0,1 train.py
  fleetrun doctor --server_num=2 --trainer_num=4 --log_dir /data/log train.py
  fleetrun doctor --nnodes 2 --master 10.0.0.1:6768 train.py   # on both
  fleetrun doctor --json > machine.json

\b
Exit codes:
  0    no check failed
  1    a check failed: the job would not run
  2    the options are wrong
  130  Ctrl-C
"""


@click.command(
    help=_HELP,
    options_metavar="[--json] [OPTIONS]",
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "max_content_width": 100,
    },
)
@json_option()
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGUMENTS]]")
@click.pass_context
def command(context: click.Context, in_json: bool, words: Strings) -> int:
    line = command_line.read(words)
    if line.action is not None:
        if line.action.option.name != "help":
            raise UsageError(f"fleetrun doctor has no option {line.action.origin}")
        click.echo(context.get_help())
        return 0
    in_json = in_json or line.last("json") is not None
    line = replace(line, options=tuple(each for each in line.options if each.option.name not in _OF_A_PLAN))
    visit = Visit(line, _job_file(line), os.environ, remark, _busy)
    sections, code = visit.run()
    if in_json:
        write(visit.document(sections) + "\n")
    else:
        write_lines(findings_table(sections, output_width(), colour=wants_colour(os.environ, 1)))
    return code


_OF_A_PLAN = ("json", "dry_run", "save")
"""Launch options that print a plan instead of launching. `doctor` ignores them."""


def _job_file(line: CommandLine) -> JobFile:
    """Load the job file that --config names."""
    named = line.last("config")
    return NOTHING if named is None else load_job_file(named.text, os.environ, named.origin)


def _busy(what: str) -> AbstractContextManager[object]:
    """Show a line on a terminal while a check runs."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(f"{what} ...")
